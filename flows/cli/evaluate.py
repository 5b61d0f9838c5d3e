"""`assay evaluate`: benchmarks or a suite on a checkpoint or a run; `assay requalify`: again with other versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.gate import (
    EarlyOptions,
    GateOptions,
    early_gate,
    gate_of,
    show_verdict,
    undecided_steps,
    write_summaries,
)
from flows.cli.options.groups import BudgetOptions, EvaluationOptions, SelectionOptions, WorkPoolOptions, flattened
from flows.console.console import ERR, OUT, Json, print_json

if TYPE_CHECKING:
    from tasks.records.record import FoundRecord, Record
    from tasks.running.requalification import Side
    from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
    from tasks.spec.sinks import Sink

_SIDE = "present (this Assay's pinned lists), a pinned list, a kept environment, or a folder of records"


@flattened
def evaluate(
    options: EvaluationOptions,
    *,
    config: Annotated[str | None, typer.Option(help="YAML file with an EvaluationConfig, in place of options.")] = None,
    selecting: SelectionOptions,
    sending: WorkPoolOptions,
    budget: BudgetOptions,
    gating: GateOptions,
    deciding: EarlyOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be evaluated, on which machines, at what price.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate the checkpoints of a run that have no succeeded record yet."""
    from flows.cli.options.evaluations import evaluation_from_file, evaluation_from_options, suite_request_from_options
    from flows.console.finished import records_if_finished
    from flows.console.running import run_series
    from resources.errors import BadInput
    from resources.settings import MAX_EGRESS_VARIABLE, MAX_USD_VARIABLE, settings, variable_set
    from tasks.checkpoints.discovery import with_pinned_model
    from tasks.spec.evaluation import CheckpointSelection
    from tasks.spec.loading import build_config

    judged_by = early_gate(gate_of(gating), deciding)
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
    egress_usd = settings().max_egress_usd if sending.max_egress_usd is None else sending.max_egress_usd
    max_usd = settings().max_usd if budget.max_usd is None else budget.max_usd
    sending_options: dict[str, Any] = {
        "gate": judged_by,
        "max_egress_usd": egress_usd,
        "max_usd": max_usd,
        "on_event": _tell,
    }
    if sending.on_work_pool and gating.summary is not None:
        raise BadInput(
            expected="--summary where the gate is judged",
            found="--summary and --on-work-pool",
            remedy="leave --summary out; the verdict is an artifact of the flow run, and `assay gate` judges again",
        )
    request = suite = None
    if options.suite is not None and config is None:
        from tasks.spec.suites import load_suite

        request, suite = with_pinned_model(suite_request_from_options(options)), load_suite(options.suite)
        configs, sinks = suite.evaluations_of(request), request.sinks
    else:
        evaluation = evaluation_from_options(options) if config is None else evaluation_from_file(config, options)
        configs = [with_pinned_model(evaluation)]
        sinks = evaluation.sinks
    if deciding.finish:
        steps = undecided_steps(configs[0].evaluation_path, configs[0].run_name)
        selection = CheckpointSelection(steps=selection.steps or steps)
    if dry_run:
        _show_plan(configs, selection, egress_usd=egress_usd if sending.on_work_pool else None, as_json=as_json)
        return
    if sending.on_work_pool:
        from flows.console.on_work_pool import send_evaluation, send_suite

        if suite is not None and request is not None:
            sent = send_suite(suite, request, selection=selection, **sending_options)
        else:
            sent = send_evaluation(configs[0], selection, **sending_options)
        show_series(sent, as_json=as_json)
        return

    def run() -> list[Record]:
        if suite is not None and request is not None:
            from flows.suites import evaluate_suite

            return evaluate_suite(suite, request, selection, judged_by)
        from flows.series import evaluate_checkpoints

        return evaluate_checkpoints(configs[0], selection, judged_by)

    place = {"evaluation_path": configs[0].evaluation_path, "run_name": configs[0].run_name}
    with ExitStack() as told:
        told.enter_context(variable_set(MAX_EGRESS_VARIABLE, str(egress_usd)))
        if max_usd is not None:
            told.enter_context(variable_set(MAX_USD_VARIABLE, str(max_usd)))
        result = run_series(
            run,
            **place,
            console=ERR,
            finished=lambda: records_if_finished(configs, selection, gate=judged_by),
            configs=configs,
        )
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, as_json=as_json, sinks=sinks)


def _show_plan(
    configs: Sequence[EvaluationConfig], selection: CheckpointSelection, *, egress_usd: float | None, as_json: bool
) -> None:
    if egress_usd is not None:
        from flows.console.on_work_pool import choose, expected_there
        from tasks.spec.names import how_many

        choice, checkpoints = choose(configs, selection, max_egress_usd=egress_usd)
        expected = expected_there(configs, checkpoints, choice)
        cell_count = len(checkpoints) * len(configs)
        content = {"wanted": cell_count, **choice.as_dict(), "expected": expected.as_dict()}
        recorded = cell_count - expected.cells
        lines = [
            f"{how_many(cell_count, 'cell')} wanted, {recorded} recorded already, {expected.cells} to evaluate",
            choice.described(),
            *(expected.lines() if expected.cells else ()),
        ]
    else:
        from flows.console.dry_run import plan_of

        plan = plan_of(configs, selection)
        content, lines = plan.as_dict(), plan.lines()
    if as_json:
        print_json(content)
    else:
        OUT.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def _tell(line: str) -> None:
    ERR.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def show_series(result: Any, *, as_json: bool, sinks: Sequence[Sink] = ()) -> None:
    """Prints the results of a series and their locations at sinks; raises its error at the end, for the exit code."""
    from tasks.records.builds import read_qualifications
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
            place = result.records[0].evaluation.get("evaluation_path")
            OUT.print(results_table(result.records, qualifications=read_qualifications(place) if place else ()))
        if result.evaluated == 0 and result.error is None:
            OUT.print(f"Nothing to evaluate: {how_many(result.already_recorded, 'cell')} recorded already.")
        else:
            OUT.print(f"Evaluated {result.evaluated}, already recorded {result.already_recorded}.", highlight=False)
        if result.report:
            OUT.print(f"Report: {result.report}", soft_wrap=True, highlight=False)
        for alert in result.alerts:
            OUT.print(alert, soft_wrap=True, highlight=False, markup=False)
        for sink in sinks:
            if sink.shown_by is not None and any(sink.name in record.sinks for record in result.records):
                OUT.print(f"To see it: {sink.shown_by}", soft_wrap=True, highlight=False, markup=False)
        if result.verdict is not None:
            show_verdict(result.verdict)
    if result.error is not None:
        raise result.error


def requalify(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint with records: NAME or RUN@STEP.")],
    before: Annotated[str | None, typer.Option("--from", help=f"{_SIDE}; those in --path when left out.")] = None,
    after: Annotated[str, typer.Option("--to", help=f"{_SIDE}.")] = "present",
    path: Annotated[str, typer.Option(help="Folder given as --output to evaluate; the verdict goes there.")] = (
        "evaluations"
    ),
    evaluator: Annotated[list[str] | None, typer.Option("--evaluator", help="Evaluator; repeatable.")] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option("--benchmark", help="Benchmark or pattern; repeatable.")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Largest difference that is noise; a share of the value where that is above 1.", min=0)
    ] = 0.01,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint with two sets of versions: are the results identical, within noise or different?"""
    from flows.console.qualification import qualification_table
    from resources.errors import BadInput
    from resources.storage import storage
    from tasks.errors import NumbersChanged
    from tasks.records.builds import write_qualification
    from tasks.records.record import QUALIFICATIONS_FOLDER, now
    from tasks.records.search import RecordFilter, records_of_checkpoints
    from tasks.running.requalification import side_of
    from tasks.spec.names import how_many
    from tasks.verdicts.qualification import qualify

    filters = RecordFilter(evaluators=tuple(evaluator or ()), benchmarks=tuple(benchmark or ()))
    filters.check()
    sides = side_of(before or path), side_of(after)
    [known] = records_of_checkpoints((checkpoint,), evaluation_path=sides[0].records or path)
    meant = [record for record in filters.select([item.record for item in known]) if record.succeeded]
    if not meant:
        raise BadInput(
            expected=f"a succeeded record of {checkpoint} below {sides[0].records or path} that is wanted here",
            found="none",
            remedy="evaluate it first, or take back --evaluator or --benchmark",
        )
    asked = storage.join(path, QUALIFICATIONS_FOLDER, "asked", f"{now():%Y%m%dT%H%M%S}-{meant[0].checkpoint.name}")
    pair = [_records(side, meant, storage.join(asked, name)) for side, name in zip(sides, ("from", "to"), strict=True)]
    qualification = qualify(*pair, compared=(sides[0].label, sides[1].label), margin=margin)
    written = write_qualification(path, qualification)
    if as_json:
        print_json({"file": written, **json.loads(qualification.model_dump_json())})
    else:
        OUT.print(qualification_table(qualification))
        OUT.print(f"Verdict: {written}", soft_wrap=True, highlight=False)
    changed = [verdict for verdict in qualification.benchmarks if verdict.verdict == "different"]
    if changed:
        raise NumbersChanged(
            expected=f"the same numbers of {checkpoint} with both",
            found=f"{len(changed)} of {how_many(len(qualification.benchmarks), 'benchmark')} different: "
            + ", ".join(verdict.benchmark for verdict in changed),
            remedy=f"look at the questions in {written}; keep to the former build, or evaluate all that is to be "
            "compared with the later build, into another evaluation_path",
        )


def _records(side: Side, meant: list[Record], evaluation_path: str) -> list[FoundRecord]:
    from tasks.running.requalification import asked_again, recorded_successes

    if side.records is None:
        from flows.console.running import run_series
        from flows.requalification import ask_again

        run = meant[0].checkpoint.run
        for configs in asked_again(meant, evaluation_path):
            result = run_series(
                lambda configs=configs: ask_again(configs, side.label, side.lists),
                evaluation_path=evaluation_path,
                run_name=run,
                console=ERR,
            )
            if result.error is not None:
                raise result.error
    records = recorded_successes(side.records or evaluation_path, digest=meant[0].checkpoint.digest)
    return [item for item in records if (item.record.evaluator, item.record.benchmarks) in _evaluations(meant)]


def _evaluations(records: list[Record]) -> set[tuple[str, tuple[str, ...]]]:
    return {(record.evaluator, record.benchmarks) for record in records}
