"""Kills each process of a real evaluation in turn, at random moments, and compares the results.

    make chaos                          100 kills
    make chaos KILLS=10 SEED=7          10, at the moments of that seed
    make chaos KILLS=3 ROLE=proxy       of a single kind of process

The same evaluation runs undisturbed first. Then, for each kill, it runs in a new folder; ended programs are restarted
as a user would. In the end there must be a single record with the same scores and samples; sampled answers that existed
at the kill must be among its samples; engines may have answered only lost requests again; and no process, port,
unfinished file, live claim, or file of a pool may be left. Ends with 1 if anything differs, and keeps the folders of
those kills.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from faults.chaos.evaluation import ROOT, ByCommand, ByDeployment, Place, Way, deployed, prepared
from faults.chaos.outcome import differences
from faults.chaos.roles import DEPLOYED, ROLES
from faults.chaos.trial import Kill, Moment, Undisturbed, killed, undisturbed

_PR_SET_CHILD_SUBREAPER = 36
_FOLDER = ROOT / ".chaos"
_MISSES = 5


class Chaos:
    """Evaluations in folders of their own below `folder`, run locally or by a deployment."""

    def __init__(self, run: Path, folder: Path, stack: ExitStack) -> None:
        self._run = run
        self._folder = folder
        self._stack = stack
        self._numbers = count(1)
        self._ways: dict[bool, tuple[Way, Undisturbed]] = {}

    def way(self, role: str) -> tuple[Way, Undisturbed]:
        """Returns a way of evaluating that has this kind of process, and its undisturbed evaluations."""
        by_deployment = role in DEPLOYED
        if by_deployment not in self._ways:
            way: Way = ByCommand()
            if by_deployment:
                way = ByDeployment(self._stack.enter_context(deployed(self._folder / "prefect")))
            self._ways[by_deployment] = way, self._undisturbed(way)
        return self._ways[by_deployment]

    def _undisturbed(self, way: Way) -> Undisturbed:
        expected = undisturbed(way, self._run, self._place())
        _say(f"undisturbed: {expected.seconds:.0f} s, {expected.requests} requests, {expected.asked} prompts")
        for _, other in self._ways.values():
            assert not (wrong := differences(expected.outcome, other.outcome)), wrong
        return expected

    def _place(self) -> Place:
        return Place.new(self._folder / str(next(self._numbers)))

    def kill(self, role: str, moment: Moment) -> Kill:
        """Evaluates with a single kill; keeps its folder if something differs."""
        way, expected = self.way(role)
        place = self._place()
        kill = killed(role, moment, way, self._run, place, expected)
        if kill.wrong:
            _say(f"   see {place.folder}")
        else:
            shutil.rmtree(place.folder)
        return kill


def _say(line: str) -> None:
    print(line, flush=True)


def _described(number: int, kill: Kill) -> str:
    moment = "ended before its moment" if kill.missed else kill.moment.words
    story = f"{kill.happened}; DIFFERS" if kill.wrong else kill.happened
    return f"{number:4d} {kill.role}, {moment}: {story}; {kill.replayed} samples replayed, {kill.seconds:.0f} s"


def _table(kills: list[Kill]) -> Table:
    table = Table("Killed", "Kills", "Started again", "Differences", "Samples replayed", "Seconds", "At most")
    table.caption = "seconds: the median; temporary files left by a single evaluation: "
    table.caption += f"{max((kill.temporary for kill in kills), default=0)} at most"
    for role in (*ROLES, "all"):
        of_role = [kill for kill in kills if role in (kill.role, "all") and not kill.missed]
        if not of_role:
            continue
        seconds = sorted(kill.seconds for kill in of_role)
        table.add_row(
            role,
            str(len(of_role)),
            str(sum("started again" in kill.happened for kill in of_role)),
            str(sum(bool(kill.wrong) for kill in of_role)),
            str(sum(kill.replayed for kill in of_role)),
            f"{seconds[len(seconds) // 2]:.0f}",
            f"{seconds[-1]:.0f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Kills each process of a real evaluation in turn.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; drawn, and printed, when left out")
    parser.add_argument("--role", choices=tuple(ROLES), action="append", help="only processes of that kind; repeatable")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    source, roles = random.Random(seed), given.role or list(ROLES)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # finds processes that outlive their parents
    _say(f"seed {seed}, {given.kills} kills")
    began, kills = time.monotonic(), list[Kill]()
    run = prepared(_FOLDER)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # a short name: paths of sockets are limited
    with ExitStack() as stack:
        chaos = Chaos(run, folder, stack)
        for number in range(given.kills):
            if number % len(roles) == 0:
                source.shuffle(roles)
            role = roles[number % len(roles)]
            expected = chaos.way(role)[1]
            for _ in range(_MISSES):
                kill = chaos.kill(role, expected.moment(role, source))
                kills.append(kill)
                _say(_described(number + 1, kill))
                for sentence in kill.wrong:
                    _say(f"     {sentence}")
                if not kill.missed:
                    break
    wrong = [kill for kill in kills if kill.wrong]
    if not wrong:
        shutil.rmtree(folder)
    Console().print(_table(kills))
    done = sum(not kill.missed for kill in kills)
    _say(f"{done} kills in {(time.monotonic() - began) / 60:.0f} min, {len(wrong)} differ; seed {seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
