"""Evaluations by evaluators that load checkpoints themselves, as a job: its input, its outcomes, and its node.

A job writes the evaluator's output to a folder of any store, and `outcome.json` last: a restarted job skips evaluations
that have it. Files of a running evaluation are kept in another folder, from which the evaluator's program resumes. A
file `given_up` marks an evaluation as not needed any more.

The node builds the environment locally, and evaluates one at a time. The evaluator's program keeps running, so its
imports and compilations serve all checkpoints; it restarts after an evaluation that failed or was given up. Copies to
and from stores happen meanwhile.
"""

from __future__ import annotations

import logging
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import ModelDigests
from pools.weights.overrides import override_of
from pools.weights.staging import Staging
from resources.config import Config
from resources.environments.environments import ensure_environment
from resources.errors import AssayError, StorageError, error_of
from resources.jobs import inheritance
from resources.jobs.announcements import announce
from resources.settings import process_environment, settings
from resources.storage import storage
from resources.tpu import tpu_type_in
from resources.warm.fork_server import WarmProgram
from tasks.errors import HarnessOutputInvalid
from tasks.evaluators.evaluator import Evaluator, HarnessCommand
from tasks.evaluators.harness import LOG_NAME, cache_variables, failure_of, prepare, refusal_in
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
    """Marks an evaluation so that its job skips it unless it has ended."""
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


BEGINS = "evaluation begins: "
"""Prefix of the line in the job's log with which an evaluation starts."""
KEPT_FOLDER = "kept"
"""Folder in the working folder of an evaluator's program, for files to resume from."""
_KEPT = "kept "
_ENDING_SECONDS = 10.0
_LOOK_SECONDS = 2.0  # between checks of `is_given_up`

_log = logging.getLogger("assay.evaluation")


def evaluate_there(evaluations: Sequence[NativeEvaluation], program: NativeProgram) -> None:
    """Runs the evaluations that have no outcome and are not given up, in order.

    Announces how many at the beginning are finished, and the number of the current evaluation.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended_at = time.monotonic()
    left = [(number, each) for number, each in enumerate(evaluations) if read_outcome(each) is None]
    done = at = left[0][0] if left else len(evaluations)
    telling = threading.Lock()

    def tell() -> None:
        with telling:  # two threads call it
            announce(f"{done} {at}")

    def publish(number: int, output: Path, outcome: Outcome | None) -> None:
        nonlocal done
        if outcome is not None and not is_given_up(evaluations[number]):
            if output.is_dir():
                storage.copy_from_local(output, evaluations[number].output)
            write_outcome(evaluations[number], outcome)
        done = number + 1
        tell()

    with ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="assay-evaluation-")))
        staged = held.enter_context(Staging(settings().staging_dir, max_bytes=settings().staging_max_bytes))
        publishing = held.enter_context(ThreadPoolExecutor(1))
        runner = held.enter_context(closing(_Runner(program)))
        published = []
        for place, (number, evaluation) in enumerate(left):
            at = number
            tell()
            output, outcome = scratch / str(number), None
            following = [each for _, each in left[place + 1 : place + 2]]
            if not is_given_up(evaluation):
                _log.info("%s%s", BEGINS, evaluation.checkpoint.name)
                try:
                    with _staged(staged, evaluation) as local:
                        if following and following[0].checkpoint.kind == "huggingface":
                            staged.prefetch(following[0].checkpoint.uri, following[0].digests)
                        ended = runner.evaluate(local, output)
                    failure = None
                except AssayError as error:
                    ended, failure = True, error.as_values()
                    _log.error("%s was not evaluated: %s", evaluation.checkpoint.name, error)
                began, ended_at = ended_at, time.monotonic()
                outcome = Outcome(failure=failure, seconds=round(ended_at - began, 3)) if ended else None
            published.append(publishing.submit(publish, number, output, outcome))
        for future in published:
            future.result()


@contextmanager
def _staged(staged: Staging, evaluation: NativeEvaluation) -> Iterator[NativeEvaluation]:
    checkpoint = evaluation.checkpoint
    if checkpoint.kind != "huggingface":
        if (reference := checkpoint.tokenizer) and override_of(reference):
            small = str(staged.stage_small_files(reference, evaluation.digests))
            evaluation = replace(evaluation, checkpoint=replace(checkpoint, tokenizer=small))
        yield evaluation
        return
    with staged.stage(checkpoint.uri, evaluation.digests) as folder:
        yield replace(evaluation, checkpoint=replace(checkpoint, uri=str(folder.path)))


@contextmanager
def _reported(trouble: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        _log.warning("%s: %s", trouble, error.found)


class _Runner:
    def __init__(self, program: NativeProgram) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def evaluate(self, evaluation: NativeEvaluation, output: Path) -> bool:
        config, evaluator = evaluation.config, self._program.evaluator
        python = self._program.python
        if python is None:
            python = ensure_environment(evaluator.environment(config), on_progress=_log.info).python
        command = evaluator.command(evaluation.checkpoint, config, output, python=python)
        folder = prepare(command, output)
        kept = folder / KEPT_FOLDER
        with _reported("Files kept of an interrupted evaluation cannot be read"):
            if storage.list_files(evaluation.kept):
                storage.copy_to_local(evaluation.kept, kept)
        deadline = time.monotonic() + config.timeout_seconds
        process = self._process or self._start(command, folder)
        asked = [str(folder / name) for name in command.arguments]
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended; see its return code
                process.stdin.write("".join(f"{name}\n" for name in asked).encode())
                process.stdin.flush()
        last = f"evaluated {asked[-1]}" if asked else ""
        log, state = self._followed(evaluation, output / LOG_NAME, until=deadline, last=last, kept=kept)
        shutil.rmtree(kept, ignore_errors=True)  # no part of the results
        if state == "evaluated":
            return True
        returncode = process.wait() if state == "ended" else None
        self.close()
        if state != "given up" and returncode != 0:
            raise refusal_in(output) or failure_of(
                evaluator,
                config,
                log=log,
                ending=f"its process ended with {returncode}",
                late=state == "late",
                interrupted=returncode is not None and returncode < 0,
                remedy="Read harness.log next to the record; work/job.json there has the harness's input",
            )
        return state != "given up"

    def _start(self, command: HarnessCommand, folder: Path) -> subprocess.Popen[bytes]:
        argv = command.argv[: len(command.argv) - len(command.arguments)]
        if self._program.warm is not None and command.arguments:
            warm = self._program.warm.command()
            argv = (warm.command, *warm.args)
        variables = {**cache_variables(), **command.variables}
        process = self._process = subprocess.Popen(
            argv,
            cwd=folder,
            env=process_environment(variables, inherited=inheritance.NATIVE_HARNESS),
            stdin=subprocess.PIPE if command.arguments else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._lines = lines = queue.SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line.decode(errors="replace"))
            lines.put(None)

        threading.Thread(target=read, name="log", daemon=True).start()
        return process

    def _followed(
        self, evaluation: NativeEvaluation, path: Path, *, until: float, last: str, kept: Path
    ) -> tuple[str, Literal["evaluated", "ended", "late", "given up"]]:
        lines: list[str] = []
        look_at = time.monotonic() + _LOOK_SECONDS
        with path.open("w") as log:
            while True:
                now = time.monotonic()
                if now >= until:
                    return "".join(lines), "late"
                if now >= look_at:
                    look_at = now + _LOOK_SECONDS
                    with _reported("Cannot check if the evaluation was given up"):
                        if is_given_up(evaluation):
                            return "".join(lines), "given up"
                try:
                    line = self._lines.get(timeout=max(0.0, min(until, look_at) - now))
                except queue.Empty:
                    continue
                if line is None:
                    return "".join(lines), "ended"
                text = line.rstrip("\n")
                if last and text == last:
                    return "".join(lines), "evaluated"
                file = kept / text.removeprefix(_KEPT)
                if text.startswith(_KEPT) and file.parent == kept and file.is_file():
                    with _reported(f"{text} cannot be copied, so it would not be there after a preemption"):
                        storage.write_bytes(storage.join(evaluation.kept, file.name), storage.read_bytes(str(file)))
                lines.append(line)
                for place in (log, sys.stderr):
                    place.write(line)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # of the last request
                process.stdin.close()
