"""The lock file that libtpu leaves behind, for which later processes report a TPU as in use by a dead process."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TPU_LOCKFILE = Path("/tmp/libtpu_lockfile")
_SUDO_SECONDS = 20.0

_log = logging.getLogger(__name__)


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
