"""The end of a run: alerts, sinks, and the verdict of a gate, which is shown in Prefect's UI and fails on NO-GO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from resources.errors import AssayError, StorageError
from resources.storage import storage
from tasks.errors import EvaluationIncomplete
from tasks.prefect_server.lazy import in_flow_run, step
from tasks.prefect_server.progress import Judged, RaisedAlert, report, report_event
from tasks.records.record import FoundRecord, Record, note_sinks
from tasks.records.verdicts import Verdict
from tasks.reports.artifacts import browser_address, report_uri
from tasks.reports.texts import verdict_markdown
from tasks.running.cells import Cell, conclude, standing_record
from tasks.running.early import unfinished_verdict
from tasks.sinks.announcement import Announcement
from tasks.sinks.publishing import missing_sinks, publish_record, publish_rest
from tasks.sinks.senders import Senders
from tasks.spec.names import artifact_key
from tasks.spec.sinks import Sink
from tasks.verdicts.alert_files import KnownAlert, read_alerts
from tasks.verdicts.alerts import sentence
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint, judge


@step(task_run_name="look at the sinks")
def check_sinks(cells: Sequence[Cell]) -> None:
    """Passes if each sink of the unevaluated cells can take records, as far as can be checked now."""
    sinks = {sink.name: sink for cell in cells if not cell.done for sink in cell.config.sinks}
    for sink in sinks.values():
        sink.check()


def raise_alerts(cells: Sequence[Cell], *, since: datetime) -> None:
    """Searches the curves that this run extended for alerts, and reports new alerts to Prefect's server.

    Errors are logged and never fail the run: alerts follow from the records, and `assay alerts` lists them.
    """
    if all(cell.done for cell in cells):
        return
    from tasks.verdicts.alert_events import find_news, tell_server  # with Prefect

    evaluation_path, run = cells[0].config.evaluation_path, cells[0].reference.run
    folder = storage.join(evaluation_path, run)
    try:
        news = find_news(folder, since=since)
        for item in news:
            report_event(f"Alert: {sentence(item.known.alert)}", RaisedAlert)
        tell_server(news, run_folder=folder, report=browser_address(report_uri(evaluation_path, run)))
    except AssayError as error:
        report_event(f"alerts of {run} could not be searched or reported: {error.found}")
    except Exception as error:  # noqa: BLE001 - the boundary: the records are written already
        report_event(f"alerts of {run} could not be searched or reported: {type(error).__name__}: {error}")


@step(task_run_name="tell the sinks")
def announce(cells: Sequence[Cell], *, since: datetime) -> None:
    """Sends records of earlier runs to sinks that lack them, and alerts and the report to sinks with new records.

    Records of this run were sent when they were written. Failures are logged and not retried: a record lists the sinks
    that have it, and the next run or `assay publish` adds the rest.
    """
    sent: list[tuple[Announcement, Sink]] = []
    with Senders() as senders:
        for cell in cells:
            item = standing_record(cell) if cell.config.sinks else None
            if item is None:
                continue
            if cell.done:
                item = _caught_up(item, cell.config.sinks, senders)
            for sink in cell.config.sinks:
                state = item.record.sinks.get(sink.name)
                if state is None or state.at < since:
                    continue
                if state.status == "published":
                    sent.append((Announcement.of(item.record, item.cell_uri), sink))
                else:
                    reason = " ".join((state.reason or "").split())
                    report_event(f"{cell.title}: {sink.name} does not have its record: {reason}")
        alerts = _raised(cells[0], since=since) if sent else []
        for title, states in publish_rest(sent, lambda _: alerts, senders=senders):
            for name, state in states.items():
                if state.status == "failed":
                    report_event(f"{name} does not have the {title}: {state.reason}")


def _raised(cell: Cell, *, since: datetime) -> list[KnownAlert]:
    try:
        known = read_alerts(storage.join(cell.config.evaluation_path, cell.reference.run)).values()
    except StorageError as error:
        report_event(f"alerts cannot be sent to sinks: {error.found}")
        return []
    return [alert for alert in known if alert.announced and alert.found_at >= since.timestamp()]


def _caught_up(item: FoundRecord, sinks: Sequence[Sink], senders: Senders) -> FoundRecord:
    missing = missing_sinks(item.record, sinks)
    states = publish_record(item.record, item.cell_uri, missing, senders=senders)
    return replace(item, record=note_sinks(item.cell_uri, states) or item.record)


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
    of, decided = cells[0].reference, tuple(early.values())
    return JudgedCheckpoint(name, of.step, records, current.count(None), early=decided, label=of.label)
