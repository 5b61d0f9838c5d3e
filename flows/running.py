"""Running flows from the command line: options to a configuration, live progress, and what came of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console

from flows.live import live_view
from flows.loading import build_config, load_config
from flows.series import evaluate_checkpoints
from resources.errors import AssayError, BadInput
from tasks.checkpoints import name_of
from tasks.config import CheckpointSelection, EvaluationConfig
from tasks.progress import CellDone, Update, listening
from tasks.publishing import report_uri
from tasks.records import Record, current_records, now, read_records


@dataclass(frozen=True)
class EvaluationOptions:
    """What `assay evaluate` was given, by the names of its options; `evals` as name or name:shots."""

    model: str | None = None
    evals: tuple[str, ...] = ()
    output: str | None = None
    name: str | None = None
    limit: int | None = None
    benchmarks: str | None = None
    base_url: str | None = None
    served_name: str | None = None
    replicas: int | None = None
    cpu: int | None = None
    engine: tuple[str, ...] = ()
    chat: bool = False
    pool: str | None = None

    def given(self, *names: str) -> list[str]:
        """Those of some options (all, if none are named) that were given, as they are written."""
        asked = names or tuple(field.name for field in fields(self))
        found = [name for name in asked if getattr(self, name) not in (None, (), False)]
        return [f"--{name.removesuffix('s') if name == 'evals' else name.replace('_', '-')}" for name in found]


@dataclass(frozen=True)
class SeriesResult:
    """What a series came to. `error` is set if not every wanted cell has a succeeded record."""

    records: list[Record]
    evaluated: int
    already_recorded: int
    report: str | None
    error: AssayError | None


def evaluation_from_file(uri: str, options: EvaluationOptions) -> EvaluationConfig:
    """The configuration in a file, beside which no option may say something else.

    Raises:
        BadInput: the file is not valid, or options were given that it would override.
    """
    if given := options.given():
        raise BadInput(
            expected="either --config or the options that describe an evaluation",
            found=f"--config and {', '.join(given)}",
            remedy="write them into the file",
        )
    return load_config(uri, EvaluationConfig)


def evaluation_from_options(options: EvaluationOptions) -> EvaluationConfig:
    """The configuration that some command-line options describe.

    Raises:
        BadInput: something is missing or wrong, or would be ignored.
    """
    if options.model is None or not options.evals:
        raise BadInput(
            expected="--model and at least one --eval, or --config FILE",
            found=" and ".join(options.given("model", "evals")) or "neither",
            remedy="for example: assay evaluate --model runs/a --eval demo_facts",
        )
    pool_options = options.given("replicas", "cpu", "engine", "chat")
    served = options.given("base_url", "pool")
    if served and pool_options:
        raise BadInput(
            expected="only options that what is up already can follow",
            found=f"{served[0]} and {', '.join(pool_options)}, which are for a pool that is started",
            remedy="leave them out: it serves the way its owner chose",
        )
    content: dict[str, Any] = {
        "model_path": options.model,
        "model_name": options.name,
        "evaluation_path": options.output or "evaluations",
        "evals": [_benchmark(text) for text in options.evals],
        "max_eval_instances": options.limit,
        "benchmarks_path": options.benchmarks,
        "served_model_name": options.served_name,
    }
    if options.base_url is not None or options.pool is not None:
        content.update({"base_url": options.base_url, "pool_name": options.pool})
    else:
        content["pool_config"] = pool_content(options)
    return build_config(content, EvaluationConfig, source="the options")


def pool_content(options: EvaluationOptions) -> dict[str, Any]:
    """The pool that some options describe, to be made an `InferencePoolConfig`."""
    assert options.model is not None
    return {
        "resource_config": {"replicas": options.replicas or 1, "cpu": options.cpu or 2},
        "model": {
            "name": options.name or name_of(options.model)[0],
            "engine_kwargs": dict(_engine_argument(text) for text in options.engine),
            "apply_chat_template": options.chat,
        },
    }


def _benchmark(text: str) -> dict[str, Any]:
    name, separator, shots = text.partition(":")
    if not separator:
        return {"name": name}
    if not shots.isdigit():
        raise BadInput(
            expected="--eval NAME or --eval NAME:SHOTS", found=f"--eval {text}", remedy="give a number of shots"
        )
    return {"name": name, "num_fewshot": int(shots), "task_alias": f"{name}_{shots}shot"}


def _engine_argument(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise BadInput(
            expected="--engine key=value", found=f"--engine {text}", remedy="for example --engine max_model_len=4096"
        )
    try:
        return key, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return key, value


def run_series(config: EvaluationConfig, selection: CheckpointSelection, *, console: Console) -> SeriesResult:
    """Runs the flow here and now, with live progress on `console`.

    Raises:
        BadInput: the request cannot be right; nothing was evaluated.
    """
    began = now()
    evaluated: set[int] = set()
    error: AssayError | None = None
    records: list[Record] = []
    with live_view(console) as show:

        def take(update: Update) -> None:
            if isinstance(update, CellDone):
                evaluated.add(update.cell)
            show(update)

        with listening(take):
            try:
                records = evaluate_checkpoints(config, selection)
            except AssayError as raised:
                if isinstance(raised, BadInput):
                    raise
                error = raised
    if error is not None:
        found = [record for record in read_records(config.evaluation_path) if record.checkpoint.run == config.run_name]
        records = current_records(found)
    already = sum(record.succeeded and record.created < began for record in records)
    return SeriesResult(records, len(evaluated), already, report_uri(config) if records else None, error)
