"""Results in a model's folder for the Hugging Face hub: `model-index` metadata, and entries for its leaderboards.

The card of a checkpoint is a README.md. Its text, other metadata and results from elsewhere are kept; only values of
the same benchmark and evaluator are replaced. Each benchmark with a leaderboard has a file in `.eval_results` next to
it, in the format of https://huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field

from resources.config import Config
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.errors import SinkFailed
from tasks.records.current import how_merged
from tasks.records.details import CheckpointReference
from tasks.records.record import RECORD_NAME, Metric, Record
from tasks.sinks.announcement import Announcement
from tasks.sinks.forms.settings import data_of, in_chat, library_of, shots
from tasks.spec.sinks import SinkConfig, web_address

CARD_NAME = "README.md"
FOLDER = ".eval_results"
"""Folder next to a model card, read by the hub."""
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)^---\r?\n?", re.DOTALL | re.MULTILINE)


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


class HuggingFaceSink(SinkConfig):
    """The results in a model card for each checkpoint, and in files for leaderboards. Nothing is uploaded. The card of
    a merged checkpoint lies under its name and lists its inputs."""

    secret_variables = ("HF_TOKEN",)
    client_lasts = True

    kind: Literal["hugging_face"] = "hugging_face"
    """Selects this sink, a model card."""
    path: str | None = None
    """Folder that gets `<run>/step-<N>/README.md`, of a merged checkpoint `<run>/<name>/README.md`; the folder of the
    records when unset."""
    task_type: str = "text-generation"
    """The hub's name for the model's task."""
    leaderboards: dict[str, Leaderboard] = {}
    """Leaderboards to send scores to, by benchmark; evaluations of a part of the questions are not sent."""
    source_url: Annotated[str, AfterValidator(web_address)] | None = None
    """Web page with details, linked by leaderboards."""

    @property
    def name(self) -> str:
        return f"hugging_face:{self.path.rstrip('/') if self.path else 'beside the records'}"


CONFIG = HuggingFaceSink


def send(announcement: Announcement, sink: HuggingFaceSink) -> str | None:
    """Writes a record's values into the card of its checkpoint and returns the card's path; ignores reports."""
    if announcement.record is None:
        return None
    record = announcement.record
    home = sink.path or announcement.series.evaluation_path
    checkpoint = record.checkpoint
    uri = storage.join(home, checkpoint.run, checkpoint.name if checkpoint.merge else checkpoint.folder, CARD_NAME)
    try:
        before = storage.read_bytes(uri).decode()
    except FileNotFoundError:
        before = ""
    card = with_results(before, record, announcement, task_type=sink.task_type, uri=uri)
    entries = hub_entries(record, sink.leaderboards, source_url=sink.source_url)
    if card != before:
        storage.write_bytes(uri, card.encode())
    for benchmark, entry in entries.items():
        file = storage.join(storage.parent(uri), FOLDER, f"{record.evaluator}.{benchmark}.yaml")
        storage.write_bytes(file, as_yaml([entry]).encode())
    return uri


def with_results(card: str, record: Record, announcement: Announcement, *, task_type: str, uri: str) -> str:
    """Returns a model card with a record's values in its metadata."""
    front = _FRONT_MATTER.match(card)
    body = card[front.end() :] if front else card
    try:
        metadata = load_yaml(front.group(1)) if front else {}
    except yaml.YAMLError:
        metadata = None
    invalid = SinkFailed(
        expected=f"a model card with metadata in YAML at {uri}, and a list of models in its model-index if any",
        found="something else",
        remedy="mend or remove it",
    )
    if not isinstance(metadata, dict):
        raise invalid
    models = metadata.get("model-index") or [{}]
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise invalid
    model = models[0]
    ours = [
        _result(record, announcement, benchmark, task_type)
        for benchmark in dict.fromkeys(each.benchmark for each in record.metrics)
    ]
    replaced = {_identity(result) for result in ours}
    kept = [result for result in model.get("results") or [] if _identity(result) not in replaced]
    name = model.get("name") or record.checkpoint.name
    metadata["model-index"] = [{"name": name, "results": sorted([*kept, *ours], key=_identity)}, *models[1:]]
    text = as_yaml(metadata)
    return f"---\n{text}---\n" + (body if front or body else f"\n# {name}\n{_made_of(record.checkpoint)}")


def _made_of(checkpoint: CheckpointReference) -> str:
    if checkpoint.merge is None:
        return ""
    inputs = [
        f"- {each.run}, {each.place}: weight {each.weight:.6g}, digest `{each.digest[:16]}`"
        for each in checkpoint.merge.inputs
    ]
    sentence = f"Its weights are an average of checkpoints ({checkpoint.merge}); training wrote no such checkpoint:"
    return "\n".join(["", sentence, "", *inputs, ""])


def _result(record: Record, announcement: Announcement, benchmark: str, task_type: str) -> dict[str, Any]:
    metrics = []
    for metric in record.metrics:
        if metric.benchmark == benchmark and not metric.smooth:
            details: dict[str, Any] = {"n": metric.n}
            details |= {"higher_is_better": metric.higher_is_better} if metric.higher_is_better is not None else {}
            known = {"stderr": metric.stderr, "low": metric.low, "high": metric.high, **_noticed(record, metric)}
            details |= {name: value for name, value in known.items() if value is not None}
            metrics.append({"name": metric.name, "type": metric.name, "value": metric.value, "args": details})
    made = {"merge": how_merged(record.checkpoint)} if record.checkpoint.merge else {}
    result: dict[str, Any] = {
        "task": {"type": task_type, "name": "Evaluation"},
        "dataset": {"name": benchmark, "type": benchmark, "args": {"evaluator": record.evaluator, **made}},
        "metrics": metrics,
    }
    if not storage.is_local(announcement.cell_uri):  # a local path is useless to readers of the card
        url = storage.join(announcement.cell_uri, RECORD_NAME)
        result["source"] = {"name": f"{record.evaluator} through Assay", "url": url}
    return result


def _noticed(record: Record, metric: Metric) -> dict[str, float | None]:
    details = record.noticed(metric.benchmark)
    if details is None:
        return {}
    counts = {"truncated": details.truncated or None, "at_limit": details.at_limit or None}
    return {**counts, "completed": details.completed.get(metric.name)}


def _identity(result: Any) -> tuple[str, str, str]:
    dataset = _mapping(_mapping(result).get("dataset"))
    task, arguments = _mapping(_mapping(result).get("task")), _mapping(dataset.get("args"))
    return (str(dataset.get("type")), str(arguments.get("evaluator")), str(task.get("type")))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def hub_entries(
    record: Record, leaderboards: Mapping[str, Leaderboard], *, source_url: str | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the entries of a succeeded record by benchmark; empty if it covers only a part of the questions.
    `leaderboards` are by the benchmark's published name; `source_url` is a web page with details."""
    if not record.succeeded or record.evaluation.get("max_eval_instances") is not None:
        return {}
    measured = {metric.benchmark for metric in record.metrics}
    return {
        benchmark: _entry(record, _ranked(record, benchmark, board), board, source_url)
        for benchmark, board in leaderboards.items()
        if benchmark in measured
    }


def as_yaml(content: Any) -> str:
    """Returns the content of a file with some entries, or of a card's metadata."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _ranked(record: Record, benchmark: str, board: Leaderboard) -> Metric:
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
    engine = record.served.get("engine") or {}
    served = (engine.get("name"), engine.get("version"))
    programs = [library_of(record), served, ("Assay", record.versions.get("assay"))]
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
