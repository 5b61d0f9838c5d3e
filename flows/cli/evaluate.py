"""`assay evaluate`: benchmarks or a suite on a checkpoint or a run; `assay train-and-evaluate`: while it is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from cyclopts import Parameter

from flows.cli.gate import EarlyOptions, GateOptions, show_verdict, undecided_steps, write_summaries
from flows.cli.options.evaluations import (
    EvaluationOptions,
    SelectionOptions,
    WorkPoolOptions,
    evaluation_from_file,
    evaluation_from_options,
    suite_request_from_options,
)
from flows.cli.options.pools import PoolOptions
from flows.console.console import ERR, OUT, Json, note, print_json, say
from flows.console.dry_run import plan_of
from flows.console.running import SeriesResult, run_series
from resources.errors import BadInput
from resources.settings import MAX_EGRESS_VARIABLE, MAX_USD_VARIABLE, settings, variable_set
from tasks.checkpoints.discovery import with_pinned_model
from tasks.records.builds import read_qualifications
from tasks.records.record import Record
from tasks.reports.page import results_rows, results_table
from tasks.running.planning import Request
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.loading import load_config
from tasks.spec.names import how_many
from tasks.spec.sinks import Sink
from tasks.spec.suites import Suite, SuiteRequest, load_suite
from tasks.spec.training import TrainAndEvaluateConfig


def evaluate(
    *,
    options: EvaluationOptions = EvaluationOptions(),
    config: str | None = None,
    selecting: SelectionOptions = SelectionOptions(),
    engines: PoolOptions = PoolOptions(),
    sending: WorkPoolOptions = WorkPoolOptions(),
    gating: GateOptions = GateOptions(),
    deciding: EarlyOptions = EarlyOptions(),
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Evaluate the checkpoints of a run that have no succeeded record yet.

    Args:
        config: YAML file with an EvaluationConfig, in place of options.
        dry_run: Only show what would be evaluated, on which machines, at what price.
    """
    gate, selection = deciding.applied_to(gating.loaded()), selecting.selection()
    if sending.on_work_pool and gating.summary is not None:
        raise BadInput(
            expected="--summary where the gate is judged",
            found="--summary and --on-work-pool",
            remedy="leave --summary out; the verdict is an artifact of the flow run, and `assay gate` judges again",
        )
    egress_usd = settings().max_egress_usd if sending.max_egress_usd is None else sending.max_egress_usd
    max_usd = settings().max_usd if sending.max_usd is None else sending.max_usd
    suite, request, configs = _requested(options, engines, config)
    if deciding.finish:
        steps = undecided_steps(configs[0].evaluation_path, configs[0].run_name)
        selection = CheckpointSelection(steps=selection.steps or steps)
    if dry_run:
        _show_plan(configs, selection, egress_usd=egress_usd if sending.on_work_pool else None, as_json=as_json)
        return
    if sending.on_work_pool:
        from flows.console.on_work_pool import send  # with Prefect, which takes seconds

        limits: dict[str, Any] = {"max_egress_usd": egress_usd, "max_usd": max_usd}
        show_series(send(request, suite, selection, gate=gate, on_event=note, **limits), as_json=as_json)
        return

    def run() -> list[Record]:
        from flows.suites import evaluate_request

        return evaluate_request(request, suite, selection, gate)

    with ExitStack() as limited:
        limited.enter_context(variable_set(MAX_EGRESS_VARIABLE, str(egress_usd)))
        if max_usd is not None:
            limited.enter_context(variable_set(MAX_USD_VARIABLE, str(max_usd)))
        result = run_series(
            run,
            evaluation_path=configs[0].evaluation_path,
            run_name=configs[0].run_name,
            console=ERR,
            request=Request(configs, selection, gate),
        )
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, as_json=as_json, sinks=configs[0].sinks)


def _requested(
    options: EvaluationOptions, engines: PoolOptions, config: str | None
) -> tuple[Suite | None, EvaluationConfig | SuiteRequest, tuple[EvaluationConfig, ...]]:
    if options.suite is not None and config is None:
        request, suite = with_pinned_model(suite_request_from_options(options, engines)), load_suite(options.suite)
        return suite, request, suite.evaluations_of(request)
    evaluation = (
        evaluation_from_options(options, engines) if config is None else evaluation_from_file(config, options, engines)
    )
    evaluation = with_pinned_model(evaluation)
    return None, evaluation, (evaluation,)


def train_and_evaluate(
    config: Annotated[str, Parameter(help="YAML file with a TrainAndEvaluateConfig.")],
    /,
    *,
    gating: GateOptions = GateOptions(),
    as_json: Json = False,
) -> None:
    """Train a model with Levanter and evaluate each checkpoint as soon as it is complete."""
    from flows.training import train_and_evaluate as flow  # with Prefect

    gate, training = gating.loaded(), load_config(config, TrainAndEvaluateConfig)
    first = training.asked()[0]
    result = run_series(
        lambda: flow(training, gate), evaluation_path=first.evaluation_path, run_name=first.run_name, console=ERR
    )
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, as_json=as_json)


def _show_plan(
    configs: tuple[EvaluationConfig, ...], selection: CheckpointSelection, *, egress_usd: float | None, as_json: bool
) -> None:
    if egress_usd is None:
        plan = plan_of(Request(configs, selection))
    else:
        from flows.console.on_work_pool import plan_elsewhere

        plan = plan_elsewhere(configs, selection, max_egress_usd=egress_usd)
    if as_json:
        print_json(plan.as_dict())
    else:
        say(*plan.lines())


def show_series(result: SeriesResult, *, as_json: bool, sinks: Sequence[Sink] = ()) -> None:
    """Prints the results of a series and their locations at sinks; raises its error at the end, for the exit code."""
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
            say(f"Nothing to evaluate: {how_many(result.already_recorded, 'cell')} recorded already.")
        else:
            say(f"Evaluated {result.evaluated}, already recorded {result.already_recorded}.")
        if result.report:
            say(f"Report: {result.report}")
        say(*result.alerts)
        for sink in sinks:
            if sink.shown_by is not None and any(sink.name in record.sinks for record in result.records):
                say(f"To see it: {sink.shown_by}")
        if result.verdict is not None:
            show_verdict(result.verdict)
    if result.error is not None:
        raise result.error
