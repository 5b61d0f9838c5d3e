"""Configuration of a generation: prompts and how rows become prompts, sampling, checkpoints and output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, field_validator, model_validator

from pools.config import InferencePoolConfig, Name
from resources.config import Config, JsonObject, ResourceConfig
from tasks.spec.evaluation import CheckpointSelection, MergeOptions, with_merge_named
from tasks.spec.model_parts import ModelParts, with_parts_named
from tasks.spec.names import in_few_words, name_of

_SET_BY_US = frozenset({"model", "prompt", "messages", "n", "stream", "stream_options", "seed"})


@cache
def _compiled(template: str) -> Template:
    templates = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    return templates.from_string(template)


class UnusableRow(Exception):
    """A row from which no prompt can be made; the message has the reason."""


class PromptsConfig(Config):
    """Prompts, and how they are made from rows."""

    files: tuple[str, ...] = Field(min_length=1)
    """JSON lines (also .gz), Parquet, or folders that hold them or a Hugging Face data set saved to disk; local, gs://
    or s3://; wildcards allowed."""
    column: str | None = None
    """Column with the prompt; when unset, `prompt`, or in a chat `messages` if it exists."""
    template: str | None = None
    """Jinja template over the columns that makes the prompt, instead of a column."""
    chat: bool = False
    """Use the chat template: a list of messages is sent unchanged, a text as the user's message."""
    system: str | None = None
    """System message in front of each conversation."""
    id_column: str | None = None
    """Column with the prompt's id; the prompt's number when unset."""
    keep: tuple[str, ...] = ()
    """Columns that are copied to the answers."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many prompts, from the start."""

    @field_validator("template")
    @classmethod
    def _template_can_be_read(cls, template: str | None) -> str | None:
        try:
            _compiled(template or "")
        except TemplateError as error:
            line = f", in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ValueError(f"expected a Jinja template, found: {error}{line}") from None
        return template

    @model_validator(mode="after")
    def _column_or_template(self) -> PromptsConfig:
        if self.column is not None and self.template is not None:
            raise ValueError("expected a column or a template, found both: remove either")
        if self.system is not None and not self.chat:
            raise ValueError("system is for conversations: set chat, or put the text into the template")
        return self


def prompt_maker(form: PromptsConfig) -> Callable[[Mapping[str, Any]], str | list[dict[str, Any]]]:
    """Returns a function that makes a prompt, a text or messages, from a row, or raises `UnusableRow`."""

    def made(row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        content = _rendered(form.template, row) if form.template is not None else _content(form, row)
        if not form.chat:
            if not isinstance(content, str):
                raise UnusableRow(f"expected a text as the prompt, found {type(content).__name__}; a chat takes lists")
            return content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else _messages(content)
        return [{"role": "system", "content": form.system}, *messages] if form.system is not None else messages

    return made


def _content(form: PromptsConfig, row: Mapping[str, Any]) -> Any:
    names = [form.column] if form.column else (["messages", "prompt"] if form.chat else ["prompt"])
    for name in names:
        if name in row:
            return row[name]
    raise UnusableRow(f"expected a column {' or '.join(names)}, found {', '.join(row) or 'none'}")


def _rendered(template: str, row: Mapping[str, Any]) -> str:
    try:
        return _compiled(template).render(**row)
    except Exception as error:
        raise UnusableRow(f"the template cannot be filled: {error or type(error).__name__}") from error


def _messages(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not content:
        raise UnusableRow(f"expected a text or a list of messages, found {type(content).__name__}")
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UnusableRow("expected messages with role and content, found another value among them")
    # Parquet and Arrow give each message the fields of all messages.
    return [{name: value for name, value in message.items() if value is not None} for message in content]


class SamplingConfig(Config):
    """Sampling of the answers. Unset fields use the engine's defaults."""

    samples: int = Field(default=1, ge=1)
    """Number of answers to each prompt."""
    seed: int | None = None
    """Seed of the first sample of each prompt; each further sample adds 1. Random when unset."""
    max_tokens: int | None = Field(default=256, ge=1)
    """Longest answer in tokens; when null, limited only by the context."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 always takes the most likely token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling: probability mass that tokens are sampled from."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    response_format: JsonObject | None = None
    """Structured output, as in OpenAI's API: {type: json_schema, json_schema: {name, schema}}."""
    tools: tuple[JsonObject, ...] = ()
    """Tools that the model may call, as in OpenAI's API."""
    extra_body: JsonObject = {}
    """Further fields of each request, such as top_k or tool_choice."""

    @field_validator("extra_body")
    @classmethod
    def _extra_body_leaves_ours_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(_SET_BY_US & set(extra)):
            raise ValueError(f"{', '.join(ours)} is set by the generation: remove it from extra_body")
        return extra

    @model_validator(mode="after")
    def _samples_differ(self) -> SamplingConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"temperature 0 gives the same answer {self.samples} times: raise it, or set samples: 1")
        return self

    def body(self) -> dict[str, Any]:
        """Returns the request fields shared by all prompts."""
        given = self.model_dump(exclude={"samples", "seed", "extra_body"}, exclude_none=True)
        return {name: value for name, value in given.items() if value not in ((), [])} | self.extra_body


class GenerationConfig(ModelParts):
    """Texts generated by checkpoints from the same prompts."""

    model_path: str | None = None
    """A checkpoint, a run with checkpoints in hf/step-N, or the name of a merged checkpoint, such as
    mean(runs/a@last:5); the checkpoints of the kept pool when unset."""
    merge: MergeOptions | None = None
    """An average of checkpoints of the run at model_path, used instead of them; it replaces model_path, as its name."""
    selection: CheckpointSelection = CheckpointSelection()
    """Checkpoints of the run."""
    model_name: Name | None = None
    """Name of the run; the pool's model name, else the path's, when unset."""
    pool_config: InferencePoolConfig | None = None
    """The pool to start; when no pool is set, a pool on this machine's CPU."""
    pool_name: str | None = None
    """A kept pool (`assay pool up`), by name or address, instead of pool_config."""
    pool_key_block: str | None = None
    """Prefect secret block with the key of a pool at an address; ASSAY_POOL_KEY when unset."""
    prompts: PromptsConfig
    """Prompts, and how they are made."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of the answers."""
    output_path: str
    """Folder for the answers, with a subfolder for each checkpoint; local, gs:// or s3://."""
    output_format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files with answers."""
    prompts_per_shard: int = Field(default=1000, ge=1)
    """Number of prompts with answers in the same file."""
    max_errors: float | None = Field(default=0.05, ge=0)
    """Most errors among the answers before the generation stops: a number, or a share of all answers if below 1; no
    limit when null."""
    workers: int = Field(default=1, ge=1)
    """Number of processes that send requests to the pool in parallel."""
    worker_resources: ResourceConfig = ResourceConfig(cpu=1, ram="4g")
    """Resources of each process."""
    in_flight: int | None = Field(default=None, ge=1)
    """Concurrent requests over all workers; the pool's capacity when unset."""
    protect: bool = True
    """Keep the files of a checkpoint until it has answered, though its trainer removes it; see EvaluationConfig."""

    @model_validator(mode="before")
    @classmethod
    def _pool_or_kept_pool(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("pool_config") and values.get("pool_name"):
            raise ValueError("expected pool_config or pool_name, found both: remove either")
        if values.get("pool_config") and values.get("model_path") is None:
            raise ValueError("expected model_path with pool_config: name a run or a checkpoint")
        if values.get("pool_name") or values.get("pool_config"):
            return values
        if not isinstance(path := values.get("model_path"), str):
            raise ValueError("expected model_path, or the pool_name of a kept pool: name either")
        return {**values, "pool_config": {"model": {"name": values.get("model_name") or name_of(path)[0]}}}

    @model_validator(mode="before")
    @classmethod
    def _model_named(cls, values: Any) -> Any:
        return with_parts_named(with_merge_named(values))

    @property
    def run_name(self) -> str:
        """Name of the run, or of the pool if no run is named."""
        if self.model_name is not None:
            return self.model_name
        if self.pool_config is not None:
            return self.pool_config.model.name
        return name_of(self.model_path)[0] if self.model_path is not None else str(self.pool_name)

    @property
    def place(self) -> str:
        return f"{self.run_name} · {in_few_words(file.rstrip('/').rpartition('/')[2] for file in self.prompts.files)}"

    @property
    def served_by(self) -> str:
        return self.pool_name or "started for it"

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters that determine requests and output, without prompts and checkpoint."""
        defaults = self.pool_config.model.generation_params if self.pool_config else None
        return {
            "prompts": self.prompts.model_dump(mode="json", exclude={"files"}),
            "sampling": self.sampling.model_dump(mode="json"),
            "generation_params": defaults,
            "output_format": self.output_format,
            "prompts_per_shard": self.prompts_per_shard,
        }

    def most_errors(self, rows: int) -> float:
        """Returns the largest tolerated number of errors among this many answers."""
        if self.max_errors is None:
            return float("inf")
        return self.max_errors * rows if 0 < self.max_errors < 1 else self.max_errors
