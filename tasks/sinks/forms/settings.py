"""Settings behind a score, without values that look like a path, an address, a key or a block's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tasks.records.record import Record
from tasks.spec.evaluators import EVALUATORS

_NOT_PUBLIC = re.compile(
    r"(?:^|[_-])(?:block|pool_name|image|variables|urls?|files?|dirs?|paths?)$"
    r"|(?:token|keys?|secrets?|password|headers?|authorization)$",
    re.IGNORECASE,
)
_PLACE = re.compile(r"[/\\]")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.parquet)(?<!\.csv)(?:@\w+)?")
_ON_THE_HUB = re.compile(r"([^/@:\s]+/[^/@:\s]+)@([0-9a-f]{40})")
# Generation arguments, with their names in options of evaluators.
_ARGUMENTS = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "max_tokens": ("max_tokens", "max_gen_toks", "max_new_tokens"),
}


class Data(NamedTuple):
    """Data of a benchmark: its repository on the hub, or None, and its revision."""

    repository: str | None
    revision: str


def library_of(record: Record) -> tuple[str, str | None]:
    """Returns name and version of the harness."""
    name = EVALUATORS.get(record.evaluator, record.evaluator).rpartition(".")[2]
    return name, record.versions.get(name)


def data_of(record: Record, benchmark: str) -> Data | None:
    """Returns the data of a benchmark, or the common data of a group's parts; None if unknown."""
    parts = _parts(record, benchmark) or {benchmark}
    known = {details.data for name in parts if (details := record.details.get(name)) and details.data}
    if len(known) != 1:
        return None
    text = known.pop()
    match = _ON_THE_HUB.fullmatch(text)
    return Data(match[1], match[2]) if match else Data(None, text)


def answers_of(record: Record, benchmark: str) -> dict[str, Any]:
    """Returns the generation arguments in the record's configuration, without the benchmark's own. Only AlpacaEval
    sends the model's arguments with its requests: elsewhere they are engine defaults, which harnesses and benchmarks
    may override without a trace, like lm-eval's own max_gen_toks."""
    evaluator = record.evaluation.get("evaluator")
    options = evaluator if isinstance(evaluator, dict) else {}
    defaults = _model(record).get("generation_params") if record.evaluator == "alpaca_eval" else None
    own = {name: options.get(name) for name in _ARGUMENTS}
    overrides = ((_task(record, benchmark) or {}).get("task_kwargs") or {}).get("generation_kwargs")
    given: dict[str, Any] = {}
    for layer in (defaults, own, options.get("generation_params"), overrides):
        for name, aliases in _ARGUMENTS.items():
            known = [layer.get(key) for key in aliases] if isinstance(layer, dict) else []
            values = [value for value in known if isinstance(value, int | float)]
            given |= {name: values[0]} if values else {}
    return given


def settings_of(record: Record, benchmark: str) -> dict[str, Any]:
    """Returns settings of a benchmark by name; None if unknown."""
    task, engine = _task(record, benchmark) or {}, record.served.get("engine") or {}
    asking = record.asking
    return {
        "num_fewshot": shots(record, benchmark),
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
    """Returns True if prompts were formatted with the chat template; None if the configuration does not specify it."""
    own = record.evaluation.get("apply_chat_template")
    return _model(record).get("apply_chat_template") if own is None else own


def shots(record: Record, benchmark: str) -> int | str | None:
    """Returns the number of few-shot examples, a text if it is the benchmark's own, or None if unknown."""
    task = _task(record, benchmark)
    if task is None:
        return None
    return "the benchmark's own" if task.get("num_fewshot") is None else task["num_fewshot"]


def _model(record: Record) -> Mapping[str, Any]:
    return (record.evaluation.get("pool_config") or {}).get("model") or {}


def _task(record: Record, benchmark: str) -> Mapping[str, Any] | None:
    named = {str(task.get("task_alias") or task.get("name")): task for task in record.evaluation.get("evals") or ()}
    if len(named) == 1:
        return next(iter(named.values()))
    parts = {name: _parts(record, name) for name in named}
    own = _parts(record, benchmark) or {benchmark}
    for known in (
        [name for name in named if benchmark == name],
        [name for name in named if benchmark.startswith(f"{name}.")],  # a part of a benchmark with an alias
        [name for name in named if own <= parts[name]],
    ):
        if known:
            return named[known[0]] if len(known) == 1 else None
    return None


def _parts(record: Record, benchmark: str) -> set[str]:
    return {part for metric in record.metrics if metric.benchmark == benchmark for part in metric.parts}


def _public(value: Any) -> Any:
    match value:
        case dict():
            public = {key: _public(item) for key, item in value.items() if not _NOT_PUBLIC.search(str(key))}
            return {key: item for key, item in public.items() if item is not None and item != {}}
        case list() | tuple():
            return [_public(item) for item in value]
        case str() if any(_PLACE.search(word) and not _HUB_ID.fullmatch(word) for word in value.split()):
            return None
        case _:
            return value
