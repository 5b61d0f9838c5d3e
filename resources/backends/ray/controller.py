"""The controller: an actor per driver that supervises its jobs, and a shared actor for jobs that outlive their drivers.

A driver's controller dies with it, and Ray ends the workers that it started, and so all processes of the jobs. All
methods run in a single event loop of the actor's process, so no state needs a lock.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from resources.backends.programs.attempts import Attempts, Outcome, outcome_of
from resources.backends.ray import placement as ray_placement
from resources.backends.ray.orders import JobOrder, Output, ProcessEnd, ProcessOrder, classify_ray, refusal_text
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.jobs import JobAlreadyExists, JobDetails, JobStatus
from resources.jobs.logs import PART_BYTES, LogPart, check_replica, logs_by_replica, part_of_hosts
from resources.jobs.waiting import no_such_job

_END_MARGIN_SECONDS = 35.0  # more than a supervisor waits for a process to die of SIGKILL
_FORCED_SECONDS = 10.0
_MOST_LOG_BYTES = 64 << 20  # of a process
_KEPT_JOBS = 200
_KEPT_BYTES = 64 << 20  # for the results of all finished jobs
_KEPT_PACKAGES = 4
_LARGE_BYTES = 64 << 10  # larger callables are put into Ray's object store, once for all processes


class LogFile:
    """A process's output over all attempts, in a file without a name on the head's disk, gone with the controller.

    When it exceeds `most_bytes`, its first half is dropped, which readers see in `LogPart.follows_dropped`.
    """

    def __init__(self, most_bytes: int = _MOST_LOG_BYTES) -> None:
        self._most_bytes = most_bytes
        self._dropped_bytes = 0
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 it ends with this object

    def add(self, output: bytes) -> None:
        self._file.write(output)
        if (size := os.fstat(self._file.fileno()).st_size) > self._most_bytes:
            kept = self._read(size - self._most_bytes // 2, self._most_bytes // 2).partition(b"\n")[2]
            self._dropped_bytes += size - len(kept)
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 as above
            self._file.write(kept)

    def last(self, max_lines: int) -> str:
        """Returns the last lines, at most 1 MiB."""
        size = os.fstat(self._file.fileno()).st_size
        lines = self._read(max(0, size - PART_BYTES)).decode(errors="replace").splitlines()
        return "\n".join(lines[-max_lines:] if max_lines > 0 else [])

    def part(self, after: str, *, whole_lines: bool) -> LogPart:
        """Returns the part after a position, the number of bytes before it; see `JobHandle.read_log`."""
        position = int(after or 0)
        start = max(position, self._dropped_bytes)
        output = self._read(start - self._dropped_bytes)
        end = output.rfind(b"\n") + 1
        if whole_lines and (end or len(output) < PART_BYTES):
            output = output[:end]
        return LogPart(output, str(start + len(output)), start > position)

    def _read(self, start: int, size: int = PART_BYTES) -> bytes:
        return os.pread(self._file.fileno(), size, start)


class ControlledJob:
    """A job, from its first wait for resources to its final status.

    Args:
        sent: references to objects in Ray's object store: the package of its `workspace`, a large `call`.
        start: starts a process from its place, a pickled `ProcessOrder` and `sent`; the result can be awaited.
    """

    def __init__(
        self,
        ray: Any,
        order: JobOrder,
        *,
        sent: Mapping[str, Any],
        start: Callable[[Any, bytes, Mapping[str, Any]], Any],
    ) -> None:
        self._ray = ray
        self.order = order
        self._replicas = order.request.replica_count
        self._sent = sent
        self._start = start
        self.status = JobStatus.PENDING
        self._reason: str | None = None
        self._tries = Attempts(order.request.max_retries_failure, order.request.max_retries_preemption)
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self._ending = asyncio.Event()  # set at the end of the current attempt
        self._started: set[tuple[int, int]] = set()
        self._expected = 0
        self._logs: dict[tuple[int, int], LogFile] = defaultdict(LogFile)
        self._reported: dict[tuple[int, int], int] = defaultdict(int)  # bytes per process of the current attempt
        self._announced: dict[int, str] = {}  # by replica, of the current attempt
        self._results: dict[int, bytes] = {}

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes of memory that its results and its callable take."""
        call = self.order.entrypoint if isinstance(self.order.entrypoint, bytes) else b""
        return len(call) + sum(map(len, self._results.values()))

    def details(self) -> JobDetails:
        return JobDetails(
            job_id=self.order.job_id,
            name=self.order.request.name,
            status=self.status,
            reason=self._reason,
            **self._tries.counts,
            submitted_at=self.order.submitted_at,
            replicas=self._replicas,
            returns=isinstance(self.order.entrypoint, bytes),
        )

    def announced(self, replica: int) -> str | None:
        """Returns the announcement of a replica in the current attempt."""
        return self._announced.get(replica)

    def result(self, replica: int) -> bytes | None:
        """Returns the result file of a replica in the last attempt."""
        return self._results.get(replica)

    def logs(self, max_lines: int, replica: int | None) -> str:
        """Returns the last lines; a replica of several hosts has a section per host."""
        return logs_by_replica(lambda index: self._log_of(index, max_lines), self._replicas, replica=replica)

    def read_log(self, after: str, replica: int) -> LogPart:
        check_replica(replica, self._replicas)
        whole_lines = self.order.hosts > 1 and not self.status.finished
        return part_of_hosts(
            lambda host, position: self._logs[replica, host].part(position, whole_lines=whole_lines),
            self.order.hosts,
            after=after,
        )

    def _log_of(self, index: int, max_lines: int) -> str:
        lasts = [self._logs[index, host].last(max_lines) for host in range(self.order.hosts)]
        return lasts[0] if len(lasts) == 1 else "\n".join(f"==> host {i} <==\n{last}" for i, last in enumerate(lasts))

    def stop(self, reason: str = "terminated") -> float:
        """Requests the end of the job, and returns the seconds that it may take."""
        if not self._stopping.is_set():
            self._stop_reason = reason
            self._stopping.set()
        return self.order.grace_seconds + _END_MARGIN_SECONDS + _FORCED_SECONDS

    async def ends_within(self, attempt: int, seconds: float) -> bool:
        """Returns True if the processes of an attempt must end, now or within that many seconds."""
        if attempt == self._tries.attempts and not self.status.finished:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)
        return attempt != self._tries.attempts or self._ending.is_set() or self.status.finished

    def report(
        self, attempt: int, process: tuple[int, int], *, output: Output, announcement: str | None, started: bool
    ) -> None:
        """Receives the output and the announcement of a process (replica, host) since its last report."""
        if attempt != self._tries.attempts or self.status.finished:
            return
        known = self._reported[process]
        self._logs[process].add(output.content[max(0, known - output.start) :])
        self._reported[process] = max(known, output.start + len(output.content))
        replica, host = process
        if announcement is not None and host == 0:
            self._announced[replica] = announcement
        if started:
            self._started.add(process)
        if self.status is JobStatus.PENDING and self._expected and len(self._started) == self._expected:
            self.status, self._reason = JobStatus.RUNNING, None

    async def run(self) -> None:
        """Attempts the job until it succeeds, is stopped, or has used up a budget."""
        status, reason = JobStatus.FAILED, "its controller failed"
        try:
            status, reason = await self._run()
        except AssayError as error:  # the request can never be satisfied
            reason = refusal_text(error)
        except Exception:  # noqa: BLE001 any error must end the job
            reason = f"its controller failed: {traceback.format_exc()}"
        finally:
            self.status, self._reason = status, reason
            self._sent = {}  # else finished jobs would keep the objects in Ray's memory
            if isinstance(self.order.entrypoint, bytes):
                self.order = replace(self.order, entrypoint=b"")
            self._ending.set()

    async def _run(self) -> tuple[JobStatus, str | None]:
        while True:
            outcome, reason = await self._attempt()
            self._tries, final = self._tries.ended(outcome, reason)
            if final is not None:
                return JobStatus(final.status), final.reason
            self.status, self._reason = JobStatus.PENDING, f"tried again after {reason}"
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._tries.pause_seconds)
            if self._stopping.is_set():
                return JobStatus.STOPPED, self._stop_reason

    async def _attempt(self) -> tuple[Outcome, str | None]:
        placement = await self._placed()
        if placement is None:
            return "stopped", self._stop_reason
        try:
            self._tries = self._tries.begun()
            self._ending = asyncio.Event()
            self._started.clear()
            self._reported.clear()
            self._announced.clear()
            self._expected = len(placement.hosts)
            self._reason = f"starts {self._expected} process{'' if self._expected == 1 else 'es'}"
            return await self._outcome(placement.hosts)
        finally:
            self._ending.set()
            placement.release()

    async def _placed(self) -> ray_placement.Placement | None:
        set_reason = partial(setattr, self, "_reason")
        placing = asyncio.ensure_future(
            ray_placement.place(self._ray, self.order.request.resources, self._replicas, on_waiting=set_reason)
        )
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({placing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not self._stopping.is_set():
            return placing.result()
        placing.cancel()
        with suppress(asyncio.CancelledError):
            (await placing).release()
        return None

    async def _outcome(self, places: list[ray_placement.HostPlace]) -> tuple[Outcome, str | None]:
        ends: dict[asyncio.Future[Any], tuple[int, int]] = {}
        references = []
        for place in places:
            process = (place.replica, place.host)
            if self._tries.attempts > 1:
                self._logs[process].add(f"--- attempt {self._tries.attempts} ---\n".encode())
            order = ProcessOrder(
                job=self.order,
                attempt=self._tries.attempts,
                replica=place.replica,
                host=place.host,
                device_variables=place.env_vars,
            )
            reference = self._start(place, pickle.dumps(order), self._sent)
            references.append(reference)
            ends[asyncio.ensure_future(_ended(reference))] = process
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            left: set[Any] = set(ends)
            while left and not self._stopping.is_set():
                done, _ = await asyncio.wait({*left, stopping}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                if any(end.done() and end.result().outcome != "succeeded" for end in ends):
                    break
            self._ending.set()
            if left:
                _, left = await asyncio.wait(left, timeout=self.order.grace_seconds + _END_MARGIN_SECONDS)
            if left:  # the worker does not respond; its supervisor ends the processes when the worker is gone
                for reference in references:
                    self._ray.cancel(reference, force=True)
                _, left = await asyncio.wait(left, timeout=_FORCED_SECONDS)
        finally:
            stopping.cancel()
        results = [end.result() if end.done() else ProcessEnd(outcome="preempted", reason="lost") for end in ends]
        for process, result in zip(ends.values(), results, strict=True):
            self.report(
                self._tries.attempts, process, output=result.output, announcement=result.announcement, started=False
            )
        self._results = {
            replica: result.result
            for (replica, host), result in zip(ends.values(), results, strict=True)
            if host == 0 and result.result is not None
        }
        return self._together(results)

    def _together(self, ends: list[ProcessEnd]) -> tuple[Outcome, str | None]:
        outcome = outcome_of((end.outcome for end in ends), stopping=self._stopping.is_set()) or "failed"
        if outcome != "stopped":
            return outcome, next((end.reason for end in ends if end.outcome == outcome), None)
        if self._stopping.is_set():
            return "stopped", self._stop_reason
        return "preempted", "it did not reach its controller"


async def _ended(reference: Any) -> ProcessEnd:
    try:
        return pickle.loads(await reference)
    except Exception as error:  # noqa: BLE001 the worker's death, or any error raised there
        outcome, reason = classify_ray(error)
        return ProcessEnd(outcome=outcome, reason=reason)


class Controller:
    """Jobs, their states and their logs; `start` starts a process, see `ControlledJob`."""

    def __init__(self, ray: Any, *, start: Callable[[Any, bytes, Mapping[str, Any]], Any]) -> None:
        self._ray = ray
        self._start = start
        self._jobs: dict[str, ControlledJob] = {}
        self._packages: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references

    async def answer(self, method: str, arguments: bytes) -> bytes:
        """Returns the pickled result of a method, or a pickled `AssayError`; other errors propagate.

        With the argument `job_id`, it is a method of that `ControlledJob`.
        """
        values = pickle.loads(arguments)
        try:
            target = self._job(values.pop("job_id")) if "job_id" in values else self
            result = getattr(target, method)(**values)
            result = await result if inspect.isawaitable(result) else result
        except AssayError as error:
            result = error
        return pickle.dumps(result)

    async def running(self, *, name: str) -> str | None:
        """Returns the id of the unfinished job of that name, or None."""
        return next(
            (key for key, job in self._jobs.items() if job.order.request.name == name and not job.status.finished), None
        )

    async def check(self, *, resources: ResourceConfig, replicas: int) -> list[str]:
        """Raises if the cluster can never provide the resources; returns the addresses of its living nodes."""
        await asyncio.to_thread(ray_placement.check, self._ray, resources, replicas)
        nodes = await asyncio.to_thread(self._ray.nodes)
        return sorted({node["NodeManagerAddress"] for node in nodes if node["Alive"]})

    async def add_package(self, *, digest: str, content: bytes | None) -> bool:
        """Stores a package for later jobs, or only looks it up without content; returns True if it is stored."""
        if content is not None and digest not in self._packages:
            self._packages[digest] = self._ray.put(content)
        return digest in self._packages

    async def submit(self, *, order: JobOrder, adopt_existing: bool) -> str:
        """Starts a job and returns its id, or with `adopt_existing` the id of the running job of the same name."""
        if order.job_id in self._jobs:  # a repeated call: the first answer was lost
            return order.job_id
        if (existing := await self.running(name=order.request.name)) is not None:
            if adopt_existing:
                return existing
            raise JobAlreadyExists.of(self._jobs[existing].details())
        self._prune()
        sent = {"workspace": self._packages[digest]} if (digest := order.workspace.digest) in self._packages else {}
        if isinstance(order.entrypoint, bytes) and len(order.entrypoint) > _LARGE_BYTES:
            sent["call"] = self._ray.put(order.entrypoint)
            order = replace(order, entrypoint=b"")
        job = self._jobs[order.job_id] = ControlledJob(self._ray, order, sent=sent, start=self._start)
        task = asyncio.get_running_loop().create_task(job.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return order.job_id

    async def jobs(self) -> list[JobDetails]:
        return [job.details() for job in self._jobs.values()]

    async def stop_client(self, *, client: str) -> list[str]:
        """Requests the end of all jobs of a client that do not outlive their parent, and returns their ids."""
        unfinished = (job for job in self._jobs.values() if not job.status.finished)
        jobs = [job for job in unfinished if job.order.client == client and not job.order.request.outlives_parent]
        for job in jobs:
            job.stop("its client was shut down")
        return [job.order.job_id for job in jobs]

    def _job(self, job_id: str) -> ControlledJob:
        if (job := self._jobs.get(job_id)) is None:
            remedy = "List the jobs of this backend; finished jobs are forgotten after a while."
            raise no_such_job("that its controller still remembers", job_id, remedy)
        return job

    def _prune(self) -> None:
        finished = [job for job in self._jobs.values() if job.status.finished]
        kept_bytes = sum(job.kept_bytes for job in finished)
        for position, job in enumerate(finished):
            if len(finished) - position <= _KEPT_JOBS and kept_bytes <= _KEPT_BYTES:
                break
            kept_bytes -= job.kept_bytes
            del self._jobs[job.order.job_id]
        needed = {job.order.workspace.digest for job in self._jobs.values() if not job.status.finished}
        for digest in list(self._packages)[:-_KEPT_PACKAGES]:
            if digest not in needed:
                del self._packages[digest]
