"""Converts options of `assay evaluate` and `assay pool` to configurations."""

from __future__ import annotations

import ast
from typing import Any

from flows.cli.options.groups import POOL_OPTIONS, EvaluationOptions, refuse_with_config, tpu_asked
from resources.errors import BadInput
from resources.regions.region_table import Regions
from resources.regions.regions import known_regions
from resources.storage import storage
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
from tasks.spec.names import name_of
from tasks.spec.suites import SuiteRequest


def evaluation_from_file(uri: str, options: EvaluationOptions) -> EvaluationConfig:
    """Returns the configuration in a file; other options are refused."""
    refuse_with_config(options.given(), "an evaluation")
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


def evaluation_from_options(options: EvaluationOptions) -> EvaluationConfig:
    """Returns the configuration for command-line options."""
    if options.model is None or not options.evals:
        raise BadInput(
            expected="--model with --eval or --suite, or --config FILE",
            found=" and ".join(options.given("model", "evals")) or "neither",
            remedy="for example: assay evaluate --model runs/a --eval demo_facts",
        )
    _refuse_with("--eval", options.given("only"), "it chooses among the evaluations of a suite")
    evaluator = _evaluator(options.evaluator)
    kind, judge = options_kind(evaluator), _judge(options)
    chosen: dict[str, Any] = {"name": evaluator}
    if judge is not None:
        if not issubclass(kind, JudgedOptions):
            _refuse_with(f"--evaluator {options.evaluator or 'lm-eval'}", options.given(*_JUDGE), "it needs no judge")
        chosen["judge"] = judge
    if options.allow_code:
        if not issubclass(kind, CodeOptions):
            _refuse_with(f"--evaluator {options.evaluator}", ["--allow-code"], "it runs no code the model wrote")
        chosen["allow_code_execution"] = options.allow_code
    content: dict[str, Any] = {
        **_content(options),
        "evaluator": chosen,
        "evals": [_benchmark(text, forced=options.force_fewshot) for text in options.evals],
    }
    if issubclass(kind, NativeOptions):
        unused = options.given("base_url", "pool", "pool_key_block", "replicas", "engine", "chat", "served_name")
        _refuse_with(f"--evaluator {options.evaluator}", unused, "it loads the checkpoint itself, without an engine")
        content["resource_config"] = resources_asked(options)
    elif options.base_url is None and options.pool is None:
        content["pool_config"] = pool_content(options)
    return build_config(content, EvaluationConfig, source="the options")


def suite_request_from_options(options: EvaluationOptions) -> SuiteRequest:
    """Returns the suite request for command-line options."""
    if options.model is None:
        raise BadInput(expected="--model with --suite", found="none", remedy="name a run or a checkpoint")
    conflicting = options.given("evals", "evaluator", "force_fewshot")
    _refuse_with("--suite", conflicting, "the suite names benchmarks and evaluators")
    content: dict[str, Any] = {
        **_content(options),
        "only": options.only,
        "allow_code_execution": options.allow_code,
        "judge": _judge(options),
        "apply_chat_template": True if options.chat else None,
    }
    if options.given(*POOL_OPTIONS):
        content["pool_config"] = pool_content(options)
        content["resource_config"] = resources_asked(options)
    return build_config(content, SuiteRequest, source="the options")


def pool_content(options: EvaluationOptions) -> dict[str, Any]:
    """Returns the pool for options, as input for `InferencePoolConfig`."""
    assert options.model is not None
    return {
        "resource_config": resources_asked(options),
        "model": {
            "name": options.name or name_of(options.model)[0],
            "engine_kwargs": dict(key_and_value("--engine", text) for text in options.engine),
            "apply_chat_template": options.chat,
        },
    }


_CORES = 2
_PLAIN = ("cpu", "hosts", "ram", "disk", "zone", "image")
_SHARES = ("max_truncated", "max_at_limit")
_JUDGE = ("judge_url", "judge_pool", "judge_model", "judge_annotator")


def _content(options: EvaluationOptions) -> dict[str, Any]:
    served = options.given("base_url", "pool")
    if served:
        pool_options = options.given(*POOL_OPTIONS)
        _refuse_with(served[0], pool_options, "they are for a pool that is started; it serves as its owner chose")
    require_pool_of_key_block(options)
    return {
        "model_path": options.model,
        "model_name": options.name,
        "evaluation_path": options.output or "evaluations",
        "max_eval_instances": options.limit,
        "benchmarks_path": options.benchmarks,
        "served_model_name": options.served_name,
        "base_url": options.base_url,
        "pool_name": options.pool,
        "pool_key_block": options.pool_key_block,
        "apply_chat_template": True if options.chat and served else None,
        "sinks": (*(sinks_in(options.sinks, None) or ()), *_mlflow(options)),
        **{name: share for name in _SHARES if (share := getattr(options, name)) is not None},
    }


def require_pool_of_key_block(options: EvaluationOptions) -> None:
    """Raises BadInput for a key without a pool."""
    if options.pool_key_block is not None and options.pool is None:
        raise BadInput(
            expected="--pool with --pool-key-block",
            found="--pool-key-block alone",
            remedy="name the pool by its address, or leave the key out",
        )


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
    experiment = options.name or name_of(options.model)[0]
    return [{"kind": "mlflow", "tracking_uri": place or local_uri, "experiment": experiment}]


def _refuse_with(option: str, others: list[str], why: str) -> None:
    if others:
        raise BadInput(
            expected=f"only options that apply with {option}",
            found=f"{option} and {', '.join(others)}",
            remedy=f"leave {others[0]} out: {why}",
        )


def _evaluator(name: str | None) -> str:
    short = short_evaluator_names()
    full = DEFAULT_EVALUATOR if name is None else short.get(name, name)
    if full in EVALUATORS:
        return full
    raise BadInput(
        expected=f"--evaluator {', '.join(short)} or another that is registered",
        found=str(name),
        remedy="name one of them",
    )


def _judge(options: EvaluationOptions) -> dict[str, Any] | None:
    if not options.given(*_JUDGE):
        return None
    asked = {"annotator": options.judge_annotator} if options.judge_annotator else {}
    return {"base_url": options.judge_url, "pool_name": options.judge_pool, "model": options.judge_model, **asked}


def resources_asked(options: EvaluationOptions, *, regions: Regions | None = None) -> dict[str, Any]:
    """Returns the resources for options, as input for `ResourceConfig`; regions by their names in a table."""
    if options.gpu is not None and options.tpu is not None:
        raise BadInput(expected="one of --gpu and --tpu", found="both", remedy="keep one of them")
    asked: dict[str, Any] = {"replicas": options.replicas or 1, "preemptible": not options.on_demand}
    asked |= {name: value for name in _PLAIN if (value := getattr(options, name))}
    if options.region:
        known = regions or known_regions()
        asked["regions"] = tuple(known.named(name).name for name in options.region)
    if options.gpu is None and options.tpu is None:
        asked.setdefault("cpu", _CORES)
    if options.gpu is not None:
        variant, separator, count = options.gpu.partition(":")
        if separator and not (count.isdecimal() and len(count) < 19):
            raise BadInput(
                expected="--gpu VARIANT or --gpu VARIANT:COUNT",
                found=f"--gpu {options.gpu}",
                remedy="for example --gpu H100:2, or --gpu auto",
            )
        asked["device"] = {"kind": "gpu", "variant": variant, "count": int(count or 1)}
    elif options.tpu is not None:
        asked["device"] = tpu_asked(options.tpu)
    return asked


def _benchmark(text: str, *, forced: bool) -> dict[str, Any]:
    name, separator, shots = text.partition(":")
    if not separator:
        return {"name": name, "force_fewshot": forced}
    if not shots.isdecimal() or len(shots) > 18:
        raise BadInput(
            expected="--eval NAME or --eval NAME:SHOTS", found=f"--eval {text}", remedy="give a number of shots"
        )
    return {"name": name, "num_fewshot": int(shots), "task_alias": f"{name}_{shots}shot", "force_fewshot": forced}


def key_and_value(option: str, text: str) -> tuple[str, Any]:
    """Returns key and value of an option `key=value`; the value is parsed as a literal or boolean if possible."""
    key, separator, value = text.partition("=")
    if not separator:
        example = {"--engine": "max_model_len=4096"}.get(option, "top_k=40")
        raise BadInput(
            expected=f"{option} key=value", found=f"{option} {text}", remedy=f"for example {option} {example}"
        )
    try:
        return key, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return key, value
