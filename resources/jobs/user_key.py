"""The secret that authenticates pickles between processes of a user: calls of actors, and results."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress

from resources.errors import StorageError
from resources.settings import settings, variable
from resources.storage.files import written_aside

USER_KEY_VARIABLE = "ASSAY_ACTOR_KEY"
_FEWEST_BYTES = 32


def user_key() -> bytes:
    """Returns `ASSAY_ACTOR_KEY`, which the processes of actors get, else a secret kept in the cache's folder."""
    if key := variable(USER_KEY_VARIABLE):
        return key.encode()
    path = settings().cache_dir / "actor.key"
    try:
        if not path.exists():
            key = secrets.token_urlsafe(32).encode()
            with written_aside(path, key, mode=0o600) as fresh, suppress(FileExistsError):
                os.link(fresh, path)  # if another process was first, its key holds
        with path.open("rb") as file:
            key, mode = file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise StorageError(
            expected=f"the key of actors and results in {path}",
            found=f"{type(error).__name__}: {error}",
            remedy=f"Make the folder writable, or set {USER_KEY_VARIABLE} to a secret.",
        ) from error
    if len(key) < _FEWEST_BYTES or mode & 0o077:
        raise StorageError(
            expected=f"{_FEWEST_BYTES} bytes or more in {path}, for its owner alone (mode 600)",
            found=f"{len(key)} bytes, mode {mode:o}",
            remedy=f"Delete the file and start running actors again, or set {USER_KEY_VARIABLE} to a secret.",
        )
    return key
