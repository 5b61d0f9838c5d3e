"""Errors of evaluations, records, gates and flows."""

from __future__ import annotations

from resources.errors import AssayError, BadInput, CheckpointError


class NoCheckpoints(CheckpointError):
    """A run has no complete checkpoint of the requested kind."""


class SeveralSeries(BadInput):
    """Several series of checkpoints lie below the folder, and none is named."""

    @property
    def names(self) -> list[str]:
        return self.found.partition(": ")[2].split(", ")


class UnknownBenchmark(BadInput):
    """The evaluator has no benchmark of that name."""


class OverBudget(BadInput):
    """An evaluation has a too high or unknown expected cost; it did not start."""


class PrefectUnavailable(AssayError):
    """The Prefect server does not answer."""


class BenchmarksChanged(AssayError):
    """Benchmarks, or files that they name, differ from their state when their evaluation was planned."""


class HarnessFailed(AssayError, record_status="failed", exit_code=1):
    """The evaluator's process ended with an error of its own."""


class HarnessInterrupted(AssayError):
    """The evaluator's process was killed, or exceeded its wall-clock limit."""


class HarnessOutputInvalid(AssayError):
    """The evaluator exited normally, but left no readable results."""


class CountsDisagree(AssayError, record_status="withheld", exit_code=1):
    """The counts of requested, answered and scored samples differ: the score is withheld."""


class GraderFailed(AssayError, record_status="withheld", exit_code=1):
    """A benchmark's grader scores right answers no better than an empty answer: the score is withheld."""


class AnswersCutOff(AssayError, record_status="withheld", exit_code=1):
    """More answers ended at the length limit than allowed: the score is withheld."""


class SinkFailed(AssayError):
    """A sink is unreachable when an evaluation begins, or rejected a record; the record remains valid."""


class EvaluationIncomplete(AssayError, record_status="failed", exit_code=1):
    """Requested cells have no succeeded record: the model, a benchmark or the counts were at fault."""


class StagingIncomplete(AssayError):
    """Data could not be fetched for workers without a network, or does not load on them."""


class TooManyErrors(AssayError, record_status="failed", exit_code=1):
    """More prompts of a generation failed than allowed; finished answers are kept."""


class GateRefused(AssayError, record_status="failed", exit_code=1):
    """A gate returns NO-GO: a score is too low, worse than its baseline, or missing."""


class RecordsChanged(AssayError, record_status="failed", exit_code=1):
    """Records, or their samples, were changed after they were written."""


class NumbersChanged(AssayError, record_status="failed", exit_code=1):
    """Other versions of engine, harness or data give other numbers for the same checkpoint."""


class EvaluationInterrupted(AssayError):
    """Requested cells have no succeeded record, and another run may well succeed."""


class ClaimLost(EvaluationInterrupted):
    """The claim on a cell was ended, taken by another run, or not renewed in time: the result is not published."""


class RecordUnwritten(AssayError):
    """The outcome of a cell could not be written, so it is lost."""
