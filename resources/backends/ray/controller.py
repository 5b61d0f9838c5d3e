"""The controller: an actor per driver that supervises its jobs, and a shared actor for jobs that outlive their drivers.

A driver's controller dies with it, and Ray ends the workers that it started, and so all processes of the jobs. All
methods run in a single event loop of the actor's process, so no state needs a lock.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from resources.backends.ray import placement as ray_placement
from resources.backends.ray.controlled_job import ControlledJob
from resources.backends.ray.orders import JobOrder
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.jobs import JobAlreadyExists, JobDetails
from resources.jobs.waiting import no_such_job

_KEPT_JOBS = 200
_KEPT_BYTES = 64 << 20  # for the results of all finished jobs
_KEPT_PACKAGES = 4
_LARGE_BYTES = 64 << 10  # larger callables are put into Ray's object store, once for all processes


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
