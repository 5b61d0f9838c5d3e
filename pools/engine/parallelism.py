"""The division of a model over the chips or GPUs of its replica: defaults, and limits of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pools.architectures import language_config
from pools.config import InferencePoolConfig
from pools.engine.engines import (
    DATA_PARALLEL,
    EXECUTOR,
    PARALLEL_SIZES,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    engine_kwargs,
)
from pools.engine.launch import Servable
from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput

_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


def require_divisible(config: InferencePoolConfig, checkpoints: Iterable[Servable]) -> None:
    """Raises BadInput unless each replica can run on its resources, and each checkpoint can be divided over them."""
    resources = config.resource_config
    chips = resources.chips_per_replica
    kwargs = engine_kwargs(config)
    sizes = {name: kwargs.get(name, 1) for name in PARALLEL_SIZES}
    shown = ", ".join(f"{name}: {size}" for name, size in sizes.items() if size != 1)
    if wrong := [name for name, size in sizes.items() if type(size) is not int or size < 1]:
        raise BadInput(
            expected=f"a whole number above 0 as {wrong[0]}",
            found=repr(sizes[wrong[0]]),
            remedy="correct engine_kwargs, or leave it out",
        )
    if chips and math.prod(sizes.values()) > chips:
        raise BadInput(
            expected=f"engine_kwargs that take the {chips} {_unit(resources, chips)} of a replica, or fewer",
            found=shown,
            remedy=f"ask for more, or leave {TENSOR_PARALLEL} out: what is left by the others is taken",
        )
    if resources.hosts_per_replica > 1:
        _require_shares(resources, kwargs, sizes, shown=shown)
    tensor, pipeline = sizes[TENSOR_PARALLEL], sizes[PIPELINE_PARALLEL]
    for checkpoint in checkpoints if max(tensor, pipeline) > 1 else ():
        described = checkpoint.described
        if (why := why_not_divided(described, tensor=tensor, pipeline=pipeline)) is not None:
            raise BadInput(
                expected=f"engine_kwargs by which {checkpoint.name} can be divided",
                found=f"{why} ({shown}, from {chips} {_unit(resources, chips)})" if chips else f"{why} ({shown})",
                remedy=_remedy(described, resources),
            )


def why_not_divided(described: Mapping[str, Any], *, tensor: int, pipeline: int = 1) -> str | None:
    """Returns the reason that vLLM cannot divide a model in this way; None if its configuration shows none.

    Each tensor has `tensor` parts, the stack of layers `pipeline`. Attention heads must divide by `tensor`; KV heads
    divide too, or are copied to the same number of parts each.
    """
    text = language_config(described)
    heads, layers = _number(text, _HEADS), _number(text, _LAYERS)
    shared = 1 if text.get("multi_query") is True else _number(text, _KEY_VALUE_HEADS)
    if heads is not None and heads % tensor:
        return f"{heads} attention heads do not divide by {tensor}"
    compressed = "kv_lora_rank" in text  # each part keeps the whole latent of keys and values
    if shared is not None and not compressed and max(shared, tensor) % min(shared, tensor):
        return f"{shared} KV heads do not divide by {tensor}"
    if layers is not None and layers < pipeline:
        return f"{layers} layers are fewer than {pipeline} parts"
    return None


def _number(described: Mapping[str, Any], names: Iterable[str]) -> int | None:
    return next((described[name] for name in names if type(described.get(name)) is int and described[name] > 0), None)


def _require_shares(
    resources: ResourceConfig, kwargs: Mapping[str, Any], sizes: Mapping[str, int], *, shown: str
) -> None:
    hosts, is_slice = resources.hosts_per_replica, isinstance(resources.device, TpuConfig)
    if sizes[DATA_PARALLEL] > 1:
        raise BadInput(
            expected=f"a single engine on the {hosts} hosts of a replica",
            found=shown,
            remedy=f"leave {DATA_PARALLEL} out, and ask for more replicas",
        )
    if is_slice:
        if sizes[PIPELINE_PARALLEL] not in (1, hosts):
            raise BadInput(
                expected=f"a stack of layers that is whole, or divided over the {hosts} VMs of a slice",
                found=shown,
                remedy=f"leave {PIPELINE_PARALLEL} out, or make it {hosts}",
            )
        return
    if (executor := kwargs.get(EXECUTOR, "mp")) != "mp":
        raise BadInput(
            expected="hosts that find each other as the pool says",
            found=f"{EXECUTOR}: {executor}",
            remedy="leave it out",
        )
    ranks = math.prod(sizes.values())
    if ranks % hosts:
        raise BadInput(
            expected=f"engine_kwargs that divide a model over {hosts} hosts alike",
            found=f"{shown or 'a single part'}, {ranks} in all",
            remedy="leave sizes out, or choose sizes with a product divisible by the number of hosts",
        )


def require_place(resources: ResourceConfig, *, is_local: bool) -> None:
    """Raises BadInput if a replica's hosts are unavailable: a local pool has several hosts only as CPU processes."""
    if resources.hosts > 1 and is_local and not isinstance(resources.device, CpuConfig):
        raise BadInput(
            expected="a single host for each replica of a pool on this machine",
            found=f"hosts: {resources.hosts}",
            remedy=f"ask for all {resources.chips_per_replica} GPUs of a single machine, or use a cluster (ASSAY_JOBS)",
        )


def _unit(resources: ResourceConfig, count: int) -> str:
    unit = {"gpu": "GPU", "tpu": "chip", "cpu": "host"}[resources.device.kind]
    return unit + ("s" if count != 1 else "")


def _remedy(described: Mapping[str, Any], resources: ResourceConfig) -> str:
    chips = resources.chips_per_replica or resources.hosts
    most = max(
        size for size in range(1, chips + 1) if chips % size == 0 and not why_not_divided(described, tensor=size)
    )
    rest, sizes = chips // most, f"{TENSOR_PARALLEL}: {most}"
    if rest == 1:
        return f"use {sizes} alone in engine_kwargs"
    if isinstance(resources.device, GpuConfig) and why_not_divided(described, tensor=most, pipeline=rest) is None:
        sizes += f" and {PIPELINE_PARALLEL}: {rest}"
    return f"use {sizes} in engine_kwargs, or ask for {most} {_unit(resources, most)}"
