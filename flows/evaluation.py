"""The flows for a single checkpoint, and steps that the flow for a run shares: plan, serve, evaluate, publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.hooks import pipeline
from resources.settings import settings, with_pinned_lists
from resources.tracing import tracing
from tasks.checkpoints.checkpoint import layouts_for
from tasks.checkpoints.discovery import discover_checkpoint, with_pinned_model
from tasks.prefect_server.flow_runs import marked
from tasks.records.record import Record, now
from tasks.reports.artifacts import publish_report
from tasks.running.cells import Cell, as_served, conclude, configs_of, plan_cells
from tasks.running.claimed_cells import ClaimedCells, put_away
from tasks.running.conclude import announce, check_sinks, conclude_by, raise_alerts
from tasks.running.expected import check_budget, tell
from tasks.running.planning import Plan, Request, plan, plan_checkpoints
from tasks.running.provisioning import provisioned
from tasks.running.scheduler import schedule_cells, stage_tokenizers
from tasks.spec.evaluation import EvaluationConfig, StepsFrom
from tasks.verdicts.gate import Gate


@pipeline("evaluate-checkpoint", run_name="evaluate {config.place} · {config.asked}")
def evaluate_checkpoint(
    config: EvaluationConfig, gate: Gate | None = None, steps_from: StepsFrom | None = None
) -> list[Record]:
    """Evaluates a checkpoint: that at model_path, or the newest complete checkpoint below it if configured so.

    Args:
        config: The evaluation.
        gate: Gate on its scores; the flow run fails on NO-GO.
        steps_from: An expression for the step in the checkpoint's path, as in a selection of checkpoints.
    """
    config = with_pinned_model(config)
    latest = config.discover_latest_checkpoint
    layouts = layouts_for([config])
    checkpoint = discover_checkpoint(config.model_path, latest=latest, steps_from=steps_from, **layouts)
    return evaluate(plan_checkpoints([config], [checkpoint], gate=gate), gate=gate)


def evaluate(plan: Plan, *, gate: Gate | None = None) -> list[Record]:
    """Evaluates the planned cells on a shared pool, except those with a succeeded record.

    Logs the expected cost before the start, and refuses a cost above `ASSAY_MAX_USD`.
    """
    with marked(configs_of(plan.cells)):
        if any(cell.config.sinks for cell in plan.cells):
            check_sinks(plan.cells)
        if plan.expected.cells:
            tell(plan.expected)
            check_budget(plan.expected, settings().max_usd)
        run_pending(plan.cells, wait=True)
        return conclude(plan.cells) if gate is None else conclude_by(gate, plan.cells)


@pipeline("evaluate-demo", run_name="evaluate {merged.run_name} · demo")
def evaluate_demo(configs: tuple[EvaluationConfig, ...], merged: EvaluationConfig) -> list[Record]:
    """Runs every evaluation of a run's checkpoints, and an evaluation of a merged checkpoint, on a shared pool.

    Args:
        configs: The evaluations of the checkpoints.
        merged: The evaluation of the merged checkpoint, with its name as model_path.
    """
    return evaluate(plan(Request(configs, merged=merged)))


def run_pending(cells: Sequence[Cell], *, wait: bool) -> None:
    """Evaluates the cells without a succeeded record, writes the report, checks for alerts, and notifies the sinks.

    Skips cells that another run has claimed; with `wait`, waits for their outcome.
    """
    if not cells:  # the checkpoints of a policy's cells can be gone by now
        return
    began = now()
    put_away(cells)
    with ClaimedCells([cell for cell in cells if not cell.settled], wait=wait) as claimed:
        run_claimed(claimed)
    publish_report(cells[0].config)
    raise_alerts(cells, since=began)
    if any(cell.config.sinks for cell in cells):
        announce(cells, since=began)


def run_claimed(claimed: ClaimedCells) -> None:
    """Evaluates the cells that this run can claim, each batch on a pool of its own."""
    while batch := claimed.next():
        with (
            tracing("evaluation", **{"assay.run": batch[0].config.run_name}),
            provisioned(configs_of(batch), stage_tokenizers(batch)) as serving,
        ):
            schedule_cells(batch, serving, claimed=claimed)


@pipeline("requalify", run_name="requalify {configs[0].place} · {label}")
def ask_again(configs: Sequence[EvaluationConfig], label: str, lists: Mapping[str, Path]) -> list[Record]:
    """Evaluates a checkpoint with other pinned lists, without report, sinks and alerts.

    Args:
        configs: The evaluations, which must share a pool.
        label: The name of this side of the comparison.
        lists: Pinned lists in place of Assay's own, by environment.
    """
    with with_pinned_lists(lists):
        checkpoint = discover_checkpoint(configs[0].model_path, latest=False, **layouts_for(configs))
        with marked(configs):
            cells = plan_cells([as_served(config) for config in configs], [checkpoint])
            with ClaimedCells(cells, wait=True) as claimed:
                run_claimed(claimed)
            return conclude(cells)
