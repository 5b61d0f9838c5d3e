"""Jobs of evaluators that load the checkpoint themselves: a single job at a time, shared by the waiting cells.

The evaluator starts once per job, and its compiled code serves all checkpoints of the job. A job runs on the current
backend and resumes after a preemption.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Self

from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.errors import AssayError, BackendUnavailable, JobTimeout, StorageError, UnexpectedError
from resources.jobs import inheritance
from resources.jobs.jobs import Call, Client, EnvironmentConfig, JobHandle, JobRequest, create_environment
from resources.settings import settings
from resources.storage import storage
from tasks.evaluators.evaluator import Progress
from tasks.evaluators.harness import LOG_NAME, job_failure
from tasks.evaluators.native import (
    BEGINS,
    NativeEvaluation,
    NativeProgram,
    Outcome,
    evaluate_there,
    give_up,
    read_outcome,
    with_benchmarks_there,
)
from tasks.prefect_server.client import accelerators_reserved
from tasks.prefect_server.progress import report_event

MOST_IN_A_JOB = 8
"""Most cells of a job, and so of cells that wait in parallel."""
_POLL_SECONDS = 0.2
_JOB_POLL_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 5.0
_END_SECONDS = 30.0
"""Time that the last job has to end once no cell needs it."""
_SILENCE_SECONDS = 600.0
"""Time without an answer until a job on a backend counts as lost; a controller may be restarting meanwhile."""
_PROGRESS_LINES = 200
_KEPT_LOG_LINES = 100_000


@dataclass(eq=False)
class _Queued:
    evaluation: NativeEvaluation
    program: NativeProgram
    name: str
    outcome: Outcome | None = None
    error: Exception | None = None
    progress: Progress | None = None
    abandoned: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def resources(self) -> ResourceConfig:
        return self.evaluation.config.resources.model_copy(update={"replicas": 1})

    @property
    def kind(self) -> tuple[NativeProgram, ResourceConfig]:
        return self.program, self.resources


class NativeJobs:
    """Jobs of the cells of a run that load checkpoints themselves; jobs are not monitored after the block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Queued] = []
        self._expected: set[int] = set()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._changed:
            self._expected.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_END_SECONDS)

    def expect(self, position: int) -> None:
        """Makes the next job wait until the cell at this position requests an evaluation or ends without."""
        with self._changed:
            self._expected.add(position)

    def forget(self, position: int) -> None:
        """Makes jobs no longer wait for the cell at this position."""
        with self._changed:
            self._expected.discard(position)
            self._changed.notify_all()

    def evaluate(
        self,
        evaluation: NativeEvaluation,
        program: NativeProgram,
        *,
        position: int,
        name: str,
        on_progress: Callable[[Progress], None],
        check: Callable[[], None],
    ) -> Outcome:
        """Runs an evaluation in a job, alone or with others, and returns its outcome.

        Args:
            name: job name, used if this evaluation is the first of the job.
            on_progress: called on each change of the progress.
            check: called at each poll; its exceptions end the evaluation and are raised from here.
        """
        queued, last = _Queued(evaluation, program, name), None
        with self._changed:
            self._waiting.append(queued)
        self.forget(position)
        try:
            ended = False
            while not ended:
                self._start()
                ended = queued.ended.wait(_POLL_SECONDS)
                if queued.progress is not None and queued.progress != last:
                    last = queued.progress
                    on_progress(last)
                if not ended:
                    check()
        except BaseException:
            with self._changed:
                queued.abandoned = True
                if queued in self._waiting:
                    self._waiting.remove(queued)
                    queued.ended.set()
            queued.ended.wait()  # until its job goes on without it, or has ended
            raise
        if queued.error is not None:
            raise queued.error
        assert queued.outcome is not None, "it has ended with an outcome or an error"
        return queued.outcome

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and self._waiting:
                run = copy_context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="native-jobs", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                # Expected cells either request an evaluation or end; a full job starts without waiting for them.
                self._changed.wait_for(lambda: len(self._waiting) >= MOST_IN_A_JOB or not self._expected)
                if not self._waiting:
                    self._thread = None
                    return
                first = self._waiting[0]
            try:
                with accelerators_reserved(first.resources):
                    self._run_job(self._taken(first))
            except Exception as error:  # noqa: BLE001 - the boundary of a thread: each waiting cell gets the error
                _fail(self._taken(first), error)

    def _taken(self, first: _Queued) -> list[_Queued]:
        with self._changed:
            taken = [queued for queued in self._waiting if queued.kind == first.kind][:MOST_IN_A_JOB]
            self._waiting = [queued for queued in self._waiting if queued not in taken]
            return taken

    def _run_job(self, together: Sequence[_Queued]) -> None:
        if not together:
            return
        try:
            client = current_client()
            job = client.submit(_request(together, client))
            try:
                self._follow(job, together)
            finally:
                job.terminate()
            for queued in together:
                if not (queued.ended.is_set() or queued.abandoned):
                    queued.error = _failure(job, queued)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: each cell of the job gets the error
            _fail(together, error)
        finally:
            for queued in together:
                queued.ended.set()

    def _follow(self, job: JobHandle, together: Sequence[_Queued]) -> None:
        heard_at = time.monotonic()
        while True:
            try:
                finished = _finished(job)
                done, at = (len(together), len(together) - 1) if finished else _announced(job)
                log = job.logs(_PROGRESS_LINES)
                heard_at = time.monotonic()
            except BackendUnavailable as error:
                if time.monotonic() - heard_at > _SILENCE_SECONDS:
                    raise
                report_event(f"the job {job.job_id} cannot be looked at: {error.found}")
                time.sleep(_LOOK_AGAIN_SECONDS)
                continue
            together[at].progress = together[at].program.evaluator.progress(log.rpartition(BEGINS)[2])
            for queued in together[:done]:
                if not queued.ended.is_set() and (outcome := read_outcome(queued.evaluation)) is not None:
                    queued.outcome = outcome
                    queued.ended.set()
            abandoned = [queued for queued in together if queued.abandoned and not queued.ended.is_set()]
            if finished:
                return
            for queued in abandoned:
                try:
                    give_up(queued.evaluation)
                except StorageError as error:
                    report_event(f"{queued.evaluation.checkpoint.name} is evaluated, but no cell waits: {error.found}")
            if abandoned and all(queued.abandoned or queued.ended.is_set() for queued in together):
                return
            for queued in abandoned:
                queued.ended.set()


def _request(together: Sequence[_Queued], client: Client) -> JobRequest:
    evaluations = [queued.evaluation for queued in together]
    if not client.is_local:
        evaluations = [with_benchmarks_there(evaluation) for evaluation in evaluations]
    first = together[0]
    return JobRequest(
        first.name,
        Call(evaluate_there, (evaluations, first.program)),
        resources=first.resources,
        environment=_environment(first.resources),
    )


def _environment(resources: ResourceConfig) -> EnvironmentConfig:
    inherited = (*inheritance.SERVICE, *inheritance.NATIVE_HARNESS)
    variables = {"ASSAY_OFFLINE": "1"} if settings().offline else {}
    if resources.image is not None:
        return create_environment(docker_image=resources.image, env_vars=variables, inherited=inherited)
    empty = settings().cache_dir / "empty"  # sends no files of the current working directory
    empty.mkdir(parents=True, exist_ok=True)
    return create_environment(workspace=empty, env_vars=variables, inherited=inherited)


def _finished(job: JobHandle) -> bool:
    try:
        return job.wait(_JOB_POLL_SECONDS, raise_on_failure=False).finished
    except JobTimeout:
        return False


def _announced(job: JobHandle) -> tuple[int, int]:
    done, _, at = (job.announced() or "0 0").partition(" ")
    return int(done), int(at)


def _failure(job: JobHandle, queued: _Queued) -> AssayError:
    log = job.logs(_KEPT_LOG_LINES)
    output = queued.evaluation.output
    with suppress(StorageError):  # a failed write must not hide how the job ended
        storage.write_bytes(storage.join(output, LOG_NAME), log.encode())
    remedy = "See harness.log next to the record, then evaluate again"
    return job_failure(job, queued.program.evaluator, queued.evaluation.config, log=log, remedy=remedy)


def _fail(waiting: Sequence[_Queued], error: Exception) -> None:
    cause = error if isinstance(error, AssayError) else UnexpectedError.of(error, expected="a job that runs")
    for queued in waiting:
        if not queued.ended.is_set():
            queued.error = cause
            queued.ended.set()
