"""Jobs on a Kubernetes cluster: each attempt is a `batch/v1` Job, controlled by a thread of the submitting process.

Pods live as long as that thread: it rewrites a ConfigMap that they mount, and they end if it does not change for the
duration of a lease. A job that outlives its parent is controlled by its own keeper pod instead.
"""

from __future__ import annotations

import atexit
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from urllib.parse import quote, urlencode

import cloudpickle

from resources.backends.kubernetes.cluster import Cluster, connect
from resources.backends.kubernetes.devices import placement, require_node
from resources.backends.kubernetes.job import KubernetesJob
from resources.backends.kubernetes.manifests import (
    Owner,
    Submission,
    bounded,
    image_of,
    keeper_pod_manifest,
    secret_content,
    secret_manifest,
)
from resources.backends.kubernetes.names import new_job_id
from resources.backends.kubernetes.owner import OwnedJob
from resources.backends.kubernetes.records import Record, all_records, create_record, prune, read_record, write_record
from resources.backends.programs.run_in_pod import ORPHANED
from resources.config import ResourceConfig
from resources.errors import AssayError, BackendUnavailable, BadInput, UnsatisfiableResources
from resources.jobs.jobs import Call, Client, Command, JobDetails, JobRequest, JobStatus
from resources.jobs.waiting import no_such_job, while_running
from resources.settings import job_id as own_job_id
from resources.settings import settings

LEAST_LEASE_SECONDS = 180.0
"""A kubelet checks about once a minute, on a copy up to a minute old; the owner sends ten heartbeats per lease."""


class KubernetesClient(Client):
    """Runs jobs in a namespace of a cluster. A job ends with its submitting process unless it outlives its parent.

    Each job of this process is advanced every `poll_seconds`; see `Owner` for the other arguments.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        image: str | None = None,
        queue: str | None = None,
        poll_seconds: float = 2.0,
        **seconds: float,
    ) -> None:
        self._cluster = cluster
        self._queue = queue
        self._poll_seconds = poll_seconds
        self._owner = Owner(jobs_url=self.url, image=image, queue=queue, **seconds)
        self._owned: list[OwnedJob] = []
        self._handles: dict[str, KubernetesJob] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._has_begun = False

    @property
    def url(self) -> str:
        """Returns the address for use inside the cluster, which is the default there."""
        queue = f"?{urlencode({'queue': self._queue})}" if self._queue else ""
        return f"kubernetes:///{self._cluster.namespace}{queue}"

    def submit(self, request: JobRequest, *, adopt_existing: bool = False) -> KubernetesJob:
        """Starts a job; its image must contain its code."""
        with self._lock:
            if running := while_running(self._handles.get(request.name), adopt_existing=adopt_existing):
                return running
            self.check_resources(request.resources.model_copy(update={"replicas": request.replica_count}))
            job_id = new_job_id(request.name)
            vms = placement(request.resources).vms
            files = secret_content(request, job_id=job_id, vms=vms, owner=self._owner)
            submission = Submission(
                job_id=job_id,
                request=replace(request, entrypoint=Command("true")),
                image=image_of(request, default=self._owner.image),
                files=files,
                owner=self._owner,
            )
            record = Record(
                job_id=job_id,
                name=request.name,
                submitted_at=time.time(),
                replicas=request.replica_count,
                vms=vms,
                grace_seconds=self._owner.grace_seconds,
                lease_seconds=self._owner.lease_seconds,
                outlives_parent=request.outlives_parent,
                returns=isinstance(request.entrypoint, Call),
            )
            submit = self._submit_with_keeper_pod if request.outlives_parent else self._submit_owned
            handle = submit(record, submission)
            self._handles[request.name] = handle
        return handle

    def attach(self, job_id: str) -> KubernetesJob:
        """Returns a handle on a job of any process in this namespace; raises `BadInput` if there is none."""
        name = job_id if job_id.replace("-", "").isalnum() else ""
        stored = read_record(self._cluster, name) if name else None
        if stored is None:
            remedy = "Choose a job that `kubectl get configmaps -l assay-evals/part=record` lists."
            raise no_such_job(f"in the namespace {self._cluster.namespace}", job_id, remedy)
        mine = next((job for job in self._owned if job.record.job_id == job_id), None)
        return self._handle(stored[0], owned=mine)

    def jobs(self) -> list[JobDetails]:
        """Returns the jobs of all processes that use this namespace."""
        return [record.details() for record in all_records(self._cluster)]

    def check_resources(self, resources: ResourceConfig) -> None:
        """Raises if the cluster cannot run the job; if node pools may grow from zero, only the scheduler decides."""
        where = placement(resources)
        if where.vms > 1 and resources.replicas > 1 and not self._cluster.serves("jobsets"):
            raise UnsatisfiableResources(
                expected="a cluster with JobSet, which keeps several slices of several VMs apart",
                found=f"{resources.replicas} slices of {where.vms} VMs each, and no jobset.x-k8s.io/v1alpha2",
                remedy="have JobSet's controller installed (kubernetes-sigs/jobset), or submit a job for each slice",
            )
        if self._queue is not None:
            self._require_queue(self._queue)
        if where.node_resource is None:
            return
        try:
            nodes = self._cluster.list("nodes")
        except BackendUnavailable:  # users with the right to submit jobs may lack the right to list nodes
            return
        require_node(where, nodes, device=resources.device)

    def shutdown(self) -> None:
        with self._lock:
            jobs = [job for job in self._owned if not job.record.finished]
        with ThreadPoolExecutor(max(1, len(jobs))) as threads:
            endings = [threads.submit(job.terminate) for job in jobs]
        self._closing.set()
        atexit.unregister(self._end_at_exit)
        self._has_begun = False
        for ending in endings:
            ending.result()

    def _require_queue(self, queue: str) -> None:
        try:
            local_queue = self._cluster.get("localqueues", quote(queue, safe=""))
        except BackendUnavailable:  # users with the right to submit jobs may lack the right to read queues
            return
        if local_queue is None:
            raise BadInput(
                expected=f"Kueue's queue {queue!r} in the namespace {self._cluster.namespace}",
                found="none, or no Kueue on the cluster",
                remedy="choose a queue of `kubectl get localqueues`, or remove ?queue= from the backend's address",
            )

    def _handle(self, record: Record, *, owned: OwnedJob | None = None) -> KubernetesJob:
        return KubernetesJob(self._cluster, record, owned=owned, poll_seconds=self._poll_seconds)

    def _submit_owned(self, record: Record, submission: Submission) -> KubernetesJob:
        job = OwnedJob(self._cluster, record, submission)
        if not self._has_begun:
            self._begin()
        create_record(self._cluster, record)
        try:
            job.step()
        except AssayError as error:
            with suppress(AssayError):
                job.give_up(JobStatus.FAILED, f"it could not be started: {error.found}")
            raise
        self._owned = [*(owned for owned in self._owned if not owned.record.finished), job]
        threading.Thread(target=self._look_after, args=(job,), name=record.job_id, daemon=True).start()
        return self._handle(record, owned=job)

    def _submit_with_keeper_pod(self, record: Record, submission: Submission) -> KubernetesJob:
        files = bounded({"keeper.pickle": cloudpickle.dumps(submission)})
        create_record(self._cluster, record)
        manifest = keeper_pod_manifest(submission)
        name = manifest["metadata"]["name"]
        try:
            job = self._cluster.create("jobs", manifest)
            self._cluster.create("secrets", secret_manifest(files, job=job))
            self._cluster.patch("jobs", name, {"spec": {"suspend": False}})
        except AssayError as error:
            with suppress(AssayError):
                self._cluster.delete("jobs", name)
                reason = f"its keeper pod could not be started: {error.found}"
                write_record(self._cluster, replace(record, status=JobStatus.FAILED, reason=reason))
            raise
        return self._handle(record)

    def _begin(self) -> None:
        with suppress(AssayError):  # pruning is not urgent
            prune(self._cluster)
        self._closing.clear()
        atexit.register(self._end_at_exit)
        self._has_begun = True

    def _look_after(self, job: OwnedJob) -> None:
        finished = False
        while not finished and not self._closing.wait(self._poll_seconds):
            try:
                finished = job.step().finished
            except AssayError:  # a cluster that is temporarily unavailable does not end the job
                continue
            except Exception as error:  # after a bug, end the pods, which nothing would control
                job.give_up(JobStatus.FAILED, f"looking after it failed: {type(error).__name__}: {error}")
                raise

    def _end_at_exit(self) -> None:
        self._closing.set()
        jobs = [job for job in self._owned if not job.record.finished]
        for stop in (OwnedJob.begin_to_end, lambda job: job.give_up(JobStatus.STOPPED, ORPHANED)):
            for job in jobs:
                with suppress(AssayError):  # otherwise the lease ends it
                    stop(job)


def client_from_address(host: str, path: str, *, queue: str | None = None) -> KubernetesClient:
    """Returns a client with the settings of this machine; for further errors see `connect`."""
    lease_seconds = settings().job_lease_seconds
    if lease_seconds < LEAST_LEASE_SECONDS and not own_job_id():  # inside a job the submitter's lease applies
        raise BadInput(
            expected=f"ASSAY_JOB_LEASE_SECONDS of {LEAST_LEASE_SECONDS:g} or more",
            found=f"{lease_seconds:g}: a pod may see a sign of life two minutes late, and would end itself meanwhile",
            remedy="set more, or leave it out for 300",
        )
    return KubernetesClient(
        connect(host, path.strip("/")), image=settings().job_image, queue=queue, lease_seconds=lease_seconds
    )
