"""Evaluations by evaluators that load checkpoints themselves, as a job is sent them, and what it leaves of each.

A job leaves the evaluator's output in a folder of any store, and in it, last of all, `outcome.json`: what has one is
not evaluated again by a job that was started anew. Of what is at work it keeps files in another folder, with which the
evaluator's program goes on. `given_up` in the place of the outcome says that nobody waits for it any more.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, ValidationError

from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import ModelDigests
from resources.config import Config
from resources.errors import HarnessOutputInvalid, StorageError, error_of
from resources.settings import process_environment
from resources.storage import storage
from resources.tpu import tpu_type_in
from resources.warm.fork_server import WarmProgram
from tasks.evaluators.evaluator import Evaluator
from tasks.spec.benchmarks import named_elsewhere
from tasks.spec.evaluation import EvaluationConfig

OUTCOME_NAME = "outcome.json"
GIVEN_UP_NAME = "given_up"
_SENT_BENCHMARKS = "benchmarks"
_MOST_READ_BYTES = 16 * 2**30  # all of MMLU's samples are 0.3 GiB


@dataclass(frozen=True)
class NativeProgram:
    """An evaluator as its job runs it: `python` and `warm` where the job's machine has them, which is this one."""

    evaluator: Evaluator
    python: Path | None = None
    warm: WarmProgram | None = None


@dataclass(frozen=True)
class NativeEvaluation:
    """An evaluation of one checkpoint: `digests` are those it was planned with, `output` is a folder in any store.

    So is `journal`: what an evaluator's program has kept there is used again, by later attempts too.
    """

    config: EvaluationConfig
    checkpoint: LocalCheckpoint
    digests: ModelDigests
    output: str
    journal: str

    @property
    def kept(self) -> str:
        """The folder of what was kept of this evaluation of these very weights, config and tokenizer."""
        return storage.join(self.journal, self.digests.checkpoint[:16])


def _this_machine() -> dict[str, str]:
    slice_type = tpu_type_in(process_environment())
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        **({"tpu": slice_type} if slice_type is not None else {}),
    }


class Outcome(Config):
    """The end of an evaluation on its machine."""

    failure: dict[str, str] | None = None
    """An error's parts; None where the evaluator has left results."""
    seconds: float
    """Time of the job that it took: since the job began, or ended its last evaluation."""
    machine: dict[str, str] = Field(default_factory=_this_machine)
    """The system that it ran on, and the type of TPU slice that the job got, of those that would have done."""

    def raise_failure(self) -> None:
        """Raises the error that it ended with, if any."""
        if self.failure is not None:
            raise error_of(self.failure)


def write_outcome(evaluation: NativeEvaluation, outcome: Outcome) -> None:
    """Writes how an evaluation ended, once its output is there."""
    storage.write_bytes(storage.join(evaluation.output, OUTCOME_NAME), outcome.model_dump_json().encode())


def read_outcome(evaluation: NativeEvaluation) -> Outcome | None:
    """Returns how an evaluation ended; None where it has not."""
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
    """Lets a job leave an evaluation out that it has not ended.

    Raises:
        StorageError: the place is not writable.
    """
    storage.write_bytes(storage.join(evaluation.output, GIVEN_UP_NAME), b"")


def is_given_up(evaluation: NativeEvaluation) -> bool:
    """Tells if nobody waits for an evaluation."""
    try:
        storage.read_bytes(storage.join(evaluation.output, GIVEN_UP_NAME))
    except FileNotFoundError:
        return False
    return True


def output_here(evaluation: NativeEvaluation, copy: Path) -> Path:
    """The folder with an evaluation's output where it lies on this machine; else `copy`, made now."""
    if storage.is_local(evaluation.output):
        return storage.local_path(evaluation.output)
    size = sum(file.size for file in storage.list_files(evaluation.output))
    if size > _MOST_READ_BYTES:
        raise HarnessOutputInvalid(
            expected=f"at most {_MOST_READ_BYTES / 2**30:g} GiB of results in {evaluation.output}",
            found=f"{size / 2**30:.1f} GiB",
            remedy="see what was written there; ask fewer benchmarks in one evaluation",
        )
    storage.copy_to_local(evaluation.output, copy)
    return copy


def with_benchmarks_there(evaluation: NativeEvaluation) -> NativeEvaluation:
    """The evaluation for a job elsewhere: a folder of benchmarks on this machine is copied to where the output goes.

    It stays where it is if the output lies in a file system too, which the job's machine has to see anyway, and if its
    benchmarks name files elsewhere, which would not come along.
    """
    config = evaluation.config
    path = config.benchmarks_path
    if path is None or not storage.is_local(path) or storage.is_local(evaluation.output) or named_elsewhere(config):
        return evaluation
    sent = storage.join(evaluation.output, _SENT_BENCHMARKS)
    storage.copy_from_local(storage.local_path(path), sent)
    return replace(evaluation, config=config.model_copy(update={"benchmarks_path": sent}))
