"""Signs of a TPU's machine: Google Cloud's preemption notice, and the lock file that libtpu leaves behind."""

from __future__ import annotations

import logging
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

# By IP address: other networks cannot resolve the name, and a lookup has no timeout.
_NOTICE_URL = "http://169.254.169.254/computeMetadata/v1/instance/preempted"
TPU_LOCKFILE = Path("/tmp/libtpu_lockfile")
"""With a left-behind lock file, later processes report the TPU as in use by a dead process."""
_SUDO_SECONDS = 20.0

_log = logging.getLogger(__name__)


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


@contextmanager
def remove_tpu_lockfile_on_exit(*, path: Path = TPU_LOCKFILE) -> Iterator[None]:
    """Removes the lock file before and after a `with` block, or each call of a function that it decorates.

    Only for the holder of all chips of the host: it would also remove the lock of a living process.
    """
    _remove(path)
    try:
        yield
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        try:
            subprocess.run(
                ["sudo", "-n", "rm", "-f", str(path)], check=True, capture_output=True, timeout=_SUDO_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("%s belongs to another user and could not be removed: %s", path, error)
