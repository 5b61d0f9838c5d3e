"""The node of a job that evaluates checkpoints: builds the environment locally, and evaluates one at a time.

The evaluator's program keeps running, so its imports and compilations serve all checkpoints; it restarts after an
evaluation that failed or was given up. Copies to and from stores happen meanwhile.
"""

from __future__ import annotations

import logging
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pools.weights.staging import Staging
from resources.environments.environments import ensure_environment
from resources.errors import AssayError, StorageError
from resources.jobs import inheritance
from resources.jobs.announcements import announce
from resources.settings import process_environment, settings
from resources.storage import storage
from tasks.evaluators.evaluator import HarnessCommand
from tasks.evaluators.harness import LOG_NAME, cache_variables, failure_of, prepare, refusal_in
from tasks.evaluators.native import (
    NativeEvaluation,
    NativeProgram,
    Outcome,
    is_given_up,
    read_outcome,
    write_outcome,
)

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
        runner = held.enter_context(_Runner(program))
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

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

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
        self._end()
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

    def _end(self) -> None:
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
