"""Properties that the jobs of a pool share: location, environment and restarts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from pools.config import InferencePoolConfig
from resources.config import ResourceConfig
from resources.jobs import inheritance
from resources.jobs.jobs import EnvironmentConfig, create_environment
from resources.settings import settings

_WINDOW_SECONDS = 600.0


def pool_environment(config: InferencePoolConfig, *, env_vars: Mapping[str, str]) -> EnvironmentConfig:
    """Returns the environment of the proxy or of a replica's agent: the Assay installation of the machine they run on.

    Its workspace is an empty folder: the caller's folder is not sent along.
    """
    image, workspace = config.resource_config.image, None
    if image is None:
        workspace = settings().cache_dir / "empty"
        workspace.mkdir(parents=True, exist_ok=True)
    return create_environment(docker_image=image, workspace=workspace, env_vars=env_vars, inherited=inheritance.SERVICE)


def labelled(name: str, label: str | None, suffix: str) -> str:
    """Returns a job's name: kind, label of the owner, and a suffix that makes it unique."""
    return "-".join(part for part in (name, label, suffix) if part)


def placed_with(resources: ResourceConfig) -> dict[str, Any]:
    """Returns region, zone and image of the replicas, for a job that must run near them."""
    return resources.model_dump(include={"regions", "zone", "image"})


class Restarts:
    """Counts the deaths of an agent, an engine or a proxy; `most` of them in ten minutes are followed by a restart."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._deaths: deque[float] = deque()

    def allow(self) -> bool:
        """Records a death; returns True if a restart may follow."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - _WINDOW_SECONDS:
            self._deaths.popleft()
        return len(self._deaths) <= self._most

    @property
    def last(self) -> str:
        return f"for the {len(self._deaths)}. time in ten minutes"
