"""Places of checkpoints in a run: a training step, or a label such as `best` where no step is known."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Protocol

_FOLDER = re.compile(r"step-([0-9]{1,18})|label-(.+)")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+=@-]+")
_CHARACTERS = 80
_LAST = "final"

Order = tuple[int, int, tuple[tuple[str, int], ...]]
"""Sorts the checkpoints of a run."""


def slug_of(label: str) -> str:
    """Returns a label as part of a path: `epoch 2` is `epoch-2`. If more than spaces is lost, a digest is added."""
    slug = _NOT_IN_NAMES.sub("-", label)[:_CHARACTERS]
    if slug == label.replace(" ", "-"):
        return slug
    return f"{slug}-{hashlib.blake2b(label.encode(errors='backslashreplace'), digest_size=3).hexdigest()}"


def folder_of(step: int, label: str | None) -> str:
    """Returns the name of a checkpoint's folder below its run's records: `step-200`, or `label-best`."""
    return f"step-{step}" if label is None else f"label-{slug_of(label)}"


def place_in(folder: str) -> tuple[int, str | None] | None:
    """Returns step and label, as in paths, of a name that `folder_of` returned; None for other names."""
    if (match := _FOLDER.fullmatch(folder)) is None:
        return None
    return int(match[1] or 0), match[2]


def order_of(step: int, label: str | None) -> Order:
    """Returns a sort key: steps first, then labels with numbers, such as epochs, by these, others, and `final` last."""
    if label is None:
        return 0, step, ()
    parts = re.split(r"([0-9]{1,18})", label)
    numbers = tuple(zip(parts[::2], (*map(int, parts[1::2]), -1), strict=True))
    rank = 3 if label == _LAST else 1 if len(numbers) > 1 else 2
    return rank, step, numbers


class _Placed(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def label(self) -> str | None: ...


class InRun:
    """The place in its run of a class with `step`, and with `label` if it has no step."""

    __slots__ = ()

    @property
    def folder(self: _Placed) -> str:
        """Name of its folder below the run's records."""
        return folder_of(self.step, self.label)

    @property
    def order(self: _Placed) -> Order:
        """Sort key within its run: labels after steps."""
        return order_of(self.step, self.label)

    @property
    def place(self: _Placed) -> str:
        """Its step or label for a sentence, such as `step 2,000`."""
        return f"step {self.step:,}" if self.label is None else self.label

    @property
    def short_place(self: _Placed) -> str:
        """Its step or label for a table, such as `2,000`."""
        return f"{self.step:,}" if self.label is None else self.label


def latest_of(orders: Iterable[Order]) -> Order | None:
    """Returns the sort key of the highest step; of the last label only if there is no step."""
    return max(orders, key=lambda order: (order[0] == 0, order), default=None)
