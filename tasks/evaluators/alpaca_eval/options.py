"""Options of AlpacaEval, beyond the instructions: sampling and the judge."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from resources.config import Config
from resources.storage.storage import content_digest
from tasks.spec.evaluators import Judge, JudgedOptions

DEFAULT_PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
_FILES = ("instructions_path", "reference_outputs_path", "length_control_path")


class GenerationParams(Config):
    """Sampling of outputs; an unset field is as in the model's generation_params, or else as documented."""

    temperature: float | None = Field(default=None, ge=0)
    """0.7 when unset."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """1 when unset."""
    top_k: int | None = Field(default=None, ge=-1)
    """-1, which is all tokens, when unset."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Not sent when unset."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """0 when unset."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """0 when unset."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """1 when unset."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end an output, in addition to the model's own; not sent when unset."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest output; 2048 tokens, or half of the context if that is less, when unset."""


_DEFAULTS = GenerationParams(
    temperature=0.7, top_p=1.0, top_k=-1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
)


class AlpacaEvalOptions(JudgedOptions):
    """Options of AlpacaEval."""

    title: ClassVar = "AlpacaEval"

    name: Literal["alpaca_eval"] = "alpaca_eval"
    """Selects AlpacaEval."""
    judge: Judge = Judge()
    """The judge that compares the model's outputs with the reference's."""
    generation_params: GenerationParams = GenerationParams()
    """Sampling of the outputs, over the generation_params of the model."""
    engine_parameters: bool = True
    """Send top_k, min_p, repetition_penalty and stop_token_ids, which vLLM takes and OpenAI's own service rejects."""
    prompt_template: str = DEFAULT_PROMPT
    """The prompt where no chat template is applied."""
    prompt_stops: tuple[str, ...] = ("### Instruction:",)
    """Texts that end an output where no chat template is applied; up to four."""
    instructions_path: str | None = None
    """Local JSON file with your own instructions, in place of the set that evals names."""
    reference_outputs_path: str | None = None
    """Local JSON file with the outputs to compare with; those in the file of instructions when unset."""
    length_control_path: str | None = None
    """AlpacaEval's df_gamed.csv, for the length-controlled win rate where there is no hub."""
    max_judge_errors: float = Field(default=0.0, ge=0, lt=1)
    """Largest share of outputs without a usable verdict; the win rate is over the other outputs."""

    @field_validator("prompt_template")
    @classmethod
    def _template_has_the_instruction(cls, template: str) -> str:
        if "{instruction}" not in template:
            raise ValueError(f"expected {{instruction}} in prompt_template, found {template!r}")
        return template

    @field_validator("prompt_stops")
    @classmethod
    def _stops_are_few(cls, stops: tuple[str, ...]) -> tuple[str, ...]:
        if len(stops) > 4 or not all(stops):
            raise ValueError(f"expected up to four texts in prompt_stops, none of them empty, found {len(stops)}")
        return stops

    def sampling(self, model_params: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the sampling parameters that have a value, by name."""
        layers = (_DEFAULTS.model_dump(), model_params or {}, self.generation_params.model_dump(mode="json"))
        return {name: value for layer in layers for name, value in layer.items() if value is not None}

    def score_inputs(self) -> dict[str, Any]:
        """Returns the options that can change a score, with digests of files in place of their paths."""
        paths = {name: path for name in _FILES if (path := getattr(self, name)) is not None}
        contents = {name: content_digest(path) or f"none at {path}" for name, path in paths.items()}
        return {**self.model_dump(mode="json", exclude={"name", *_FILES}), **contents}


OPTIONS = AlpacaEvalOptions
