"""Results in a model's folder for the Hugging Face hub: `model-index` metadata, and entries for its leaderboards.

The card of a checkpoint is a README.md. Its text, other metadata and results from elsewhere are kept; only values of
the same benchmark and evaluator are replaced. Each benchmark with a leaderboard has a file in `.eval_results` next to
it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator

from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.errors import SinkFailed
from tasks.records.current import how_merged
from tasks.records.details import CheckpointReference
from tasks.records.record import RECORD_NAME, Metric, Record
from tasks.sinks.announcement import Announcement
from tasks.sinks.forms.hub_results import FOLDER, Leaderboard, as_yaml, hub_entries
from tasks.spec.sinks import SinkConfig, web_address

CARD_NAME = "README.md"
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)^---\r?\n?", re.DOTALL | re.MULTILINE)


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
    uri = storage.join(
        home, checkpoint.run, checkpoint.name if checkpoint.merge else f"step-{checkpoint.step}", CARD_NAME
    )
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
    if not isinstance(metadata, dict):
        raise SinkFailed(
            expected=f"a model card with metadata in YAML at {uri}", found="something else", remedy="mend or remove it"
        )
    models = metadata.get("model-index") or [{}]
    model = models[0] if isinstance(models, list) and isinstance(models[0], dict) else {}
    ours = [_result(record, announcement, benchmark, task_type) for benchmark in _benchmarks(record)]
    replaced = {_identity(result) for result in ours}
    kept = [result for result in model.get("results") or [] if _identity(result) not in replaced]
    name = model.get("name") or record.checkpoint.name
    metadata["model-index"] = [{"name": name, "results": sorted([*kept, *ours], key=_identity)}, *models[1:]]
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=120)
    return f"---\n{text}---\n" + (body if front or body else f"\n# {name}\n{_made_of(record.checkpoint)}")


def _made_of(checkpoint: CheckpointReference) -> str:
    if checkpoint.merge is None:
        return ""
    inputs = [
        f"- {each.run}, step {each.step:,}: weight {each.weight:.6g}, digest `{each.digest[:16]}`"
        for each in checkpoint.merge.inputs
    ]
    sentence = f"Its weights are an average of checkpoints ({checkpoint.merge}); training wrote no such checkpoint:"
    return "\n".join(["", sentence, "", *inputs, ""])


def _benchmarks(record: Record) -> list[str]:
    return list(dict.fromkeys(metric.benchmark for metric in record.metrics))


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
    if not isinstance(result, dict):
        return ("", "", "")
    dataset = result.get("dataset") or {}
    evaluator = (dataset.get("args") or {}).get("evaluator") if isinstance(dataset, dict) else None
    task = result.get("task") or {}
    return (str(dataset.get("type")), str(evaluator), str(task.get("type")))
