"""Properties that the jobs of a pool share: their place, their environment, how often they are started again."""

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
    """The environment of the proxy or of a replica's agent: Assay as it is installed where they run.

    The workspace is an empty folder: nothing of the folder where a pool was asked for is sent along.
    """
    if config.resource_config.image is not None:
        image = config.resource_config.image
        return create_environment(docker_image=image, env_vars=dict(env_vars), inherited=inheritance.SERVICE)
    workspace = settings().cache_dir / "empty"
    workspace.mkdir(parents=True, exist_ok=True)
    return create_environment(workspace=workspace, env_vars=dict(env_vars), inherited=inheritance.SERVICE)


def labelled(name: str, label: str | None, suffix: str) -> str:
    """The name of a job: what it is, whose, and what makes it the only one of that name."""
    return "-".join(part for part in (name, label, suffix) if part)


def placed_with(resources: ResourceConfig) -> dict[str, Any]:
    """Region, zone and image of the replicas, for a job that is to run near them."""
    return resources.model_dump(include={"regions", "zone", "image"})


class Restarts:
    """The latest deaths of an agent, an engine or a proxy.

    Args:
        most: deaths in ten minutes that are followed by a restart.
        clock: seconds that never go back.
    """

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._deaths: deque[float] = deque()

    def allow(self) -> bool:
        """Notes a death; whether a restart may follow."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - _WINDOW_SECONDS:
            self._deaths.popleft()
        return len(self._deaths) <= self._most

    @property
    def count(self) -> int:
        """Deaths in the ten minutes before the last one."""
        return len(self._deaths)

    @property
    def last(self) -> str:
        """The last death among those of ten minutes, in words."""
        return f"for the {self.count}. time in ten minutes"
