"""Registry of evaluators and their options. An evaluator is a folder with `options.py`, which defines `OPTIONS` (the
options class), and `evaluator.py`, which defines `EVALUATOR` (runs the harness). Both are imported when a configuration
is first read, so this module depends on no harness."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from resources.config import AnyOfInForms, Config
from tasks.spec.registered import OneOfTheRegistered

EVALUATORS: dict[str, str] = {
    "lm_evaluation_harness": "tasks.evaluators.lm_eval",
    "helm": "tasks.evaluators.helm",
    "alpaca_eval": "tasks.evaluators.alpaca_eval",
    "inspect_ai": "tasks.evaluators.inspect_ai",
    "levanter_lm_evaluation_harness": "tasks.evaluators.levanter",
}
"""The package of each evaluator, by its name in configurations and records, in the order of reports."""
DEFAULT_EVALUATOR = "lm_evaluation_harness"
_POLICY = re.compile(r"(?:(?:[pco]|params|compute|output)=(?:f32|float32|bf16|bfloat16)(?:,|$))+")


class EvaluatorOptions(Config):
    """Options of an evaluator. Subclasses add `name: Literal[...]` as tag, and the harness's options."""

    title: ClassVar[str]
    """The evaluator's display name."""
    in_suites: ClassVar[Mapping[str, Any]] = {}
    """Different defaults of options in suites."""
    reads_tokenizer: ClassVar[bool] = False
    """True if the harness itself loads the tokenizer of the checkpoint."""

    name: Any
    """The evaluator's name in configurations, records and paths; a Literal in each subclass."""

    def score_inputs(self) -> dict[str, Any]:
        """Returns the options that can change a score; input of the evaluation hash."""
        return self.model_dump(mode="json", exclude={"name"})

    @property
    def levanter_fallback(self) -> EvaluatorOptions | None:
        """Options of Levanter, if it must evaluate when the engine returns no log-probabilities of prompts."""
        return None

    def without_fallback(self) -> Self:
        """Returns the options for benchmarks that Levanter cannot evaluate."""
        return self


class CodeOptions(EvaluatorOptions):
    """Options of an evaluator with benchmarks that run code written by the model."""

    allow_code_execution: tuple[str, ...] = ()
    """Benchmarks that may run the model's code on this machine, such as humaneval."""


class LmEvalBenchmarkOptions(CodeOptions):
    """Options of an evaluator that runs lm-eval's benchmarks."""

    long_prompts: Literal["truncate_left", "skip", "fail"] = "truncate_left"
    """Prompts too long for the model: truncate on the left as lm-eval does, skip the question, or refuse to start."""


class NativeOptions(EvaluatorOptions):
    """Options of an evaluator that loads the checkpoint itself, without a server."""

    reference: str | None = None
    """For Levanter's own checkpoints, a Hugging Face folder of the model; an export next to them when unset."""


class LevanterComputation(Config):
    """Options of Levanter's log-likelihood computation."""

    max_length: int = Field(default=4096, ge=2)
    """Most tokens of a request; longer requests are truncated on the left."""
    precision: str | None = None
    """A policy such as p=f32,c=bfloat16 (parameters, computation); when unset, float32 on a CPU, else that policy."""
    rows_per_device: int = Field(default=4, ge=1)
    """Rows per batch on each device; a row packs many short requests."""

    @field_validator("precision")
    @classmethod
    def _policy_is_readable(cls, policy: str | None) -> str | None:
        if policy is not None and not _POLICY.fullmatch(policy):
            raise ValueError(f"expected a precision such as p=f32,c=bfloat16, found {policy!r}")
        return policy


class JudgeEndpoint(Config):
    """The judge of outputs: an endpoint, a kept pool, or the pool of the model itself."""

    base_url: str | None = None
    """An OpenAI-compatible endpoint, ending in /v1; its key is read from ASSAY_JUDGE_API_KEY."""
    pool_name: str | None = None
    """Name or address of a kept pool (`assay pool up`)."""
    pool_key_block: str | None = None
    """Prefect secret block with the key of a pool at an address; ASSAY_POOL_KEY when unset."""
    model: str | None = None
    """The judge's name at that endpoint; in a pool, a checkpoint. The evaluated checkpoint itself when its own pool
    judges."""

    @model_validator(mode="after")
    def _single_judge(self) -> JudgeEndpoint:
        if self.base_url is not None and self.pool_name is not None:
            raise ValueError("expected one of base_url and pool_name, found both: remove either")
        if self.model is None and (self.base_url is not None or self.pool_name is not None):
            raise ValueError("a judge at base_url or pool_name needs model, its name there")
        if self.base_url is not None and not self.base_url.rstrip("/").endswith("/v1"):
            raise ValueError(f"expected a judge's base_url that ends in /v1, found {self.base_url!r}")
        return self

    @property
    def elsewhere(self) -> bool:
        return self.base_url is not None or self.pool_name is not None


class Judge(JudgeEndpoint):
    """The judge of two outputs, and AlpacaEval's way of prompting it."""

    annotator: str = "weighted_alpaca_eval_gpt4_turbo"
    """Configuration of the judge: one of AlpacaEval's own, a bundled configuration, or a folder in benchmarks_path."""
    constrained: bool = False
    """Restrict the judge's output to a verdict; needs vLLM, and a configuration with fixed verdicts."""

    @field_validator("annotator")
    @classmethod
    def _annotator_counts(cls, annotator: str) -> str:
        if annotator.startswith("/") or "/." in f"/{annotator}":  # hidden files are not in the evaluation's hash
            raise ValueError(f"expected a judge's annotator in benchmarks_path that is not hidden, found {annotator!r}")
        return annotator


class JudgedOptions(EvaluatorOptions):
    """Options of an evaluator that scores, or may score, by a judge's verdicts."""

    judge: Any
    """The judge of the model's outputs, a `JudgeEndpoint` or None; subclasses narrow the type."""


def options_kind(name: str) -> type[EvaluatorOptions]:
    """Returns the options class of a registered evaluator."""
    return import_module(f"{EVALUATORS[name]}.options").OPTIONS


def evaluator_title(name: str) -> str:
    """Returns an evaluator's display name; its name if it is not registered."""
    return options_kind(name).title if name in EVALUATORS else name


def short_evaluator_names() -> dict[str, str]:
    """Returns evaluator names by their short names on the command line, which are those of their folders."""
    return {package.rpartition(".")[2].replace("_", "-"): name for name, package in EVALUATORS.items()}


def spelled_out(evaluator: Any) -> Any:
    """Returns the value of `evaluator` as options with a name; bare names and options without a name are completed."""
    if isinstance(evaluator, str):
        return {"name": evaluator}
    return {"name": DEFAULT_EVALUATOR, **evaluator} if isinstance(evaluator, dict) else evaluator


class _RegisteredNames:
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(EVALUATORS)}


def _registered(name: str) -> str:
    if name not in EVALUATORS:
        raise ValueError(f"expected one of {', '.join(EVALUATORS)}, found {name!r}")
    return name


AnyEvaluator = Annotated[
    EvaluatorOptions,
    OneOfTheRegistered(lambda: tuple(map(options_kind, EVALUATORS)), tag="name", spelled_out=spelled_out),
    AnyOfInForms(),
]
"""The options of an evaluator, discriminated by `name`; a bare name means that evaluator's defaults."""
EvaluatorName = Annotated[str, AfterValidator(_registered), _RegisteredNames()]
"""Name of a registered evaluator."""


OptionsKind = TypeVar("OptionsKind", bound=EvaluatorOptions)


def options_as(kind: type[OptionsKind], options: EvaluatorOptions) -> OptionsKind:
    """Returns options narrowed to the given class."""
    assert isinstance(options, kind), f"{kind.__name__} expected, found {type(options).__name__}"
    return options


def is_native(evaluator: Any) -> bool:
    """Returns True if the value of `evaluator` is an evaluator that loads the checkpoint itself."""
    if isinstance(evaluator, EvaluatorOptions):
        return isinstance(evaluator, NativeOptions)
    content = spelled_out(evaluator)
    name = content.get("name") if isinstance(content, dict) else None
    return name in EVALUATORS and issubclass(options_kind(name), NativeOptions)
