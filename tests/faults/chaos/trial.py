"""An evaluation, undisturbed or with a kill: started, restarted if it ended, and inspected."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

from faults.chaos.evaluation import Place, Started, Way
from faults.chaos.outcome import (
    Answered,
    Outcome,
    answered,
    asked_too_often,
    count_answers,
    differences,
    journal_damage,
    leftovers,
    not_replayed,
    outcome_of,
)
from faults.chaos.roles import ROLES, Tree
from faults.scenarios.processes import children, listens_on, state_of
from faults.scenarios.target import engine_answers

_POLL_SECONDS = 0.15
_SELDOM_SECONDS = 0.5
_MOST_STARTS = 3
_LONGEST_SECONDS = 420.0
_GONE_SECONDS = 45.0


@dataclass(frozen=True)
class Moment:
    """The moment of a kill: seconds after the process was first seen, or the number of answers in the journal."""

    seconds: float | None
    answers: int | None

    @property
    def words(self) -> str:
        return f"{self.seconds:.1f} s old" if self.seconds is not None else f"with {self.answers} requests answered"

    def has_come(self, place: Place, *, since: float) -> bool:
        if self.seconds is not None:
            return time.monotonic() - since >= self.seconds
        assert self.answers is not None
        return count_answers(place) >= self.answers


@dataclass(frozen=True)
class Undisturbed:
    """An evaluation without a kill: the reference of the other evaluations, and the times of possible kills."""

    outcome: Outcome
    asked: int
    requests: int
    seconds: float
    lives: dict[str, float]
    """Lifetimes of processes by kind, in seconds."""

    def moment(self, role: str, source: random.Random) -> Moment:
        """Draws a moment in the life of a process: half of the draws by the clock, half by the answers."""
        share = source.random()
        if source.random() < 0.5:
            return Moment(round(share * self.lives[role], 1), None)
        return Moment(None, 1 + int(share * (self.requests - 1)))


@dataclass
class Watch:
    way: Way
    place: Place
    before: frozenset[int]
    """Unrelated processes."""
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)
    ours: set[int] = field(default_factory=set)
    """Processes that this process started itself, and waits for."""
    requests: int = 0
    _looked: float = 0.0

    def start(self, run: Path) -> Started:
        with self._starting():
            self.way.serve(self.place)
            return self.way.start(run, self.place)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        before = set(children(os.getpid()))
        yield
        self.ours |= set(children(os.getpid())) - before

    def look(self, *, serving: bool = True) -> Tree:
        """Polls once, reaps orphans, and restarts a service that has ended."""
        for pid in children(os.getpid()):
            if pid not in self.ours and pid not in self.before and state_of(pid) == "Z":
                os.waitpid(pid, 0)
        below = Tree.below(os.getpid()).processes
        tree = Tree({pid: process for pid, process in below.items() if pid not in self.before})
        now = time.monotonic()
        for role, find in ROLES.items():
            for pid in find(tree):
                self.first.setdefault(pid, now)
                self.last[pid] = now
                self.roles[pid] = role
        if now - self._looked > _SELDOM_SECONDS:
            if serving:
                with self._starting():
                    self.way.serve(self.place)
            self.ask_engines(tree)
            self.requests = max(self.requests, count_answers(self.place))
            self._looked = now
        return tree

    def ask_engines(self, tree: Tree) -> None:
        """Records the number of prompts that each engine has answered."""
        for pid in ROLES["engine's server"](tree):
            for address, port in listens_on(pid):
                try:
                    self.answers[pid] = max(self.answers.get(pid, 0), engine_answers(f"http://{address}:{port}"))
                except (OSError, URLError):
                    continue  # it starts, or ends

    def lives(self) -> dict[str, float]:
        """Returns the longest lifetime of each kind of process, in seconds."""
        lifetimes: dict[str, float] = {}
        for pid, role in self.roles.items():
            lifetimes[role] = max(lifetimes.get(role, 0.0), self.last[pid] - self.first[pid])
        return lifetimes


@dataclass(frozen=True)
class Kill:
    role: str
    moment: Moment
    happened: str
    seconds: float
    missed: bool = False
    """True if the process had ended before its moment."""
    wrong: tuple[str, ...] = ()
    replayed: int = 0
    """Number of sampled answers at the kill, and in the end."""
    temporary: int = 0
    """Leftover temporary files and folders."""


def undisturbed(way: Way, run: Path, place: Place) -> Undisturbed:
    """Evaluates without a kill; raises AssertionError if it failed or left something."""
    began, watch = time.monotonic(), Watch(way, place, frozenset(Tree.below(os.getpid()).processes))
    started = watch.start(run)
    ended = _watched(started, watch, until=began + _LONGEST_SECONDS)
    seconds = time.monotonic() - began
    way.end()
    outcome, wrong = outcome_of(place)
    left = _left(place, watch)
    assert ended == "" and outcome is not None and not wrong and not left, (ended, wrong, left)
    asked = sum(watch.answers.values())
    assert asked >= watch.requests > 0, f"engines counted {asked} prompts of {watch.requests} requests"
    asked = max(asked, outcome.prompts)  # an ended engine does not report its last second
    return Undisturbed(outcome, asked, watch.requests, seconds, watch.lives())


def killed(role: str, moment: Moment, way: Way, run: Path, place: Place, expected: Undisturbed) -> Kill:
    """Evaluates, kills a process at its moment, and restarts ended processes."""
    began, watch = time.monotonic(), Watch(way, place, frozenset(Tree.below(os.getpid()).processes))
    deadline = began + _LONGEST_SECONDS
    started = watch.start(run)
    before = _kill(role, moment, started, watch, until=deadline)
    story: list[str] = []
    ended = _watched(started, watch, until=deadline)
    while ended and len(story) < _MOST_STARTS - 1:
        story.append(f"ended with {ended}; started again")
        started = watch.start(run)
        ended = _watched(started, watch, until=time.monotonic() + _LONGEST_SECONDS)
    seconds = time.monotonic() - began
    wrong: list[str] = []
    if ended is None:
        wrong.append(f"it does not end within {_LONGEST_SECONDS:g} s")
    elif ended:
        wrong.append(f"it ended with {ended}")
    way.end()
    outcome, of_itself = outcome_of(place)
    wrong += of_itself
    replayed = 0
    if outcome is not None:
        wrong += differences(outcome, expected.outcome)
        if before is not None:
            wrong += not_replayed(outcome, before)
            replayed = before.sampled.total()
        starts = sum(watch.roles[pid] == "engine's server" for pid in watch.roles)
        wrong += asked_too_often(sum(watch.answers.values()), expected.asked, starts=max(1, starts))
    wrong += _left(place, watch)
    wrong += journal_damage(place)
    happened = "; ".join(story) or "went on to its end"
    temporary = sum(1 for _ in place.temporary.iterdir())
    return Kill(role, moment, happened, seconds, before is None, tuple(wrong), replayed, temporary)


def _kill(role: str, moment: Moment, started: Started, watch: Watch, *, until: float) -> Answered | None:
    # returns None if the moment never came
    since: float | None = None
    while started.outcome() is None and time.monotonic() < until:
        tree = watch.look()
        pids = ROLES[role](tree)
        if pids and since is None:
            since = time.monotonic()
        if pids and since is not None and moment.has_come(watch.place, since=since):
            watch.ask_engines(tree)
            before = answered(watch.place)
            try:
                os.kill(random.Random(len(tree.processes)).choice(sorted(pids)), signal.SIGKILL)
            except ProcessLookupError:
                return None
            return before
        time.sleep(_POLL_SECONDS)
    return None


def _watched(started: Started, watch: Watch, *, until: float) -> str | None:
    # returns None after `until`
    while (ended := started.outcome()) is None and time.monotonic() < until:
        watch.look()
        time.sleep(_POLL_SECONDS)
    return ended


def _left(place: Place, watch: Watch) -> list[str]:
    deadline = time.monotonic() + _GONE_SECONDS
    while (tree := watch.look(serving=False)).processes and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    left = leftovers(place, tree)
    for pid in tree.processes:
        os.kill(pid, signal.SIGKILL)
    return left
