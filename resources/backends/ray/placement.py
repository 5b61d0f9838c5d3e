"""Places of a job's processes on a Ray cluster: reserved all at once, or not at all.

A replica is a share of a node, or a whole TPU slice (`nodes.py`). All shares of a job are the bundles of a placement
group, which Ray creates only when it has room for all of them, so that two jobs cannot block each other with half of
their resources.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resources.backends.processes import device_variables
from resources.backends.ray.demand import allowed_nodes, best_selector, reason_to_wait, refusal, selector_of, share_of
from resources.backends.ray.nodes import (
    NODE_LABEL,
    RayNode,
    choose_slices,
    has_autoscaler,
    head_resource,
    read_nodes,
    slice_variables,
)
from resources.config import ResourceConfig, TpuConfig
from resources.tpu import TPU_TYPE_VARIABLE

_QUIET_SECONDS = 1.0  # a wait that every job has is not reported
_LAST_LOOK_SECONDS = 10.0  # 200 waiting jobs then read the nodes 20 times per second, 3 ms each
_LAST_SLICE_LOOK_SECONDS = 3.0  # free slices are only found by polling
_SHOWN_SECONDS = 60.0  # request for a slice type before the next type: an autoscaler would start all requested types
_NOT_GRANTED = {"NO_RESOURCES", "INFEASIBLE", "REMOVED", "FAILED_TO_COMMIT_RESOURCES"}
_DECISION_SECONDS = 5.0  # Ray takes milliseconds, on a busy machine tenths of a second
_DECISION_LOOK_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """Place of a process of a job: a bundle of the job's placement group."""

    share: Mapping[str, float]
    """Its resources by Ray's names."""
    selector: Mapping[str, str]
    """Labels of its node."""
    replica: int
    host: int
    """Index among the replica's hosts; a replica on a multi-VM TPU slice has several."""
    env_vars: Mapping[str, str]
    """Variables for the device; variables of the job override them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its Ray task, once the place is granted."""


async def place(ray: Any, resources: ResourceConfig, replicas: int, *, on_waiting: Callable[[str], None]) -> Placement:
    """Reserves the places of all replicas at once, waiting without a time limit. Cancelling releases the reservation.

    Args:
        on_waiting: called after a second, and on each change, with the reason that the job waits.
    """
    started = time.monotonic()
    reported: str | None = None
    claim: Placement | None = None
    pause_seconds = _QUIET_SECONDS
    slices = isinstance(resources.device, TpuConfig)
    anywhere = False
    try:
        while True:
            nodes = await asyncio.to_thread(read_nodes, ray)
            if claim is None:
                grows = slices and await asyncio.to_thread(has_autoscaler, ray, nodes)
                shown = resources.choices[int((time.monotonic() - started) / _SHOWN_SECONDS) % len(resources.choices)]
                claim = _next_claim(ray, nodes, resources, replicas, anywhere=anywhere, shown=shown if grows else None)
            reason = reason_to_wait(nodes, resources, replicas)
            if reason != reported and time.monotonic() - started >= _QUIET_SECONDS:
                on_waiting(reason)
                reported = reason
            if claim is None:
                await asyncio.sleep(pause_seconds)
            elif await claim.granted_within(pause_seconds):
                if claim.is_real:
                    return claim
                claim = await claim.withdraw()
                await asyncio.sleep(pause_seconds)
            elif not claim.lasts:
                claim = await claim.withdraw()
                anywhere = True
            pause_seconds = min(pause_seconds * 1.5, _LAST_SLICE_LOOK_SECONDS if slices else _LAST_LOOK_SECONDS)
    except BaseException:
        if claim is not None:
            await claim.withdraw()
        raise


def check(ray: Any, resources: ResourceConfig, replicas: int) -> None:
    """Raises if the current nodes can never satisfy the request, unless an autoscaler may add others."""
    nodes = read_nodes(ray)
    refused = refusal(nodes, resources, replicas)
    if refused is not None and not has_autoscaler(ray, nodes):
        raise refused


def _next_claim(
    ray: Any,
    nodes: Sequence[RayNode],
    resources: ResourceConfig,
    replicas: int,
    *,
    anywhere: bool,
    shown: ResourceConfig | None,
) -> Placement | None:
    if isinstance(resources.device, TpuConfig):
        for choice in resources.device.choices:
            if places := _slice_places(nodes, resources, choice, replicas):
                # These hosts looked free. If not granted soon, another job was faster, and other hosts are tried.
                return Placement(ray, places, lasts=False)
        if shown is not None:  # an autoscaler acts on requests: a claim on the slices' head resources
            head_places = [_head_place(shown, replica) for replica in range(replicas)]
            return Placement(ray, head_places, lasts=False, is_real=False)
        return None
    allowed = allowed_nodes(nodes, resources)
    if not allowed and not resources.preemptible:
        return None  # non-preemptible nodes are selected by their ids
    share = share_of(nodes, resources)
    everywhere = selector_of(allowed, resources, region=None, avoided=())
    selector = everywhere if anywhere else best_selector(allowed, resources, share=share, replicas=replicas)
    # A claim on the best nodes is withdrawn if not granted soon; a claim on all allowed nodes waits.
    env_vars = device_variables(resources.device)
    places = [
        HostPlace(share=share, selector=selector, replica=replica, host=0, env_vars=env_vars)
        for replica in range(replicas)
    ]
    return Placement(ray, places, lasts=selector == everywhere)


def _slice_places(
    nodes: Sequence[RayNode], resources: ResourceConfig, tpu: TpuConfig, replicas: int
) -> list[HostPlace] | None:
    share = share_of(nodes, resources)
    allowed = allowed_nodes(nodes, resources)
    slices = choose_slices(allowed, tpu, replicas, share=share, regions=resources.regions or ())
    if slices is None:
        return None
    return [
        HostPlace(
            share={**share, **tpu_slice.claim(host)},
            selector={NODE_LABEL: node.node_id},
            replica=replica,
            host=host,
            env_vars={
                **device_variables(tpu),
                TPU_TYPE_VARIABLE: tpu.variant,
                **slice_variables(slices, replica, host),
            },
        )
        for replica, tpu_slice in enumerate(slices)
        for host, node in enumerate(tpu_slice.hosts)
    ]


def _head_place(resources: ResourceConfig, replica: int) -> HostPlace:
    assert isinstance(resources.device, TpuConfig)
    selector = selector_of((), resources, region=None, avoided=())
    return HostPlace(
        share={head_resource(resources.device.variant): 1.0}, selector=selector, replica=replica, host=0, env_vars={}
    )


class Placement:
    """A requested placement group, with all resources of a job once it is granted.

    Args:
        lasts: keep waiting for it.
        is_real: False if it is only a request for the autoscaler.
    """

    def __init__(self, ray: Any, places: Sequence[HostPlace], *, lasts: bool, is_real: bool = True) -> None:
        self.lasts = lasts
        self.is_real = is_real
        self._ray = ray
        self._places = places
        self._group = ray.util.placement_group(
            [dict(place.share) for place in places],
            strategy="PACK",
            bundle_label_selector=[dict(place.selector) for place in places],
        )
        self._granted = asyncio.wrap_future(self._group.ready().future())

    async def granted_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait({self._granted}, timeout=seconds)
        return bool(done) and self._granted.result() is not None

    async def withdraw(self) -> None:
        try:
            await self._decided()
        finally:
            self.release()

    async def _decided(self) -> None:
        deadline = time.monotonic() + _DECISION_SECONDS
        while not self._granted.done() and time.monotonic() < deadline:
            table = await asyncio.to_thread(self._ray.util.placement_group_table, self._group)
            if table.get("stats", {}).get("scheduling_state") in _NOT_GRANTED:
                return
            await asyncio.wait({self._granted}, timeout=_DECISION_LOOK_SECONDS)

    def release(self) -> None:
        """Releases the resources and ends the processes that still use them; may be called again."""
        self._granted.cancel()
        self._ray.util.remove_placement_group(self._group)

    @property
    def hosts(self) -> list[HostPlace]:
        """Returns the places of all processes."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [
            replace(
                place,
                options={
                    "scheduling_strategy": strategy(self._group, placement_group_bundle_index=index),
                    "resources": {"TPU": place.share["TPU"]} if "TPU" in place.share else {},
                    "num_cpus": place.share["CPU"],
                    "num_gpus": place.share.get("GPU", 0.0),
                    "memory": int(place.share["memory"]),
                },
            )
            for index, place in enumerate(self._places)
        ]
