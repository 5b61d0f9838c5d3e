"""Multiple tests: adjusted p-values, and the share of the error probability for each decision of a series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the import takes 0.15 s, which most processes do not need
    import numpy as np

Adjustment = Literal["bh", "holm", "none"]
FIRST_BLOCK = 64
"""Number of decisions in a series that share the first half of the error probability."""


def adjusted(p_values: Sequence[float | None], *, by: Adjustment) -> list[float | None]:
    """Returns p-values adjusted for their number; None entries are not counted.

    `bh` (Benjamini and Hochberg) bounds the false discovery rate, `holm` the probability of any false difference;
    `none` returns the p-values unchanged.
    """
    from scipy import stats

    known = [p for p in p_values if p is not None]
    if not known or by == "none":
        return list(p_values)
    adjusted_values = iter(stats.false_discovery_control(known, method="bh") if by == "bh" else _holm(known))
    return [None if p is None else float(next(adjusted_values)) for p in p_values]


def spent(number: int) -> float:
    """Returns the share of the error probability for decision `number`, counted from 1; the shares of all sum to 1.

    The first 64 share a half, the next 128 a quarter, the next 256 an eighth. Shares change rarely, so that a rule that
    could be decided before can be decided again.
    """
    block = ((number - 1) // FIRST_BLOCK + 1).bit_length() - 1
    return 0.5 ** (block + 1) / (FIRST_BLOCK * 2**block)


def _holm(p_values: Sequence[float]) -> np.ndarray:
    import numpy as np

    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1))
    result = np.empty_like(stepped)
    result[order] = np.minimum(stepped, 1.0)
    return result
