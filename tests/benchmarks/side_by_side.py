"""Common parts of this folder's scripts: timed processes, facts about the machine, and the JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich.console import Console
from rich.table import Table

from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import process_environment
from tasks.evaluators.evaluator import harness_environments

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
"""The working folder of the scripts; ignored by git, safe to delete."""

Side = Literal["ours", "theirs"]
Phases = Mapping[str, float]
"""Seconds by phase of a single attempt."""

_SHOWN_LOG_LINES = 25
_STOP_SECONDS = 10.0
_READY_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Comparison:
    """Two ways of doing the same, measured in the same run; `ratio` above 1 means that ours is better."""

    name: str
    unit: str
    ours: float
    theirs: float
    better: Literal["less", "more"]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Above 1 if ours is better; None if a side is not above 0, as a difference may be."""
        if self.ours <= 0 or self.theirs <= 0:
            return None
        return self.theirs / self.ours if self.better == "less" else self.ours / self.theirs

    def as_json(self) -> str:
        content = {
            "name": self.name,
            "ours": round(self.ours, 3),
            "theirs": round(self.theirs, 3),
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "unit": self.unit,
            "better": self.better,
            **self.facts,
            "environment": environment_facts(),
        }
        return json.dumps(content)


def interleaved(sides: Sequence[str], rounds: int) -> list[str]:
    """Returns rounds of all sides, each beginning with another side: changes in the machine's speed affect all."""
    turns = [place % len(sides) for place in range(rounds)]
    return [side for turn in turns for side in (*sides[turn:], *sides[:turn])]


@dataclass(frozen=True)
class Contest:
    """Two ways to do the same: each call runs it once and returns the seconds of its phases."""

    name: str
    ours: Callable[[], Phases]
    theirs: Callable[[], Phases]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def measured(self, rounds: int, *, warm_up_rounds: int = 1) -> dict[Side, list[Phases]]:
        """Returns the phases of each side, in turns; warm-up rounds come first and are not counted."""
        by_side: defaultdict[Side, list[Phases]] = defaultdict(list)
        sides: dict[str, tuple[Side, Callable[[], Phases]]] = {
            "ours": ("ours", self.ours),
            "theirs": ("theirs", self.theirs),
        }
        for turn, name in enumerate(interleaved(tuple(sides), warm_up_rounds + rounds)):
            side, tried = sides[name]
            phases = tried()
            say(f"{self.name}, {side}: " + ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in phases.items()))
            if turn >= warm_up_rounds * len(sides):
                by_side[side].append(phases)
        return dict(by_side)


def comparisons(
    contest: Contest, by_side: Mapping[Side, Sequence[Phases]], *, unit: Literal["s", "ms"] = "s"
) -> list[Comparison]:
    """Returns a comparison for each phase, of the medians of both sides."""
    scale = {"s": 1, "ms": 1000}[unit]
    made = []
    for phase in by_side["ours"][0]:
        ours, theirs = ([scale * phases[phase] for phases in by_side[side]] for side in ("ours", "theirs"))
        slowest = {"ours_slowest": round(max(ours), 3), "theirs_slowest": round(max(theirs), 3)}
        made.append(
            Comparison(
                f"{contest.name}.{phase}",
                unit,
                statistics.median(ours),
                statistics.median(theirs),
                better="less",
                facts={"rounds": len(ours), **slowest, **contest.facts},
            )
        )
    return made


def environment_facts() -> dict[str, Any]:
    """Returns facts that a number depends on besides the code: machine, load, versions."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "assay": metadata.version("assay-evals"),
        "prefect": metadata.version("prefect"),
        "commit": _commit(),
    }
    return facts


def installed_version(environment: str, distribution: str) -> str:
    python = ensure_environment((ENVIRONMENTS | harness_environments())[environment]).python
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def requirement_pin(requirements: Path, distribution: str) -> str:
    """Returns the line of a pinned list that names a distribution."""
    [line] = [line for line in requirements.read_text().splitlines() if line.startswith(f"{distribution}==")]
    return line


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def environment_of_a_user(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process, without this process's Prefect settings, and with `variables`."""
    inherited = {name: value for name, value in process_environment().items() if not name.startswith("PREFECT_")}
    return {**inherited, **variables}


def run_timed(
    argv: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path = ROOT, limit_seconds: float = 1800
) -> float:
    """Runs a command to its end; returns the wall seconds from its start to its exit.

    Standard error goes to `log`, standard output to `log` with the suffix .out. Ends this script if it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (
        log.open("wb") as errors,
        log.with_suffix(".out").open("wb") as output,
        subprocess.Popen(argv, stdout=output, stderr=errors, env=env, cwd=cwd) as process,
    ):
        try:
            returncode = process.wait(limit_seconds)
        finally:
            process.terminate()  # SIGTERM, so that it can end its child processes
    seconds = time.monotonic() - began
    if returncode != 0:
        give_up(f"{Path(argv[0]).name} ended with {returncode}", log)
    return seconds


def end_children_on_sigterm() -> None:
    """Makes SIGTERM end this script as an exception, through every `finally`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def on_a_single_core() -> Iterator[None]:
    """Keeps this process and its children on a single core if the system supports it.

    For processes that run in turn: a message between them takes 10 to 80 microseconds, depending on if they share a
    core, which would dominate the measurement.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def background(argv: Sequence[str | Path], *, log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process for the block; its output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=log.parent)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until(condition: Callable[[], bool], *, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for a condition of a background process; ends the script if the process ends or after a time-out."""
    deadline = time.monotonic() + _READY_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            give_up("a program of the comparison did not start", log)
        time.sleep(_POLL_SECONDS)


def give_up(reason: str, log: Path | None = None) -> NoReturn:
    """Ends the script with the last lines of a log: half a comparison is worthless."""
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:] if log and log.is_file() else []
    sys.exit("\n".join([f"no result: {reason}", *lines]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)


def print_comparisons(title: str, compared: Sequence[Comparison]) -> None:
    rows = [(line.name, line.ours, line.theirs, f"{line.ratio:.2f}" if line.ratio else "-") for line in compared]
    print_table(title, ("", "ours", "theirs", "times better"), rows)
    for line in compared:
        print_comparison(line)


def print_comparison(comparison: Comparison) -> None:
    print(comparison.as_json(), flush=True)
