"""Settings behind a number, as far as they may be told to anybody: no path, no address, no name of a block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tasks.records.record import Record
from tasks.spec.evaluators import EVALUATORS

_NOT_PUBLIC = re.compile(r"(?:^|_)(?:path|url|block|pool_name|image|variables)$")
_PLACE = re.compile(r"^[/~]|://")
_ON_THE_HUB = re.compile(r"([^/@:\s]+/[^/@:\s]+)@([0-9a-f]{40})")
_ARGUMENTS = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "max_tokens": ("max_new_tokens", "max_gen_toks", "max_tokens"),
}
"""Arguments of a generation, with their names in options of evaluators."""


class Data(NamedTuple):
    """Data that a benchmark was asked from: its repository on the hub, None elsewhere, and its revision."""

    repository: str | None
    revision: str


def library_of(record: Record) -> tuple[str, str | None]:
    """Name and version of the harness."""
    name = EVALUATORS.get(record.evaluator, record.evaluator).rpartition(".")[2]
    return name, record.versions.get(name)


def data_of(record: Record, benchmark: str) -> Data | None:
    """The data of a benchmark, or of a group whose parts all have the same; None where nobody said."""
    parts = {part for metric in record.metrics if metric.benchmark == benchmark for part in metric.parts}
    known = {details.data for name in parts or {benchmark} if (details := record.details.get(name)) and details.data}
    if len(known) != 1:
        return None
    text = known.pop()
    found = _ON_THE_HUB.fullmatch(text)
    return Data(found[1], found[2]) if found else Data(None, text)


def answers_of(record: Record, benchmark: str) -> dict[str, Any]:
    """Arguments of the generation that its configuration names; the benchmark's own are not among them."""
    model = _model(record)
    evaluator = record.evaluation.get("evaluator")
    options = evaluator if isinstance(evaluator, dict) else {}
    overrides = _task(record, benchmark).get("task_kwargs") or {}
    given: dict[str, Any] = {}
    for layer in (model.get("generation_params"), options.get("generation_params"), overrides.get("generation_kwargs")):
        given |= {name: value for name, value in (layer or {}).items() if value is not None}
    known = {name: [given[key] for key in keys if key in given] for name, keys in _ARGUMENTS.items()}
    return {name: values[0] for name, values in known.items() if values and isinstance(values[0], int | float)}


def settings_of(record: Record, benchmark: str) -> dict[str, Any]:
    """Settings of a benchmark by their names; None where one is not known."""
    task, engine = _task(record, benchmark), record.served.get("engine") or {}
    asking = record.asking
    return {
        "num_fewshot": "the benchmark's own" if task.get("num_fewshot") is None else task["num_fewshot"],
        "apply_chat_template": in_chat(record),
        "chat_template_sha256": asking.chat_template,
        "max_eval_instances": record.evaluation.get("max_eval_instances"),
        "task_kwargs": _public(task.get("task_kwargs")) or None,
        "evaluator_options": _public(record.evaluation.get("evaluator")),
        "engine_arguments": _public(engine.get("arguments")),
        "bos": asking.bos,
        "seeds": asking.seeds or None,
        "log_likelihoods_by": asking.loglikelihood.way if asking.loglikelihood else None,
        "notes": list(asking.notes) or None,
    }


def in_chat(record: Record) -> bool | None:
    """True if prompts were put into the chat template; None where the configuration does not say."""
    own = record.evaluation.get("apply_chat_template")
    return _model(record).get("apply_chat_template") if own is None else own


def shots(record: Record, benchmark: str) -> int | None:
    """Worked examples in front of each question; None where the benchmark's own number stands."""
    return _task(record, benchmark).get("num_fewshot")


def _model(record: Record) -> Mapping[str, Any]:
    return (record.evaluation.get("pool_config") or {}).get("model") or {}


def _task(record: Record, benchmark: str) -> Mapping[str, Any]:
    """The benchmark, or the group, that was asked for and has a benchmark among its parts."""
    named = {str(task.get("task_alias") or task.get("name")): task for task in record.evaluation.get("evals") or ()}
    known = [name for name in named if benchmark == name or benchmark.startswith((f"{name}_", f"{name}."))]
    return named[max(known, key=len)] if known else {}


def _public(value: Any) -> Any:
    """A value less all that says where something lies, and all that is unset."""
    match value:
        case dict():
            public = {key: _public(item) for key, item in value.items() if not _NOT_PUBLIC.search(str(key))}
            return {key: item for key, item in public.items() if item is not None and item != {}}
        case list() | tuple():
            return [_public(item) for item in value]
        case str() if _PLACE.search(value):
            return None
        case _:
            return value
