"""Jobs on a Slurm cluster: each is a batch job with a folder that all machines of the cluster see.

The folder (`<folder>/jobs/<job id>`) holds specification, status, logs, announcements and results. Variables of a job
are only in the environment that Slurm keeps for it, never in that folder. The job's program writes its status, and
reading changes nothing; the process that submitted the job, which renews its lease regularly, also takes the steps that
Slurm leaves to a job's owner.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from resources.backends.job_folders import FolderClient, FolderJob
from resources.backends.leases import LEASE_SECONDS, POLL_SECONDS, LeaseRenewer
from resources.backends.processes import (
    PROGRAMS,
    device_variables,
    existing_folder,
    import_folders,
    interpreter_of,
    moved,
    variables_of,
    workspace_of,
)
from resources.backends.slurm.resources import check_nodes, refuse_what_slurm_lacks, sbatch_options, warning_seconds
from resources.backends.slurm.slurm import Slurm
from resources.backends.slurm.states import LOST, Seen, after_failed_launch, from_outside
from resources.config import ResourceConfig
from resources.errors import AssayError, BadInput, JobTimeout, UnsatisfiableResources
from resources.jobs.jobs import JobRequest, JobStatus, polls
from resources.jobs.packaging import package_workspace, unpack
from resources.jobs.waiting import while_running
from resources.settings import job_id, settings
from resources.storage.files import replace_text

_LEASE, _SLURM_ID, _STOP = "lease", "slurm_id", "stop"
"""Further files of the folder: the lease, Slurm's id of the job, and the request to end it."""
_STOP_SIGNAL, _UNTIL_HEARD_SECONDS = "USR2", 2.0
_END_MARGIN_SECONDS = 60.0  # 45 s of `slurm_batch.py` for processes that do not die, plus Slurm's time to end a job
_UNSUBMITTED_SECONDS = 120.0
_SETTLED_SECONDS = 15.0


class SlurmJob(FolderJob):
    """Handle on a job of a Slurm cluster, submitted by this process or attached to."""

    longest_pause_seconds = 2.0

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        super().__init__(folder)
        self._slurm = slurm

    @property
    def workspace(self) -> str:
        """Returns the name of the unpacked workspace folder that the job runs in."""
        return self._specification["workspace"]

    def process_details(self) -> dict[str, Any]:
        """Returns its `status.json`, or the state that follows from Slurm's if its program can report no more."""
        slurm_id = self._slurm_id
        known = self._read()
        if JobStatus(known["status"]).finished:
            return known
        return self._details(known, self._slurm.state(slurm_id) if slurm_id else None)

    def renew(self) -> bool:
        """Renews the lease, and requeues the job if Slurm has not; only for the process that submitted the job."""
        if not (self._folder / "status.json").exists():  # removed
            return False
        replace_text(self._folder / _LEASE, str(time.time()))
        known, slurm_id = self._read(), self._slurm_id
        if JobStatus(known["status"]).finished:
            return False
        if not slurm_id:
            return True
        seen = self._slurm.state(slurm_id)
        is_to_stop = (self._folder / _STOP).exists()
        if seen is not None and seen.was_not_launched and not is_to_stop:
            budget: int = self._specification["max_retries_preemption"]
            now = after_failed_launch(known, name=_named(slurm_id), max_retries_preemption=budget)
            self._write(now)
            has_failed = JobStatus(now["status"]).finished
            (self._slurm.cancel if has_failed else self._slurm.release)(slurm_id)
            return not has_failed
        now = self._details(known, seen)
        if JobStatus(now["status"]).finished:
            self._write(now)
            return False
        if seen is None or is_to_stop:
            return True
        if seen.waits_after_requeue and known.get("all_ended"):  # otherwise a copy may run on a lost node
            self._slurm.start_now(slurm_id)
        elif seen.has_ended:
            if seen.state not in LOST:
                self._write({**known, "left_machines": True, "all_ended": True})
            self._slurm.requeue(slurm_id)
        return True

    def terminate(self) -> None:
        self.request_stop()
        asked_at = time.monotonic()
        deadline = asked_at + self._specification["grace_seconds"] + _END_MARGIN_SECONDS
        has_cancelled = False
        for _ in polls():
            seen = self._slurm.state_now(self._slurm_id) if self._slurm_id else None
            details = self._details(self._read(), seen)
            if JobStatus(details["status"]).finished and (seen is None or seen.has_ended):
                self._write(details)
                return
            if seen is not None and seen.is_waiting:
                self._slurm.cancel(self._slurm_id)
            elif time.monotonic() > deadline and not has_cancelled:
                self._slurm.cancel(self._slurm_id)
                deadline, has_cancelled = time.monotonic() + _END_MARGIN_SECONDS, True
            elif time.monotonic() > deadline:
                raise JobTimeout(
                    expected=f"Slurm to end {self.job_id}, its job {self._slurm_id}",
                    found=f"it is {seen.state if seen else 'not heard of'}",
                    remedy="Look with squeue at its nodes; an operator may have to end it.",
                )
            elif time.monotonic() - asked_at > _UNTIL_HEARD_SECONDS:  # a program that had just started may miss it
                self._slurm.signal(self._slurm_id, _STOP_SIGNAL)
                asked_at = time.monotonic()

    def request_stop(self) -> None:
        """Requests the end of the job, and returns at once."""
        if self.status().finished:
            return
        (self._folder / _STOP).touch()
        slurm_id = self._slurm_id
        seen = self._slurm.state_now(slurm_id) if slurm_id else None
        if seen is not None and seen.is_waiting:
            self._slurm.cancel(slurm_id)
        elif seen is not None and not seen.has_ended:
            self._slurm.signal(slurm_id, _STOP_SIGNAL)

    @property
    def where(self) -> str:
        return f"read {self._folder}/task-*/replica-0.log, and batch.log there"

    @property
    def _slurm_id(self) -> str:
        with suppress(FileNotFoundError):
            return (self._folder / _SLURM_ID).read_text().strip()
        return ""  # another process is submitting it, or died while submitting it

    def _file(self, name: str, replica: int) -> Path:
        stem, dot, suffix = name.partition(".")
        return self._folder / f"task-{replica}" / f"{stem}-0{dot}{suffix}"

    def _details(self, known: dict[str, Any], seen: Seen | None) -> dict[str, Any]:
        if not (slurm_id := self._slurm_id):
            if time.time() - self._specification["submitted_at"] < _UNSUBMITTED_SECONDS:
                return {**known, "reason": "is being submitted"}
            return {**known, "status": JobStatus.FAILED, "reason": "never submitted"}
        if seen is None or seen.has_ended:
            known = self._read()  # it may have finished before it ended
        if JobStatus(known["status"]).finished:
            return known
        return from_outside(
            known,
            seen,
            name=_named(slurm_id),
            max_retries_preemption=self._specification["max_retries_preemption"],
            is_to_stop=(self._folder / _STOP).exists(),
            is_owned=self._is_owned(),
            is_recent=seen is not None and time.time() - (seen.ended_at or 0.0) < _SETTLED_SECONDS,
            log=self._folder / "batch.log",
        )

    def _is_owned(self) -> bool:
        try:
            renewed_at = (self._folder / _LEASE).stat().st_mtime
        except FileNotFoundError:
            return False
        return time.time() - renewed_at < 2 * self._specification["lease_seconds"]


class SlurmClient(FolderClient[SlurmJob]):
    """Runs jobs on a partition of a Slurm cluster.

    All machines of the cluster see `folder`, which is `settings().slurm_dir` when None. Processes get `grace_seconds`
    between SIGTERM and SIGKILL; see `leases.py` for the other arguments.
    """

    def __init__(
        self,
        slurm: Slurm,
        *,
        folder: Path | None = None,
        grace_seconds: float = 10.0,
        poll_seconds: float = POLL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._slurm = slurm
        self._folder = (folder or settings().slurm_dir).absolute()
        super().__init__(self._folder / "jobs", partial(SlurmJob, slurm))
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._lease_seconds = lease_seconds
        self._leases = LeaseRenewer(lease_seconds=lease_seconds)
        self._has_begun = False

    @property
    def url(self) -> str:
        query = f"?{urlencode(self._slurm.options)}" if self._slurm.options else ""
        return f"slurm://{self._slurm.partition}{query}"

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> SlurmJob:
        with self._lock:
            if running := while_running(self._jobs.get(request.name), adopt_existing=adopt_existing):
                return running
            environment = request.environment
            self._check(request.resources, image=environment.docker_image, replicas=request.replica_count)
            if not self._has_begun:
                self._begin()
            local_workspace = workspace_of(environment, backend="on Slurm we run")
            workspace = unpack(package_workspace(local_workspace), self._folder / "workspaces")
            python = interpreter_of(environment, workspace=workspace)
            imports = [str(moved(Path(path), local_workspace, to=workspace)) for path in import_folders()]
            start_in = moved(
                existing_folder(request.working_directory or local_workspace), local_workspace, to=workspace
            )
            start_in.mkdir(parents=True, exist_ok=True)  # empty folders are not in the package
            folder = self._create_folder(
                request,
                python=python,
                imports=[str(workspace), *imports],
                working_directory=start_in,
                workspace=workspace.name,
                cpus=request.resources.cpu,
                parent=self._parent(),
                grace_seconds=self._grace_seconds,
                poll_seconds=self._poll_seconds,
                lease_seconds=self._lease_seconds,
            )
            variables = variables_of(
                environment,
                python=python,
                defaults=device_variables(request.resources.device),
                given={"ASSAY_JOB_ID": folder.name, "ASSAY_JOBS": self.url, "ASSAY_SLURM_DIR": str(self._folder)},
            )
            job = self._queue(folder, request, variables=variables)
            self._jobs[request.name] = job
            self._leases.add(job.job_id, job.renew)
        return job

    def check_resources(self, resources: ResourceConfig) -> None:
        self._check(resources, image=None, replicas=resources.replicas * resources.hosts_per_replica)

    def shutdown(self) -> None:
        super().shutdown()
        self._leases.close()

    def _check(self, resources: ResourceConfig, *, image: str | None, replicas: int) -> None:
        refuse_what_slurm_lacks(resources, image=image)
        check_nodes(resources, self._slurm.nodes(), replicas=replicas)
        if not resources.preemptible and self._slurm.preempts():
            raise UnsatisfiableResources(
                expected=f"a partition where Slurm preempts no jobs, for preemptible=False, in {self.url}",
                found="a PreemptMode that is not OFF",
                remedy="Name another partition, or leave preemptible at True: preempted jobs begin again.",
            )

    def _queue(self, folder: Path, request: JobRequest, *, variables: dict[str, str]) -> SlurmJob:
        job = SlurmJob(self._slurm, folder)
        replace_text(folder / _LEASE, str(time.time()))
        program = [sys.executable, "-E", "-s", "-S", str(PROGRAMS / "slurm_batch.py"), str(folder)]
        options = sbatch_options(request.resources, self._slurm.nodes(), replicas=request.replica_count)
        options.append(f"--signal=B:USR1@{warning_seconds(self._slurm.options.get('time'))}")  # before the time limit
        try:
            slurm_id = self._slurm.submit(
                options, script=f"exec {shlex.join(program)}", name=request.name, folder=folder, variables=variables
            )
        except AssayError:
            shutil.rmtree(folder)
            raise
        replace_text(folder / _SLURM_ID, slurm_id)
        return job

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = {job.workspace for job in self._prune()}
        for workspace in (self._folder / "workspaces").glob("*"):
            with suppress(OSError):  # another process may be pruning too
                if workspace.name not in kept and time.time() - workspace.stat().st_mtime > 86400:
                    shutil.rmtree(workspace)
        owner = os.getpid()
        atexit.register(lambda: self._end_at_exit() if os.getpid() == owner else None)
        self._has_begun = True

    def _end_at_exit(self) -> None:
        for job in self._mortal():
            with suppress(AssayError, OSError):  # otherwise the lease ends it
                job.request_stop()

    def _parent(self) -> str | None:
        mine = job_id()
        return mine if mine and (self._folder / "jobs" / mine / "status.json").is_file() else None


def client_from_address(host: str, path: str, **options: str) -> SlurmClient:
    """Returns the client of the partition `host` (empty: the cluster's default); `options` are options of `sbatch`."""
    if path.strip("/"):
        raise BadInput(expected="slurm://partition", found=f"slurm://{host}{path}", remedy="Correct ASSAY_JOBS.")
    return SlurmClient(Slurm(host, options=options))


def _named(slurm_id: str) -> str:
    return f"Slurm's job {slurm_id}"
