"""The lock file that libtpu leaves behind: whoever finds it is told that the TPU is in use, by a process long gone."""

from __future__ import annotations

import logging
import subprocess
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType

TPU_LOCKFILE = Path("/tmp/libtpu_lockfile")
_SUDO_SECONDS = 20.0

_log = logging.getLogger(__name__)


class remove_tpu_lockfile_on_exit(ContextDecorator):  # called like a function
    """Removes the lock file before and after a `with` block, or each call of a function that it decorates.

    Only for whoever holds all chips of the host: the lock of a living process would be taken away too.
    """

    def __init__(self, *, path: Path = TPU_LOCKFILE) -> None:
        self._path = path

    def __enter__(self) -> None:
        _remove(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _remove(self._path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        try:
            subprocess.run(
                ["sudo", "-n", "rm", "-f", str(path)], check=True, capture_output=True, timeout=_SUDO_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("%s belongs to somebody else and could not be removed: %s", path, error)
