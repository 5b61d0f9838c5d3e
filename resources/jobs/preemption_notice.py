"""Google Cloud's preemption notice for this machine, for programs that react before the machine ends."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException

# By IP address: other networks cannot resolve the name, and a lookup has no timeout.
_NOTICE_URL = "http://169.254.169.254/computeMetadata/v1/instance/preempted"


def preemption_announced(*, url: str = _NOTICE_URL, timeout_seconds: float = 2.0) -> bool:
    """Returns True if this machine is being preempted; False on machines outside of Google Cloud.

    A program on a TPU fails with an unrelated error and exit code when its chips, or chips of another host of its
    slice, disappear, up to 30 s before the machine does. Without a metadata server, the query runs into the timeout.
    """
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return answer.read(16).strip() == b"TRUE"
    except (OSError, HTTPException):
        return False
