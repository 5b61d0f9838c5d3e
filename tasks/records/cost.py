"""Cost of cells: price, prediction, and sums that keep unknown costs unknown."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Literal

from pydantic import FiniteFloat

from tasks.records.details import Part


class Predicted(Part):
    """Cost of a cell predicted before its first request."""

    how: Literal["measured", "guess"]
    """measured: from the same evaluation of other checkpoints; guess: from other evaluations, or from its plan."""
    basis: str
    """Records used and the calculation, formatted."""
    seconds: FiniteFloat
    """Wall seconds of the cell; for a guess, seconds of its replica."""
    chip_seconds: FiniteFloat | None = None
    """Accelerators of a replica times its seconds for this cell."""
    usd: FiniteFloat | None = None
    """Price of the chip-seconds in USD; empty if the price of an hour is unknown."""


class Spent(Part):
    """Cost of recorded attempts, with the number of attempts of unknown cost."""

    attempts: int = 0
    """Attempts in the sum."""
    chip_seconds: FiniteFloat = 0.0
    """Chip-seconds of the attempts where they are known."""
    without_chips: int = 0
    """Attempts with unknown chip-seconds, because a foreign endpoint answered."""
    usd: FiniteFloat = 0.0
    """USD of attempts with a price, and of the priced parts of the others."""
    unpriced: int = 0
    """Attempts without a price, or with an unpriced part."""

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            attempts=self.attempts + other.attempts,
            chip_seconds=round(self.chip_seconds + other.chip_seconds, 3),
            without_chips=self.without_chips + other.without_chips,
            usd=round(self.usd + other.usd, 8),
            unpriced=self.unpriced + other.unpriced,
        )

    @property
    def price(self) -> str:
        """USD, formatted: `1.20 USD`, `at least 1.20 USD, 3 unknown`, or `unknown`."""
        if not self.attempts or not self.unpriced:
            return in_usd(self.usd)
        known = f"at least {in_usd(self.usd)}, {self.unpriced:,} unknown"
        return known if self.usd or self.unpriced < self.attempts else "unknown"

    @property
    def chip_hours(self) -> str:
        """Chip-hours, formatted: `1.200`, `at least 1.200, 3 unknown`, or `unknown`."""
        hours = f"{self.chip_seconds / 3600:,.3f}"
        if not self.without_chips:
            return hours
        return "unknown" if self.without_chips == self.attempts else f"at least {hours}, {self.without_chips:,} unknown"


class Cost(Part):
    """Price of a cell when its record was written; unknown values are empty, never 0."""

    usd: FiniteFloat | None = None
    """USD for the replica's seconds; empty if its price, or the cost of a judge elsewhere, is unknown."""
    known_usd: FiniteFloat | None = None
    """USD of the priced parts, if another part has no price, such as a judge elsewhere."""
    replica_seconds: FiniteFloat | None = None
    """Seconds of a replica used by this cell, or the cell's share if cells of a checkpoint used it together."""
    usd_per_hour: FiniteFloat | None = None
    """Price of an hour of a replica."""
    as_of: date | None = None
    """Date of the price list."""
    source: str | None = None
    """Source of the price list."""
    region: str | None = None
    """Region of the machine."""
    zone: str | None = None
    """Zone of the machine, if known."""
    preemptible: bool | None = None
    """True if the machine was preemptible."""
    why_unknown: str | None = None
    """Reason why `usd` is empty."""
    predicted: Predicted | None = None
    """Predicted cost; empty if there was no basis for a prediction."""
    earlier: Spent = Spent()
    """Cost of earlier attempts at this cell with records that this record replaced, so that failures count too."""


def spent_on(cost: Cost, *, chip_seconds: float) -> Spent:
    """Returns the cost of an attempt and of the recorded attempts before it."""
    own = Spent(
        attempts=1,
        chip_seconds=chip_seconds,
        without_chips=int(cost.replica_seconds is None),
        usd=(cost.known_usd or 0.0) if cost.usd is None else cost.usd,
        unpriced=int(cost.usd is None),
    )
    return own + cost.earlier


def sum_of(costs: Iterable[Spent]) -> Spent:
    """Returns the sum of several costs."""
    return sum(costs, Spent())


def in_usd(usd: float) -> str:
    """Formats USD with cents; amounts below 1 USD with 2 significant digits."""
    return f"{usd:,.2f} USD" if usd >= 1 or usd == 0 else f"{usd:.2g} USD"
