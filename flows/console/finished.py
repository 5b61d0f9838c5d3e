"""Concludes finished requests without Prefect, which takes seconds to import and start."""

from __future__ import annotations

from collections.abc import Sequence

from resources.errors import StorageError
from resources.settings import settings
from tasks.checkpoints.discovery import discover, layouts_for
from tasks.errors import OverBudget
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import Update, listening, report
from tasks.records.record import Record
from tasks.reports.artifacts import publish_report
from tasks.running.cells import Cell, as_served, conclude, plan_cells, standing_record
from tasks.running.claimed_cells import put_away
from tasks.running.conclude import conclude_by
from tasks.sinks.publishing import missing_sinks
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.verdicts.gate import Gate


def records_if_finished(
    configs: Sequence[EvaluationConfig], selection: CheckpointSelection, *, gate: Gate | None = None
) -> list[Record] | None:
    """Returns the records of the wanted cells if every cell has a record, and every sink has received it.

    Writes the report and the gate's verdict as a flow run would. Returns None, without any effect, if cells or sinks
    are pending, if incomplete checkpoints must be waited for, or if a Prefect server is configured, which must show the
    flow run.
    """
    if server_named() or selection.wait_for_incomplete_seconds:
        return None
    updates: list[Update] = []
    finished = True
    try:
        with listening(updates.append):
            checkpoints = discover(configs[0].model_path, selection, **layouts_for(configs))
            cells = plan_cells([as_served(config) for config in configs], checkpoints)
            finished = all(cell.done and _is_announced(cell) for cell in cells)
    finally:
        for update in updates if finished else ():  # else a flow run reports the same
            report(update)
    if not finished:
        if settings().max_usd is not None:
            _check_budget(cells)
        return None
    try:
        put_away(cells)
        publish_report(configs[0])
    except StorageError:
        return None  # a flow run retries
    return conclude(cells) if gate is None else conclude_by(gate, cells)


def _check_budget(cells: Sequence[Cell]) -> None:
    from tasks.running.expected import check_budget, tell, with_expectations  # imports all that starts pools

    _, expected = with_expectations(cells)
    try:
        check_budget(expected, settings().max_usd)
    except OverBudget:
        tell(expected)  # if it may start, its flow run logs this
        raise


def _is_announced(cell: Cell) -> bool:
    recorded = standing_record(cell) if cell.config.sinks else None
    return recorded is None or not missing_sinks(recorded.record, cell.config.sinks)
