"""Cost of cells: price and expectation of each, and sums in which the unknown stays unknown."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Literal

from pydantic import FiniteFloat

from tasks.records.details import Part


class Predicted(Part):
    """Expected cost of a cell, as it was said before it asked."""

    how: Literal["measured", "guess"]
    """measured: by what the same evaluation took of other checkpoints; guess: by other evaluations, or by its plan."""
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
