"""Looks for new alerts of a run after some of its cells were evaluated, and creates their files."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

from resources.errors import StorageError
from resources.storage import storage
from tasks.alerts.detection import Alert, alerts_in
from tasks.alerts.files import KnownAlert, alerts_on_file, take_untold, write_first
from tasks.alerts.lost_questions import improvements
from tasks.records.builds import read_qualifications
from tasks.records.current import told_apart
from tasks.records.index import record_stamps
from tasks.records.record import FoundRecord, now, read_record
from tasks.statistics.question_scores import QuestionScores

# Age of a record that is still announced if an earlier pass wrote it, which may have died before it found the alert.
_RECENT = timedelta(hours=1)
_READ_AT_ONCE = 16  # from an object store; each read waits for the network


@dataclass(frozen=True)
class News:
    """An alert to announce, with its record and the number of questions lost, if known."""

    known: KnownAlert
    record: FoundRecord
    lost_questions: int | None


def find_news(run_folder: str, *, since: datetime) -> list[News]:
    """Creates a file for each alert of a run that has none; returns those to announce. 1 listing, a read per record.

    To announce is the latest alert of a curve, if its record was written since the pass began or shortly before. Alerts
    in runs that were evaluated long ago, and earlier alerts when many checkpoints are evaluated at once, are only
    listed. Of several concurrent passes, a single pass finds each alert.
    """
    cells = [storage.join(run_folder, cell) for cell, _ in record_stamps(run_folder)]
    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        read = list(zip(cells, threads.map(read_record, cells), strict=True))
    records = [FoundRecord(cell, record) for cell, record in read if record is not None]
    qualifications = read_qualifications(storage.parent(run_folder))
    alerts = alerts_in([found_record.record for found_record in records], qualifications=qualifications)
    latest = {_curve(alert): alert.id for alert in sorted(alerts, key=lambda alert: alert.step)}
    known = alerts_on_file(run_folder)
    apart = told_apart([found_record.record.checkpoint for found_record in records])
    by_run: dict[str, list[FoundRecord]] = defaultdict(list)
    for found_record in records:
        by_run[apart(found_record.record.checkpoint).run].append(found_record)
    scores = QuestionScores()
    news: list[News] = []
    for alert in (alert for alert in alerts if alert.id not in known):
        record = _record_at(alert.step, alert, by_run[alert.run])
        is_latest = alert.id == latest[_curve(alert)]
        is_recent = record.record.created >= min(since, now() - _RECENT)
        is_news = take_untold(run_folder, alert) or (is_latest and is_recent)
        known_alert = KnownAlert(alert=alert, found_at=time.time(), announced=is_news)
        if write_first(run_folder, known_alert) and is_news:
            before = _record_at(alert.before, alert, by_run[alert.run])
            try:
                changes = improvements(alert, before, record, scores=scores)
            except StorageError as error:  # the alert is announced without the number of questions
                changes = error.found
            lost = None if isinstance(changes, str) else sum(change < 0 for change in changes.values())
            news.append(News(known_alert, record, lost))
    return news


def _curve(alert: Alert) -> tuple[str, ...]:
    return alert.run, alert.evaluator, alert.evaluation_hash, alert.benchmark, alert.metric


def _record_at(step: int, alert: Alert, records: Sequence[FoundRecord]) -> FoundRecord:
    own = (
        candidate
        for candidate in records
        if candidate.record.checkpoint.step == step
        and (candidate.record.evaluator, candidate.record.evaluation_hash) == (alert.evaluator, alert.evaluation_hash)
        and any((m.benchmark, m.name) == (alert.benchmark, alert.metric) for m in candidate.record.metrics)
    )
    return max(own, key=lambda candidate: candidate.record.created)
