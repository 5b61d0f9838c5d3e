"""Options of an evaluation or a suite, and their conversion to configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from flows.cli.options.pools import (
    POOL_OPTIONS,
    AtLeastZero,
    OptionGroup,
    PoolOptions,
    pool_content,
    refuse_with,
    refuse_with_config,
    resources_asked,
)
from pools.weights.merges import as_named
from resources.errors import BadInput, unknown
from resources.storage import storage
from tasks.checkpoints.discovery import run_named_by
from tasks.records.provenance import place_in_git
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.sinks.publishing import sinks_in
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import (
    DEFAULT_EVALUATOR,
    EVALUATORS,
    CodeOptions,
    JudgedOptions,
    NativeOptions,
    options_kind,
    short_evaluator_names,
)
from tasks.spec.loading import build_config, load_config
from tasks.spec.model_parts import ModelParts, with_parts_named
from tasks.spec.suites import SuiteRequest

_SHARES = ("max_truncated", "max_at_limit")
_JUDGE = ("judge_url", "judge_pool", "judge_model", "judge_annotator")
_NO_POOL = PoolOptions()


@Parameter(name="*")
@dataclass(frozen=True)
class PartOptions(OptionGroup):
    """Parts of a model in place of those of its checkpoints, as in `ModelParts`."""

    tokenizer: str | None = None
    """Tokenizer in place of the checkpoint's: a folder, or owner/name[@revision] on the hub."""
    chat_template: str | None = None
    """File with a chat template in place of the tokenizer's."""
    base: str | None = None
    """The model that an adapter changes; as in its adapter_config.json when left out."""

    def parts(self) -> dict[str, str | None]:
        """Returns the input for `ModelParts`."""
        return {name: getattr(self, name) for name in ModelParts.model_fields}

    def named(self, location: str) -> str:
        """Returns the name of a location with these parts."""
        return with_parts_named({**self.parts(), "model_path": as_named(location)})["model_path"]


@Parameter(name="*")
@dataclass(frozen=True)
class ServedOptions(PartOptions):
    """The model, and a pool that serves it already."""

    model: str | None = None
    """A checkpoint, or a run that holds them as hf/step-N."""
    name: str | None = None
    """Name of the run in records, reports and outputs."""
    pool: str | None = None
    """A kept pool, by name or https:// address: see assay pool."""
    pool_key_block: str | None = None
    """Prefect secret block with the key of that pool; ASSAY_POOL_KEY when left out."""

    def require_pool_of_key_block(self) -> None:
        """Raises BadInput for a key without a pool."""
        if self.pool_key_block is not None and self.pool is None:
            raise BadInput(
                expected="--pool with --pool-key-block",
                found="--pool-key-block alone",
                remedy="name the pool by its address, or leave the key out",
            )


@Parameter(name="*")
@dataclass(frozen=True)
class EvaluationOptions(ServedOptions):
    """An evaluation, or a suite."""

    evals: Annotated[tuple[str, ...], Parameter("--eval")] = ()
    """Benchmark or benchmark:shots; repeatable."""
    force_fewshot: bool = False
    """Put shots also in front of a benchmark that takes none."""
    evaluator: str | None = None
    """lm-eval (when left out), helm, alpaca-eval, inspect-ai, levanter."""
    suite: str | None = None
    """A suite by its name, or a YAML file; see assay suites."""
    only: tuple[str, ...] = ()
    """A part of the suite; repeatable."""
    output: str | None = None
    """Folder for records, evaluations when left out."""
    limit: int | None = None
    """Questions per benchmark."""
    max_truncated: float | None = None
    """Share of prompts that may be cut to fit."""
    max_at_limit: float | None = None
    """Share of answers that may end at the limit."""
    benchmarks: str | None = None
    """Folder with benchmarks of your own (YAML)."""
    base_url: str | None = None
    """An endpoint that serves the checkpoint already."""
    served_name: str | None = None
    """The checkpoint's name at the endpoint, if different."""
    allow_code: tuple[str, ...] = ()
    """A benchmark that may run code the model wrote; repeatable."""
    judge_url: str | None = None
    """Endpoint of a judge; its own pool when left out."""
    judge_pool: str | None = None
    """A kept pool as the judge."""
    judge_model: str | None = None
    """Name of the judge there."""
    judge_annotator: str | None = None
    """AlpacaEval's configuration of the judge."""
    sinks: str | None = None
    """YAML file with sinks, where results are announced."""
    protect: Annotated[bool, Parameter(negative="--no-protect")] = True
    """Keep files of checkpoints until they are evaluated, though their trainer removes them."""
    mlflow: bool = False
    """Show results in MLflow too: in mlruns next to the records."""
    mlflow_uri: str | None = None
    """Tracking server, sqlite:///FILE or folder for that."""


@Parameter(name="*")
@dataclass(frozen=True)
class SelectionOptions(OptionGroup):
    """Checkpoints of a run, as in `CheckpointSelection`."""

    which: str = "all"
    """all, latest or first."""
    every_n_steps: Annotated[int | None, Parameter("--every")] = None
    """Only the first step at or past each multiple of this, and the last."""
    steps: Annotated[tuple[int, ...], Parameter("--step")] = ()
    """Only this training step; repeatable."""
    steps_from: str | None = None
    r"""A regular expression with a group around the step, for other paths, such as 'step(\d+)-tokens'; or tokens, or
    epoch."""
    series: str | None = None
    """Only this series, where several lie below the run, each with its own name; . for checkpoints without a series."""
    wait_for_incomplete_seconds: Annotated[float, Parameter("--wait")] = 0.0
    """Seconds to wait for checkpoints that are being written."""


@Parameter(name="*")
@dataclass(frozen=True)
class WorkPoolOptions(OptionGroup):
    """Execution at a work pool of another region, and limits of cost."""

    on_work_pool: bool = False
    """At the work pool of the best region, not here; waits for it."""
    max_egress_usd: Annotated[float | None, AtLeastZero] = None
    """Most that reading from another region may cost; ASSAY_MAX_EGRESS_USD when left out."""
    max_usd: Annotated[float | None, AtLeastZero] = None
    """Begin nothing with a higher or unknown expected cost; ASSAY_MAX_USD when left out."""


def evaluation_from_file(
    uri: str, options: EvaluationOptions = EvaluationOptions(), engines: PoolOptions = _NO_POOL
) -> EvaluationConfig:
    """Returns the configuration in a file; other options are refused."""
    refuse_with_config([*options.given(), *engines.given()], "an evaluation")
    config = load_config(uri, EvaluationConfig)
    entries = getattr(config.evaluator, "run_specs_path", None)
    tags = {
        **_git_tags(uri, "config_path_git_repo", "config_git_sha"),
        **_git_tags(entries, "helm_config_path_git_repo"),
    }
    sinks = (
        sink.model_copy(update={"tags": {**tags, **sink.tags}}) if isinstance(sink, MlflowSink) else sink
        for sink in config.sinks
    )
    return config.model_copy(update={"sinks": tuple(sinks)})


def _git_tags(uri: str | None, *names: str) -> dict[str, str]:
    place = place_in_git(storage.local_path(uri)) if uri is not None and storage.is_local(uri) else None
    return dict(zip(names, place, strict=False)) if place else {}


def evaluation_from_options(options: EvaluationOptions, engines: PoolOptions = _NO_POOL) -> EvaluationConfig:
    """Returns the configuration for command-line options."""
    if options.model is None or not options.evals:
        raise BadInput(
            expected="--model with --eval or --suite, or --config FILE",
            found=" and ".join(options.given("model", "evals")) or "neither",
            remedy="for example: assay evaluate --model runs/a --eval demo_facts",
        )
    refuse_with("--eval", options.given("only"), "it chooses among the evaluations of a suite")
    evaluator = _evaluator(options.evaluator)
    kind, judge = options_kind(evaluator), _judge(options)
    chosen: dict[str, Any] = {"name": evaluator}
    if judge is not None:
        if not issubclass(kind, JudgedOptions):
            refuse_with(f"--evaluator {options.evaluator or 'lm-eval'}", options.given(*_JUDGE), "it needs no judge")
        chosen["judge"] = judge
    if options.allow_code:
        if not issubclass(kind, CodeOptions):
            refuse_with(f"--evaluator {options.evaluator}", ["--allow-code"], "it runs no code the model wrote")
        chosen["allow_code_execution"] = options.allow_code
    content: dict[str, Any] = {
        **_content(options, engines),
        "evaluator": chosen,
        "evals": [_benchmark(text, forced=options.force_fewshot) for text in options.evals],
    }
    if issubclass(kind, NativeOptions):
        unused = options.given("base_url", "pool", "pool_key_block", "served_name")
        unused += engines.given("replicas", "engine", "chat")
        refuse_with(f"--evaluator {options.evaluator}", unused, "it loads the checkpoint itself, without an engine")
        content["resource_config"] = resources_asked(engines)
    elif options.base_url is None and options.pool is None:
        content["pool_config"] = pool_content(engines, model=options.model, name=options.name)
    return build_config(content, EvaluationConfig, source="the options")


def suite_request_from_options(options: EvaluationOptions, engines: PoolOptions = _NO_POOL) -> SuiteRequest:
    """Returns the suite request for command-line options."""
    if options.model is None:
        raise BadInput(expected="--model with --suite", found="none", remedy="name a run or a checkpoint")
    conflicting = options.given("evals", "evaluator", "force_fewshot")
    refuse_with("--suite", conflicting, "the suite names benchmarks and evaluators")
    content: dict[str, Any] = {
        **_content(options, engines),
        "only": options.only,
        "allow_code_execution": options.allow_code,
        "judge": _judge(options),
        "apply_chat_template": True if engines.chat else None,
    }
    if engines.given(*POOL_OPTIONS):
        content["pool_config"] = pool_content(engines, model=options.model, name=options.name)
        content["resource_config"] = resources_asked(engines)
    return build_config(content, SuiteRequest, source="the options")


def _content(options: EvaluationOptions, engines: PoolOptions) -> dict[str, Any]:
    served = options.given("base_url", "pool")
    if served:
        why = "they are for a pool that is started; it serves as its owner chose"
        refuse_with(served[0], engines.given(*POOL_OPTIONS), why)
    options.require_pool_of_key_block()
    return {
        **options.parts(),
        "model_path": options.model,
        "model_name": options.name,
        "evaluation_path": options.output or "evaluations",
        "max_eval_instances": options.limit,
        "benchmarks_path": options.benchmarks,
        "served_model_name": options.served_name,
        "base_url": options.base_url,
        "pool_name": options.pool,
        "pool_key_block": options.pool_key_block,
        "apply_chat_template": True if engines.chat and served else None,
        "protect": options.protect,
        "sinks": (*(sinks_in(options.sinks, None) or ()), *_mlflow(options)),
        **{name: share for name in _SHARES if (share := getattr(options, name)) is not None},
    }


def _mlflow(options: EvaluationOptions) -> list[dict[str, str]]:
    if not options.mlflow and options.mlflow_uri is None:
        return []
    assert options.model is not None
    output, place = options.output or "evaluations", options.mlflow_uri
    if place is None and not storage.is_local(output):
        raise BadInput(
            expected="--mlflow-uri with --mlflow if the records are in a store",
            found=f"--output {output} and --mlflow",
            remedy="name a tracking server, or a folder of this machine: --mlflow-uri mlruns",
        )
    local_uri = storage.join(storage.parent(storage.absolute(output)), "mlruns")
    experiment = options.name or run_named_by(as_named(options.model))
    return [{"kind": "mlflow", "tracking_uri": place or local_uri, "experiment": experiment}]


def _evaluator(name: str | None) -> str:
    short = short_evaluator_names()
    full = DEFAULT_EVALUATOR if name is None else short.get(name, name)
    if full in EVALUATORS:
        return full
    raise unknown("--evaluator with a registered name", str(name), short, "name one of them")


def _judge(options: EvaluationOptions) -> dict[str, Any] | None:
    if not options.given(*_JUDGE):
        return None
    asked = {"annotator": options.judge_annotator} if options.judge_annotator else {}
    return {"base_url": options.judge_url, "pool_name": options.judge_pool, "model": options.judge_model, **asked}


def _benchmark(text: str, *, forced: bool) -> dict[str, Any]:
    name, separator, shots = text.partition(":")
    if not separator:
        return {"name": name, "force_fewshot": forced}
    if not shots.isdecimal() or len(shots) > 18:
        raise BadInput(
            expected="--eval NAME or --eval NAME:SHOTS", found=f"--eval {text}", remedy="give a number of shots"
        )
    return {"name": name, "num_fewshot": int(shots), "task_alias": f"{name}_{shots}shot", "force_fewshot": forced}
