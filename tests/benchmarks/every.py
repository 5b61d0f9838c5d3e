"""Runs every script at a small size, and prints a table of their figures: that they run, not how fast Assay is.

    make bench-all
    python tests/benchmarks/every.py [--write] [SCRIPT ...]

Rounds are single and short, so that ratios of this table differ between runs. `--write` puts it into
docs/performance.md. Ends with 1 if a script gave no figure; its output is in `.bench/every/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from side_by_side import BENCH, ROOT, end_children_on_sigterm, environment_of_a_user, give_up, say

_HERE = ("--backends", "local", "--rounds", "1")
SMALL: Mapping[str, tuple[str, ...]] = {
    "alarms": ("--runs", "4"),
    "contamination": ("--megabytes", "8", "--plain-megabytes", "8"),
    "early": ("--decisions", "4", "--questions", "1000", "--rounds", "1"),
    "evaluator_start": ("--rounds", "1"),
    "evaluators": ("--checkpoints", "2", "--theirs", "1"),
    "generate": ("--rounds", "1", "--requests", "256"),
    "jobs": _HERE,
    "levanter_jobs": (*_HERE, "--warm-up-rounds", "0", "--checkpoints", "1"),
    "loglikelihood": ("--rounds", "1", "--one-token", "6", "--long", "6", "--without-in-process"),
    "merge": ("--megabytes", "50", "--rounds", "1"),
    "plan_hub": ("--revisions", "20", "--delay-ms", "5"),
    "plan_scale": ("--checkpoints", "100", "--suites", "2", "--naive", "20"),
    "pool_start": (*_HERE, "--warm-up-rounds", "0", "--hosts", "1"),
    "proxy_stub": ("--rounds", "1", "--seconds", "0.5"),
    "resume": ("--requests", "200"),
    "scaling": ("--replicas", "1", "4", "--seconds", "1"),
    "series": ("--checkpoints", "2", "--theirs", "1"),
    "statistics": ("--trials", "20"),
    "swap": ("--swaps", "6", "--restarts", "1"),
    "view": ("--questions", "500", "--checkpoints", "4", "--plain-checkpoints", "4"),
}
"""Options of each script for a run of seconds to a few minutes."""
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- make bench-all WRITE=--write: begin -->\n\n", "<!-- end -->"
HEAD = ("| Script | Figure | Ours; theirs | Ratio |", "| --- | --- | --- | --- |")
LOGS = BENCH / "every"
_LIMIT_SECONDS = 900.0
_NOTHING = "–"


def figures_of(script: str) -> list[dict[str, Any]] | None:
    """Runs a script; returns its lines of JSON, or None if it gave up or took too long."""
    began = time.monotonic()
    command = [sys.executable, Path(__file__).with_name(f"{script}.py"), *SMALL[script]]
    output = LOGS / f"{script}.out"
    with (
        output.open("wb") as out,
        output.with_suffix(".log").open("wb") as log,
        subprocess.Popen(command, stdout=out, stderr=log, env=environment_of_a_user({}), cwd=ROOT) as process,
    ):
        try:
            returncode = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            process.terminate()  # SIGTERM, so that it can end its child processes
    say(f"{script}: {'done' if returncode == 0 else 'no figure'} after {time.monotonic() - began:.0f} s")
    if returncode != 0:
        say(output.with_suffix(".log").read_text(errors="replace")[-2000:])
        return None
    lines = output.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def rows_of(figures: Mapping[str, Iterable[Mapping[str, Any]] | None]) -> list[str]:
    """Returns rows in Markdown: for each figure of each script, and for a script without a figure."""
    rows = []
    for script, lines in figures.items():
        compared = [line for line in lines or () if "ratio" in line]
        for line in compared:
            sides = f"{line['ours']:g}; {line['theirs']:g} {line['unit']}"
            ratio = _NOTHING if line["ratio"] is None else f"{line['ratio']:.2g}"
            rows.append(f"| `{script}` | {line['name']} | {sides} | {ratio} |")
        if not compared:
            rows.append(f"| `{script}` | {'gave up' if lines is None else 'simulations'} | {_NOTHING} | {_NOTHING} |")
    return rows


def written(page: str, rows: Sequence[str]) -> str:
    """Returns the page with rows in place of those of the same scripts, and without those of scripts that are gone."""
    before, _, rest = page.partition(BEGIN)
    former, end, after = rest.partition(END)
    if not end:
        give_up(f"{PAGE} has no place for the table, between {BEGIN.strip()} and {END}")
    fresh = {script_of(row) for row in rows}
    kept = [row for row in former.splitlines() if script_of(row) in {*SMALL} - fresh]
    table = "\n".join([*HEAD, *sorted([*kept, *rows], key=script_of)])
    return f"{before}{BEGIN}{table}\n\n{END}{after}"


def script_of(row: str) -> str:
    return row.split("`")[1] if "`" in row else ""


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", choices=[[], *SMALL], help="default: all")  # [] is checked, too
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    given = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    figures = {script: figures_of(script) for script in given.scripts or SMALL}
    rows = rows_of(figures)
    print(*HEAD, *rows, sep="\n", flush=True)
    if given.write:
        PAGE.write_text(written(PAGE.read_text(), rows))
    sys.exit(any(lines is None for lines in figures.values()))


if __name__ == "__main__":
    main()
