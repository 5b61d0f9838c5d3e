"""Evaluations by evaluators that load checkpoints themselves: a job's input, and its outcomes.

A job writes the evaluator's output to a folder of any store, and `outcome.json` last: a restarted job skips evaluations
that have it. Files of a running evaluation are kept in another folder, from which the evaluator's program resumes. A
file `given_up` marks an evaluation as not needed any more.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, ValidationError

from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import ModelDigests
from resources.config import Config
from resources.errors import StorageError, error_of
from resources.settings import process_environment
from resources.storage import storage
from resources.tpu import tpu_type_in
from resources.warm.fork_server import WarmProgram
from tasks.errors import HarnessOutputInvalid
from tasks.evaluators.evaluator import Evaluator
from tasks.spec.benchmarks import named_elsewhere
from tasks.spec.evaluation import EvaluationConfig

OUTCOME_NAME = "outcome.json"
GIVEN_UP_NAME = "given_up"
_SENT_BENCHMARKS = "benchmarks"
_MOST_READ_BYTES = 16 * 2**30  # all of MMLU's samples are 0.3 GiB


@dataclass(frozen=True)
class NativeProgram:
    """An evaluator as its job runs it; `python` and `warm` are set if the job runs on this machine."""

    evaluator: Evaluator
    python: Path | None = None
    warm: WarmProgram | None = None


@dataclass(frozen=True)
class NativeEvaluation:
    """An evaluation of a checkpoint: `digests` date from planning; `output` and `journal` are folders in any store.

    The evaluator's program reuses the files in `journal`, in later attempts too.
    """

    config: EvaluationConfig
    checkpoint: LocalCheckpoint
    digests: ModelDigests
    output: str
    journal: str

    @property
    def kept(self) -> str:
        """The folder of files kept for this evaluation of exactly these weights, config and tokenizer."""
        return storage.join(self.journal, self.digests.checkpoint[:16])


def _this_machine() -> dict[str, str]:
    slice_type = tpu_type_in(process_environment())
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        **({"tpu": slice_type} if slice_type is not None else {}),
    }


class Outcome(Config):
    """The outcome of an evaluation on its machine."""

    failure: dict[str, str] | None = None
    """Fields of an error; None if the evaluator wrote results."""
    seconds: float
    """Time of the job for it: since the job's start, or the end of its last evaluation."""
    machine: dict[str, str] = Field(default_factory=_this_machine)
    """The operating system, and the type of TPU slice that the job got among the acceptable types."""

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise error_of(self.failure)


def write_outcome(evaluation: NativeEvaluation, outcome: Outcome) -> None:
    """Writes an evaluation's outcome; its output must be complete before."""
    storage.write_bytes(storage.join(evaluation.output, OUTCOME_NAME), outcome.model_dump_json().encode())


def read_outcome(evaluation: NativeEvaluation) -> Outcome | None:
    """Returns an evaluation's outcome; None if it has not ended."""
    place = storage.join(evaluation.output, OUTCOME_NAME)
    try:
        return Outcome.model_validate_json(storage.read_bytes(place))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StorageError(
            expected=f"{place} as the job of the evaluation wrote it",
            found=str(error).splitlines()[0],
            remedy="let nothing else write there, and evaluate again",
        ) from error


def give_up(evaluation: NativeEvaluation) -> None:
    """Marks an evaluation so that its job skips it unless it has ended.

    Raises:
        StorageError: the folder is not writable.
    """
    storage.write_bytes(storage.join(evaluation.output, GIVEN_UP_NAME), b"")


def is_given_up(evaluation: NativeEvaluation) -> bool:
    """Returns True if an evaluation's result is not needed any more."""
    try:
        storage.read_bytes(storage.join(evaluation.output, GIVEN_UP_NAME))
    except FileNotFoundError:
        return False
    return True


def output_here(evaluation: NativeEvaluation, copy: Path) -> Path:
    """Returns the local folder with an evaluation's output; downloads it to `copy` if it is in a store."""
    if storage.is_local(evaluation.output):
        return storage.local_path(evaluation.output)
    size = sum(file.size for file in storage.list_files(evaluation.output))
    if size > _MOST_READ_BYTES:
        raise HarnessOutputInvalid(
            expected=f"at most {_MOST_READ_BYTES / 2**30:g} GiB of results in {evaluation.output}",
            found=f"{size / 2**30:.1f} GiB",
            remedy="see what was written there; split the benchmarks over several evaluations",
        )
    storage.copy_to_local(evaluation.output, copy)
    return copy


def with_benchmarks_there(evaluation: NativeEvaluation) -> NativeEvaluation:
    """Returns the evaluation for a remote job, after copying a local folder of benchmarks next to the output.

    Nothing is copied if the output lies in a file system, which the job's machine must see anyway, or if the benchmarks
    name files elsewhere, which would be missing from the copy.
    """
    config = evaluation.config
    path = config.benchmarks_path
    if path is None or not storage.is_local(path) or storage.is_local(evaluation.output) or named_elsewhere(config):
        return evaluation
    sent = storage.join(evaluation.output, _SENT_BENCHMARKS)
    storage.copy_from_local(storage.local_path(path), sent)
    return replace(evaluation, config=config.model_copy(update={"benchmarks_path": sent}))
