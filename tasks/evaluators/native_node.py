"""The node of a job that evaluates checkpoints: builds the environment where it runs, and evaluates one by one.

The evaluator's program is started once and asked again and again, so what it has imported and compiled serves all
checkpoints of the job. It is started anew after an evaluation that failed. While it works, the next checkpoint is
copied to this machine, and the last output to its place.
"""

from __future__ import annotations

import logging
import queue
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
from resources.errors import AssayError
from resources.jobs import inheritance
from resources.jobs.announcements import announce
from resources.settings import process_environment, settings
from resources.storage import storage
from tasks.evaluators.evaluator import HarnessCommand
from tasks.evaluators.harness import LOG_NAME, cache_variables, failure_of, prepare, refusal_in
from tasks.evaluators.native import NativeEvaluation, NativeProgram, Outcome, read_outcome, write_outcome

BEGINS = "evaluation begins: "
"""Beginning of the line of the job's log with which an evaluation begins."""
_ENDING_SECONDS = 10.0

_log = logging.getLogger("assay.evaluation")


def evaluate_there(evaluations: Sequence[NativeEvaluation], program: NativeProgram) -> None:
    """Evaluates what has no outcome yet, in order; announces how many have one, and the number of the one at work.

    Raises:
        StorageError: an output could not be written to its place.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended_at = time.monotonic()
    done = at = sum(read_outcome(evaluation) is not None for evaluation in evaluations)  # in this very order
    left, telling = evaluations[done:], threading.Lock()

    def tell() -> None:
        with telling:  # two threads do
            announce(f"{done} {at}")

    def publish(evaluation: NativeEvaluation, output: Path, outcome: Outcome) -> None:
        nonlocal done
        if output.is_dir():
            storage.copy_from_local(output, evaluation.output)
        write_outcome(evaluation, outcome)
        done += 1
        tell()

    with ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="assay-evaluation-")))
        staged = held.enter_context(Staging(settings().staging_dir, max_bytes=settings().staging_max_bytes))
        publishing = held.enter_context(ThreadPoolExecutor(1))
        runner = held.enter_context(_Runner(program))
        published = []
        for number, evaluation in enumerate(left):
            at = len(evaluations) - len(left) + number
            tell()
            _log.info("%s%s", BEGINS, evaluation.checkpoint.name)
            output, failure = scratch / str(number), None
            following = left[number + 1] if number + 1 < len(left) else None
            try:
                with _staged(staged, evaluation) as here:
                    if following is not None and following.checkpoint.kind == "huggingface":
                        staged.prefetch(following.checkpoint.uri, following.digests)
                    runner.evaluate(here, output)
            except AssayError as error:
                failure = error.as_values()
                _log.error("%s was not evaluated: %s", evaluation.checkpoint.name, error)
            began, ended_at = ended_at, time.monotonic()
            outcome = Outcome(failure=failure, seconds=round(ended_at - began, 3))
            published.append(publishing.submit(publish, evaluation, output, outcome))
        for future in published:
            future.result()


@contextmanager
def _staged(staged: Staging, evaluation: NativeEvaluation) -> Iterator[NativeEvaluation]:
    """The evaluation with its checkpoint as files of this machine; Levanter's own layout is read where it lies."""
    checkpoint = evaluation.checkpoint
    if checkpoint.kind != "huggingface":
        yield evaluation
        return
    with staged.stage(checkpoint.uri, evaluation.digests) as folder:
        yield replace(evaluation, checkpoint=replace(checkpoint, uri=str(folder.path)))


class _Runner:
    """Runs the evaluator's program, which lives as long as its evaluations go well."""

    def __init__(self, program: NativeProgram) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def evaluate(self, evaluation: NativeEvaluation, output: Path) -> None:
        """Evaluates, and leaves the evaluator's output and its log in a folder.

        Raises:
            EnvironmentBuildFailed: the evaluator's environment cannot be built here.
            HarnessFailed, HarnessInterrupted: it ended with an error, was killed, or ran past its wall clock.
            UnknownBenchmark, BadInput: it refused what it was asked to do.
        """
        config, evaluator = evaluation.config, self._program.evaluator
        python = self._program.python
        if python is None:
            python = ensure_environment(evaluator.environment(config), on_progress=_log.info).python
        command = evaluator.command(evaluation.checkpoint, config, output, python=python)
        folder = prepare(command, output)
        deadline = time.monotonic() + config.timeout_seconds
        process = self._process or self._start(command, folder)
        asked = [str(folder / name) for name in command.arguments]
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended, and its return code says how
                process.stdin.write("".join(f"{name}\n" for name in asked).encode())
                process.stdin.flush()
        log, state = self._followed(output / LOG_NAME, until=deadline, last=f"evaluated {asked[-1]}" if asked else "")
        if state == "evaluated":
            return
        returncode = process.wait() if state == "ended" else None
        self._end()
        if returncode != 0:
            raise refusal_in(output) or failure_of(
                evaluator,
                config,
                log=log,
                found=f"its process ended with {returncode}",
                late=state == "late",
                interrupted=returncode is not None and returncode < 0,
                remedy="See harness.log beside the record; work/job.json there says what was asked",
            )

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

    def _followed(self, path: Path, *, until: float, last: str) -> tuple[str, Literal["evaluated", "ended", "late"]]:
        """Writes the log of an evaluation down as it comes, up to a line; returns it, and what came to an end."""
        kept: list[str] = []
        with path.open("w") as log:
            while True:
                try:
                    line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    return "".join(kept), "late"
                if line is None:
                    return "".join(kept), "ended"
                if last and line.rstrip("\n") == last:
                    return "".join(kept), "evaluated"
                kept.append(line)
                for place in (log, sys.stderr):
                    place.write(line)

    def _end(self) -> None:
        """Ends the program, if it is there."""
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
            with suppress(BrokenPipeError):  # of what was asked of it last
                process.stdin.close()
