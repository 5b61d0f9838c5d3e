"""Expected cost of cells: measured on the same evaluation of other checkpoints, else guessed from other evaluations.

A guess divides the expected tokens by the engine's measured rate. Token counts come from records of the same benchmarks
with other settings or models, else from the plan that a harness writes before its first request; rates come from
records on the same kind of engine. Without token counts or a rate there is no guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from resources.errors import StorageError
from resources.regions.regions import Tariff
from resources.storage import storage
from tasks.errors import OverBudget
from tasks.evaluators.reading import TokensToAsk
from tasks.prefect_server.progress import Event, Notice, report_event
from tasks.records.cost import Predicted, Spent, in_usd
from tasks.records.index import RunRecords, indexed_records
from tasks.records.provenance import hardware
from tasks.records.usage import Typical, Work, asked_of, engine_of
from tasks.running.cells import Cell
from tasks.running.pricing import judge_elsewhere, resources_of_replica, tariff_of_cell
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import how_many

NEVER_MEASURED = "unknown: never measured"
_UNCOUNTED = "the share of a judge elsewhere, or the seconds of a replica, are not known"
_MOST_RUNS = 64
"""Limit on the number of other runs that a guess reads the index of."""


@dataclass(frozen=True)
class Expected:
    """Expected cost of cells together."""

    cells: int
    measured: int
    guessed: int
    seconds: float
    """Sum over the cells with an expectation."""
    cost: Spent
    """Expected cost, with counts of cells of unknown price or chips."""
    basis: tuple[str, ...] = ()
    """Records and calculation behind the guesses."""
    why_unpriced: str | None = None
    """Reason of the first unpriced cell."""

    @property
    def price(self) -> str:
        return self.cost.price

    def lines(self) -> list[str]:
        known = self.measured + self.guessed
        if not known:
            return [f"expected for {how_many(self.cells, 'cell')}: {NEVER_MEASURED}"]
        ways = {"measured": self.measured, "guess": self.guessed, "never measured": self.cells - known}
        counted = ", ".join(f"{number:,} {way}" for way, number in ways.items() if number)
        way = "a guess" if not self.measured else "partly a guess" if self.guessed else "as measured before"
        took = _duration(self.seconds) + (" in sequence" if known > 1 else "")
        numbers = f"{took}, {self.cost.chip_hours} chip-hours, {self.price}"
        why = f" ({self.why_unpriced})" if self.why_unpriced else ""
        lines = [f"expected for {how_many(self.cells, 'cell')}: {numbers}{why}; {way} ({counted})"]
        return [*lines, *(f"  guess: {basis}" for basis in self.basis)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the expectation for JSON; numbers cover the known cells, None if no cell is known."""
        known = self.measured + self.guessed
        return {
            "cells": self.cells,
            "measured": self.measured,
            "guessed": self.guessed,
            "never_measured": self.cells - known,
            "seconds": round(self.seconds, 1) if known else None,
            "chip_seconds": self.cost.chip_seconds if self.cost.without_chips < self.cells else None,
            "usd": self.cost.usd if self.cost.unpriced < self.cells else None,
            "usd_unknown_cells": self.cost.unpriced,
            "price": self.price,
            "basis": list(self.basis),
        }


def check_budget(expected: Expected, max_usd: float | None) -> None:
    """Passes if the expected cost is at most `max_usd`; always passes without a bound or without cells.

    Raises:
        OverBudget: the expected cost is higher or unknown.
    """
    if max_usd is None or not expected.cells:
        return
    cost, bound = expected.cost, f"an evaluation that is expected to cost at most {in_usd(max_usd)}"
    if cost.usd > max_usd:
        raise OverBudget(
            expected=bound,
            found=f"{cost.price} expected for {how_many(expected.cells, 'cell')}; no cell was started",
            remedy="ask fewer checkpoints, benchmarks or questions (--which, --eval, --limit), or allow more: "
            "--max-usd, or max_usd of the policy",
        )
    if cost.unpriced:
        why = f": {expected.why_unpriced}" if expected.why_unpriced else ""
        raise OverBudget(
            expected=bound,
            found=f"{cost.price} for {how_many(expected.cells, 'cell')}{why}; no cell was started",
            remedy="evaluate a single checkpoint first without --max-usd, so that there is something to expect from; "
            "where the price is missing, name the region (ASSAY_REGION) and its prices (ASSAY_REGIONS); for "
            "an endpoint of another owner and a judge elsewhere, with prices never known, leave out --max-usd",
        )


class Expectations:
    """Expected costs below an evaluation path. `known` has indexed records by run; other indices are read on demand."""

    def __init__(self, evaluation_path: str, known: Mapping[str, RunRecords]) -> None:
        self._path = evaluation_path
        self._known = known
        self._typical: dict[str, Typical] = {}
        for records in known.values():
            self._typical |= records.typical

    def of(self, config: EvaluationConfig, hashes: Iterable[str | None], tariff: Tariff) -> Predicted | None:
        """Returns a cell's expected cost, if known; `config` is from `as_served`, `hashes` include its fallback's."""
        for hash_ in filter(None, hashes):
            if (typical := self._typical.get(hash_)) is not None:
                replica = typical.replica_seconds
                if replica is None and (chips := _chips(config)):
                    replica = typical.chip_seconds / chips or None
                basis = f"the median of {how_many(typical.records, 'record')} with these settings"
                return _priced(config, tariff, "measured", basis, typical.seconds, replica)
        if (guessed := guess(config, self._work)) is None:
            return None
        return _priced(config, tariff, "guess", guessed[1], guessed[0], guessed[0])

    def of_tokens(self, config: EvaluationConfig, asked: Sequence[TokensToAsk], tariff: Tariff) -> Predicted | None:
        """Returns a guess from planned tokens; None if the engine's rate was never measured."""
        if (guessed := guess_of_tokens(config, asked, self._work)) is None:
            return None
        return _priced(config, tariff, "guess", guessed[1], guessed[0], guessed[0])

    @cached_property
    def _work(self) -> list[Work]:
        work = [work for records in self._known.values() for work in records.work]
        for folder in self._others():
            try:
                work += indexed_records(folder).work
            except StorageError:
                continue  # the guess uses fewer records
        return work

    def _others(self) -> list[str]:
        try:
            files = storage.matching_files(storage.join(self._path, "*", "index", "*.json"))
        except StorageError:
            return []
        folders = dict.fromkeys(storage.parent(storage.parent(file)) for file in files)
        return [folder for folder in folders if storage.basename(folder) not in self._known][:_MOST_RUNS]


def _chips(config: EvaluationConfig) -> int | None:
    resources = resources_of_replica(config)
    return resources.chip_count() if resources else None


def _priced(
    config: EvaluationConfig, tariff: Tariff, how: str, basis: str, seconds: float, replica_seconds: float | None
) -> Predicted:
    hourly, chips = None if judge_elsewhere(config) else tariff.usd_per_hour, _chips(config)
    usd = None if hourly is None or replica_seconds is None else round(hourly * replica_seconds / 3600, 8)
    spent = None if chips is None or replica_seconds is None else round(chips * replica_seconds, 3)
    return Predicted.model_validate({"how": how, "basis": basis, "seconds": seconds, "chip_seconds": spent, "usd": usd})


def guess(config: EvaluationConfig, work: Sequence[Work]) -> tuple[float, str] | None:
    """Returns the replica seconds an evaluation may take, and the calculation; None if too little was measured."""
    engine = engine_of(hardware(config), config.evaluator.name if config.native else "pool")
    if engine is None:
        return None
    mine = [item for item in work if item.evaluator == config.evaluator.name]
    asked = tuple(asked_of(task.model_dump() for task in config.evals))
    parts = [asked] if _like(mine, asked) or len(asked) == 1 else [(name,) for name in asked]
    guesses = [_guessed(_like(mine, part), work, engine=engine, limit=config.max_eval_instances) for part in parts]
    known = [part for part in guesses if part is not None]
    if len(known) < len(guesses):
        return None
    return round(sum(seconds for seconds, _ in known), 1), "; ".join(dict.fromkeys(basis for _, basis in known))


def guess_of_tokens(
    config: EvaluationConfig, asked: Sequence[TokensToAsk], work: Sequence[Work]
) -> tuple[float, str] | None:
    """Returns the replica seconds that tokens may take, and the calculation; None without a measured rate.

    Generated answers count the mean token number of other benchmarks' answers, or their limit if that is less.
    """
    engine = engine_of(hardware(config), "pool")
    seconds, bases = 0.0, list[str]()
    for generates in sorted({part.generates for part in asked}):
        parts = [part for part in asked if part.generates is generates]
        alike = [item for item in work if item.engine == engine and item.generates is generates]
        if (rated := _rate(alike) or _rate(alike, journaled=True)) is None:
            return None
        rate, measured = rated
        source = f"{how_many(measured, 'record')} on {engine}"
        prompts, answers = sum(part.prompt_tokens for part in parts), sum(part.answer_tokens for part in parts)
        words = "of answers"
        if generates:
            each = sum(item.completion_tokens for item in alike) / sum(item.asked_questions for item in alike)
            usual = round(each * sum(part.questions for part in parts))
            words = "of answers, their limit" if answers <= usual else f"of answers, {each:,.0f} a question as there"
            answers = min(answers, usual)
        seconds += (prompts + answers) / rate
        bases.append(
            f"the plan's {prompts:,} tokens of prompts and {answers:,} {words} ÷ {rate:,.0f} tokens/s ({source})"
        )
    return round(seconds, 1), "; ".join(bases)


def _like(work: Sequence[Work], asked: tuple[str, ...]) -> list[Work]:
    same = [item for item in work if item.asked == asked and item.asked_questions]
    names = [name.partition(":")[0] for name in asked]
    others = [item for item in work if [name.partition(":")[0] for name in item.asked] == names]
    return same or [item for item in others if item.asked_questions]


def _guessed(like: Sequence[Work], work: Sequence[Work], *, engine: str, limit: int | None) -> tuple[float, str] | None:
    if not like or (questions := _questions(like, limit)) is None:
        return None
    asked, records = sum(item.asked_questions for item in like), sum(item.records for item in like)
    tokens = sum(item.prompt_tokens + item.completion_tokens for item in like) / asked
    source = f"{how_many(records, 'record')} of {', '.join(like[0].asked)}"
    same = [item for item in like if item.engine == engine]
    if not tokens:  # an evaluator that loads the checkpoint itself counts no tokens
        if not any(item.engine_seconds for item in same):
            return None
        each = sum(item.engine_seconds for item in same) / sum(item.asked_questions for item in same)
        return questions * each, f"{questions:,} questions × {each:.2g} s ({source} on {engine})"
    alike = [item for item in work if item.engine == engine and item.generates == like[0].generates]
    if (rated := _rate(same) or _rate(alike) or _rate(same, journaled=True) or _rate(alike, journaled=True)) is None:
        return None
    rate, measured = rated
    return questions * tokens / rate, (
        f"{questions:,} questions × {tokens:,.0f} tokens ({source}) ÷ {rate:,.0f} tokens/s "
        f"({how_many(measured, 'record')} on {engine})"
    )


def _rate(work: Sequence[Work], *, journaled: bool = False) -> tuple[float, int] | None:
    counts = [
        (each.all_tokens, each.all_seconds) if journaled else (each.engine_tokens, each.engine_seconds) for each in work
    ]
    tokens, seconds = sum(tokens for tokens, _ in counts), sum(seconds for _, seconds in counts)
    records = sum(each.records for each, (counted, _) in zip(work, counts, strict=True) if counted)
    return (tokens / seconds, records) if tokens and seconds else None


def _questions(like: Sequence[Work], limit: int | None) -> int | None:
    total = 0
    for name in {name for item in like for name in item.questions}:
        seen = [(item, item.questions[name]) for item in like if name in item.questions]
        parts = len(like[0].asked) if not name else 1  # all tasks together, if the record has no counts per task
        most = max(count for _, count in seen)
        whole = any(item.limit is None or count < item.limit * parts for item, count in seen)
        if limit is None:
            if not whole:
                return None
            total += most
        else:
            total += min(most, limit * parts) if whole else limit * parts
    return total


def together(predictions: Sequence[Predicted | None], *, why_unpriced: str | None = None) -> Expected:
    """Returns the expected cost of cells together; None entries are unknown costs."""
    known = [predicted for predicted in predictions if predicted is not None]
    guesses = [predicted for predicted in known if predicted.how == "guess"]
    unpriced = sum(predicted is None or predicted.usd is None for predicted in predictions)
    cost = Spent(
        attempts=len(predictions),
        chip_seconds=round(sum(predicted.chip_seconds or 0.0 for predicted in known), 3),
        without_chips=sum(predicted is None or predicted.chip_seconds is None for predicted in predictions),
        usd=round(sum(predicted.usd or 0.0 for predicted in known), 8),
        unpriced=unpriced,
    )
    never = NEVER_MEASURED.partition(": ")[2] if len(known) < len(predictions) else _UNCOUNTED
    return Expected(
        cells=len(predictions),
        measured=len(known) - len(guesses),
        guessed=len(guesses),
        seconds=sum(predicted.seconds for predicted in known),
        cost=cost,
        basis=tuple(dict.fromkeys(predicted.basis for predicted in guesses)),
        why_unpriced=(why_unpriced or never) if unpriced else None,
    )


def with_expectations(cells: Sequence[Cell]) -> tuple[list[Cell], Expected]:
    """Returns a run's cells, open cells with expected cost, and their total; unknown if records are unreadable."""
    open_cells = [cell for cell in cells if not cell.settled]
    if not open_cells:
        return list(cells), together([])
    run, path = open_cells[0].reference.run, open_cells[0].config.evaluation_path
    try:
        known = indexed_records(storage.join(path, run))
    except StorageError:
        known = RunRecords({}, (), {})
    expectations = Expectations(path, {run: known})
    by_config: dict[int, tuple[Tariff, Predicted | None]] = {}  # all checkpoints share the config objects

    def expecting(cell: Cell) -> Cell:
        if id(cell.config) not in by_config:
            tariff = tariff_of_cell(cell.config)
            by_config[id(cell.config)] = tariff, expectations.of(cell.config, [cell.evaluation_hash], tariff)
        return replace(cell, predicted=by_config[id(cell.config)][1])

    expected_cells: dict[int, Cell] = {}
    for cell in open_cells:
        fallback = expecting(cell.levanter_fallback) if cell.levanter_fallback is not None else None
        expected_cells[id(cell)] = replace(expecting(cell), levanter_fallback=fallback)
    tariffs = (by_config[id(cell.config)][0] for cell in open_cells)
    whys = [tariff.why_unknown for tariff in tariffs if tariff.usd_per_hour is None]
    expected = together([cell.predicted for cell in expected_cells.values()], why_unpriced=whys[0] if whys else None)
    return [expected_cells.get(id(cell), cell) for cell in cells], expected


def expected_by_plan(cell: Cell, asked: Sequence[TokensToAsk]) -> Predicted | None:
    """Returns and reports the expected cost of a started cell, from new records or its plan; None if unknown."""
    path, run, tariff = cell.config.evaluation_path, cell.reference.run, tariff_of_cell(cell.config)
    try:
        known = {run: indexed_records(storage.join(path, run))}
    except StorageError:
        known = {}
    expectations = Expectations(path, known)
    predicted = expectations.of(cell.config, [cell.evaluation_hash], tariff)
    predicted = predicted or expectations.of_tokens(cell.config, asked, tariff)
    tokens = sum(part.prompt_tokens for part in asked)
    lines = [f"expected for 1 cell: unknown: {tokens:,} tokens of prompts, and no rate of such an engine is known"]
    if predicted is not None:
        lines = together([predicted], why_unpriced=tariff.why_unknown).lines()
    for line in lines:
        report_event(f"{cell.title}: {line.strip()}", Event if predicted and predicted.how == "measured" else Notice)
    return predicted


def tell(expected: Expected) -> None:
    """Reports the expected cost of cells before they start."""
    for line in expected.lines():
        report_event(line, Notice)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
