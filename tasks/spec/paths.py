"""Paths that mean the same location in every working folder."""

from __future__ import annotations

from collections.abc import Iterable

from pools.weights.merges import locations_of
from resources.errors import BadInput
from resources.storage import storage


def is_relative(path: str) -> bool:
    """Returns True if a path depends on the working folder; addresses in a store never do."""
    return any(storage.is_local(place) and not storage.local_path(place).is_absolute() for place in locations_of(path))


def check_deployed_paths(paths: Iterable[str]) -> None:
    """Refuses relative paths, for a flow that a worker runs in a temporary folder."""
    relative = [path for path in paths if is_relative(path)]
    if relative:
        raise BadInput(
            expected="absolute paths in a deployed flow: a worker runs it in a folder that it deletes afterwards",
            found=", ".join(relative),
            remedy="write the whole path",
        )
