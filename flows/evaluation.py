"""The flow for one checkpoint, and what it shares with the flow for a run: plan, serve, evaluate, publish."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import flow

from flows.hooks import leave_nothing
from resources.settings import settings
from resources.tracing import tracing
from tasks.checkpoints.discovery import Checkpoint, discover_one, layouts_for, with_pinned_model
from tasks.gates.conclude import conclude_by
from tasks.gates.early import decided_early
from tasks.gates.gate import Gate
from tasks.prefect_server.client import end_reported
from tasks.prefect_server.progress_artifact import marked
from tasks.records.record import Record, now
from tasks.reports.artifacts import publish_report
from tasks.reports.page import import_plotting
from tasks.running.announce import announce, check_sinks, raise_alerts
from tasks.running.cells import Cell, as_served, conclude, plan_cells
from tasks.running.claimed_cells import ClaimedCells, put_away
from tasks.running.expected import check_budget, tell, with_expectations
from tasks.running.provisioning import provisioned
from tasks.running.scheduler import schedule_cells, stage_tokenizers
from tasks.spec.evaluation import EvaluationConfig


@flow(
    name="evaluate-checkpoint",
    flow_run_name="evaluate {config.place} · {config.asked}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def evaluate_checkpoint(config: EvaluationConfig, gate: Gate | None = None) -> list[Record]:
    """Evaluates one checkpoint: the one at model_path, or the newest complete one below it if asked to look.

    Args:
        config: What is evaluated, and how.
        gate: What its scores must show; the flow run fails where it says NO-GO.

    Raises:
        AssayError: it is not there, not complete, or its cell has no succeeded record in the end.
        GateRefused: the gate says NO-GO.
    """
    config = with_pinned_model(config)
    latest = config.discover_latest_checkpoint
    checkpoint = discover_one(config.model_path, latest=latest, **layouts_for([config]))
    return evaluate([config], [checkpoint], gate=gate)


def evaluate(
    configs: Sequence[EvaluationConfig],
    checkpoints: Sequence[Checkpoint],
    *,
    gate: Gate | None = None,
    along: Sequence[Cell] = (),
) -> list[Record]:
    """Makes one or several evaluations of checkpoints on one pool, leaving out cells that have a succeeded record.

    What it is expected to cost is said before anything begins, and refused where it is more than `ASSAY_MAX_USD`.

    Args:
        configs: the evaluations.
        checkpoints: each of which they are made of.
        gate: what the scores must show.
        along: cells of others of the run's checkpoints, which the pool serves too.

    Raises:
        AssayError: the request cannot be right, or a wanted cell has no succeeded record in the end.
        OverBudget: it is expected to cost more than it may, or nobody knows what.
        GateRefused: the gate says NO-GO; it may let pass that a cell failed or was withheld.
    """
    configs = [as_served(config) for config in configs]
    with marked(configs), end_reported():
        cells = [*plan_cells(configs, checkpoints), *along]
        if gate is not None and gate.decide == "early":
            cells = decided_early(gate, cells)
        if any(config.sinks for config in configs):
            check_sinks(cells)
        cells, expected = with_expectations(cells)
        if expected.cells:
            tell(expected)
            check_budget(expected, settings().max_usd)
        run_pending(configs, cells, wait=True)
        return conclude(cells) if gate is None else conclude_by(gate, cells)


def run_pending(configs: Sequence[EvaluationConfig], cells: Sequence[Cell], *, wait: bool) -> None:
    """Evaluates the cells that have no succeeded record, then writes the report, looks for alerts and tells the sinks.

    Cells that another run has claimed are left to it; with `wait`, this one waits for their outcome.
    """
    began = now()
    put_away(cells)
    import_plotting()
    with ClaimedCells([cell for cell in cells if not cell.settled], wait=wait) as claimed:
        run_claimed(configs, claimed)
    publish_report(configs[0])
    raise_alerts(cells, since=began)
    if any(config.sinks for config in configs):
        announce(cells, since=began)


def run_claimed(configs: Sequence[EvaluationConfig], claimed: ClaimedCells) -> None:
    """Evaluates the cells that this run gets a claim of, each batch of them on a pool of its own."""
    with tracing("evaluation", **{"assay.run": configs[0].run_name}):
        while batch := claimed.next():
            with provisioned(configs, stage_tokenizers(batch)) as serving:
                schedule_cells(batch, serving, claimed=claimed)
