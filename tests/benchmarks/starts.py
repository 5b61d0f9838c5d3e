"""The starts on every backend, against the backend's own client: the table of docs/performance.md.

    make bench NAME=starts

Runs `jobs`, `pool_start` and `levanter_jobs` on each backend in sequence, and prints a table in Markdown; if a script
gives up, its cells are empty. Warm-up fills the machine's caches, so only the first backend has a round that is not
counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends import BACKENDS
from side_by_side import end_children_on_sigterm, say

ROWS = {
    "a job, until its first line has run": "jobs.{backend}.started",
    "a pool, until the first answer": "pool_start.{backend}.answered",
    "a replica of two hosts, until the first answer": "pool_start.{backend}.two_hosts.answered",
    "an evaluation of a checkpoint by Levanter, until its result": "levanter_jobs.{backend}.evaluated",
}
"""The figure of each row."""
_EMPTY = "–"
_MS_BELOW_SECONDS = 2.0


def figures_of(script: str, backend: str, *options: str) -> dict[str, dict[str, Any]]:
    """Runs a script on a backend; returns its figures by name, empty if it gave up."""
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), "--backends", backend, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            written, _ = process.communicate()
        finally:
            process.terminate()  # SIGTERM, so that it can end its child processes
    if process.returncode:
        say(f"{script} gave no figure on {backend}")
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def formatted(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < _MS_BELOW_SECONDS else f"{seconds:.1f} s"


def cell(figure: Mapping[str, Any] | None) -> str:
    """Formats a figure: ours, theirs, and how many times faster ours is."""
    if figure is None or figure["ratio"] is None:
        return _EMPTY
    scale = {"s": 1, "ms": 0.001}[figure["unit"]]
    ours, theirs = (formatted(scale * figure[side]) for side in ("ours", "theirs"))
    return f"{ours} / {theirs}, {figure['ratio']:.2g}"


def table(figures: Mapping[str, Mapping[str, Any]], backends: list[str]) -> list[str]:
    """Returns lines of the table in Markdown: a row for each start, a column for each backend."""
    rows = [["", *(backend.capitalize() for backend in backends)], ["---"] * (len(backends) + 1)]
    for title, name in ROWS.items():
        rows.append([title, *(cell(figures.get(name.format(backend=backend))) for backend in backends)])
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="counted rounds; of jobs five times as many (default: 1)")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS], help="which (default: all)")
    given = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    for place, backend in enumerate(given.backends):
        rounds = ("--rounds", str(given.rounds), "--warm-up-rounds", "0" if place else "1")
        options = {
            "jobs": ("--rounds", str(5 * given.rounds)),
            "pool_start": rounds,
            "levanter_jobs": (*rounds, "--checkpoints", "1"),
        }
        for script in options:
            script_figures = figures_of(script, backend, *options[script])
            for figure in script_figures.values():
                print(json.dumps(figure), flush=True)
            figures |= script_figures
    print("\n".join(table(figures, given.backends)))


if __name__ == "__main__":
    main()
