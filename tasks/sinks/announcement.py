"""The announcement of a record: the same names and numbers for every sink."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from resources.storage import storage
from tasks.records.builds import build_of
from tasks.records.current import merged_by
from tasks.records.record import FoundRecord, Record
from tasks.records.samples import Sample, samples_of
from tasks.spec.names import in_few_words
from tasks.verdicts.alert_files import KnownAlert

STEP_METRIC = "training_step"
"""The x axis of all curves."""
REPORT_NAME = "report.html"
ALERT = "alert"
"""Tag of a tracker's run in which a curve has raised an alert."""
SEVERAL_BUILDS = "several builds"
"""Tag of a tracker's run with records of different versions of engine, harness or data."""


class Series(BaseModel):
    """The records that a tracker's run shows as curves: those of the same evaluation hash and kind of merge. Otherwise
    curves would mix values measured with different settings, or of merged and trained checkpoints."""

    model_config = ConfigDict(frozen=True)

    run: str
    evaluator: str
    evaluation_path: str
    evaluation_hash: str
    benchmarks: tuple[str, ...]
    """The benchmarks, which the hash includes too."""
    max_eval_instances: int | None
    """Questions per benchmark, if limited."""
    merged_by: str = ""
    """Kind of merge of its checkpoints; empty for trained checkpoints."""

    @property
    def name(self) -> str:
        limit = f" limit {self.max_eval_instances}" if self.max_eval_instances else ""
        asked = f"{self.evaluator} {in_few_words(self.benchmarks)}{limit} {self.evaluation_hash[:8]}"
        return f"{self.run}{self.merged_by} {asked}"

    @property
    def id(self) -> str:
        """Id of the series, the same from every machine while the records stay at their path."""
        identity = [self.run, self.evaluator, self.evaluation_path, self.evaluation_hash]
        content = json.dumps([*identity, *([self.merged_by] if self.merged_by else [])])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class Announcement(BaseModel):
    """A succeeded record to publish or, if `record` is unset, alerts, or the report over a whole run."""

    model_config = ConfigDict(frozen=True)

    series: Series
    record: Record | None
    """The record without its status at sinks, so that the same record is the same bytes."""
    cell_uri: str
    """Its folder."""
    report_uri: str
    """Page over the training run's records; may be missing."""
    alerts: tuple[KnownAlert, ...] = ()
    """Alerts of its series; empty for a record or a report."""

    @classmethod
    def of(cls, record: Record, cell_uri: str) -> Announcement:
        """Returns the announcement of a record in `<evaluation_path>/<run>/step-<N>/<evaluator>/<cell>`."""
        cell_uri = storage.absolute(cell_uri)
        run_uri = storage.parent(storage.parent(storage.parent(cell_uri)))
        series = Series(
            run=record.checkpoint.run,
            evaluator=record.evaluator,
            evaluation_path=storage.parent(run_uri),
            evaluation_hash=record.evaluation_hash,
            benchmarks=record.benchmarks,
            max_eval_instances=record.evaluation.get("max_eval_instances"),
            merged_by=merged_by(record.checkpoint),
        )
        report = storage.join(run_uri, REPORT_NAME)
        return cls(series=series, record=record.model_copy(update={"sinks": {}}), cell_uri=cell_uri, report_uri=report)

    def of_report(self) -> Announcement:
        return self.model_copy(update={"record": None})

    def of_alerts(self, alerts: Sequence[KnownAlert]) -> Announcement:
        series = self.series.evaluator, self.series.evaluation_hash, self.series.merged_by
        own = [a for a in alerts if (a.alert.evaluator, a.alert.evaluation_hash, a.alert.merged_by) == series]
        return self.model_copy(update={"record": None, "alerts": tuple(own)})

    @property
    def known(self) -> Record:
        assert self.record is not None, "only asked for announcements of records"
        return self.record

    @property
    def run_uri(self) -> str:
        return storage.parent(self.report_uri)

    @property
    def place(self) -> str:
        """Path of the cell's folder relative to the folder of the records."""
        return self.cell_uri.removeprefix(self.series.evaluation_path).strip("/")

    @property
    def attempt_uri(self) -> str:
        """Folder with the harness's own output."""
        return storage.join(self.cell_uri, self.known.attempt)

    def record_json(self) -> bytes:
        return self.known.model_dump_json(indent=2).encode()

    def samples(self, limit: int) -> Iterator[Sample]:
        """Yields the first questions of every benchmark, at most `limit` in total; empty without samples."""
        benchmarks = self.known.benchmarks
        each = -(-limit // max(len(benchmarks), 1))
        taken: Counter[str] = Counter()
        for sample in samples_of(FoundRecord(self.cell_uri, self.known)):
            if taken.total() >= limit:
                return
            if taken[sample.benchmark] < each:
                taken[sample.benchmark] += 1
                yield sample


def metric_values(record: Record) -> dict[str, float]:
    """Returns values by their names in every tracker: `benchmark/metric`, with `…_stderr`, `…_low`, `…_high` and `…_n`.
    Per benchmark also the number of questions with truncated prompts (`benchmark/truncated`), skipped questions
    (`…/skipped`), answers at the length limit (`…/at_limit`), and metrics without the latter
    (`benchmark/completed/metric`). Smooth scores of a benchmark's parts, such as MMLU's 57 subjects, are omitted. Known
    costs: `cost/usd`, `cost/chip_seconds`, `cost/seconds`, each also with `predicted_`. Names of a checkpoint without a
    step begin with its label, as in `best/benchmark/metric`, so that its values are points of no curve."""
    values: dict[str, float] = {}
    for metric in (m for m in record.metrics if not m.smooth or m.benchmark in record.benchmarks):
        name = f"{metric.benchmark}/{metric.name}"
        values[name] = metric.value
        further = {"stderr": metric.stderr, "low": metric.low, "high": metric.high, "n": metric.n}
        values |= {f"{name}_{end}": value for end, value in further.items() if value is not None}
    for benchmark in dict.fromkeys([*record.details, *(metric.benchmark for metric in record.metrics)]):
        details = record.noticed(benchmark)
        if details is not None:
            numbers = {"truncated": details.truncated, "skipped": details.skipped, "at_limit": details.at_limit}
            values |= {f"{benchmark}/{name}": value for name, value in numbers.items() if value is not None}
            values |= {f"{benchmark}/completed/{name}": value for name, value in details.completed.items()}
    values |= _cost_values(record)
    label = record.checkpoint.label
    return values if label is None else {f"{label}/{name}": value for name, value in values.items()}


def _cost_values(record: Record) -> dict[str, float]:
    cost = record.cost
    chip_seconds = None if cost.replica_seconds is None else record.chip_seconds
    known = {"usd": cost.usd, "chip_seconds": chip_seconds, "seconds": round(sum(record.seconds.values()), 3)}
    if cost.predicted is not None:
        predicted = cost.predicted
        of_them = {"usd": predicted.usd, "chip_seconds": predicted.chip_seconds, "seconds": predicted.seconds}
        known |= {f"predicted_{name}": value for name, value in of_them.items()}
    return {f"cost/{name}": value for name, value in known.items() if value is not None}


def alert_values(known: KnownAlert) -> dict[str, float]:
    """Returns an alert's deviation, measured minus expected, by its name in every tracker."""
    alert = known.alert
    return {f"{alert.benchmark}/{alert.metric}_alert": alert.found - alert.expected}


def build_mark(record: Record) -> tuple[str, str]:
    """Returns a key for a record's versions, and the versions as a line of text; a new key means changed versions."""
    build = build_of(record)
    named = {**build.engine, **build.harness, **{f"data of {name}": data for name, data in build.data.items()}}
    text = ", ".join(f"{name} {version}" for name, version in sorted(named.items())) + f", method {build.method}"
    return f"build/{hashlib.sha256(text.encode()).hexdigest()[:8]}", text


def has_several_builds(known: Iterable[str]) -> bool:
    """Returns True if the keys of a tracker's run include several versions."""
    return len({key for key in known if key.startswith("build/")}) > 1
