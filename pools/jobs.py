"""Properties that the jobs of a pool share: their place and their environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pools.config import InferencePoolConfig
from resources.config import ResourceConfig
from resources.jobs import inheritance
from resources.jobs.jobs import EnvironmentConfig, create_environment
from resources.settings import settings


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
