"""Simulates the alarms of curves: how often they are false, and how soon they find a drop.

    make bench NAME=alarms
    python tests/benchmarks/alarms.py [--runs 1000] [--seed 0]

Scores are shares of 2,000 questions, half of them right by default (a standard error of 1.1 points). They jitter by
half a point, a size unknown to the detector. Runs have 50 checkpoints, and 20 benchmarks or 1.

- alarms.false: runs without a drop that raise any alarm, and alarms per thousand checkpoints, for each kind of jitter.
  For jitter that is normal, independent and of constant size, 1 in 1,000 checkpoints and 5 % of runs are promised
- alarms.neighbours: runs with a regression by comparing each checkpoint with its predecessor, by a z test of the
  jitter's true size at p < 0.05
- alarms.distance: checkpoints of a series between 2 false alarms, with a stated distance of 200
- alarms.planted: drops of 2 points in 1 of 20 benchmarks that raise an alarm at the first or second checkpoint after so
  many; at least 75 % after 30 with independent jitter

Takes about 20 minutes with 1000 runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tasks.verdicts.statistics.alarms import Score, alarms

CHECKPOINTS, BENCHMARKS = 50, 20
QUESTIONS = 2_000
JITTER, DROP = 0.005, 0.02
_AT_5_PERCENT = 1.645

Draw = Callable[[np.random.Generator, int, int], np.ndarray]
"""Draws scores of some benchmarks at some checkpoints."""


class FalseAlarms(NamedTuple):
    """The share of runs with any false alarm, and the number per thousand checkpoints of a run."""

    runs: float
    per_thousand: float


def _jitter(random: np.random.Generator, benchmarks: int, checkpoints: int) -> np.ndarray:
    return JITTER * random.normal(size=(benchmarks, checkpoints))


def _outlier(random: np.random.Generator, benchmarks: int, checkpoints: int) -> np.ndarray:
    # a checkpoint of a benchmark is 8 jitters above or below its level
    values = _jitter(random, benchmarks, checkpoints)
    values[random.integers(benchmarks), random.integers(10, checkpoints)] += random.choice([-8, 8]) * JITTER
    return values


def _correlated(correlation: float) -> Draw:
    def draw(random: np.random.Generator, benchmarks: int, checkpoints: int) -> np.ndarray:
        fresh = random.normal(size=(benchmarks, checkpoints))
        fresh[:, 1:] *= math.sqrt(1 - correlation**2)
        for at in range(1, checkpoints):
            fresh[:, at] += correlation * fresh[:, at - 1]
        return JITTER * fresh

    return draw


def _kept(share: float) -> Draw:
    # so many questions keep their answer from a checkpoint to the next, and the others are answered by chance
    def draw(random: np.random.Generator, benchmarks: int, checkpoints: int) -> np.ndarray:
        right = random.binomial(QUESTIONS, 0.5, size=benchmarks)
        right_counts = [right]
        for _ in range(1, checkpoints):
            kept, wrong = random.binomial(right, share), random.binomial(QUESTIONS - right, share)
            right_counts.append(right := kept + random.binomial(QUESTIONS - kept - wrong, 0.5))
        return np.array(right_counts).T / QUESTIONS - 0.5

    return draw


def _near_the_top(wrong: float) -> Draw:
    # each checkpoint draws its wrong answers independently, `wrong` in the mean
    return lambda random, *size: 0.5 - random.binomial(QUESTIONS, wrong / QUESTIONS, size=size) / QUESTIONS


def _unequal(random: np.random.Generator, benchmarks: int, checkpoints: int) -> np.ndarray:
    return np.exp(0.5 * random.normal(size=(benchmarks, 1))) * _jitter(random, benchmarks, checkpoints)


def _rising(shape: Callable[[np.ndarray], np.ndarray]) -> Draw:
    return lambda random, *size: _jitter(random, *size) + shape(np.arange(size[1]))


KINDS: dict[str, Draw] = {
    "identical": lambda _, *size: np.zeros(size),
    "independent": _jitter,
    "unequal between benchmarks (a factor of 1.6)": _unequal,
    "near the top (1 of 2,000 wrong)": _near_the_top(1.0),
    "at the top (1 of 20,000 wrong)": _near_the_top(0.1),
    "lone outlier (8 jitters)": _outlier,
    "heavy tails (t, 3 degrees)": lambda random, *size: JITTER / math.sqrt(3) * random.standard_t(3, size=size),
    "growing threefold": lambda random, *size: _jitter(random, *size) * np.linspace(1, 3, size[1]),
    "correlated 0.5": _correlated(0.5),
    "correlated 0.8": _correlated(0.8),
    "90 % of answers kept": _kept(0.9),
    "98 % of answers kept": _kept(0.98),
    "rise saturates": _rising(lambda at: 0.3 * (1 - np.exp(-at / 15))),
    "rise emerges": _rising(lambda at: 0.3 / (1 + np.exp(-(at - 20) / 3))),
    "rise jumps": _rising(lambda at: 0.1 * (at > 25)),
}


def false_alarms(kind: str, *, runs: int, seed: int, benchmarks: int = BENCHMARKS) -> FalseAlarms:
    random = np.random.default_rng([seed, list(KINDS).index(kind), benchmarks])
    alarm_counts = [
        sum(map(len, alarms(_scores(0.5 + KINDS[kind](random, benchmarks, CHECKPOINTS))))) for _ in range(runs)
    ]
    return FalseAlarms(float(np.mean(np.array(alarm_counts) > 0)), 1_000 * sum(alarm_counts) / (runs * CHECKPOINTS))


def compared_with_neighbours(*, runs: int, seed: int) -> float:
    """Returns the share of runs without a drop that have a checkpoint worse than its predecessor by p < 0.05."""
    random = np.random.default_rng([seed, 1])
    values = JITTER * random.normal(size=(runs, BENCHMARKS, CHECKPOINTS))
    worse = np.diff(values, axis=2) < -_AT_5_PERCENT * math.sqrt(2) * JITTER
    return float(worse.any(axis=(1, 2)).mean())


def distance(*, stated: int, checkpoints: int, seed: int) -> float:
    """Returns the mean number of checkpoints between 2 false alarms of a series."""
    random = np.random.default_rng([seed, stated])
    [raised] = alarms(_scores(0.5 + JITTER * random.normal(size=(1, checkpoints))), distance=stated)
    return checkpoints / max(1, len(raised))


def found_drops(*, after: int, runs: int, seed: int, kind: str = "independent") -> float:
    """Returns the share of drops in 1 of a run's benchmarks with an alarm at the first or second checkpoint."""
    random = np.random.default_rng([seed, after, list(KINDS).index(kind)])
    detected = 0
    for _ in range(runs):
        values = 0.5 + KINDS[kind](random, BENCHMARKS, after + 2)
        values[0, after:] -= DROP
        detected += any(alarm.at >= after for alarm in alarms(_scores(values))[0])
    return detected / runs


def _scores(values: np.ndarray) -> list[Sequence[Score | None]]:
    # if all are right, with the error of Clopper and Pearson's interval
    shares = np.clip(np.round(values * QUESTIONS), 0, QUESTIONS) / QUESTIONS
    width = 1 - 0.025 ** (1 / QUESTIONS)
    errors = np.sqrt(shares * (1 - shares) / QUESTIONS)
    return [
        [Score(value, error or width / (2 * 1.96), unvaried=error == 0.0) for value, error in zip(*both, strict=True)]
        for both in zip(shares.tolist(), errors.tolist(), strict=True)
    ]


def everything(*, runs: int, seed: int) -> Iterator[dict[str, Any]]:
    def row(name: str, value: float, **facts: Any) -> dict[str, Any]:
        return {"row": name, **facts, "value": round(value, 4)}

    for benchmarks in (BENCHMARKS, 1):
        for kind in KINDS:
            drawn = runs if benchmarks > 1 else 4 * runs
            rates = false_alarms(kind, runs=drawn, seed=seed, benchmarks=benchmarks)
            facts = {"kind": kind, "benchmarks": benchmarks, "runs": drawn}
            yield row("alarms.false", rates.runs, **facts, per_thousand=round(rates.per_thousand, 2))
    yield row("alarms.neighbours", compared_with_neighbours(runs=runs, seed=seed), runs=runs)
    yield row("alarms.distance", distance(stated=200, checkpoints=50 * runs, seed=seed), stated=200)
    for after in (15, 20, 30, 40):
        yield row("alarms.planted", found_drops(after=after, runs=runs, seed=seed), after=after, runs=runs)
    for kind in ("heavy tails (t, 3 degrees)", "growing threefold", "correlated 0.5", "correlated 0.8"):
        value = found_drops(after=30, runs=runs, seed=seed, kind=kind)
        yield row("alarms.planted", value, after=30, kind=kind, runs=runs)


def main() -> None:
    """Simulates all figures and prints each, and in the end all as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in everything(runs=options.runs, seed=options.seed):
        print(json.dumps(row), flush=True)
        rows.append(row)
    print(json.dumps({"runs": options.runs, "seed": options.seed, "rows": rows}))


if __name__ == "__main__":
    main()
