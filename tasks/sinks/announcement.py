"""The announcement of a record: the same names and numbers for every sink."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice

from pydantic import BaseModel, ConfigDict

from resources.storage import storage
from tasks.records.record import Record
from tasks.records.samples import SAMPLES_NAME, Sample, read_samples

STEP_METRIC = "training_step"
"""The x axis of all curves."""
REPORT_NAME = "report.html"


class Series(BaseModel):
    """The records that one run of a tracker shows as curves: those that can be compared step by step.

    A quick look and a full evaluation are two series, and so are two evaluators: their numbers would otherwise stand
    in one curve under the same name.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    """The training run."""
    evaluator: str
    """The harness."""
    evaluation_path: str
    """Folder of the records."""
    max_eval_instances: int | None
    """Questions per benchmark, if they were limited."""

    @property
    def name(self) -> str:
        """The name that people see."""
        limit = f" limit {self.max_eval_instances}" if self.max_eval_instances else ""
        return f"{self.run} {self.evaluator}{limit}"

    @property
    def id(self) -> str:
        """Identifies the series wherever it is published from, as long as the records stay where they are."""
        content = json.dumps([self.run, self.evaluator, self.evaluation_path, self.max_eval_instances])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class Announcement(BaseModel):
    """A succeeded record on its way to a sink, or with `record` unset the report over a whole run."""

    model_config = ConfigDict(frozen=True)

    series: Series
    """The series that it belongs to."""
    record: Record | None
    """The record, without what became of it at sinks, so that the same record is the same bytes."""
    cell_uri: str
    """Its folder."""
    report_uri: str
    """Page over the training run's records; perhaps not there."""

    @classmethod
    def of(cls, record: Record, cell_uri: str) -> Announcement:
        """A record that lies in `<evaluation_path>/<run>/step-<N>/<evaluator>/<cell>`."""
        cell_uri = storage.absolute(cell_uri)
        run_uri = storage.parent(storage.parent(storage.parent(cell_uri)))
        series = Series(
            run=record.checkpoint.run,
            evaluator=record.evaluator,
            evaluation_path=storage.parent(run_uri),
            max_eval_instances=record.evaluation.get("max_eval_instances"),
        )
        report = storage.join(run_uri, REPORT_NAME)
        return cls(series=series, record=record.model_copy(update={"sinks": {}}), cell_uri=cell_uri, report_uri=report)

    def of_report(self) -> Announcement:
        """The report that this record is a part of."""
        return self.model_copy(update={"record": None})

    @property
    def known(self) -> Record:
        """The record, where there is one by construction."""
        assert self.record is not None, "only asked for announcements of records"
        return self.record

    @property
    def run_uri(self) -> str:
        """Folder of the training run's records."""
        return storage.parent(self.report_uri)

    @property
    def place(self) -> str:
        """Path of the cell's folder inside the folder of the records."""
        return self.cell_uri.removeprefix(self.series.evaluation_path).strip("/")

    @property
    def attempt_uri(self) -> str:
        """Folder with the harness's own output."""
        return storage.join(self.cell_uri, self.known.attempt)

    def record_json(self) -> bytes:
        """The record as it is published."""
        return self.known.model_dump_json(indent=2).encode()

    def samples(self, limit: int) -> Iterator[Sample]:
        """The first questions of every benchmark, `limit` in all at most; none if the record has no samples."""
        benchmarks = self.known.benchmarks
        each = -(-limit // max(len(benchmarks), 1))
        taken: dict[str, int] = {}

        def wanted() -> Iterator[Sample]:
            for sample in read_samples(storage.join(self.attempt_uri, SAMPLES_NAME)):
                taken[sample.benchmark] = taken.get(sample.benchmark, 0) + 1
                if taken[sample.benchmark] <= each:
                    yield sample

        try:
            yield from islice(wanted(), limit)
        except FileNotFoundError:
            return


def metric_values(record: Record) -> dict[str, float]:
    """Numbers by the names they have in every tracker: `benchmark/metric`, `…_stderr` and `…_n`."""
    values: dict[str, float] = {}
    for metric in record.metrics:
        name = f"{metric.benchmark}/{metric.name}"
        values[name] = metric.value
        if metric.stderr is not None:
            values[f"{name}_stderr"] = metric.stderr
        values[f"{name}_n"] = metric.n
    return values
