"""Sinks at the end of a run: what they still lack of earlier runs, and the report over the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.prefect_server.progress import report_event
from tasks.records.record import FoundRecord, note_sinks
from tasks.running.cells import Cell, standing_record
from tasks.sinks.publishing import missing_sinks, publish_record, publish_report
from tasks.sinks.senders import Senders
from tasks.spec.sinks import Sink


@task(task_run_name="look at the sinks", cache_policy=NO_CACHE, persist_result=False)
def check_sinks(cells: Sequence[Cell]) -> None:
    """Passes if every sink of cells that are yet to be evaluated can take records, as far as it can tell now.

    Raises:
        SinkFailed: one cannot.
    """
    sinks = {sink.name: sink for cell in cells if not cell.done for sink in cell.config.sinks}
    for sink in sinks.values():
        sink.check()


@task(task_run_name="tell the sinks", cache_policy=NO_CACHE, persist_result=False)
def announce(cells: Sequence[Cell], *, since: datetime) -> None:
    """Sends the records of earlier runs to sinks that lack them, then the report to those that got something new.

    Records of this run were sent when they were written. Nothing here fails a run or is tried again: a record says
    which sinks have it, and the next run or `assay publish` sends what is missing.

    Args:
        cells: those of the run.
        since: when the run began.
    """
    reports: dict[tuple[str, str], tuple[FoundRecord, Sink]] = {}
    with Senders() as senders:
        for cell in cells:
            found = standing_record(cell) if cell.config.sinks else None
            if found is None:
                continue
            if cell.done:
                found = _caught_up(found, cell.config.sinks, senders)
            record = found.record
            for sink in cell.config.sinks:
                state = record.sinks.get(sink.name)
                if state is not None and state.at >= since:
                    if state.status == "published":
                        reports[record.evaluator, sink.name] = (found, sink)
                    else:
                        reason = " ".join((state.reason or "").split())
                        report_event(f"{cell.title}: {sink.name} does not have its record: {reason}")
        for found, sink in reports.values():
            for name, state in publish_report(found.record, found.cell_uri, (sink,), senders=senders).items():
                if state.status == "failed":
                    report_event(f"{name} does not have the report: {state.reason}")


def _caught_up(found: FoundRecord, sinks: Sequence[Sink], senders: Senders) -> FoundRecord:
    missing = missing_sinks(found.record, sinks)
    states = publish_record(found.record, found.cell_uri, missing, senders=senders)
    return replace(found, record=note_sinks(found.cell_uri, states) or found.record)
