"""Numbers as text, and the order of evaluators, the same in tables, gates and comparisons."""

from __future__ import annotations

import math

from tasks.records.record import Metric
from tasks.spec.evaluators import EVALUATORS

Z_95 = 1.96
"""Half width of a 95 % interval in standard errors."""
_AS_POWERS_FROM = 1e7
_MOST_DECIMALS = 6
NOTHING = "–"
"""Placeholder for a missing number."""


def evaluator_place(evaluator: str) -> tuple[int, str]:
    """Returns a sort key for evaluators."""
    return list(EVALUATORS).index(evaluator) if evaluator in EVALUATORS else len(EVALUATORS), evaluator


def arrow(higher_is_better: bool | None) -> str:
    """Returns the arrow for a direction of improvement."""
    return {True: " ↑", False: " ↓", None: ""}[higher_is_better]


def measured(value: float, stderr: float | None = None) -> str:
    """Formats a number and any standard error, with decimals by magnitude; in scientific notation from 1e7."""
    if math.isfinite(value) and abs(value) >= _AS_POWERS_FROM:
        return f"{value:.3g}" + ("" if stderr is None else f" ± {stderr:.2g}")
    decimals = _decimals(value, fewest=3 if abs(value) < 10 else 2 if abs(value) < 100 else 1)
    return f"{value:,.{decimals}f}" + ("" if stderr is None else f" ± {stderr:.{decimals}f}")


def _decimals(*numbers: float, fewest: int) -> int:
    enough = (
        decimals
        for decimals in range(fewest, _MOST_DECIMALS + 1)
        if all(abs(number) in (0.0, 1.0) or round(abs(number), decimals) not in (0.0, 1.0) for number in numbers)
    )
    return next(enough, fewest)


def margin(metric: Metric) -> str:
    """Formats the uncertainty of a score: its 95 % interval, else its standard error; empty without."""
    if metric.low is not None and metric.high is not None:
        return between(metric.low, metric.high, like=metric.value)
    return measured(metric.value, metric.stderr).partition(" ")[2] if metric.stderr else ""


def interval(metric: Metric) -> tuple[float, float] | None:
    """Returns the 95 % interval of a score: as given, else from its standard error; None if neither is known.

    A standard error of 0 means that all answers have the same score, which gives no interval.
    """
    if metric.low is not None and metric.high is not None:
        return metric.low, metric.high
    return (metric.value - Z_95 * metric.stderr, metric.value + Z_95 * metric.stderr) if metric.stderr else None


def signed(value: float, *, like: float) -> str:
    """Formats a number with its sign and as many decimals as `like` has."""
    if "e" in measured(like):
        return f"{value:+.2e}".replace("-", "−")
    decimals = len(measured(like).partition(".")[2])
    return f"{value:+,.{decimals}f}".replace("-", "−")


def between(low: float, high: float, *, like: float) -> str:
    """Formats the ends of an interval with at least as many decimals as `like` has."""
    if "e" in measured(like):
        return f"[{low:.3g}, {high:.3g}]"
    decimals = _decimals(low, high, fewest=len(measured(like).partition(".")[2]))
    return f"[{low:,.{decimals}f}, {high:,.{decimals}f}]".replace("-", "−")
