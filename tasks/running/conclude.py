"""A gate at the end of a flow: the verdict is shown in Prefect's UI, and NO-GO fails the flow run."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.errors import EvaluationIncomplete
from tasks.prefect_server.lazy import in_flow_run, step
from tasks.prefect_server.progress import Judged, report, report_event
from tasks.records.record import Record
from tasks.records.verdicts import Verdict
from tasks.reports.texts import verdict_markdown
from tasks.running.cells import Cell, conclude, standing_record
from tasks.running.early import unfinished_verdict
from tasks.spec.names import artifact_key
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint, judge


def conclude_by(gate: Gate, cells: Sequence[Cell]) -> list[Record]:
    """Returns the current records of whole cells if the gate says GO; it may tolerate failed or withheld cells."""
    verdict = judge_cells(gate, cells)
    report(Judged(verdict))
    whole = [cell for cell in cells if unfinished_verdict(cell) is None]
    try:
        records = conclude(whole)
    except EvaluationIncomplete:
        records = [item.record for item in map(standing_record, whole) if item is not None]
    verdict.raise_unless_go()
    return records


def judge_cells(gate: Gate, cells: Sequence[Cell]) -> Verdict:
    """Applies a gate to the checkpoints of cells of a single run; shows the verdict in Prefect's UI."""
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.reference.name, []).append(cell)
    checkpoints = [_judged(name, cells_of_checkpoint) for name, cells_of_checkpoint in by_name.items()]
    run, evaluation_path = cells[0].reference.run, cells[0].config.evaluation_path
    return judge_checkpoints(gate, checkpoints, run=run, evaluation_path=evaluation_path)


@step(task_run_name="gate {gate.name} on {run}")
def judge_checkpoints(
    gate: Gate, checkpoints: Sequence[JudgedCheckpoint], *, run: str, evaluation_path: str
) -> Verdict:
    """Applies a gate to checkpoints of a run; shows the verdict in Prefect's UI."""
    verdict = judge(gate, checkpoints, evaluation_path=evaluation_path)
    report_event(f"gate {verdict.gate} on {run}: {verdict.word}")
    if in_flow_run():
        _show(verdict, gate, run=run)
    return verdict


def _show(verdict: Verdict, gate: Gate, *, run: str) -> None:
    from prefect.artifacts import create_markdown_artifact

    from tasks.prefect_server.client import show

    labels = {"key": f"{artifact_key(run)}-gate", "description": f"Gate {gate.name} on {run}"}
    show("the verdict", lambda: create_markdown_artifact(verdict_markdown(verdict), **labels))


def _judged(name: str, cells: Sequence[Cell]) -> JudgedCheckpoint:
    early = {cell: verdict for cell in cells if (verdict := unfinished_verdict(cell)) is not None}
    current = [standing_record(cell) for cell in cells if cell not in early]
    records = tuple(record for record in current if record is not None)
    return JudgedCheckpoint(name, cells[0].reference.step, records, current.count(None), early=tuple(early.values()))
