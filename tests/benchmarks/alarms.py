"""Holds the alarms of curves against simulation: how often they are false, and how soon a drop is found.

    make bench NAME=alarms
    python tests/benchmarks/alarms.py [--runs 1000] [--seed 0]

Each checkpoint's score is a level plus normal jitter with a standard deviation of half a point, of which the detector
is told nothing but the standard error of 2,000 questions, half of them right (1.1 points).

- alarms.identical, alarms.jitter, alarms.unequal_jitter: runs of 50 checkpoints and 20 benchmarks without a change
  that raise any alarm; 5 % at most are promised
- alarms.rising: the same where every score rises, in three shapes, and the rise ends
- alarms.neighbours: runs that comparing each checkpoint with the one before would call a regression, by a z test of the
  jitter's true size at p < 0.05
- alarms.distance: checkpoints of one series between two false alarms, where one in 200 is stated
- alarms.planted: drops of 2 points in one of 20 benchmarks that are alarmed at the first or second checkpoint after so
  many; at least 80 % after 30

With 1000 runs it takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tasks.statistics.alarms import Score, alarms

CHECKPOINTS, BENCHMARKS = 50, 20
QUESTIONS = 2_000
JITTER, DROP = 0.005, 0.02
_ERROR = math.sqrt(0.25 / QUESTIONS)
_AT_5_PERCENT = 1.645

RISES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "saturates": lambda at: 0.3 * (1 - np.exp(-at / 15)),
    "emerges": lambda at: 0.3 / (1 + np.exp(-(at - 20) / 3)),
    "jumps": lambda at: 0.1 * (at > 25),
}


def alarmed_runs(
    *, runs: int, seed: int, jitter: float = JITTER, unequal: float = 0.0, rises: str | None = None
) -> float:
    """Share of runs without a drop that raise any alarm.

    Args:
        runs: number of runs.
        seed: of the simulation.
        jitter: standard deviation from checkpoint to checkpoint.
        unequal: standard deviation of its logarithm among the benchmarks of a run.
        rises: the shape of a rise.
    """
    random = np.random.default_rng([seed, round(1e6 * jitter), round(100 * unequal), len(rises or "")])
    level = RISES[rises](np.arange(CHECKPOINTS)) if rises else np.zeros(CHECKPOINTS)
    found = 0
    for _ in range(runs):
        sizes = jitter * np.exp(unequal * random.normal(size=(BENCHMARKS, 1)))
        found += any(alarms(_scores(0.5 + level + sizes * random.normal(size=(BENCHMARKS, CHECKPOINTS)))))
    return found / runs


def compared_with_neighbours(*, runs: int, seed: int) -> float:
    """Share of runs without a drop in which a checkpoint is worse than the one before by p < 0.05."""
    random = np.random.default_rng([seed, 1])
    values = JITTER * random.normal(size=(runs, BENCHMARKS, CHECKPOINTS))
    worse = np.diff(values, axis=2) < -_AT_5_PERCENT * math.sqrt(2) * JITTER
    return float(worse.any(axis=(1, 2)).mean())


def distance(*, stated: int, checkpoints: int, seed: int) -> float:
    """Mean number of checkpoints between two false alarms of one series."""
    random = np.random.default_rng([seed, stated])
    [found] = alarms(_scores(0.5 + JITTER * random.normal(size=(1, checkpoints))), distance=stated)
    return checkpoints / max(1, len(found))


def found_drops(*, after: int, runs: int, seed: int) -> float:
    """Share of drops in one of the benchmarks of a run that are alarmed at the first or second checkpoint."""
    random = np.random.default_rng([seed, after])
    found = 0
    for _ in range(runs):
        values = 0.5 + JITTER * random.normal(size=(BENCHMARKS, after + 2))
        values[0, after:] -= DROP
        found += any(alarm.at >= after for alarm in alarms(_scores(values))[0])
    return found / runs


def _scores(values: np.ndarray) -> list[Sequence[Score | None]]:
    return [[Score(value, _ERROR) for value in series] for series in values.tolist()]


def everything(*, runs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields each figure with what it is of."""

    def row(name: str, value: float, **facts: Any) -> dict[str, Any]:
        return {"row": name, **facts, "value": round(value, 4)}

    yield row("alarms.identical", alarmed_runs(runs=runs, seed=seed, jitter=0.0), runs=runs)
    yield row("alarms.jitter", alarmed_runs(runs=runs, seed=seed), runs=runs)
    yield row("alarms.unequal_jitter", alarmed_runs(runs=runs, seed=seed, unequal=0.5), runs=runs)
    for shape in RISES:
        few = max(1, runs // 4)
        yield row("alarms.rising", alarmed_runs(runs=few, seed=seed, rises=shape), shape=shape, runs=few)
    yield row("alarms.neighbours", compared_with_neighbours(runs=runs, seed=seed), runs=runs)
    yield row("alarms.distance", distance(stated=200, checkpoints=50 * runs, seed=seed), stated=200)
    for after in (15, 20, 30, 40):
        yield row("alarms.planted", found_drops(after=after, runs=runs, seed=seed), after=after, runs=runs)


def main() -> None:
    """Simulates all of it, prints each figure as it is found, and in the end all as one line of JSON."""
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
