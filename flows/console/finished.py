"""Requests that leave nothing to do, concluded at once: without Prefect, which takes seconds to import and to start."""

from __future__ import annotations

from collections.abc import Sequence

from resources.errors import OverBudget, StorageError
from resources.settings import settings
from tasks.checkpoints.discovery import discover, layouts_for
from tasks.gates.conclude import conclude_by
from tasks.gates.gate import Gate
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import Update, listening, report
from tasks.records.record import Record
from tasks.reports.artifacts import publish_report
from tasks.running.cells import Cell, as_served, conclude, plan_cells, standing_record
from tasks.running.claimed_cells import put_away
from tasks.sinks.publishing import missing_sinks
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig


def records_if_finished(
    configs: Sequence[EvaluationConfig], selection: CheckpointSelection, *, gate: Gate | None = None
) -> list[Record] | None:
    """Returns the records that stand for what is wanted, if every cell has one, and every sink has those.

    It leaves what a flow run would leave then: the report, and the gate's verdict. None is returned, and nothing done,
    where something is left to do, where incomplete checkpoints are to be waited for, or where Prefect was told of a
    server, which is to see the flow run.
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
        for update in updates if finished else ():  # else a flow run says the same
            report(update)
    if not finished:
        if settings().max_usd is not None:
            _check_budget(cells)
        return None
    try:
        put_away(cells)
        publish_report(configs[0])
    except StorageError:
        return None  # a flow run tries again
    return conclude(cells) if gate is None else conclude_by(gate, cells)


def _check_budget(cells: Sequence[Cell]) -> None:
    from tasks.running.expected import check_budget, tell, with_expectations  # with all that starts pools

    _, expected = with_expectations(cells)
    try:
        check_budget(expected, settings().max_usd)
    except OverBudget:
        tell(expected)  # where it may begin, its flow run says so
        raise


def _is_announced(cell: Cell) -> bool:
    found = standing_record(cell) if cell.config.sinks else None
    return found is None or not missing_sinks(found.record, cell.config.sinks)
