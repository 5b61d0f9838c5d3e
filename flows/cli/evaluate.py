"""`assay evaluate`: benchmarks or a suite on a checkpoint or a run; `assay train-and-evaluate`: while it is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from flows.console.console import OUT, Json, note, print_json, say
from flows.console.running import SeriesResult, run_series
from resources.backends.current import current_client
from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import AssayError, BadInput
from resources.jobs.jobs import Client
from resources.regions.regions import price_per_hour, regions_for
from resources.settings import MAX_EGRESS_VARIABLE, MAX_USD_VARIABLE, settings, variable_set
from tasks.checkpoints.discovery import with_pinned_model
from tasks.errors import SeveralSeries
from tasks.records.builds import read_qualifications
from tasks.records.record import Record
from tasks.reports.page import results_rows, results_table
from tasks.running.cells import Cell
from tasks.running.planning import Plan, Request, plan
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.loading import build_config, load_config
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
    parts: dict[str, Any] = {"options": options, "config": config, "engines": engines, "sending": sending}
    parts |= {"gating": gating, "deciding": deciding, "dry_run": dry_run}
    try:
        _evaluate(selecting, print_json if as_json else None, **parts)
    except SeveralSeries as several:
        _evaluate_each([replace(selecting, series=name) for name in several.names], parts, as_json=as_json)


def _evaluate_each(series: Sequence[SelectionOptions], parts: dict[str, Any], *, as_json: bool) -> None:
    errors: list[AssayError] = []
    documents: dict[str, Any] = {}
    for selecting in series:
        name = str(selecting.series)
        if not as_json:
            say(f"Series {name}:")
        try:
            _evaluate(selecting, partial(documents.__setitem__, name) if as_json else None, **parts)
        except AssayError as error:
            errors.append(error)
            if as_json:
                documents.setdefault(name, {"error": error.as_values()})
            else:
                say(str(error))
    if as_json:
        print_json({"series": documents})
    if errors:
        raise errors[0]


def _evaluate(
    selecting: SelectionOptions,
    shown: Callable[[Any], None] | None,
    *,
    options: EvaluationOptions,
    config: str | None,
    engines: PoolOptions,
    sending: WorkPoolOptions,
    gating: GateOptions,
    deciding: EarlyOptions,
    dry_run: bool,
) -> None:
    gate = deciding.applied_to(gating.loaded())
    selection = build_config(asdict(selecting), CheckpointSelection, source="the options")
    if sending.on_work_pool and gating.summary is not None:
        raise BadInput(
            expected="--summary where the gate is judged",
            found="--summary and --on-work-pool",
            remedy="leave --summary out; the verdict is an artifact of the flow run, and `assay gate` judges again",
        )
    egress_usd = settings().max_egress_usd if sending.max_egress_usd is None else sending.max_egress_usd
    max_usd = settings().max_usd if sending.max_usd is None else sending.max_usd
    suite, request, configs = _requested(options, engines, config, selection.series)
    if deciding.finish:
        steps = undecided_steps(configs[0].evaluation_path, configs[0].run_name)
        changed = {"which": "all", "steps": selection.steps or steps, "every_n_steps": None}
        selection = selection.model_copy(update=changed)
    if dry_run:
        _show_plan(configs, selection, egress_usd=egress_usd if sending.on_work_pool else None, shown=shown)
        return
    if sending.on_work_pool:
        from flows.console.on_work_pool import send  # with Prefect, which takes seconds

        limits: dict[str, Any] = {"max_egress_usd": egress_usd, "max_usd": max_usd}
        show_series(send(request, suite, selection, gate=gate, on_event=note, **limits), shown=shown)
        return

    def run() -> list[Record]:
        from flows.suites import evaluate_request

        return evaluate_request(request, suite, selection, gate)

    with ExitStack() as limited:
        limited.enter_context(variable_set(MAX_EGRESS_VARIABLE, str(egress_usd)))
        if max_usd is not None:
            limited.enter_context(variable_set(MAX_USD_VARIABLE, str(max_usd)))
        place = configs[0].evaluation_path, configs[0].run_name
        result = run_series(run, *place, request=Request(configs, selection, gate))
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, shown=shown, sinks=configs[0].sinks)


def _requested(
    options: EvaluationOptions, engines: PoolOptions, config: str | None, series: str | None
) -> tuple[Suite | None, EvaluationConfig | SuiteRequest, tuple[EvaluationConfig, ...]]:
    if options.suite is not None and config is None:
        request = with_pinned_model(suite_request_from_options(options, engines), series)
        suite = load_suite(options.suite)
        return suite, request, suite.evaluations_of(request)
    evaluation = (
        evaluation_from_options(options, engines) if config is None else evaluation_from_file(config, options, engines)
    )
    evaluation = with_pinned_model(evaluation, series)
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
    result = run_series(lambda: flow(training, gate), first.evaluation_path, first.run_name)
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, shown=print_json if as_json else None)


def _show_plan(
    configs: tuple[EvaluationConfig, ...],
    selection: CheckpointSelection,
    *,
    egress_usd: float | None,
    shown: Callable[[Any], None] | None,
) -> None:
    if egress_usd is None:
        plan = plan_of(Request(configs, selection))
    else:
        from flows.console.on_work_pool import plan_elsewhere

        plan = plan_elsewhere(configs, selection, max_egress_usd=egress_usd)
    if shown is not None:
        shown(plan.as_dict())
    else:
        say(*plan.lines())


@dataclass(frozen=True)
class Asked:
    """Machines that would be requested, their backend and cost."""

    resources: ResourceConfig
    backend: str
    usd_per_hour: dict[str, float | None]
    """USD per hour for all replicas, by region that offers them; None for an unknown price. Empty on this machine."""
    is_rented: bool

    def lines(self) -> Iterator[str]:
        machine = self.resources
        parts = [
            *_device(machine),
            how_many(machine.cpu, "core"),
            f"{machine.ram} of memory",
            f"{machine.disk} of disk",
        ]
        parts += ["preemptible" if machine.preemptible else "on demand"] if self.is_rented else []
        parts += [f"zone {machine.zone}"] if machine.zone else []
        parts += [f"image {machine.image}"] if machine.image else []
        machines = f"{machine.replicas} × {machine.hosts}" if machine.hosts > 1 else f"{machine.replicas}"
        yield f"{machines} × {', '.join(parts)}; on {self.backend}"
        for region, price in self.usd_per_hour.items():
            yield f"  {region}: " + ("price not known" if price is None else f"{price:.2f} USD an hour")


@dataclass(frozen=True, eq=False)
class DryRun(Plan):
    """A plan with the machines to request, none for an existing pool or endpoint."""

    machines: tuple[Asked, ...] = ()

    def lines(self) -> Iterator[str]:
        recorded = sum(cell.done for cell in self.cells)
        left = len(self.cells) - recorded
        yield f"{how_many(len(self.cells), 'cell')} wanted, {recorded} recorded already, {left} to evaluate"
        for cell in self.cells:
            yield f"  {_described(cell)}{' (recorded)' if cell.done else ''}"
        for asked in self.machines:
            yield from asked.lines()
        if self.expected.cells:
            yield from self.expected.lines()

    def as_dict(self) -> dict[str, Any]:
        machines = [
            {
                "resources": asked.resources.model_dump(mode="json"),
                "backend": asked.backend,
                "usd_per_hour": asked.usd_per_hour,
            }
            for asked in self.machines
        ]
        return {
            "wanted": len(self.cells),
            "recorded": sum(cell.done for cell in self.cells),
            "cells": [{"cell": _described(cell), "uri": cell.uri, "recorded": cell.done} for cell in self.cells],
            "machines": machines,
            "expected": self.expected.as_dict(),
        }


def plan_of(request: Request) -> DryRun:
    """Plans an evaluation like its flow, with the same errors."""
    made = plan(request)
    needed = [config.resources for config in request.configs if config.starts_jobs]
    machines = [_asked(each, current_client()) for place, each in enumerate(needed) if each not in needed[:place]]
    return DryRun(made.cells, made.expected, machines=tuple(machines))


def _described(cell: Cell) -> str:
    return f"{cell.title}: {', '.join(task.metric_key for task in cell.config.evals)}"


def _asked(resources: ResourceConfig, client: Client) -> Asked:
    elsewhere = not client.is_local or bool(resources.regions)
    prices = {region.name: price_per_hour(region, resources) for region in regions_for(resources)} if elsewhere else {}
    known = {name: None if price is None else round(float(price), 4) for name, price in prices.items()}
    return Asked(resources, "this machine" if client.is_local else client.description, known, is_rented=elsewhere)


def _device(resources: ResourceConfig) -> list[str]:
    match resources.device:
        case CpuConfig():
            return []
        case GpuConfig(variant=variant, count=count):
            return [how_many(count, "GPU" if variant == "auto" else f"{variant} GPU")]
        case TpuConfig(types=types):
            return [f"TPU slice {' or '.join(types)}"]


def show_series(
    result: SeriesResult, *, shown: Callable[[Any], None] | None = None, sinks: Sequence[Sink] = ()
) -> None:
    """Prints the results of a series and their locations at sinks, or gives them as JSON values to `shown`; raises its
    error at the end, for the exit code."""
    if shown is not None:
        shown(
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
            gone = sum(record.status == "gone" for record in result.records)
            more = f", gone {gone}" if gone else ""
            say(f"Evaluated {result.evaluated}, already recorded {result.already_recorded}{more}.")
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
