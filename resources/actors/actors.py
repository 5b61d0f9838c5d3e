"""Actors: objects that live in a process of a job, called from elsewhere by handles.

Built once, on jobs: whatever runs jobs runs actors too. An actor dies with its job, and its job with whoever created
it, unless it outlives its parent. What it knows lives in its memory alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from resources.actors.actor_group import ActorGroup
from resources.actors.actor_handle import ActorHandle
from resources.actors.actor_key import actor_variables
from resources.actors.actor_server import serve_actor
from resources.config import ResourceConfig, TpuConfig
from resources.errors import BadInput
from resources.jobs.jobs import Call, Client, EnvironmentConfig, JobRequest, create_environment

_PREFIX = "actor-"  # of the names of their jobs


def create_actor(
    client: Client,
    actor_class: Callable[..., object],
    *args: Any,
    name: str,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    max_concurrency: int = 1,
    max_restarts: int = 0,
    outlives_parent: bool = False,
    **kwargs: Any,
) -> ActorHandle:
    """Starts an actor; returns before its object is made, and calls wait until it is.

    Args:
        client: where it runs.
        actor_class: makes the object in the actor's process, with the positional and named arguments that are left.
        args: positional arguments of `actor_class`.
        name: by which `get_actor` finds it while it lives.
        resources: what its process gets; one CPU when None.
        environment: of its process; `create_environment()` when None.
        max_concurrency: how many of its methods may run at once; the object must bear that.
        max_restarts: how often it is made anew, empty, after it was ended from outside, by preemption for example. An
            actor that crashes by its own doing, or cannot be made, is dead at once.
        outlives_parent: whether it goes on when the process that created it ends.
        kwargs: named arguments of `actor_class`.
    """
    if max_concurrency < 1:
        raise BadInput(expected="max_concurrency of at least 1", found=str(max_concurrency), remedy="Correct it.")
    resources = resources or ResourceConfig()
    if isinstance(resources.device, TpuConfig) and resources.device.slice.vms > 1:
        raise BadInput(
            expected="one machine for an actor, which is one object",
            found=f"{resources.device.variant}, a slice of {resources.device.slice.vms} VMs",
            remedy="Take a slice of one VM, or submit a job: it runs on every VM.",
        )
    environment = environment or create_environment()
    variables = {**environment.env_vars, **actor_variables()}
    host = "127.0.0.1" if client.is_local else None
    request = JobRequest(
        _PREFIX + name,
        Call(serve_actor, (actor_class, args, kwargs, max_concurrency, host)),
        resources=resources,
        environment=dataclasses.replace(environment, env_vars=variables),
        replicas=1,
        max_retries_preemption=max_restarts,
        outlives_parent=outlives_parent,
    )
    return ActorHandle(client, client.submit(request), name=name)


def create_actor_group(
    client: Client, actor_class: Callable[..., object], *args: Any, name: str, count: int, **options: Any
) -> ActorGroup:
    """Starts `count` equal actors named `<name>-0`, `<name>-1` …, which live and die each on its own.

    Args:
        client: where they run.
        actor_class: see `create_actor`, also for the other arguments.
        args: positional arguments of `actor_class`.
        name: first part of their names.
        count: how many.
        options: options of `create_actor`, and named arguments of `actor_class`.
    """
    if count < 1:
        raise BadInput(expected="at least one actor", found=f"count={count}", remedy="Correct it.")
    group = ActorGroup([], name=name)
    try:
        for index in range(count):
            group.add(create_actor(client, actor_class, *args, name=f"{name}-{index}", **options))
    except BaseException:
        group.shutdown()
        raise
    return group


def get_actor(client: Client, name: str) -> ActorHandle:
    """The living actor of that name, whichever process created it; the newest where several drivers chose the name."""
    living = [details for details in client.jobs() if not details.status.finished]
    names = [details.name.removeprefix(_PREFIX) for details in living if details.name.startswith(_PREFIX)]
    for details in living:
        if details.name == _PREFIX + name:
            return ActorHandle(client, client.attach(details.job_id), name=name)
    raise BadInput(
        expected=f"a living actor named {name}",
        found=f"only {', '.join(sorted(names))}" if names else "no actors at all",
        remedy="Correct the name, or create it first.",
    )
