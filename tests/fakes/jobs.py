"""A job client that runs nothing: it records requests, and tests set the state of its jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from resources.config import ResourceConfig
from resources.errors import JobFailed
from resources.jobs.jobs import JobDetails, JobRequest, JobStatus
from resources.jobs.logs import LogPart


@dataclass
class FakeJob:
    job_id: str
    current: JobDetails
    log: str = ""
    announcement: str | None = None
    ends_as: JobStatus = JobStatus.SUCCEEDED
    terminated: int = 0
    returned: Any = None

    def details(self) -> JobDetails:
        return self.current

    def status(self) -> JobStatus:
        return self.current.status

    def says(self, status: JobStatus, **fields: Any) -> None:
        self.current = replace(self.current, status=status, **fields)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Ends the job at once in the state `ends_as`."""
        if not self.current.status.finished:
            self.says(self.ends_as)
        if raise_on_failure and self.current.status is not JobStatus.SUCCEEDED:
            raise JobFailed(
                expected="it to succeed", found=f"it {self.current.status}\n{self.log}", remedy="see its log"
            )
        return self.current.status

    def result(self, timeout: float | None = None, *, replica: int = 0) -> Any:
        self.wait(timeout)
        return self.returned

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        return "\n".join(self.log.splitlines()[-max_lines:])

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        # positions are offsets
        output = self.log.encode()[int(after or 0) :]
        return LogPart(output, str(int(after or 0) + len(output)))

    def announced(self, replica: int = 0) -> str | None:
        return self.announcement

    def terminate(self) -> None:
        self.terminated += 1
        if not self.current.status.finished:
            self.says(JobStatus.STOPPED)


@dataclass
class FakeClient:
    """Accepts every job; `on_submit` may change a job before its handle is returned."""

    on_submit: Callable[[FakeJob], None] = lambda job: None
    requests: list[JobRequest] = field(default_factory=list)
    submitted: list[FakeJob] = field(default_factory=list)

    @property
    def url(self) -> str:
        return "local"

    @property
    def description(self) -> str:
        return self.url

    @property
    def is_local(self) -> bool:
        return True

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> FakeJob:
        job_id = f"{request.name}-{len(self.requests)}"
        job = FakeJob(job_id, JobDetails(job_id=job_id, name=request.name, status=JobStatus.RUNNING, attempts=1))
        self.requests.append(request)
        self.submitted.append(job)
        self.on_submit(job)
        return job

    def attach(self, job_id: str) -> FakeJob:
        return next(job for job in self.submitted if job.job_id == job_id)

    def jobs(self) -> list[JobDetails]:
        return [job.current for job in reversed(self.submitted)]

    def check_resources(self, resources: ResourceConfig) -> None:
        # all resources are available
        ...

    def shutdown(self) -> None:
        for job in self.submitted:
            job.terminate()
