"""Notice that Google Cloud is about to take this machine away, for programs to see before the machine ends."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException

_NOTICE_URL = "http://169.254.169.254/computeMetadata/v1/instance/preempted"
"""By address: elsewhere nobody knows the name, and a look-up has no time-out."""


def preemption_announced(*, url: str = _NOTICE_URL, timeout_seconds: float = 2.0) -> bool:
    """Returns True if this machine was told that it is being preempted; False on machines of anybody else.

    A program on a TPU fails with an error of its own when its chips, or those of another host of its slice, go away,
    up to half a minute before the machine does. Its exit code says nothing of that.

    Args:
        url: where to ask.
        timeout_seconds: for the answer; on machines without a metadata server nothing answers.
    """
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return answer.read(16).strip() == b"TRUE"
    except (OSError, HTTPException):
        return False
