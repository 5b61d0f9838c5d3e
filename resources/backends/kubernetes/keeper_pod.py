"""Program of the keeper pod, which controls a job that outlives its parent.

`python -m resources.backends.kubernetes.keeper_pod <job id> <file with the pickled request>`. It needs an image with
Assay and its `kubernetes` extra, and a service account with the rights of the submitting user.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import cloudpickle

from resources.backends.kubernetes.attempts import Bounds, OwnedJob
from resources.backends.kubernetes.cluster import Cluster, connect
from resources.backends.kubernetes.devices import placement
from resources.backends.kubernetes.manifests import Owner
from resources.backends.kubernetes.records import beat, read_record
from resources.errors import AssayError, BadInput
from resources.jobs.jobs import EnvironmentConfig, JobRequest

_JOB_POLL_SECONDS = 0.5
_BEATS_PER_LEASE = 10


def keep(
    cluster: Cluster,
    job_id: str,
    *,
    request: JobRequest,
    environment: EnvironmentConfig,
    image: str,
    files: dict[str, bytes],
    owner: Owner,
    bounds: Bounds,
) -> None:
    """Advances a job from its recorded state until it has finished."""
    stored = read_record(cluster, job_id)
    if stored is None:
        raise BadInput(expected="the id of a job", found=repr(job_id), remedy="Its record is gone: submit it again.")
    where = placement(request.resources)
    job = OwnedJob(
        cluster,
        stored[0],
        request,
        environment,
        image=image,
        files=files,
        where=where,
        owner=owner,
        bounds=bounds,
    )
    beaten_at = 0.0
    while not job.record.finished:
        with suppress(AssayError):  # a cluster that is temporarily unavailable does not end the job
            if time.monotonic() - beaten_at >= owner.lease_seconds / _BEATS_PER_LEASE:
                beat(cluster, owner.name)
                beaten_at = time.monotonic()
            job.step()
        time.sleep(_JOB_POLL_SECONDS)


def main(arguments: list[str]) -> None:
    """Reads the request from its file, and controls the job until it has finished."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the first process of a pod ignores SIGTERM
    job_id, path = arguments
    request, environment, image, files, owner, bounds = cloudpickle.loads(Path(path).read_bytes())
    cluster = connect("", urlsplit(owner.jobs_url).path.strip("/"))
    keep(
        cluster, job_id, request=request, environment=environment, image=image, files=files, owner=owner, bounds=bounds
    )


if __name__ == "__main__":
    main(sys.argv[1:])
