"""`assay evaluate`: benchmarks or a suite, asked of one checkpoint or of a run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from flows.cli.gate import GateOptions, gate_of, show_verdict, write_summaries
from flows.cli.option_groups import EvaluationOptions, SelectionOptions, WorkPoolOptions, flattened
from flows.console.console import ERR, OUT, Json, print_json


@flattened
def evaluate(
    options: EvaluationOptions,
    *,
    config: Annotated[str | None, typer.Option(help="YAML file with an EvaluationConfig, in place of options.")] = None,
    selecting: SelectionOptions,
    sending: WorkPoolOptions,
    gating: GateOptions,
    as_json: Json = False,
) -> None:
    """Evaluate the checkpoints of a run that have no succeeded record yet."""
    from flows.cli.options import evaluation_from_file, evaluation_from_options, suite_request_from_options
    from flows.console.running import run_series
    from flows.series import evaluate_checkpoints
    from resources.errors import BadInput
    from tasks.spec.evaluation import CheckpointSelection
    from tasks.spec.loading import build_config

    judged_by = gate_of(gating)
    selection = build_config(
        {
            "which": selecting.which,
            "every_n_steps": selecting.every,
            "steps": selecting.step,
            "wait_for_incomplete_seconds": selecting.wait,
        },
        CheckpointSelection,
        source="the options",
    )
    there: dict[str, Any] = {"gate": judged_by, "max_egress_usd": sending.max_egress_usd, "on_event": _tell}
    if sending.on_work_pool and gating.summary is not None:
        raise BadInput(
            expected="--summary where the gate is judged",
            found="--summary and --on-work-pool",
            remedy="leave --summary out; the verdict is an artifact of the flow run, and `assay gate` judges again",
        )
    if options.suite is not None and config is None:
        from flows.suites import evaluate_suite
        from tasks.spec.suites import load_suite

        request, chosen = suite_request_from_options(options), load_suite(options.suite)
        if sending.on_work_pool:
            from flows.console.on_work_pool import send_suite

            show_series(send_suite(chosen, request, selection=selection, **there), as_json=as_json)
            return
        first = chosen.evaluations_of(request)[0]
        place = {"evaluation_path": first.evaluation_path, "run_name": first.run_name}
        result = run_series(lambda: evaluate_suite(chosen, request, selection, judged_by), **place, console=ERR)
    else:
        wanted = evaluation_from_options(options) if config is None else evaluation_from_file(config, options)
        if sending.on_work_pool:
            from flows.console.on_work_pool import send_evaluation

            show_series(send_evaluation(wanted, selection, **there), as_json=as_json)
            return
        place = {"evaluation_path": wanted.evaluation_path, "run_name": wanted.run_name}
        result = run_series(lambda: evaluate_checkpoints(wanted, selection, judged_by), **place, console=ERR)
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, as_json=as_json)


def _tell(line: str) -> None:
    ERR.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def show_series(result: Any, *, as_json: bool) -> None:
    """Prints what a series came to; raises its error afterwards, so that it decides the exit code."""
    from tasks.reports.page import results_rows, results_table
    from tasks.spec.names import how_many

    if as_json:
        print_json(
            {
                "evaluated": result.evaluated,
                "already_recorded": result.already_recorded,
                "report": result.report,
                "gate": result.verdict.as_dict() if result.verdict else None,
                "results": results_rows(result.records),
                "records": [json.loads(record.model_dump_json()) for record in result.records],
            }
        )
    else:
        if result.records:
            OUT.print(results_table(result.records))
        if result.evaluated == 0 and result.error is None:
            OUT.print(f"Nothing to evaluate: {how_many(result.already_recorded, 'cell')} recorded already.")
        else:
            OUT.print(f"Evaluated {result.evaluated}, already recorded {result.already_recorded}.", highlight=False)
        if result.report:
            OUT.print(f"Report: {result.report}", soft_wrap=True, highlight=False)
        if result.verdict is not None:
            show_verdict(result.verdict)
    if result.error is not None:
        raise result.error
