"""Export of records as rows, a row per metric, for spreadsheets, data frames and scripts: CSV, JSON lines, Parquet.

All formats have the same columns, in the same order, with the same types.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple

from resources.storage import storage
from tasks.records.details import BenchmarkDetails
from tasks.records.record import Counts, Metric, Record, integrity
from tasks.records.search import RecordFilter

ExportFormat = Literal["csv", "jsonl", "parquet"]
Kind = Literal["text", "whole", "number", "yes or no", "time", "texts"]


class Measured(NamedTuple):
    """Source of a row: a metric, or a benchmark without metrics; `split` has the values of `SPLIT_COLUMNS`."""

    record: Record
    benchmark: str
    metric: Metric | None
    split: Mapping[str, Any] = MappingProxyType({})

    @property
    def details(self) -> BenchmarkDetails | None:
        return self.record.noticed(self.benchmark)

    @property
    def completed(self) -> float | None:
        return self.details.completed.get(self.metric.name) if self.details and self.metric else None

    @property
    def chip_seconds(self) -> float | None:
        return None if self.record.cost.replica_seconds is None else self.record.chip_seconds


SPLIT_COLUMNS: dict[str, Kind] = {
    **{"clean_value": "number", "clean_n": "whole", "flagged_value": "number", "flagged_n": "whole"},
    **{"not_scanned_n": "whole", "clean_less_flagged": "number", "clean_less_flagged_low": "number"},
    **{"clean_less_flagged_high": "number", "contamination_note": "text"},
}
"""Columns with the metric over questions that were not found in training texts (clean) and that were (flagged)."""


def _at(path: str) -> Callable[[Measured], Any]:
    def read(row: Measured) -> Any:
        value: Any = row
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        return value

    return read


COLUMNS: dict[str, tuple[Kind, Callable[[Measured], Any]]] = {
    "run": ("text", _at("record.checkpoint.run")),
    "step": ("whole", lambda row: row.record.checkpoint.step if row.record.checkpoint.label is None else None),
    "label": ("text", _at("record.checkpoint.label")),
    "checkpoint": ("text", _at("record.checkpoint.name")),
    "evaluator": ("text", _at("record.evaluator")),
    "benchmark": ("text", _at("benchmark")),
    "metric": ("text", _at("metric.name")),
    "value": ("number", _at("metric.value")),
    "stderr": ("number", _at("metric.stderr")),
    "low": ("number", _at("metric.low")),
    "high": ("number", _at("metric.high")),
    "n": ("whole", _at("metric.n")),
    "higher_is_better": ("yes or no", _at("metric.higher_is_better")),
    "smooth": ("yes or no", _at("metric.smooth")),
    "status": ("text", _at("record.status")),
    "reason": ("text", _at("record.reason")),
    **{name: ("whole", _at(f"record.counts.{name}")) for name in Counts.model_fields},
    "benchmark_truncated": ("whole", _at("details.truncated")),
    "benchmark_skipped": ("whole", _at("details.skipped")),
    "at_limit": ("whole", _at("details.at_limit")),
    "completed_value": ("number", _at("completed")),
    "max_eval_instances": ("whole", lambda row: row.record.evaluation.get("max_eval_instances")),
    **{name: (kind, lambda row, name=name: row.split.get(name)) for name, kind in SPLIT_COLUMNS.items()},
    "evaluation_hash": ("text", _at("record.evaluation_hash")),
    "integrity": ("text", lambda row: integrity(row.record)),
    "digest": ("text", _at("record.checkpoint.digest")),
    "weights_digest": ("text", _at("record.checkpoint.weights_digest")),
    "checkpoint_uri": ("text", _at("record.checkpoint.uri")),
    "seconds": ("number", lambda row: round(math.fsum(row.record.seconds.values()), 3)),
    "chip_seconds": ("number", _at("chip_seconds")),
    **{
        name: ("number", _at(f"record.cost.{name}")) for name in ("replica_seconds", "usd", "known_usd", "usd_per_hour")
    },
    "price_as_of": ("text", lambda row: row.record.cost.as_of and row.record.cost.as_of.isoformat()),
    "price_source": ("text", _at("record.cost.source")),
    "region": ("text", _at("record.cost.region")),
    "zone": ("text", _at("record.cost.zone")),
    "preemptible": ("yes or no", _at("record.cost.preemptible")),
    **{
        f"predicted_{name}": ("number", _at(f"record.cost.predicted.{name}"))
        for name in ("seconds", "chip_seconds", "usd")
    },
    "predicted_how": ("text", _at("record.cost.predicted.how")),
    "attempts": ("whole", _at("record.spent.attempts")),
    "tags": ("texts", lambda row: list(row.record.tags)),
    "sinks": (
        "texts",
        lambda row: [name for name, delivery in row.record.sinks.items() if delivery.status == "published"],
    ),
    "git_commit": ("text", _at("record.git_commit")),
    "cell": ("text", _at("record.cell")),
    "attempt": ("text", _at("record.attempt")),
    "created": ("time", _at("record.created")),
}
"""Type and source of each column of every export, in order."""


def measured_rows(
    records: Iterable[Record],
    *,
    filters: RecordFilter,
    splits_of: Callable[[Record], Mapping[tuple[str, str], Mapping[str, Any]]] = lambda record: {},
) -> Iterator[dict[str, Any]]:
    """Yields a row with the columns in `COLUMNS` for each metric that `filters` takes.

    A record without metrics has a row per benchmark with empty metric and value, unless `filters` filters by metric.

    `splits_of` returns the values of `SPLIT_COLUMNS` by benchmark and metric; without it they are empty.
    """
    for record in records:
        splits = splits_of(record)
        rows = [Measured(record, m.benchmark, m, splits.get((m.benchmark, m.name), {})) for m in record.metrics]
        rows = rows or [Measured(record, benchmark, None) for benchmark in record.benchmarks]
        for row in rows:
            if filters.takes(row.benchmark, row.metric.name if row.metric else ""):
                yield {name: value_of(row) for name, (_, value_of) in COLUMNS.items()}


def exported(rows: Iterable[dict[str, Any]], *, form: ExportFormat) -> bytes:
    """Returns the content of a file with some rows; without rows it still has the columns, except for `jsonl`."""
    match form:
        case "csv":
            return _csv(rows).encode()
        case "jsonl":
            return "".join(json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows).encode()
        case "parquet":
            return _parquet(list(rows))


def form_of(output: str) -> ExportFormat | None:
    """Returns the format for a file name's extension; None for others."""
    ends: dict[str, ExportFormat] = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
    return next((form for end, form in ends.items() if storage.basename(output).lower().endswith(end)), None)


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    lines: list[str] = []
    each_line: Any = SimpleNamespace(write=lines.append)
    writer = csv.writer(each_line)  # with its default terminator \r\n it quotes both \r and \n
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_in_a_cell(row[name]) for name in COLUMNS])
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def _in_a_cell(value: Any) -> Any:
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return _in_a_cell(";".join(value))
        case str() if value.startswith(_FORMULA):
            return f"'{value}"
        case datetime():
            return value.isoformat()
        case _:
            return value


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, datetime):
            value = value.isoformat()
        elif isinstance(value, float) and not math.isfinite(value):
            value = None
        plain[name] = value
    return plain


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    import pyarrow  # slow import (0.25 s), only for this format
    from pyarrow import parquet

    types: dict[Kind, Any] = {
        "text": pyarrow.string(),
        "whole": pyarrow.int64(),
        "number": pyarrow.float64(),
        "yes or no": pyarrow.bool_(),
        "time": pyarrow.timestamp("us", tz="UTC"),
        "texts": pyarrow.list_(pyarrow.string()),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, (kind, _) in COLUMNS.items()])
    output = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), output)
    return output.getvalue()
