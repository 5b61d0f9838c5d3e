"""Program of the keeper pod, which controls a job that outlives its parent.

`python -m resources.backends.kubernetes.keeper_pod <file with the pickled submission>`. It needs an image with Assay
and its `kubernetes` extra, and a service account with the rights of the submitting user.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import cloudpickle

from resources.backends.kubernetes.attempts import OwnedJob
from resources.backends.kubernetes.cluster import connect
from resources.backends.kubernetes.manifests import Submission
from resources.backends.kubernetes.records import BEATS_PER_LEASE, beat, read_record
from resources.errors import AssayError, BadInput

_JOB_POLL_SECONDS = 0.5


def main(arguments: list[str]) -> None:
    """Reads the submission, and advances the job from its recorded state until it has finished."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the first process of a pod ignores SIGTERM
    submission: Submission = cloudpickle.loads(Path(arguments[0]).read_bytes())
    owner, job_id = submission.owner, submission.job_id
    cluster = connect("", urlsplit(owner.jobs_url).path.strip("/"))
    stored = read_record(cluster, job_id)
    if stored is None:
        raise BadInput(expected="the id of a job", found=repr(job_id), remedy="Its record is gone: submit it again.")
    job = OwnedJob(cluster, stored[0], submission)
    beaten_at = 0.0
    while not job.record.finished:
        with suppress(AssayError):  # a cluster that is temporarily unavailable does not end the job
            if time.monotonic() - beaten_at >= owner.lease_seconds / BEATS_PER_LEASE:
                beat(cluster, owner.name)
                beaten_at = time.monotonic()
            job.step()
        time.sleep(_JOB_POLL_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
