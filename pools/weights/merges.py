"""Names of merged checkpoints, which are averages of other checkpoints, such as `mean(runs/a@8000..10000)`.

A name is a kind, the input checkpoints, and for most kinds a parameter:

    mean(RUN@STEPS)              the plain average; with shares, as in mean(RUN@1000+2000, 1+3), a weighted average
    ema(RUN@STEPS, 0.9)          an exponential moving average with that decay
    wsm(RUN@STEPS, cosine)       the weights equivalent to a decay of the learning rate: linear, cosine or sqrt
    interpolate(A@1, B@2, 0.3)   the first, moved by that share towards the second

`RUN@STEPS` takes checkpoints of a run: `1000`, `1000+2000`, `1000..2000`, `..2000`, `1000..`, `..` or `last:5`. A
location without `@` is a single checkpoint. A name with single checkpoints only is resolved, and is the location of the
merged checkpoint for pools and records. In a location `,()@%` are written as `%` and their hex digits, except in the
name of a checkpoint with options (see `overrides`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from pools.weights.overrides import OVERRIDE, Override, override_of, quoted, unquoted, without_options
from resources.errors import BadInput
from resources.storage.hub import hub_location

MergeKind = Literal["mean", "ema", "wsm", "interpolate"]
"""Ways to average checkpoints."""
_NAME = re.compile(rf"({'|'.join(get_args(MergeKind))})\((.*)\)", re.DOTALL)
STEPS_PATTERN = r"last:[1-9][0-9]*|[0-9]*\.\.[0-9]*|[0-9]+(?:\+[0-9]+)*"
"""Steps of a run, as written after its location."""
_STEPS = re.compile(STEPS_PATTERN)
_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:\+[0-9]+(?:\.[0-9]+)?)*")
_WORD = re.compile("[a-z]+")
_COMMA = re.compile(r",(?![^()]*\))")  # of the merge, not of the options of an input
_INPUT = re.compile(rf"[^()]+|{OVERRIDE}(@.+)?")
_EXAMPLES = "mean(RUN@8000..10000), ema(RUN@last:5, 0.9), wsm(RUN@last:5, cosine) or interpolate(A@1000, B@2000, 0.3)"

_DECAYS: dict[str, Callable[[Fraction], float]] = {
    "linear": lambda passed: float(1 - passed),
    "cosine": lambda passed: (1 + math.cos(math.pi * passed)) / 2,
    "sqrt": lambda passed: 1 - math.sqrt(passed),
}
"""Learning rate, for a peak of 1, after a share of the decay has passed."""


@dataclass(frozen=True)
class Source:
    """An input checkpoint of a merge, or the checkpoints at the `steps` of a run."""

    location: str
    steps: str = ""

    def __str__(self) -> str:
        written = self.location if override_of(self.location) else quoted(self.location)
        return f"{written}@{self.steps}" if self.steps else written

    @property
    def last(self) -> int | None:
        return int(self.steps.removeprefix("last:")) if self.steps.startswith("last:") else None

    def taken(self, known: Collection[int]) -> list[int]:
        """Returns the steps that it takes of the known steps; listed steps in their order, known or not."""
        if self.last is not None:
            return sorted(known)[-self.last :]
        first, dots, end = self.steps.partition("..")
        if not dots:
            return list(map(int, self.steps.split("+")))
        return [step for step in sorted(known) if int(first or 0) <= step <= (int(end) if end else step)]


@dataclass(frozen=True)
class Merge:
    """A merge as written in its name; see the module. `parameter` is empty if the kind needs none."""

    kind: MergeKind
    sources: tuple[Source, ...]
    parameter: str = ""

    @classmethod
    def of_folders(cls, kind: MergeKind, folders: Sequence[str], parameter: str = "") -> Merge:
        merge = cls(kind, tuple(map(Source, folders)), parameter)
        merge.weights(len(folders))
        return merge

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(filter(None, [*map(str, self.sources), self.parameter]))})"

    @property
    def locations(self) -> tuple[str, ...]:
        return tuple(source.location for source in self.sources)

    def with_locations(self, changed: Callable[[str], str]) -> Merge:
        return replace(self, sources=tuple(replace(each, location=changed(each.location)) for each in self.sources))

    @property
    def recipe(self) -> str:
        """The computation, without the checkpoints: names with the same arithmetic have the same recipe."""
        return "mean" if (self.kind, self.parameter) == ("wsm", "linear") else f"{self.kind} {self.parameter}".strip()

    def weights(self, count: int) -> tuple[float, ...]:
        """Returns the weights of its checkpoints, in the order of their steps; their sum is 1.

        `wsm` follows "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging" (arXiv 2507.17634). Let the
        updates after checkpoint j be scaled by w(j+1) <= w(j), with w(0) = 1: then the last checkpoint would be the
        average of all n with the weights w(j) - w(j+1), where w(n) = 0. A linear decay is the mean.
        """
        match self.kind:
            case "mean" if not self.parameter:
                return (1 / count,) * count
            case "mean":
                shares = [Fraction(share) for share in self._numbers(count, "a share for each checkpoint, as in 1+3")]
                total = sum(shares)
                if not total:
                    raise self._refused("shares that are not all 0")
                return tuple(float(share / total) for share in shares)
            case "ema":
                kept = Fraction(self._numbers(1, "a decay from 0 to 1, as in ema(RUN@last:5, 0.9)", most=1)[0])
                first = [kept ** (count - 1)]
                return tuple(map(float, first + [(1 - kept) * kept ** (count - 1 - at) for at in range(1, count)]))
            case "wsm":
                decay = _DECAYS.get(self.parameter)
                if decay is None:
                    raise self._refused(f"one of the decays {', '.join(_DECAYS)}, as in wsm(RUN@last:5, cosine)")
                if self.parameter == "linear":
                    return (1 / count,) * count
                left = [decay(Fraction(at, count)) for at in range(count)] + [0.0]
                return tuple(left[at] - left[at + 1] for at in range(count))
            case "interpolate":
                if count != 2:
                    raise self._refused(f"two checkpoints, not {count}")
                share = Fraction(self._numbers(1, "a share from 0 to 1, as in interpolate(A@1, B@2, 0.3)", most=1)[0])
                return float(1 - share), float(share)

    def _numbers(self, count: int, expected: str, *, most: float = math.inf) -> list[str]:
        numbers = self.parameter.split("+") if _NUMBERS.fullmatch(self.parameter) else []
        if len(numbers) != count or any(float(number) > most for number in numbers):
            raise self._refused(expected)
        return numbers

    def _refused(self, expected: str) -> BadInput:
        return BadInput(expected=expected, found=str(self), remedy="correct the name of the merged checkpoint")


def merge_of(location: str) -> Merge | None:
    """Returns the merge that a location names; None for all other locations."""
    matched = _NAME.fullmatch(location.strip())
    if matched is None:
        return None
    kind: MergeKind = matched[1]  # pyright: ignore[reportAssignmentType]
    parts = [part.strip() for part in _COMMA.split(matched[2])]
    parameters = _WORD if kind == "wsm" else _NUMBERS
    parameter = parts.pop() if len(parts) > 1 and parameters.fullmatch(parts[-1]) else ""
    if not all(map(_INPUT.fullmatch, parts)):
        raise BadInput(expected=_EXAMPLES, found=location, remedy="write it so; in paths, %2C for a comma, %28 and %29")
    if kind != "wsm":
        parameter = "+".join(map(_shortest, filter(None, parameter.split("+"))))
    merge = Merge(kind, tuple(map(_source, parts)), parameter or ("linear" if kind == "wsm" else ""))
    if all(not source.steps for source in merge.sources):
        merge.weights(len(parts))
    elif kind != "mean":  # shares of a mean are counted when the steps are known
        merge.weights(2)
    return merge


def _shortest(number: str) -> str:
    whole, _, part = number.partition(".")
    return ".".join(filter(None, [whole.lstrip("0") or "0", part.rstrip("0")]))


def locations_of(location: str) -> tuple[str, ...]:
    """Returns the locations of the files behind a location, without options: those of a merge's inputs, or its own."""
    merge = merge_of(location)
    return tuple(map(without_options, merge.locations if merge else (location,)))


def with_each_location(location: str, changed: Callable[[str], str]) -> str:
    """Returns a location in changed form; in a name, each location of an input and of an option is changed."""
    if (merge := merge_of(location)) is not None:
        return str(merge.with_locations(lambda each: with_each_location(each, changed)))
    override = override_of(location)
    return str(override.with_locations(changed)) if override else changed(location)


def with_options(location: str, **options: str | None) -> str:
    """Returns the name of a location, or of a merge of such, with the options that are not None; see `overrides`."""
    if (merge := merge_of(location)) is not None:
        return str(merge.with_locations(lambda each: with_options(each, **options)))
    given = {name: value for name, value in options.items() if value is not None}
    return str(replace(override_of(location) or Override(location), **given))


def as_named(location: str) -> str:
    """Returns a location that a user named, with each repository of the hub in it as `hf://owner/name`."""
    return with_each_location(location, hub_location)


def _source(part: str) -> Source:
    location, _, steps = part.rpartition("@")
    if not location or not _STEPS.fullmatch(steps):
        location, steps = part, ""
    override = override_of(location)
    return Source(str(override) if override else unquoted(location), steps)
