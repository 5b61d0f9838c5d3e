"""Errors that Assay reports, as a tree; upper packages add theirs. They survive pickling between processes."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Literal

RecordStatus = Literal["succeeded", "failed", "infra_failed", "withheld", "gone"]
"""Outcome of an evaluation of a cell; model or benchmark cause `failed`, Assay or the machines cause `infra_failed`.
`gone`: the checkpoint was removed before its evaluation, which is no failure."""
_SHOWN_NAMES = 20
_PACKAGES = ("flows", "tasks", "pools", "resources")


class AssayError(Exception):
    """Base of all errors for users: the expectation (without a final full stop), the finding, and the remedy.

    `found` may end in several log lines.
    """

    record_status: ClassVar[RecordStatus] = "infra_failed"
    exit_code: ClassVar[int] = 2
    kinds: ClassVar[dict[str, type[AssayError]]] = {}
    """Its subclasses by name, as far as their modules are imported."""

    def __init_subclass__(cls, *, record_status: RecordStatus | None = None, exit_code: int | None = None) -> None:
        AssayError.kinds[cls.__name__] = cls
        cls.record_status, cls.exit_code = record_status or cls.record_status, exit_code or cls.exit_code

    def __init__(self, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(expected, found, remedy)
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return f"Expected: {self.expected}\nFound:    {self.found}\nTo do:    {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), expected=self.expected, found=self.found, remedy=self.remedy), ()

    def as_values(self) -> dict[str, str]:
        """Returns its parts and class name, from which `error_of` recreates it in another process."""
        return {"kind": type(self).__name__, "expected": self.expected, "found": self.found, "remedy": self.remedy}


def error_of(values: Mapping[str, Any]) -> AssayError:
    """Recreates the error that gave `as_values`, with its own class if that is imported; KeyError without a part."""
    known = AssayError.kinds.get(str(values["kind"]), AssayError)
    return known(expected=str(values["expected"]), found=str(values["found"]), remedy=str(values["remedy"]))


class BadInput(AssayError, record_status="failed", exit_code=3):
    """The request is wrong on any machine: a config, a path, a name."""


def exclusive(first: str, second: str, remedy: str = "leave one of them out") -> BadInput:
    """Returns the error for two options that exclude each other."""
    return BadInput(expected=f"{first} or {second}", found="both", remedy=remedy)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Formats the up to three known names that are most like a name, or the known names if none is like it."""
    names = sorted(set(known))
    if near := get_close_matches(name, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(near)}?"
    return f"there: {', '.join(names) or 'none'}" if len(names) <= _SHOWN_NAMES else f"there: {len(names)} others"


def unknown(
    expected: str, name: str, known: Iterable[str], remedy: str, *, kind: type[BadInput] = BadInput
) -> BadInput:
    """Returns the error for a name that is not one of the known names; `expected` describes a known name."""
    return kind(expected=expected, found=f"{name!r}; {suggestion(name, known)}", remedy=remedy)


def not_there(expected: str, uri: object, remedy: str = "check the path") -> BadInput:
    """Returns the error for a missing file or folder; `expected` describes it."""
    return BadInput(expected=expected, found=f"{uri} is not there", remedy=remedy)


class CheckpointError(BadInput):
    """A checkpoint folder cannot be evaluated in its current state."""


class IncompleteCheckpoint(CheckpointError):
    """A checkpoint is still being written, or its writing was cut off."""


class CheckpointGone(IncompleteCheckpoint, record_status="gone"):
    """A checkpoint's folder was removed, as by trainers that keep the newest few; no failure, and not tried again."""


class UnsatisfiableResources(BadInput):
    """No machine of this backend can ever provide the requested resources."""


class NoMatchingRegion(UnsatisfiableResources):
    """No region in the regions file offers the requested resources."""


class WrongRegion(BadInput):
    """A job would read or write data of another region."""


class NoUsableWorkPool(AssayError):
    """Every work pool that could run a flow run is paused, full, without a worker, or too far away."""


class StorageError(AssayError):
    """A file could not be read or written at its path."""


class IrregularFile(StorageError):
    """A pipe, a device, a folder, or a link that leads out of its folder, in place of the expected file."""


class EnvironmentBuildFailed(AssayError):
    """uv could not build an environment from its pinned list."""


class BackendUnavailable(AssayError):
    """The cluster that runs the jobs does not answer, or refuses access."""


class JobFailed(AssayError):
    """A job ended without success."""


class JobTimeout(AssayError, TimeoutError):
    """A job did not end within its waiter's timeout."""


class ActorDied(AssayError):
    """An actor's process has ended for good, and its state is lost."""


class ActorCallLost(AssayError):
    """The connection to an actor broke during a call, which may have taken effect or not."""


class ActorRestarted(ActorCallLost):
    """An actor was killed from outside during a call, and restarts without its state."""


class ActorCallCancelled(AssayError, CancelledError):
    """A call of an actor was cancelled before it began."""


class ActorMethodFailed(AssayError):
    """An actor's method raised an object that cannot be sent to another process."""


class EngineStartFailed(AssayError):
    """An engine ended, or hung, before its model answered."""


class WeightsNotRead(EngineStartFailed):
    """An engine ended while it read the weights of a checkpoint, which others may not have."""


class EngineDied(AssayError):
    """A replica that had answered is gone, and its restarts are used up."""


class ModelUnusable(AssayError, record_status="failed", exit_code=1):
    """The engine is up, but its weights give no usable numbers."""


class SwapRefused(AssayError):
    """A checkpoint cannot be loaded into the running engine; a restart is needed."""


class ReloadUnavailable(SwapRefused):
    """The engine has no call that loads other weights, so no further reload is attempted."""


class ProxyFailed(AssayError):
    """The pool's proxy did not start, or is gone."""


class ProxyRefused(ProxyFailed):
    """The pool's proxy is up, and refuses a request."""


class CheckpointChanged(CheckpointError):
    """A checkpoint differs from its state when its evaluation was planned."""


class EndpointUnusable(AssayError):
    """The endpoint lacks a feature that the evaluator needs."""


class UnexpectedError(AssayError):
    """An exception that Assay's own code did not foresee."""

    @classmethod
    def of(cls, error: Exception, *, expected: str) -> UnexpectedError:
        """Creates an error with an exception's type and location, without its message, which may quote secrets."""
        frames = [
            (str(frame.f_globals.get("__name__", "?")), line) for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        ours = [place for place in frames if place[0].partition(".")[0] in _PACKAGES]
        module, line = (ours or frames or [("an unknown place", 0)])[-1]
        return cls(
            expected=expected,
            found=f"{type(error).__name__} at {module}:{line}",
            remedy="report it: the code there has a bug, or received an unexpected value; try again once it is fixed",
        )
