"""Milliseconds until a job runs and until it has ended, through Assay's clients and through the backends' own.

    make bench NAME=jobs

Started is from the call that submits until the program's first line has run, which writes its process id; ended is from
the call that ends the job until that process is gone. Both are observed from outside, in the same way on both sides.
When our call returns, nothing of the job may be left; the script gives up if the process still exists then.

| | ours | theirs |
| --- | --- | --- |
| `local` | a command | the same by `subprocess.Popen`, `terminate` and `wait` |
| `ray` | a command | the same by Ray's own `JobSubmissionClient` |
| `ray_call` | a callable | the same as a bare task of `ray.remote`, ended by `ray.cancel(force=True)` |
| `iris` | a command | the same by Iris' own client |
| `slurm` | a command | the same by `sbatch` and `scancel` |

The sides do different work: a bare process or task has no supervisor that ends its children with it or with its client,
keeps its log, restarts it, or distinguishes a failure from a lost machine. The difference is the cost of that. A bare
task runs in an existing worker, but a callable of ours begins with an interpreter of its own. Ending the task ends the
worker, so Ray starts another before the next turn.
Ray and Iris run on this machine, with the settings of a cluster: our replicas on Iris poll every 2 s for their end. The
sides take turns, and the first round is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

if __name__ == "__main__":  # for the package of fakes
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends import BACKENDS, START_SECONDS, Backend, Ends, seconds_until
from side_by_side import (
    BENCH,
    Comparison,
    Contest,
    Phases,
    comparisons,
    end_children_on_sigterm,
    give_up,
    print_comparisons,
)

from fakes import ray_variables  # noqa: F401 before ray is imported
from resources.config import ResourceConfig
from resources.jobs.jobs import Client, Entrypoint, JobRequest, create_environment

WORK = BENCH / "jobs"
RUNS_SECONDS = 600
_END_SECONDS = 60.0
_QUIET_SECONDS = 1.0  # between start and end, so that the rest of a start is not measured with the end
_numbers = count()

Starts = Callable[[Path], Ends]
"""Starts a program that writes its process id into a file, and runs until it is ended."""


def begin(path: Path) -> None:
    written = path.with_suffix(".new")
    written.write_text(str(os.getpid()))
    written.rename(path)
    time.sleep(RUNS_SECONDS)


def command(path: Path) -> list[str]:
    written = path.with_suffix(".new")
    return ["sh", "-c", f"echo $$ > {written} && mv {written} {path} && exec sleep {RUNS_SECONDS}"]


def through_client(client: Client, path: Path, *, call: bool = False) -> Ends:
    program, *arguments = command(path)
    entrypoint = Entrypoint.from_callable(begin, [path]) if call else Entrypoint.from_binary(program, arguments)
    return client.submit(
        JobRequest(
            f"bench-{next(_numbers)}",
            entrypoint,
            resources=ResourceConfig(),
            environment=create_environment(workspace=path.parent),
        )
    ).terminate


def is_gone(pid: int) -> bool:
    """Returns True if a process has ended, even as a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # it has ended in between, or the system has no such files
        return Path("/proc/self/stat").is_file()


def timed(starts: Starts, path: Path, *, gone_at_return: bool, quiet_seconds: float = _QUIET_SECONDS) -> Phases:
    """Runs the program once.

    Args:
        path: gets the program's process id.
        gone_at_return: if True, the process must be gone when the call that ends it returns.
        quiet_seconds: duration of its run.
    """
    began = time.monotonic()
    ends = starts(path)
    started = seconds_until(path.exists, began, at_most=START_SECONDS, event="a start")
    pid = int(path.read_text())
    time.sleep(quiet_seconds)
    began = time.monotonic()
    ends()
    if gone_at_return and not is_gone(pid):
        give_up("our client said that a job had ended, and its process was there")
    ended = seconds_until(lambda: is_gone(pid), began, at_most=_END_SECONDS, event="an end")
    return {"started": started, "ended": ended}


def contest_of(
    name: str, backend: Backend, ours: Starts, theirs: Starts, *, prepare: Callable[[], object] = lambda: None
) -> Contest:
    """Returns a contest of 2 ways to run the program; `prepare` runs before each job, to make jobs independent."""

    def once(starts: Starts, *, gone_at_return: bool) -> Phases:
        prepare()
        return timed(starts, WORK / f"{name}-{next(_numbers)}", gone_at_return=gone_at_return)

    sides = (partial(once, ours, gone_at_return=True), partial(once, theirs, gone_at_return=False))
    return Contest(f"jobs.{name}", *sides, backend.facts)


def contests(backend: Backend) -> list[Contest]:
    def by_its_own_client(path: Path) -> Ends:
        return backend.starts(command(path), {})

    if backend.name != "ray":
        return [contest_of(backend.name, backend, partial(through_client, backend.client), by_its_own_client)]
    import ray

    task = ray.remote(max_retries=0)(begin)

    def as_task(path: Path) -> Ends:
        return partial(ray.cancel, task.remote(path), force=True)

    def have_idle_worker() -> None:
        ray.get(ray.remote(lambda: None).remote())

    command_of_ours = partial(through_client, backend.client)
    return [
        contest_of("ray", backend, command_of_ours, by_its_own_client, prepare=have_idle_worker),
        contest_of("ray_call", backend, partial(command_of_ours, call=True), as_task, prepare=have_idle_worker),
    ]


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted jobs of each side (default: 7)")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS], help="which (default: all)")
    given = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    compared: list[Comparison] = []
    for backend in given.backends:
        with BACKENDS[backend](WORK) as standing:
            for contest in contests(standing):
                compared += comparisons(contest, contest.measured(given.rounds), unit="ms")
    print_comparisons(f"Median milliseconds of {given.rounds} jobs", compared)


if __name__ == "__main__":
    main()
