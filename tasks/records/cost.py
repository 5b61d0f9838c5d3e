"""Cost of cells: price and expectation of each, and sums in which the unknown stays unknown; what a guess goes by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from math import fsum
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import FiniteFloat

from tasks.records.details import Part

if TYPE_CHECKING:
    from tasks.records.record import Record

_POLICY = "policy="
_REPLAYED = 0.1  # share of answers from the journal up to which a record says how fast its engine is
_WHOLE = ""
"""Stands for all benchmarks of a record together, where it does not say how many questions each asks."""


class Predicted(Part):
    """Expected cost of a cell, as it was said before it began."""

    how: Literal["measured", "guess"]
    """measured: by what the same evaluation took of other checkpoints; guess: by other evaluations."""
    basis: str
    """Records that it is taken from, and the reckoning, in words."""
    seconds: FiniteFloat
    """Wall seconds of the cell; of a guess, those of its replica."""
    chip_seconds: FiniteFloat | None = None
    """Accelerators of a replica times the seconds that it is the cell's."""
    usd: FiniteFloat | None = None
    """Price of that; empty where the price of an hour is unknown."""


class Spent(Part):
    """Cost of some attempts, recorded ones, with the number of those whose share is unknown."""

    attempts: int = 0
    """Attempts that are counted."""
    chip_seconds: FiniteFloat = 0.0
    """Chip-seconds of those that say."""
    without_chips: int = 0
    """Attempts that do not say, since somebody else's endpoint answered."""
    usd: FiniteFloat = 0.0
    """USD of those with a price, and of those parts of others that have one."""
    unpriced: int = 0
    """Attempts without a price, wholly or in part."""

    def __add__(self, other: Spent) -> Spent:
        """The cost of both."""
        return Spent(
            attempts=self.attempts + other.attempts,
            chip_seconds=round(self.chip_seconds + other.chip_seconds, 3),
            without_chips=self.without_chips + other.without_chips,
            usd=round(self.usd + other.usd, 8),
            unpriced=self.unpriced + other.unpriced,
        )

    @property
    def price(self) -> str:
        """USD in words: `1.20 USD`, `at least 1.20 USD, 3 unknown`, or `unknown`."""
        if not self.attempts or not self.unpriced:
            return in_usd(self.usd)
        known = f"at least {in_usd(self.usd)}, {self.unpriced:,} unknown"
        return known if self.usd or self.unpriced < self.attempts else "unknown"

    @property
    def chip_hours(self) -> str:
        """Chip-hours in words, likewise."""
        hours = f"{self.chip_seconds / 3600:,.3f}"
        if not self.without_chips:
            return hours
        return "unknown" if self.without_chips == self.attempts else f"at least {hours}, {self.without_chips:,} unknown"


class Cost(Part):
    """Price of a cell, as it was when its record was written; every unknown is empty, never 0."""

    usd: FiniteFloat | None = None
    """USD for the replica's seconds; empty where the price, or what a judge elsewhere cost, is unknown."""
    known_usd: FiniteFloat | None = None
    """USD of the parts that have a price, where another has none, such as a judge elsewhere."""
    replica_seconds: FiniteFloat | None = None
    """Seconds that a replica was this cell's, or its share where cells of one checkpoint had it together."""
    usd_per_hour: FiniteFloat | None = None
    """Price of an hour of a replica."""
    as_of: date | None = None
    """Date of the price list."""
    source: str | None = None
    """Source of the price list."""
    region: str | None = None
    """Region that it ran in."""
    zone: str | None = None
    """Zone that it ran in, where that is known."""
    preemptible: bool | None = None
    """True if the machine could be taken away."""
    why_unknown: str | None = None
    """Reason that USD is empty."""
    predicted: Predicted | None = None
    """Expected cost; empty where nothing was known to expect it from."""
    earlier: Spent = Spent()
    """Cost of attempts at this cell whose records this one has replaced, so that failed ones count too."""


def spent_on(cost: Cost | None, *, chip_seconds: float, by_others: bool) -> Spent:
    """The cost of an attempt and of the recorded ones before it.

    Args:
        cost: as its record has it; None in one from before there was a price.
        chip_seconds: as its record has them.
        by_others: that somebody else's endpoint answered.
    """
    known = cost or Cost()
    own = Spent(
        attempts=1,
        chip_seconds=chip_seconds,
        without_chips=int(by_others if cost is None else cost.replica_seconds is None),
        usd=(known.known_usd or 0.0) if known.usd is None else known.usd,
        unpriced=int(known.usd is None),
    )
    return own + known.earlier


def sum_of(costs: Iterable[Spent]) -> Spent:
    """The cost of all together."""
    return sum(costs, Spent())


def in_usd(usd: float) -> str:
    """USD in words, with cents, and with as many digits as show something of less than one."""
    return f"{usd:,.2f} USD" if usd >= 1 or usd == 0 else f"{usd:.2g} USD"


class Usage(NamedTuple):
    """One record as sums need it. Lists, not tuples, inside: as JSON has it."""

    policies: list[str]
    spent: list[float]
    """The numbers of its `Spent`, in the order of the fields."""
    replica_seconds: float | None
    engine: str | None
    evaluator: str
    asked: list[str]
    limit: int | None
    questions: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    requests: int
    replayed: int


class Typical(NamedTuple):
    """Medians of what successes of one evaluation took; `replica_seconds` is None where nobody counted them."""

    seconds: float
    chip_seconds: float
    replica_seconds: float | None = None
    records: int = 1


class MonthSpent(NamedTuple):
    """Cost of the records of a month that some policies asked for; of `assay evaluate` where those are none."""

    policies: tuple[str, ...]
    month: str
    spent: Spent


class Work(NamedTuple):
    """Succeeded records of the same benchmarks by one evaluator on one kind of engine, added up."""

    engine: str
    evaluator: str
    asked: tuple[str, ...]
    """Benchmarks, as `asked_of` names them."""
    limit: int | None
    records: int
    asked_questions: int
    """Over all records, as are tokens and seconds."""
    questions: Mapping[str, int]
    """Questions of each benchmark in one record."""
    prompt_tokens: float
    """Tokens, those of answers from the journal included as far as the others tell."""
    completion_tokens: float
    requests: int
    engine_tokens: int
    """Tokens that engines counted in records of which the journal answered a tenth at most."""
    engine_seconds: float
    """Seconds of a replica for these."""
    all_tokens: int
    """Tokens that engines counted in all records with some; where the journal answered most, an engine seems slower."""
    all_seconds: float
    """Seconds of a replica for these."""

    @property
    def generates(self) -> bool:
        """True if engines write answers, rather than weigh given ones, which goes many times as fast."""
        return self.completion_tokens > 2 * self.requests


def usage_of(record: Record) -> Usage:
    """Reads a record's usage from it."""
    cost, requests = record.cost, record.requests
    native = record.served.get("by") == "the evaluator itself"
    seconds = cost.replica_seconds if cost else record.served.get("replica_seconds")
    if cost is None and native:
        seconds = record.seconds.get("evaluate")
    questions = {name: details.questions for name, details in record.details.items()}
    if not questions and record.counts:
        questions = {_WHOLE: record.counts.requested}
    return Usage(
        policies=[tag.removeprefix(_POLICY) for tag in record.tags if tag.startswith(_POLICY)],
        spent=list(record.spent.model_dump().values()),
        replica_seconds=seconds,
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
    """Words for what answers and what it computes on, the same for what is about as fast; None where that is unknown.

    Args:
        hardware: as records have it.
        by: `pool`, or the evaluator that loads checkpoints itself.
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
    """Benchmarks of a configuration by name and worked examples, such as mmlu:5."""
    shots = ((str(task["name"]), task.get("num_fewshot")) for task in evals)
    return sorted(name if number is None else f"{name}:{number}" for name, number in shots)


def month_of(created: float) -> str:
    """The month of a time in seconds since the epoch, in UTC, such as 2026-11."""
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m")


class Costed(NamedTuple):
    """A record as sums are made of it."""

    evaluation_hash: str
    succeeded: bool
    created: float
    seconds: float
    chip_seconds: float
    usage: Usage


class Sums(NamedTuple):
    """Records of a run added up: what a success of each evaluation took, by its hash and by what it asked, and cost."""

    typical: Mapping[str, Typical]
    work: Sequence[Work]
    spent: Sequence[MonthSpent]

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Sums:
        """Reads what `summed` made, from JSON."""
        return cls(
            {key: Typical(*cost) for key, cost in content["typical"].items()},
            [Work(*found)._replace(asked=tuple(found[2])) for found in content["work"]],
            [month_spent(*found) for found in content["spent"]],
        )


def summed(records: Sequence[Costed]) -> dict[str, Any]:
    """Adds records up, as JSON has it."""
    succeeded = [record for record in records if record.succeeded]
    costs: dict[str, list[tuple[float, float, float | None]]] = {}
    for record in succeeded:
        cost = (record.seconds, record.chip_seconds, record.usage.replica_seconds)
        costs.setdefault(record.evaluation_hash, []).append(cost)
    return {
        "typical": {key: tuple(typical_of(found)) for key, found in costs.items()},
        "work": [tuple(work) for work in worked(record.usage for record in succeeded)],
        "spent": spent_by_month((record.usage, record.created) for record in records),
    }


def typical_of(costs: Sequence[tuple[float, float, float | None]]) -> Typical:
    """Medians of seconds, chip-seconds and, as far as they are known, seconds of a replica."""
    counted = [replica for _, _, replica in costs if replica is not None]
    return Typical(
        median(seconds for seconds, *_ in costs),
        median(chips for _, chips, _ in costs),
        median(counted) if counted else None,
        len(costs),
    )


def worked(usages: Iterable[Usage]) -> list[Work]:
    """Adds up the usage of succeeded records."""
    groups: dict[tuple[str, str, tuple[str, ...], int | None], list[Usage]] = {}
    for usage in usages:
        if usage.engine is not None and usage.questions:
            key = (usage.engine, usage.evaluator, tuple(usage.asked), usage.limit)
            groups.setdefault(key, []).append(usage)
    return [_together(found, *key) for key, found in groups.items()]


def _together(found: Sequence[Usage], engine: str, evaluator: str, asked: tuple[str, ...], limit: int | None) -> Work:
    sizes: dict[str, int] = {}
    for usage in found:
        for name, questions in usage.questions.items():
            sizes[name] = max(questions, sizes.get(name, 0))
    # What the journal answered has no tokens: the rest of a record says how many it would have had.
    fresh = [(usage, usage.requests / max(1, usage.requests - usage.replayed)) for usage in found]
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


def spent_by_month(rows: Iterable[tuple[Usage, float]]) -> list[tuple[list[str], str, list[float]]]:
    """Cost by the policies that asked, and by month: of usage with the time that its record was written."""
    groups: dict[tuple[tuple[str, ...], str], list[list[float]]] = {}
    for usage, created in rows:
        groups.setdefault((tuple(usage.policies), month_of(created)), []).append(usage.spent)
    return [
        (list(policies), month, [round(fsum(numbers), 8) for numbers in zip(*found, strict=True)])
        for (policies, month), found in groups.items()
    ]


def month_spent(policies: Sequence[str], month: str, numbers: Sequence[float]) -> MonthSpent:
    """One of those from its parts."""
    spent = Spent.model_validate(dict(zip(Spent.model_fields, numbers, strict=True)))
    return MonthSpent(tuple(policies), month, spent)
