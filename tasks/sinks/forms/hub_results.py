"""Scores for leaderboards of the Hugging Face hub: entries of `.eval_results/*.yaml` in a model's folder, in the format
of https://huggingface.co/docs/hub/eval-results. Users must configure each leaderboard's metric and scale, in a
`Leaderboard` per benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import Field

from resources.config import Config
from tasks.errors import SinkFailed
from tasks.records.current import how_merged
from tasks.records.record import Metric, Record
from tasks.sinks.forms.settings import data_of, in_chat, library_of, shots

FOLDER = ".eval_results"
"""Folder next to a model card, read by the hub."""


class Leaderboard(Config):
    """Leaderboard of the Hugging Face hub for a benchmark's score: that of a task of a data set."""

    dataset: str = Field(pattern=r"^[^/\s]+/[^/\s]+$")
    """The data set, such as openai/gsm8k."""
    task_id: str
    """The task, by its `id` in the data set's eval.yaml."""
    metric: str
    """Metric in Assay that the leaderboard ranks by, such as exact_match."""
    factor: float = 1.0
    """Factor for scores: 100 if the leaderboard uses per cent."""


def hub_entries(
    record: Record, leaderboards: Mapping[str, Leaderboard], *, source_url: str | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the entries of a succeeded record by benchmark; empty if it covers only a part of the questions.
    `leaderboards` are by the benchmark's published name; `source_url` is a web page with details."""
    if not record.succeeded or record.evaluation.get("max_eval_instances") is not None:
        return {}
    measured = {metric.benchmark for metric in record.metrics}
    return {
        benchmark: _entry(record, _metric(record, benchmark, board), board, source_url)
        for benchmark, board in leaderboards.items()
        if benchmark in measured
    }


def as_yaml(entries: list[dict[str, Any]]) -> str:
    """Returns the content of a file with some entries."""
    return yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=120)


def _metric(record: Record, benchmark: str, board: Leaderboard) -> Metric:
    named = {metric.name: metric for metric in record.metrics if metric.benchmark == benchmark}
    if board.metric not in named:
        raise SinkFailed(
            expected=f"a metric {board.metric} of {benchmark} for the leaderboard of {board.dataset}",
            found=", ".join(named),
            remedy="name one of these",
        )
    return named[board.metric]


def _entry(record: Record, metric: Metric, board: Leaderboard, source_url: str | None) -> dict[str, Any]:
    data = data_of(record, metric.benchmark)
    dataset = {"id": board.dataset, "task_id": board.task_id}
    if data is not None and data.repository == board.dataset:
        dataset["revision"] = data.revision
    entry = {"dataset": dataset, "value": metric.value * board.factor, "date": record.created.isoformat()}
    source = {"source": {"url": source_url, "name": "Assay"}} if source_url else {}
    return {**entry, **source, "notes": "; ".join(_notes(record, metric, board))}


def _notes(record: Record, metric: Metric, board: Leaderboard) -> list[str]:
    examples = shots(record, metric.benchmark)
    asked = f"{examples}-shot" if isinstance(examples, int) else examples and f"{examples} number of examples"
    noticed = record.noticed(metric.benchmark)
    library, version = library_of(record)
    engine = record.served.get("engine") or {}
    programs = [
        (library, version),
        (engine.get("name"), engine.get("version")),
        ("Assay", record.versions.get("assay")),
    ]
    data = data_of(record, metric.benchmark)
    bar = {"95 % interval": (metric.low, metric.high), "standard error": (metric.stderr,)}
    known = {
        named: " to ".join(f"{number * board.factor:.4g}" for number in numbers if number is not None)
        for named, numbers in bar.items()
        if None not in numbers
    }
    counted = {
        "prompts were cut to fit": noticed.truncated if noticed else 0,
        "questions were left out as too long": noticed.skipped if noticed else 0,
        "answers ended at the length limit": (noticed.at_limit or 0) if noticed else 0,
    }
    return [
        metric.name,
        *([asked] if asked else []),
        *(["chat template"] if in_chat(record) else []),
        f"{metric.n:,} questions",
        *(f"{named} {numbers}" for named, numbers in known.items()),
        *(f"{number:,} {happened}" for happened, number in counted.items() if number),
        *([f"data of {data.repository}"] if data and data.repository not in (None, board.dataset) else []),
        *([f"weights: {made}"] if (made := how_merged(record.checkpoint)) else []),
        *(f"{name} {version}" for name, version in programs if name and version),
    ]
