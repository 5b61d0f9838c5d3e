"""Running flows from the command line: options to a configuration, live progress, and what came of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from flows.live import live_view
from flows.loading import build_config
from flows.series import evaluate_checkpoints
from resources.errors import AssayError, BadInput
from tasks.checkpoints import name_of
from tasks.config import CheckpointSelection, EvaluationConfig
from tasks.progress import CellDone, Update, listening
from tasks.publishing import report_uri
from tasks.records import Record, current_records, read_records


@dataclass(frozen=True)
class EvaluationOptions:
    """What `assay evaluate` was given in place of a file; `benchmarks` as name or name:shots."""

    model: str | None
    benchmarks: tuple[str, ...]
    output: str
    name: str | None = None
    limit: int | None = None
    benchmarks_path: str | None = None
    base_url: str | None = None
    replicas: int = 1
    cpu: int = 2
    engine: tuple[str, ...] = ()
    chat: bool = False


@dataclass(frozen=True)
class SeriesResult:
    """What a series came to. `error` is set if not every wanted cell has a succeeded record."""

    records: list[Record]
    evaluated: int
    already_recorded: int
    report: str | None
    error: AssayError | None


def evaluation_from_options(options: EvaluationOptions) -> EvaluationConfig:
    """The configuration that some command-line options describe.

    Raises:
        BadInput: something is missing or wrong.
    """
    if options.model is None or not options.benchmarks:
        raise BadInput(
            expected="--model and at least one --eval, or --config FILE",
            found=f"--model {options.model}, {len(options.benchmarks)} benchmarks",
            remedy="for example: assay evaluate --model runs/a --eval demo_facts",
        )
    content: dict[str, Any] = {
        "model_path": options.model,
        "model_name": options.name,
        "evaluation_path": options.output,
        "evals": [_benchmark(text) for text in options.benchmarks],
        "max_eval_instances": options.limit,
        "benchmarks_path": options.benchmarks_path,
    }
    if options.base_url is not None:
        content["base_url"] = options.base_url
    else:
        content["pool_config"] = {
            "resource_config": {"replicas": options.replicas, "cpu": options.cpu},
            "model": {
                "name": options.name or name_of(options.model)[0],
                "engine_kwargs": dict(_engine_argument(text) for text in options.engine),
                "apply_chat_template": options.chat,
            },
        }
    return build_config(content, EvaluationConfig, source="the options")


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
    evaluated: list[CellDone] = []
    error: AssayError | None = None
    records: list[Record] = []
    with live_view(console) as show:

        def take(update: Update) -> None:
            if isinstance(update, CellDone):
                evaluated.append(update)
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
    names = {update.checkpoint for update in evaluated}
    already = sum(record.succeeded and record.checkpoint.name not in names for record in records)
    return SeriesResult(records, len(names), already, report_uri(config) if records else None, error)
