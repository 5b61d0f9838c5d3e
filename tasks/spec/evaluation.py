"""Configuration of an evaluation: `EvalTaskConfig` and `EvaluationConfig`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from pools.config import InferencePoolConfig, Name
from pools.weights.merges import STEPS_PATTERN, Merge, MergeKind, Source, as_named, merge_of
from resources.config import Config, JsonObject, ResourceConfig, TpuConfig
from resources.tpu import largest_single_vm_slice
from tasks.spec.evaluators import DEFAULT_EVALUATOR, AnyEvaluator, NativeOptions, OptionsKind, is_native, options_as
from tasks.spec.model_parts import ModelParts, with_parts_named
from tasks.spec.names import in_few_words, name_of, run_name_of
from tasks.spec.sinks import Sinks
from tasks.spec.steps import check_expression


class EvalTaskConfig(Config):
    """A benchmark."""

    name: Name
    """The benchmark's name in its harness, such as mmlu."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Few-shot examples in front of each question; the benchmark's own number when unset."""
    task_alias: Name | None = None
    """Name under which its metrics are published."""
    task_kwargs: JsonObject = {}
    """Overrides of the benchmark's own configuration in lm-eval; arguments of HELM's run entry, of Inspect's task."""
    force_fewshot: bool = False
    """Use num_fewshot examples even if lm-eval's benchmark declares that it takes none."""
    cluster_by: str | None = None
    """Field of lm-eval's documents, or of the metadata of Inspect's samples, that has the same value within a cluster
    of questions."""

    @model_validator(mode="after")
    def _examples_to_force(self) -> EvalTaskConfig:
        if self.force_fewshot and self.num_fewshot is None:
            raise ValueError("expected num_fewshot with force_fewshot, found none: say how many examples")
        return self

    @property
    def metric_key(self) -> str:
        return self.task_alias or self.name

    def score_inputs(self) -> dict[str, Any]:
        """Returns every setting that can change its score."""
        return self.model_dump(exclude={"cluster_by"} if self.force_fewshot else {"cluster_by", "force_fewshot"})


class MergeOptions(Config):
    """An average of checkpoints of the run at model_path, evaluated in their place."""

    kind: MergeKind = "mean"
    """The plain or weighted average, an exponential moving average, the weights of a decayed learning rate, or two
    checkpoints interpolated."""
    steps: Annotated[str, Field(pattern=f"^({STEPS_PATTERN})$")] | tuple[int, ...] = "last:5"
    """Steps of the run: a list, 8000..10000, ..10000, 8000.. or last:5."""
    weights: float | str | tuple[float, ...] | None = Field(default=None, union_mode="left_to_right")
    """Shares of a mean, as a list; the decay of an ema, such as 0.9; linear, cosine or sqrt of a wsm; the share of the
    second checkpoint of an interpolate."""

    def merge(self, path: str) -> Merge:
        steps = self.steps if isinstance(self.steps, str) else "+".join(map(str, self.steps))
        match self.weights:
            case None:
                parameter = ""
            case str() as word:
                parameter = word
            case tuple() as shares:
                parameter = "+".join(map(_decimal, shares))
            case number:
                parameter = _decimal(number)
        merge = Merge(self.kind, (Source(path, steps),), parameter)
        parsed = merge_of(str(merge))  # rejects merges that have no valid name
        assert parsed is not None, "a written merge can be parsed"
        return parsed


def with_merge_named(values: Any) -> Any:
    """Moves the merge of a request into its model_path, as the merge's name; names repositories of the hub as such."""
    if isinstance(values, dict) and isinstance(path := values.get("model_path"), str):
        values = {**values, "model_path": as_named(path)}
    if not isinstance(values, dict) or values.get("merge") is None:
        return values
    if not isinstance(path := values.get("model_path"), str) or merge_of(path) is not None:
        raise ValueError("expected the run in model_path with merge: name a run that holds checkpoints")
    merge = MergeOptions.model_validate(values["merge"]).merge(path)
    return {name: value for name, value in values.items() if name != "merge"} | {"model_path": str(merge)}


def _decimal(number: float) -> str:
    return format(Decimal(repr(number)).normalize(), "f")


StepsFrom = Annotated[str, AfterValidator(check_expression)]
"""An expression for steps, see `tasks.spec.steps`."""


class CheckpointSelection(Config):
    """Selection among a run's checkpoints."""

    which: Literal["all", "latest", "first"] = "all"
    """Every complete checkpoint, or only that with the highest or lowest step."""
    steps: tuple[int, ...] = ()
    """Only these training steps; a step without a complete checkpoint is an error."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """Keep only the first step at or past each multiple of this number, and the last step."""
    steps_from: StepsFrom | None = None
    """A regular expression with a group around the step, searched in the paths of checkpoints below the run, such as
    step(\\d+)-tokens; or tokens, or epoch. The number behind the last word for a step when unset."""
    series: str | None = None
    """Only this series of checkpoints, where several lie below the run, and . for those in none of the others."""
    wait_for_incomplete_seconds: float = Field(default=0.0, ge=0)
    """Longest wait for checkpoints that are still being written."""

    @property
    def words(self) -> str:
        """The selection as text to append to the run's name; empty if all are selected."""
        if self.steps:
            return f", {'step' if len(self.steps) == 1 else 'steps'} {in_few_words(map(str, self.steps))}"
        if self.every_n_steps is not None:
            return f", every {self.every_n_steps:,} steps"
        return "" if self.which == "all" else f", {self.which}"

    @model_validator(mode="after")
    def _single_rule(self) -> CheckpointSelection:
        rules = [f"which={self.which!r}"] if self.which != "all" else []
        rules += ["every_n_steps"] if self.every_n_steps is not None else []
        rules += ["steps"] if self.steps else []
        if len(rules) > 1:
            raise ValueError(f"expected a single rule for checkpoints, found {' and '.join(rules)}: remove others")
        return self


class Serving(Config):
    """The engine or endpoint that answers, and its resources."""

    pool_config: InferencePoolConfig | None = None
    """The inference pool to start; a pool on this machine's CPU, or on resource_config, if nothing else serves."""
    pool_name: str | None = None
    """Name or address of a kept pool (`assay pool up`), in place of pool_config."""
    pool_key_block: str | None = None
    """Prefect secret block with the key of a pool at an address; ASSAY_POOL_KEY when unset."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint that serves the checkpoint, in place of a pool; ends in /v1."""
    resource_config: ResourceConfig | None = None
    """Resources of engines, and of evaluators that load the checkpoint themselves; this machine's CPU when unset."""
    protect: bool = True
    """Keep the files of a checkpoint until it is evaluated, though its trainer removes it: open, or as copies if its
    file system has removed files no longer."""


SERVING_WAYS = ("pool_config", "pool_name", "base_url")
"""Fields of `Serving` of which only a single field may be set."""


class Asking(Config):
    """The number of questions, how they are asked, and the answers that are tolerated."""

    max_eval_instances: int | None = Field(default=None, ge=1)
    """Questions per benchmark, for a quick check; all, or the suite's setting, when unset."""
    max_at_limit: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a benchmark's answers that may end at the length limit; with more, the score is withheld. Any,
    or the suite's setting, when unset."""
    apply_chat_template: bool | None = None
    """Format prompts with the model's chat template; the suite's setting, else the pool's, when unset."""


class Request(ModelParts, Serving, Asking):
    """The model to evaluate, and the places of records and results."""

    model_path: str
    """A checkpoint in Hugging Face layout, or a run that holds them as hf/step-N; local, gs://, s3://, in MLflow, or on
    the hub as owner/name or owner/name@revision. Or the name of a merged checkpoint, such as mean(runs/a@last:5)."""
    merge: MergeOptions | None = None
    """An average of checkpoints of the run at model_path, evaluated in their place; model_path becomes its name."""
    evaluation_path: str = "evaluations"
    """Folder for records and the harness's own output; local, gs:// or s3://."""
    model_name: Name | None = None
    """The run's name in records and reports; the pool's model name, else the path's, when unset."""
    served_model_name: str | None = None
    """The checkpoint's name at base_url, if it is neither its own name nor its path."""
    benchmarks_path: str | None = None
    """Folder with your own benchmarks, as files of the harness; those bundled with Assay when unset."""
    sinks: Sinks = ()
    """Destinations to publish results to, in addition to the records."""
    wandb_tags: tuple[str, ...] = ()
    """Tags to add to every record."""

    @model_validator(mode="before")
    @classmethod
    def _model_named(cls, values: Any) -> Any:
        return with_parts_named(with_merge_named(values))

    @property
    def named(self) -> str:
        """The run's name according to model_name and model_path only."""
        return self.model_name or name_of(self.model_path)[0]

    @property
    def run_name(self) -> str:
        return self.named

    @property
    def place(self) -> str:
        """The run, and the step if it is in model_path, for the names of flow runs."""
        step = name_of(self.model_path)[2] if self.run_name != run_name_of(self.model_path) else 0
        return f"{self.run_name} step-{step}" if step else self.run_name


class EvaluationConfig(Request):
    """An evaluation of a checkpoint, or of every checkpoint of a run."""

    evaluator: AnyEvaluator = Field(default={"name": DEFAULT_EVALUATOR}, validate_default=True)
    """The harness: its name, or its options including its name."""
    evals: tuple[EvalTaskConfig, ...] = Field(min_length=1)
    """The benchmarks, evaluated together as a single cell per checkpoint."""
    discover_latest_checkpoint: bool = False
    """Use the newest complete checkpoint below model_path."""
    max_truncated: float = Field(default=0.05, ge=0, le=1)
    """Largest share of a benchmark's questions with truncated prompts; with more, no requests are sent."""
    timeout_seconds: float = Field(default=4 * 3600, gt=0)
    """Time limit of a cell (wall clock)."""

    @model_validator(mode="before")
    @classmethod
    def _single_way_of_serving(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        ways = [name for name in SERVING_WAYS if values.get(name)]
        if len(ways) > 1:
            raise ValueError(f"expected pool_config, pool_name or base_url, found {', '.join(ways)}: remove others")
        if ways or is_native(values.get("evaluator")) or not isinstance(values.get("model_path"), str):
            return values
        name, _, _ = name_of(as_named(values["model_path"]))
        return {**values, "pool_config": {"model": {"name": values.get("model_name") or name}}}

    @model_validator(mode="after")
    def _endpoint_and_pool_fit(self) -> EvaluationConfig:
        if self.base_url is not None and not self.base_url.rstrip("/").endswith("/v1"):
            raise ValueError(f"expected a base_url that ends in /v1, found {self.base_url!r}")
        if self.served_model_name is not None and self.base_url is None:
            raise ValueError("served_model_name is for base_url: a pool names its checkpoints itself")
        served = self.pool_config.model.path if self.pool_config else None
        if served is not None and served.rstrip("/") != self.model_path.rstrip("/"):
            raise ValueError(
                f"model_path is {self.model_path!r} but pool_config.model.path is {served!r}: leave the latter out"
            )
        return self

    @field_validator("evals")
    @classmethod
    def _metric_keys_differ(cls, evals: tuple[EvalTaskConfig, ...]) -> tuple[EvalTaskConfig, ...]:
        twice = [key for key, times in Counter(task.metric_key for task in evals).items() if times > 1]
        if twice:
            raise ValueError(
                f"two benchmarks would publish their metrics as {', '.join(twice)}: "
                "give one of them a task_alias of its own"
            )
        return evals

    @property
    def run_name(self) -> str:
        return self.model_name or (self.pool_config.model.name if self.pool_config else self.named)

    @property
    def asked(self) -> str:
        return in_few_words([task.metric_key for task in self.evals])

    @property
    def asks_in_chat(self) -> bool:
        if self.apply_chat_template is not None:
            return self.apply_chat_template
        return self.pool_config is not None and self.pool_config.model.apply_chat_template

    def options(self, kind: type[OptionsKind]) -> OptionsKind:
        return options_as(kind, self.evaluator)

    def score_inputs(self) -> dict[str, Any]:
        """Returns every setting that can change a score, except the checkpoint and the benchmarks' files."""
        asked: dict[str, Any] = {
            "evaluator": self.evaluator.name,
            "evals": [task.score_inputs() for task in self.evals],
            "max_eval_instances": self.max_eval_instances,
            "options": self.evaluator.score_inputs(),
            "apply_chat_template": self.asks_in_chat,
        }
        if self.native:
            return {**asked, "device": f"{self.evaluator.name} on {self.resources.device.kind}"}
        model = self.pool_config.model if self.pool_config else None
        return {
            **asked,
            "engine_kwargs": model.engine_kwargs if model else None,
            "generation_params": model.generation_params if model else None,
            "device": self.pool_config.device if self.pool_config else self._endpoint,
            **(model.unnamed_inputs() if model else {}),
        }

    @property
    def _endpoint(self) -> str | None:
        if self.base_url is None:
            return None
        name = f" {self.served_model_name}" if self.served_model_name else ""
        return self.base_url.rstrip("/") + name

    @property
    def trusts_code(self) -> bool:
        """True if engine and harness may run code of the checkpoint, such as that of its tokenizer."""
        return self.pool_config is not None and self.pool_config.model.trusts_code

    @property
    def native(self) -> bool:
        """True if the evaluator loads the checkpoint itself, without a server."""
        return isinstance(self.evaluator, NativeOptions)

    @property
    def resources(self) -> ResourceConfig:
        """Resources of its engines, or of an evaluator that loads the checkpoint itself; a CPU here if unset."""
        if self.pool_config is not None and not self.native:
            return self.pool_config.resource_config
        return self.resource_config or ResourceConfig()

    @property
    def starts_jobs(self) -> bool:
        """True if it starts engines or such an evaluator; False if a kept pool or an endpoint answers."""
        return self.native or (self.pool_config is not None and self.pool_name is None)

    @property
    def native_reference(self) -> str | None:
        """The Hugging Face folder configured for checkpoints in Levanter's own layout."""
        return self.evaluator.reference if isinstance(self.evaluator, NativeOptions) else None

    def levanter_fallback(self) -> EvaluationConfig | None:
        """Returns the same evaluation by Levanter if it is configured to replace the engine, else None."""
        options = self.evaluator.levanter_fallback
        if options is None:
            return None
        resources = self.resource_config or (self.pool_config.resource_config if self.pool_config else None)
        changed = {
            "evaluator": options,
            "resource_config": _of_single_machine(resources) if resources else None,
            "apply_chat_template": self.asks_in_chat,
            "model_name": self.run_name,
        }
        served = {*SERVING_WAYS, "pool_key_block", "served_model_name"}
        return EvaluationConfig.model_validate({**self.model_dump(exclude={*served, "evaluator"}), **changed})


def _of_single_machine(resources: ResourceConfig) -> ResourceConfig:
    device = resources.device
    if isinstance(device, TpuConfig) and device.slice.vms > 1:
        device = TpuConfig(variant=largest_single_vm_slice(device.variant))
    return resources.model_copy(update={"replicas": 1, "device": device})


def digest_of(content: Any) -> str:
    """Returns a deterministic hex digest of a JSON-like value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
