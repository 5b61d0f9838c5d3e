"""Series: scores with the same evaluation hash, which may share a curve; and labels for the differences of series."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tasks.records.record import Record
from tasks.spec.names import in_few_words

_NO_SETTINGS = (
    "model_path", "model_name", "evaluation_path", "benchmarks_path", "timeout_seconds", "wandb_tags", "sinks", "evals",
    "served_model_name", "discover_latest_checkpoint",
)  # fmt: skip
_WORDS: dict[str, Callable[[Any], str]] = {
    "max_eval_instances": lambda value: "all questions" if value is None else f"limit {value:,}",
    "num_fewshot": lambda value: "its own shots" if value is None else f"{value}-shot",
    "apply_chat_template": lambda value: "chat" if value else "no chat",
    "together_with": lambda value: f"with {in_few_words(value)}" if value else "alone",
}
_HASH_CHARACTERS = 8


def is_full(record: Record) -> bool:
    """Returns True if the evaluation was not limited to some of the questions."""
    return record.evaluation.get("max_eval_instances") is None


def newest_of_each_hash(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each evaluation hash: full evaluations first, then newest first."""
    newest = {record.evaluation_hash: record for record in sorted(records, key=lambda record: record.created)}
    return sorted(newest.values(), key=lambda record: (is_full(record), record.created), reverse=True)


def words_of_settings(records: Iterable[Record], benchmark: str) -> dict[str, str]:
    """Returns labels for the differing settings of a benchmark's series, by evaluation hash; empty for a single series.

    `records` has a record of each hash, all by the same evaluator; `benchmark` may be part of a group.
    """
    records = list(records)
    if len(records) < 2:
        return {record.evaluation_hash: "" for record in records}
    settings = [dict(flat(_settings(record, benchmark))) for record in records]
    names = sorted({name for asked in settings for name in asked})
    differing = [name for name in names if len({json.dumps(asked.get(name), default=str) for asked in settings}) > 1]
    known = [name for name in differing if name.rpartition(".")[2] in _WORDS]
    words = [
        ", ".join(dict.fromkeys(_WORDS[name.rpartition(".")[2]](asked.get(name)) for name in known))
        for asked in settings
    ]
    alike = Counter(words)
    return {
        record.evaluation_hash: text
        if text and alike[text] == 1
        else ", ".join(filter(None, (text, f"settings {record.evaluation_hash[:_HASH_CHARACTERS]}")))
        for record, text in zip(records, words, strict=True)
    }


def _settings(record: Record, benchmark: str) -> dict[str, Any]:
    evals = {task.get("task_alias") or task.get("name"): task for task in record.evaluation.get("evals") or ()}
    kept = {name: value for name, value in record.evaluation.items() if name not in _NO_SETTINGS}
    others = [name for name in record.benchmarks if name != benchmark] if benchmark in record.benchmarks else []
    return {
        **kept,
        "max_eval_instances": kept.get("max_eval_instances"),
        "benchmark": {benchmark: evals[benchmark]} if benchmark in evals else evals,
        "together_with": others,
    }


def flat(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the non-empty settings; nested settings have names such as `pool_config.model.name`."""
    if isinstance(settings, dict) and settings:
        for key, inner in settings.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif settings not in (None, {}, [], ()):
        yield name, settings
