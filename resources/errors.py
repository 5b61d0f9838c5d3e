"""Every failure Assay reports, as one tree.

Each error says what was expected, what was found and what to do, survives pickling (Prefect and job backends
send errors between processes), and knows which record status it leads to.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any, ClassVar, Literal

RecordStatus = Literal["succeeded", "failed", "infra_failed", "withheld"]
"""Outcome of an evaluation of a cell; `failed` is the model's or benchmark's doing, `infra_failed` is ours."""
_PACKAGES = ("flows", "tasks", "pools", "resources")


class AssayError(Exception):
    """Base of all errors that are meant to be read by a user.

    Args:
        expected: what should have been the case, a clause or sentence without a final full stop.
        found: what was the case instead, likewise; may end in several lines of log.
        remedy: what the reader can do about it.
    """

    record_status: ClassVar[RecordStatus] = "infra_failed"
    exit_code: ClassVar[int] = 2

    def __init__(self, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(expected, found, remedy)
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return f"Expected: {self.expected}\nFound:    {self.found}\nTo do:    {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.expected, self.found, self.remedy)

    def as_values(self) -> dict[str, str]:
        """Return its parts and the name of its class, of which `error_of` makes it again in another process."""
        return {
            "kind": type(self).__name__,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
        }


def error_of(values: Mapping[str, Any]) -> AssayError:
    """Return the error that gave `as_values`, of its own class where this module has it.

    Raises:
        KeyError: a part is missing.
    """
    kind = globals().get(str(values["kind"]))
    known = kind if isinstance(kind, type) and issubclass(kind, AssayError) else AssayError
    return known(expected=str(values["expected"]), found=str(values["found"]), remedy=str(values["remedy"]))


def _rebuild(kind: type[AssayError], expected: str, found: str, remedy: str) -> AssayError:
    return kind(expected=expected, found=found, remedy=remedy)


class BadInput(AssayError):
    """The request cannot be right whatever the machines do: a config, a path, a name."""

    record_status = "failed"
    exit_code = 3


class CheckpointError(BadInput):
    """A checkpoint folder cannot be evaluated as it stands."""


class NoCheckpoints(CheckpointError):
    """A run holds no complete checkpoint of the kind asked for."""


class IncompleteCheckpoint(CheckpointError):
    """A checkpoint is still being written, or was cut off."""


class CheckpointGone(IncompleteCheckpoint):
    """A checkpoint's folder was removed, as trainers do that keep the newest few; no failure of the model."""

    record_status = "infra_failed"


class UnknownBenchmark(BadInput):
    """The evaluator knows no benchmark of that name."""


class UnsatisfiableResources(BadInput):
    """No machine of this backend can ever give what was asked for."""


class NoMatchingRegion(UnsatisfiableResources):
    """No region that is described offers what was asked for."""


class WrongRegion(BadInput):
    """A job would read, or write, data of another region."""


class OverBudget(BadInput):
    """An evaluation is expected to cost more than it may, or nobody knows what; nothing of it was begun."""


class PrefectUnavailable(AssayError):
    """The Prefect server does not answer."""


class DeploymentFailed(AssayError):
    """Prefect did not take a deployment."""


class NoUsableWorkPool(AssayError):
    """Every work pool that could run a flow run is paused, full, without a worker, or too far away."""


class StorageError(AssayError):
    """A file could not be read or written where it belongs."""


class IrregularFile(StorageError):
    """A pipe, a device, a folder, or a link that leads out of its folder, where a file is expected."""


class EnvironmentBuildFailed(AssayError):
    """uv could not build an environment from its pinned list."""


class BackendUnavailable(AssayError):
    """The cluster that runs the jobs does not answer, or does not let us in."""


class JobFailed(AssayError):
    """A job ended, and not as it should."""


class JobTimeout(AssayError, TimeoutError):
    """A job did not end in the time its waiter was ready to give it."""


class ActorDied(AssayError):
    """An actor's process is gone for good, and what it knew with it."""


class ActorCallLost(AssayError):
    """The connection to an actor broke during a call, which may have had its effect or not."""


class ActorRestarted(ActorCallLost):
    """An actor was ended from outside during a call, and begins anew, without what it knew."""


class ActorCallCancelled(AssayError, CancelledError):
    """A call of an actor was cancelled before it began."""


class ActorMethodFailed(AssayError):
    """An actor's method raised something that cannot be sent to another process."""


class EngineStartFailed(AssayError):
    """An engine ended, or hung, before its model answered."""


class EngineDied(AssayError):
    """A replica that had answered is gone, and so are its restarts."""


class ModelUnusable(AssayError):
    """The engine is up, but the weights it holds give no usable numbers."""

    record_status = "failed"
    exit_code = 1


class SwapRefused(AssayError):
    """A checkpoint cannot be loaded into the running engine; a restart is needed."""


class ReloadUnavailable(SwapRefused):
    """The engine has no call that loads other weights; it never will, so it is not asked again."""


class ProxyFailed(AssayError):
    """The pool's proxy did not start, or is gone."""


class ProxyRefused(ProxyFailed):
    """The pool's proxy is there, and does not do what it was asked."""


class CheckpointChanged(CheckpointError):
    """A checkpoint is not what it was when its evaluation was planned."""


class BenchmarksChanged(AssayError):
    """Benchmarks, or files that they name, are not what they were when their evaluation was planned."""


class EndpointUnusable(AssayError):
    """The endpoint cannot do what the evaluator needs of it."""


class HarnessFailed(AssayError):
    """The evaluator's process ended with an error of its own."""

    record_status = "failed"
    exit_code = 1


class HarnessInterrupted(AssayError):
    """The evaluator's process was killed, or ran past its wall clock."""


class HarnessOutputInvalid(AssayError):
    """The evaluator ended well, but left no results that can be read."""


class CountsDisagree(AssayError):
    """Requested, answered and scored are not the same number: the score is withheld."""

    record_status = "withheld"
    exit_code = 1


class GraderFailed(AssayError):
    """A benchmark's grader scores right answers no better than an empty one: the score is withheld."""

    record_status = "withheld"
    exit_code = 1


class AnswersCutOff(AssayError):
    """More answers ended at the length limit than may: the score is withheld."""

    record_status = "withheld"
    exit_code = 1


class SinkFailed(AssayError):
    """A sink cannot be reached when an evaluation begins; or did not take a record, which stands all the same."""


class EvaluationIncomplete(AssayError):
    """Wanted cells have no succeeded record: the model, a benchmark or the counts were at fault."""

    record_status = "failed"
    exit_code = 1


class StagingIncomplete(AssayError):
    """Data could not be fetched for workers without a network, or does not load there."""


class TooManyErrors(AssayError):
    """More prompts of a generation could not be answered than may; what was answered stays."""

    record_status = "failed"
    exit_code = 1


class GateRefused(AssayError):
    """A gate says NO-GO: a score is too low, worse than its baseline, or missing."""

    record_status = "failed"
    exit_code = 1


class RecordsChanged(AssayError):
    """Records, or their samples, are not what was written."""

    record_status = "failed"
    exit_code = 1


class NumbersChanged(AssayError):
    """Another build of engine, harness or data gives other numbers for the same checkpoint."""

    record_status = "failed"
    exit_code = 1


class EvaluationInterrupted(AssayError):
    """Wanted cells have no succeeded record, and running again may well give them one."""


class ClaimLost(EvaluationInterrupted):
    """Somebody else has the cell by now, or was told that nobody is to have it: what was found out is not published."""


class RecordUnwritten(AssayError):
    """The outcome of a cell could not be written down, so nobody will know of it."""


class UnexpectedError(AssayError):
    """An exception that our own code did not foresee."""

    @classmethod
    def of(cls, error: Exception, *, expected: str) -> UnexpectedError:
        """Returns an error that names an exception's type and place, and not its text, which may quote anything."""
        frames = [
            (str(frame.f_globals.get("__name__", "?")), line) for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        ours = [place for place in frames if place[0].partition(".")[0] in _PACKAGES]
        module, line = (ours or frames or [("an unknown place", 0)])[-1]
        return cls(
            expected=expected,
            found=f"{type(error).__name__} at {module}:{line}",
            remedy="report it: the code there is wrong, or was given what nobody foresaw; try again once it is mended",
        )
