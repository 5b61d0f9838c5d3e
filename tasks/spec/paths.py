"""Paths that mean the same place wherever a flow runs."""

from __future__ import annotations

from collections.abc import Iterable

from pools.weights.merges import locations_of
from resources.errors import BadInput
from resources.storage import storage


def is_relative(path: str) -> bool:
    """Tells if a path means another place in another working folder; an address in a store never does."""
    return any(storage.is_local(place) and not storage.local_path(place).is_absolute() for place in locations_of(path))


def check_deployed_paths(paths: Iterable[str]) -> None:
    """Refuses relative paths, for a flow that a worker runs in a folder of its own."""
    relative = [path for path in paths if is_relative(path)]
    if relative:
        raise BadInput(
            expected="absolute paths in a deployed flow: a worker runs it in a folder that it deletes afterwards",
            found=", ".join(relative),
            remedy="write the whole path",
        )
