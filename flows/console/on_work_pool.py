"""`assay evaluate --on-work-pool`: sends a series to a work pool's machine and waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import FlowRun

from flows.console.running import SeriesResult
from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from pools.config import is_address
from pools.weights.merges import locations_of, with_each_location
from resources.errors import AssayError, BadInput
from resources.regions.region_check import region_of_data
from resources.regions.regions import known_regions, tariff_in
from resources.regions.work_pools import WorkPoolChoice, choose_work_pool
from resources.storage import storage
from tasks.checkpoints.checkpoint import Checkpoint, layouts_for
from tasks.checkpoints.discovery import discover
from tasks.checkpoints.run_snapshot import listing_of
from tasks.errors import EvaluationInterrupted
from tasks.policies.dispatch import send_run, source_of, states_of
from tasks.prefect_server.client import prefect_client, require_server
from tasks.prefect_server.flow_runs import noted_error
from tasks.records.cost import Predicted
from tasks.records.current import current_records
from tasks.records.index import RunRecords, indexed_records
from tasks.records.record import now, read_records
from tasks.reports.artifacts import report_uri
from tasks.running.cells import as_served
from tasks.running.expected import Expectations, Expected, check_budget, together
from tasks.running.pricing import resources_of_replica, tariff_of_cell
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig, digest_of
from tasks.spec.names import how_many
from tasks.spec.suites import Suite, SuiteRequest
from tasks.verdicts.gate import Gate

_FLOW_RUN_POLL_SECONDS = 2.0
_PATHS = ("model_path", "evaluation_path", "benchmarks_path")


@dataclass(frozen=True)
class PlanElsewhere:
    """The plan of an evaluation at a work pool."""

    cells: int
    choice: WorkPoolChoice
    checkpoints: Sequence[Checkpoint]
    expected: Expected

    def lines(self) -> list[str]:
        left = self.expected.cells
        counts = f"{how_many(self.cells, 'cell')} wanted, {self.cells - left} recorded already, {left} to evaluate"
        return [counts, self.choice.described(), *(self.expected.lines() if left else ())]

    def as_dict(self) -> dict[str, Any]:
        return {"wanted": self.cells, **self.choice.as_dict(), "expected": self.expected.as_dict()}


def plan_elsewhere(
    configs: Sequence[EvaluationConfig], selection: CheckpointSelection, *, max_egress_usd: float
) -> PlanElsewhere:
    """Returns the best work pool, the present checkpoints, and the expected cost there.

    Different checkpoints make a different flow run.
    """
    require_server()
    first = next((config for config in configs if not config.native), configs[0])
    if first.pool_name is not None and not is_address(first.pool_name):
        raise BadInput(
            expected="an endpoint, a new pool or the address of a kept pool with --on-work-pool",
            found=f"--pool {first.pool_name}, a name of this machine",
            remedy="give the pool's https:// address, or leave one of them out",
        )
    checkpoints = discover.fn(first.model_path, selection, **layouts_for(configs))
    regions = known_regions()
    choice = choose_work_pool(
        first.resources,
        regions=regions,
        states=states_of(regions),
        source=source_of(
            (checkpoint.uri for checkpoint in checkpoints),
            region=region_of_data(storage.behind_link(locations_of(first.model_path)[-1]), regions),
        ),
        max_egress_usd=Decimal(str(max_egress_usd)),
    )
    expected = _expected(configs, checkpoints, choice)
    return PlanElsewhere(len(checkpoints) * len(configs), choice, checkpoints, expected)


def send(
    request: EvaluationConfig | SuiteRequest,
    suite: Suite | None,
    selection: CheckpointSelection,
    *,
    gate: Gate | None,
    max_egress_usd: float,
    max_usd: float | None,
    on_event: Callable[[str], None],
) -> SeriesResult:
    """Sends an evaluation, or a suite with its full content, to the work pool of the best region and waits for it.

    Local paths must be valid on that machine. `max_egress_usd` limits the cost of reading the checkpoints from another
    region, `max_usd` the whole expected cost.
    """
    paths = {name: path for name in _PATHS if (path := getattr(request, name))}
    whole = request.model_copy(
        update={name: with_each_location(path, storage.absolute) for name, path in paths.items()}
    )
    content = whole.model_dump(mode="json")
    parameters: dict[str, Any] = {"selection": selection.model_dump(mode="json")}
    parameters |= {"gate": gate.model_dump(mode="json")} if gate is not None else {}
    if isinstance(whole, SuiteRequest):
        assert suite is not None
        flow, configs, label = evaluate_suite.name, suite.evaluations_of(whole), str(suite)
        parameters |= {"suite": suite.model_dump(mode="json"), "request": content}
    else:
        flow, configs, label = evaluate_checkpoints.name, (whole,), whole.asked
        parameters |= {"config": content}
    plan = plan_elsewhere(configs, selection, max_egress_usd=max_egress_usd)
    for line in plan.lines()[1:]:
        on_event(line)
    check_budget(plan.expected, max_usd)
    began, path, run_name = now(), configs[0].evaluation_path, configs[0].run_name
    present = [(checkpoint.uri, checkpoint.modified) for checkpoint in plan.checkpoints]
    run = send_run(
        flow,
        plan.choice,
        parameters=parameters,
        tags=[f"run={run_name}"],
        name=f"evaluate {whole.place}{selection.words} · {label}",
        key=digest_of([flow, parameters, present]),
    )
    on_event(f"flow run {run.name!r} ({run.id})")
    error = _error_of(_ended(run.id, on_event))
    if isinstance(error, BadInput):
        raise error
    records = current_records([record for record in read_records(path) if record.checkpoint.run == run_name])
    evaluated = sum(record.created >= began for record in records)
    already = sum(record.succeeded and record.created < began for record in records)
    return SeriesResult(records, evaluated, already, report_uri(path, run_name) if records else None, error)


def _expected(
    configs: Sequence[EvaluationConfig], checkpoints: Sequence[Checkpoint], choice: WorkPoolChoice
) -> Expected:
    first = configs[0]
    known = indexed_records(storage.join(first.evaluation_path, first.run_name))
    expectations = Expectations(first.evaluation_path, {first.run_name: known})
    predictions: list[Predicted | None] = []
    why_unpriced: str | None = None
    for config in map(as_served, configs):
        fallback = config.levanter_fallback()
        hashes = [evaluation_hash(config), *([evaluation_hash(fallback)] if fallback else [])]
        resources, tariff = resources_of_replica(config), tariff_of_cell(config)
        if resources is not None and config.pool_name is None:
            tariff = tariff_in(choice.region, resources, known_regions())
        pending = [checkpoint for checkpoint in checkpoints if not _is_recorded(checkpoint, config, hashes, known)]
        if pending and tariff.usd_per_hour is None:
            why_unpriced = why_unpriced or tariff.why_unknown
        predictions += [expectations.of(config, hashes, tariff)] * len(pending)
    return together(predictions, why_unpriced=why_unpriced)


def _is_recorded(checkpoint: Checkpoint, config: EvaluationConfig, hashes: Sequence[str], known: RunRecords) -> bool:
    listing = listing_of(checkpoint)
    states = known.done.get(f"{config.run_name}{checkpoint.name.removeprefix(checkpoint.run)}", ())
    return any(state.listing == listing and state.hashes.intersection(hashes) for state in states)


def _ended(run: UUID, on_event: Callable[[str], None]) -> FlowRun:
    reported: str | None = None
    try:
        while True:
            with prefect_client() as client:
                sent_run = client.read_flow_run(run)
            state = sent_run.state
            assert state is not None, "a flow run that was sent has a state"
            if state.name != reported:
                on_event(f"{state.name}")
                reported = state.name
            if state.is_final():
                return sent_run
            time.sleep(_FLOW_RUN_POLL_SECONDS)
    except KeyboardInterrupt:
        on_event("the flow run goes on; the same command waits for it again")
        raise SystemExit(130) from None


def _error_of(run: FlowRun) -> AssayError | None:
    state = run.state
    assert state is not None, "a flow run that is over has a state"
    if state.is_completed():
        return None
    if state.is_failed() and (noted := noted_error(run)) is not None:
        return noted
    return EvaluationInterrupted(
        expected="a flow run that completes",
        found=f"it is {state.name}: {state.message}" if state.message else f"it is {state.name}",
        remedy="its log on the Prefect server says more; run the same command again to go on",
    )
