"""Usage for cost estimates and sums: benchmarks, requests, tokens, engine and seconds of each record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import fsum
from statistics import median
from typing import Annotated, Any, NamedTuple

from pydantic import Field, FiniteFloat

from resources.errors import RecordStatus
from tasks.records.cost import Spent
from tasks.records.details import Whole
from tasks.records.record import Record

_POLICY = "policy="
_SPENT = len(Spent.model_fields)
_REPLAYED = 0.1  # largest share of answers from the journal at which a record still shows the speed of its engine
_WHOLE = ""
"""Key for all benchmarks of a record together, if the record has no number of questions for each benchmark."""


class Usage(NamedTuple):
    """Usage of a record, as sums need it. Its fields are lists, not tuples, to match JSON."""

    policies: list[str]
    spent: Annotated[list[FiniteFloat], Field(min_length=_SPENT, max_length=_SPENT)]
    """Numbers of the record's `Spent`, in the order of its fields."""
    replica_seconds: float | None
    engine: str | None
    evaluator: str
    asked: list[str]
    limit: int | None
    questions: dict[str, Whole]
    prompt_tokens: Whole
    completion_tokens: Whole
    requests: Whole
    replayed: Whole


class Typical(NamedTuple):
    """Median cost of an evaluator's successes; `replica_seconds` is None where it was not measured."""

    seconds: float
    chip_seconds: float
    replica_seconds: float | None = None
    records: int = 1


class MonthSpent(NamedTuple):
    """Cost of a month's records requested by `policies`; an empty tuple means `assay evaluate`."""

    policies: tuple[str, ...]
    month: str
    spent: Spent


class Work(NamedTuple):
    """Sum over the succeeded records with the same benchmarks, evaluator and kind of engine."""

    engine: str
    evaluator: str
    asked: tuple[str, ...]
    """Benchmarks, in the format of `asked_of`."""
    limit: int | None
    records: int
    asked_questions: int
    """Questions of all records together; tokens and seconds below are sums over all records too."""
    questions: Mapping[str, int]
    """Questions of each benchmark in a record."""
    prompt_tokens: float
    """Tokens. Answers from the journal, which have no token counts, are extrapolated from the other answers."""
    completion_tokens: float
    requests: int
    engine_tokens: int
    """Tokens counted by engines, only from records of which the journal answered at most a tenth."""
    engine_seconds: float
    """Replica seconds for `engine_tokens`."""
    all_tokens: int
    """Tokens counted by engines in all records that have any; if the journal answered most, the engine seems slower."""
    all_seconds: float
    """Replica seconds for `all_tokens`."""

    @property
    def generates(self) -> bool:
        """True if the engine generates answers. Scoring given answers is many times as fast."""
        return self.completion_tokens > 2 * self.requests


def usage_of(record: Record) -> Usage:
    """Returns the usage of a record."""
    cost, requests = record.cost, record.requests
    native = record.served.get("by") == "the evaluator itself"
    questions = {name: details.questions for name, details in record.details.items()}
    if not questions and record.counts:
        questions = {_WHOLE: record.counts.requested}
    return Usage(
        policies=[tag.removeprefix(_POLICY) for tag in record.tags if tag.startswith(_POLICY)],
        spent=list(record.spent.model_dump().values()),
        replica_seconds=cost.replica_seconds,
        engine=engine_of(record.hardware, record.evaluator if native else "pool"),
        evaluator=record.evaluator,
        asked=asked_of(record.evaluation.get("evals") or [{"name": name} for name in record.benchmarks]),
        limit=record.evaluation.get("max_eval_instances"),
        questions=questions,
        prompt_tokens=requests.get("prompt_tokens", 0),
        completion_tokens=requests.get("completion_tokens", 0),
        requests=requests.get("answered", 0),
        replayed=requests.get("journal_hits", 0),
    )


def engine_of(hardware: Mapping[str, Any], by: str) -> str | None:
    """Returns a label for engine and device, the same for about the same speed; None if the device is unknown.

    `hardware` is `Record.hardware`; `by` is `pool`, or the evaluator that loads checkpoints itself.
    """
    match hardware.get("device"):
        case {"kind": "tpu", "variant": variant}:
            device = str(variant)
        case {"kind": "gpu", "variant": variant, "count": count}:
            device = f"{count} × {variant}"
        case {"kind": "cpu"}:
            device = f"{hardware.get('cpu', 1)} CPU cores"
        case _:
            return None
    hosts = hardware.get("hosts", 1)
    return f"{by} on {f'{hosts} hosts with ' if hosts > 1 else ''}{device}"


def asked_of(evals: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the benchmarks of a configuration by name and number of few-shot examples, such as mmlu:5."""
    shots = ((str(task.get("name")), task.get("num_fewshot")) for task in evals)
    return sorted(name if number is None else f"{name}:{number}" for name, number in shots)


class IndexedRecord(NamedTuple):
    """The fields of a record that planning needs. `cell` is relative to the run's folder; times are epoch seconds."""

    cell: str
    checkpoint: str
    evaluation_hash: str
    digest: str
    listing: str | None
    status: RecordStatus
    created: Annotated[float, Field(ge=-(2**35), lt=2**37)]  # times that `datetime` can hold
    seconds: FiniteFloat
    chip_seconds: FiniteFloat
    infra_failures: Whole
    reason: str | None
    usage: Usage

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"


class Sums(NamedTuple):
    """Sums over the records of a run: typical cost by evaluation hash, work by benchmarks, and cost by month."""

    typical: Mapping[str, Typical]
    work: Sequence[Work]
    spent: Sequence[MonthSpent]


def summed(rows: Sequence[IndexedRecord]) -> Sums:
    """Returns the sums over records."""
    succeeded = [row for row in rows if row.succeeded]
    costs: dict[str, list[IndexedRecord]] = {}
    for row in succeeded:
        costs.setdefault(row.evaluation_hash, []).append(row)
    typical = {key: _typical(group) for key, group in costs.items()}
    return Sums(typical, _worked(row.usage for row in succeeded), _spent_by_month(rows))


def _typical(rows: Sequence[IndexedRecord]) -> Typical:
    counted = [row.usage.replica_seconds for row in rows if row.usage.replica_seconds is not None]
    return Typical(
        median(row.seconds for row in rows),
        median(row.chip_seconds for row in rows),
        median(counted) if counted else None,
        len(rows),
    )


def _worked(usages: Iterable[Usage]) -> list[Work]:
    groups: dict[tuple[str, str, tuple[str, ...], int | None], list[Usage]] = {}
    for usage in usages:
        if usage.engine is not None and usage.questions:
            key = (usage.engine, usage.evaluator, tuple(usage.asked), usage.limit)
            groups.setdefault(key, []).append(usage)
    return [_together(group, *key) for key, group in groups.items()]


def _together(usages: Sequence[Usage], engine: str, evaluator: str, asked: tuple[str, ...], limit: int | None) -> Work:
    sizes: dict[str, int] = {}
    for usage in usages:
        for name, questions in usage.questions.items():
            sizes[name] = max(questions, sizes.get(name, 0))
    # Answers from the journal have no token counts: extrapolate from the other answers of the record.
    fresh = [(usage, usage.requests / max(1, usage.requests - usage.replayed)) for usage in usages]
    fresh = [(usage, scale) for usage, scale in fresh if usage.requests > usage.replayed or not usage.requests]
    by_engine = [usage for usage, _ in fresh if usage.replica_seconds]
    mostly = [usage for usage in by_engine if usage.replayed <= usage.requests * _REPLAYED]
    return Work(
        engine=engine,
        evaluator=evaluator,
        asked=asked,
        limit=limit,
        records=len(fresh),
        asked_questions=sum(sum(usage.questions.values()) for usage, _ in fresh),
        questions=sizes,
        prompt_tokens=round(sum(usage.prompt_tokens * scale for usage, scale in fresh), 1),
        completion_tokens=round(sum(usage.completion_tokens * scale for usage, scale in fresh), 1),
        requests=sum(usage.requests for usage, _ in fresh),
        engine_tokens=sum(usage.prompt_tokens + usage.completion_tokens for usage in mostly),
        engine_seconds=round(sum(usage.replica_seconds or 0.0 for usage in mostly), 3),
        all_tokens=sum(usage.prompt_tokens + usage.completion_tokens for usage in by_engine),
        all_seconds=round(sum(usage.replica_seconds or 0.0 for usage in by_engine), 3),
    )


def _spent_by_month(rows: Iterable[IndexedRecord]) -> list[MonthSpent]:
    groups: dict[tuple[tuple[str, ...], str], list[list[float]]] = {}
    for row in rows:
        month = datetime.fromtimestamp(row.created, UTC).strftime("%Y-%m")
        groups.setdefault((tuple(row.usage.policies), month), []).append(row.usage.spent)
    sums = {key: [round(fsum(numbers), 8) for numbers in zip(*group, strict=True)] for key, group in groups.items()}
    return [
        MonthSpent(*key, Spent.model_validate(dict(zip(Spent.model_fields, numbers, strict=True))))
        for key, numbers in sums.items()
    ]
