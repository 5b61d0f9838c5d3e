"""Configuration of a generation: which prompts, how they are asked, of which checkpoints, and where the texts go."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pools.config import InferencePoolConfig, check_name
from resources.config import Config, JsonObject, ResourceConfig
from tasks.generation.templates import check_template
from tasks.spec.evaluation import CheckpointSelection
from tasks.spec.merges import MergeOptions, with_merge_named
from tasks.spec.names import in_few_words, name_of

_SET_BY_US = frozenset({"model", "prompt", "messages", "n", "stream", "stream_options", "seed"})


class PromptsConfig(Config):
    """Prompts, and how a row becomes one."""

    files: tuple[str, ...] = Field(min_length=1)
    """JSON lines (also .gz), Parquet, or folders that hold them or a Hugging Face data set saved to disk; local, gs://
    or s3://; wildcards allowed."""
    column: str | None = None
    """Column with the prompt; `prompt` when unset, in a chat `messages` where there is one."""
    template: str | None = None
    """Jinja template over the columns that makes the prompt, in place of a column."""
    chat: bool = False
    """Ask through the chat template: a list of messages as it is, a text as the user's message."""
    system: str | None = None
    """System message in front of each conversation."""
    id_column: str | None = None
    """Column that names each prompt; its number when unset."""
    keep: tuple[str, ...] = ()
    """Columns that are copied beside the answers."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many prompts only."""

    @field_validator("template")
    @classmethod
    def _template_can_be_read(cls, template: str | None) -> str | None:
        if template is not None:
            check_template(template)
        return template

    @model_validator(mode="after")
    def _one_way(self) -> PromptsConfig:
        if self.column is not None and self.template is not None:
            raise ValueError("expected a column or a template, found both: keep one")
        if self.system is not None and not self.chat:
            raise ValueError("system is for conversations: set chat, or put the text into the template")
        return self


class SamplingConfig(Config):
    """Sampling of the answers. A field that is unset is the engine's own."""

    samples: int = Field(default=1, ge=1)
    """Answers to each prompt."""
    seed: int | None = None
    """Seed of the first sample of each prompt; the k-th gets k more. Random when unset."""
    max_tokens: int | None = Field(default=256, ge=1)
    """Longest answer in tokens; as long as the context allows when null."""
    temperature: float | None = Field(default=None, ge=0)
    """Randomness of the choice of tokens; 0 takes the likeliest."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Share of the probability that tokens are chosen from."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    response_format: JsonObject | None = None
    """Structured output, as OpenAI's API has it: {type: json_schema, json_schema: {name, schema}}."""
    tools: tuple[JsonObject, ...] = ()
    """Tools that the model may call, as OpenAI's API has them."""
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
            raise ValueError(f"temperature 0 gives the same answer {self.samples} times: raise it, or take one sample")
        return self

    def body(self) -> dict[str, Any]:
        """Returns the fields of a request that are the same for every prompt."""
        given = self.model_dump(exclude={"samples", "seed", "extra_body"}, exclude_none=True)
        return {name: value for name, value in given.items() if value not in ((), [])} | self.extra_body


class GenerationConfig(Config):
    """Texts written by checkpoints: the same prompts for each of them."""

    model_path: str | None = None
    """A checkpoint, or a run that holds them as hf/step-N, or the name of a merged one, such as mean(runs/a@last:5);
    those of the kept pool when unset."""
    merge: MergeOptions | None = None
    """An average of checkpoints of the run at model_path, in their place; it becomes the model_path, as its name."""
    selection: CheckpointSelection = CheckpointSelection()
    """Checkpoints of the run."""
    model_name: str | None = None
    """Name of the run; the pool's model name, else the path's, when unset."""
    pool_config: InferencePoolConfig | None = None
    """The pool to start; one on this machine's CPU when no pool is named."""
    pool_name: str | None = None
    """A kept pool (`assay pool up`), by its name or by its address, in place of pool_config."""
    pool_key_block: str | None = None
    """Prefect secret block with the key of a pool at an address; ASSAY_POOL_KEY when unset."""
    prompts: PromptsConfig
    """Prompts, and how they are put."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of their answers."""
    output_path: str
    """Folder for the answers, one folder in it for each checkpoint; local, gs:// or s3://."""
    output_format: Literal["parquet", "jsonl"] = "parquet"
    """Format of the files with answers."""
    prompts_per_shard: int = Field(default=1000, ge=1)
    """Prompts whose answers are written together, as one file."""
    max_errors: float | None = Field(default=0.05, ge=0)
    """Answers that may be errors before the generation stops: a number, or a share of all where below 1; any number
    when null."""
    workers: int = Field(default=1, ge=1)
    """Processes that ask the pool, side by side."""
    worker_resources: ResourceConfig = ResourceConfig(cpu=1, ram="4g")
    """Resources of each of them."""
    in_flight: int | None = Field(default=None, ge=1)
    """Requests at once, over all workers; as many as the pool has room for when unset."""

    @model_validator(mode="before")
    @classmethod
    def _one_way_of_serving(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("pool_config") and values.get("pool_name"):
            raise ValueError("expected pool_config or pool_name, found both: keep one")
        if values.get("pool_name") or values.get("pool_config"):
            return values
        if not isinstance(path := values.get("model_path"), str):
            raise ValueError("expected model_path, or the pool_name of a kept pool: name one")
        return {**values, "pool_config": {"model": {"name": values.get("model_name") or name_of(path)[0]}}}

    @model_validator(mode="before")
    @classmethod
    def _merge_named(cls, values: Any) -> Any:
        return with_merge_named(values)

    @field_validator("model_name")
    @classmethod
    def _model_name_is_usable(cls, name: str | None) -> str | None:
        return check_name(name) if name is not None else None

    @model_validator(mode="after")
    def _checkpoints_are_named(self) -> GenerationConfig:
        if self.pool_config is not None and self.model_path is None:
            raise ValueError("expected model_path beside pool_config: name a run or a checkpoint")
        return self

    @property
    def run_name(self) -> str:
        """Name of the run, or of the pool where no run is named."""
        if self.model_name is not None:
            return self.model_name
        if self.pool_config is not None:
            return self.pool_config.model.name
        return name_of(self.model_path)[0] if self.model_path is not None else str(self.pool_name)

    @property
    def place(self) -> str:
        """Run and prompts in a few words, for the name of the flow run."""
        return f"{self.run_name} · {in_few_words(file.rstrip('/').rpartition('/')[2] for file in self.prompts.files)}"

    @property
    def served_by(self) -> str:
        """The pool, for the column of that name."""
        return self.pool_name or "started for it"

    def parameters(self) -> dict[str, Any]:
        """Returns all that decides what is asked and how it is written, apart from prompts and checkpoint."""
        defaults = self.pool_config.model.generation_params if self.pool_config else None
        return {
            "prompts": self.prompts.model_dump(mode="json", exclude={"files"}),
            "sampling": self.sampling.model_dump(mode="json"),
            "generation_params": defaults,
            "output_format": self.output_format,
            "prompts_per_shard": self.prompts_per_shard,
        }

    def most_errors(self, rows: int) -> float:
        """Returns the number of errors among so many answers that is not too many yet."""
        if self.max_errors is None:
            return float("inf")
        return self.max_errors * rows if 0 < self.max_errors < 1 else self.max_errors
