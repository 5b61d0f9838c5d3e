"""Division of a model over a replica's devices: by default, by engine_kwargs, and models that cannot be divided."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.pools import InferencePool
from pools.config import InferencePoolConfig
from pools.engine.engines import engine_flags, engine_kwargs, ranks_of
from pools.engine.launch import Servable
from pools.engine.parallelism import require_divisible, why_not_divided
from pools.weights.model_files import ModelDigests
from resources.errors import BadInput
from resources.tpu import TPU_TOPOLOGIES

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
SEVEN = {"num_attention_heads": 56, "num_key_value_heads": 7, "num_hidden_layers": 80}

Describe = Callable[[dict[str, Any]], Servable]


@pytest.fixture
def described(tmp_path: Path) -> Describe:
    def servable(config: dict[str, Any]) -> Servable:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return Servable("run-1", str(tmp_path), ModelDigests(weights="w", tokenizer="t", config="c"), tmp_path)

    return servable


def pool(device: dict[str, Any], *, hosts: int = 1, **kwargs: Any) -> InferencePoolConfig:
    model = {"name": "run", "engine_kwargs": kwargs}
    return InferencePoolConfig.model_validate({"resource_config": {"device": device, "hosts": hosts}, "model": model})


def gpus(count: int, *, hosts: int = 1, **kwargs: Any) -> InferencePoolConfig:
    return pool({"kind": "gpu", "count": count}, hosts=hosts, **kwargs)


def tpu(variant: str, **kwargs: Any) -> InferencePoolConfig:
    return pool({"kind": "tpu", "variant": variant}, **kwargs)


def sizes(config: InferencePoolConfig) -> tuple[int, int]:
    flags = engine_flags(engine_kwargs(config))
    names = ("--tensor-parallel-size", "--pipeline-parallel-size")
    tensor, stack = (int(flags[flags.index(name) + 1]) if name in flags else 1 for name in names)
    return tensor, stack


WIDE = {**LLAMA, "num_attention_heads": 49152, "num_key_value_heads": 49152}


@pytest.mark.parametrize("variant", TPU_TOPOLOGIES)
def test_replica_on_a_slice_divides_each_tensor_over_all_its_chips(variant: str, described: Describe) -> None:
    config, slice_ = tpu(variant), TPU_TOPOLOGIES[variant]
    require_divisible(config, [described(WIDE)])
    assert sizes(config) == (slice_.chips, 1)
    assert config.resource_config.hosts_per_replica == slice_.vms


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8, 16])
def test_replica_with_gpus_divides_each_tensor_within_a_host_and_the_layers_over_hosts(
    count: int, hosts: int, described: Describe
) -> None:
    config = gpus(count, hosts=hosts)
    require_divisible(config, [described(WIDE)])
    assert sizes(config) == (count, hosts)
    assert config.resource_config.chip_count() == ranks_of(config) == count * hosts


def test_replica_on_the_cpus_of_several_hosts_divides_each_tensor_over_them(described: Describe) -> None:
    require_divisible(pool({"kind": "cpu"}, hosts=2), [described(LLAMA)])
    assert sizes(pool({"kind": "cpu"}, hosts=2)) == (2, 1)
    assert sizes(pool({"kind": "cpu"})) == (1, 1)


@pytest.mark.parametrize(
    ("kwargs", "tensor", "stack"),
    [
        ({"tensor_parallel_size": 16}, 16, 1),
        ({"tensor_parallel_size": 8}, 8, 2),
        ({"tensor_parallel_size": 4}, 4, 4),
        ({"pipeline_parallel_size": 1}, 16, 1),
        ({"pipeline_parallel_size": 4}, 4, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2, 2),
    ],
)
def test_engine_kwargs_say_otherwise_over_two_hosts_with_eight_gpus_each(
    kwargs: dict[str, Any], tensor: int, stack: int, described: Describe
) -> None:
    config = gpus(8, hosts=2, **kwargs)
    require_divisible(config, [described(LLAMA)])
    assert sizes(config) == (tensor, stack)


@pytest.mark.parametrize(
    ("kwargs", "tensor"),
    [
        ({"pipeline_parallel_size": 2}, 4),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 8}, None),
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor-parallel-size": 1}, 1),
    ],
)
def test_engine_kwargs_leave_the_rest_to_tensors(kwargs: dict[str, Any], tensor: int | None) -> None:
    assert engine_kwargs(gpus(8, **kwargs)).get("tensor_parallel_size") == tensor


@pytest.mark.parametrize(
    ("config", "tensor", "pipeline", "reason"),
    [
        (LLAMA, 8, 1, None),
        (LLAMA, 16, 1, None),  # two parts hold a copy of each KV head
        (LLAMA, 12, 1, "32 attention heads do not divide by 12"),
        (SEVEN, 8, 1, "7 KV heads do not divide by 8"),
        (SEVEN, 7, 1, None),
        (SEVEN, 14, 1, None),
        ({**SEVEN, "kv_lora_rank": 512}, 8, 1, None),
        (LLAMA, 1, 33, "32 layers are fewer than 33 parts"),
        ({"text_config": SEVEN, "num_attention_heads": 16}, 8, 1, "7 KV heads do not divide by 8"),
        ({"n_head": 12, "n_layer": 12}, 8, 1, "12 attention heads do not divide by 8"),
        ({"n_head": 71, "multi_query": True}, 71, 1, None),
        ({"num_attention_heads": [8, 16], "num_hidden_layers": 2}, 8, 2, None),  # differs by layer: left to the engine
        ({}, 8, 4, None),
    ],
)
def test_model_is_divided_where_its_heads_and_layers_allow(
    config: dict[str, Any], tensor: int, pipeline: int, reason: str | None
) -> None:
    assert why_not_divided(config, tensor=tensor, pipeline=pipeline) == reason


@pytest.mark.parametrize(
    ("pool_config", "model", "problem", "remedy"),
    [
        (gpus(8), SEVEN, "7 KV heads do not divide by 8", "tensor_parallel_size: 1 and pipeline_parallel_size: 8"),
        (gpus(8), {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 12}, "12 attention", "size: 4 and .* 2 "),
        (tpu("v6e-8"), SEVEN, "7 KV heads", "tensor_parallel_size: 1 in engine_kwargs, or ask for 1 chip$"),
        (gpus(4, pipeline_parallel_size=4), {"num_hidden_layers": 2}, "2 layers are fewer than 4", "size: 4 alone"),
        (gpus(4, tensor_parallel_size=8), LLAMA, "tensor_parallel_size: 8", "is taken$"),
        (tpu("v6e-1", pipeline_parallel_size=2), LLAMA, "pipeline_parallel_size: 2", "ask for more"),
        (gpus(4, tensor_parallel_size="all"), LLAMA, "'all'", "correct engine_kwargs"),
        (gpus(4, data_parallel_size=0), LLAMA, "0", "correct engine_kwargs"),
        (
            tpu("v6e-16"),
            SEVEN,
            "56 attention heads do not divide by 16",
            "tensor_parallel_size: 1 in engine_kwargs, or ask",
        ),
        (tpu("v6e-16", pipeline_parallel_size=2), LLAMA, "pipeline_parallel_size: 2", "make it 4"),
        (gpus(8, hosts=2), SEVEN, "7 KV heads do not divide by 8", "size: 1 and pipeline_parallel_size: 16"),
        (gpus(1, hosts=4), {"num_hidden_layers": 3}, "3 layers are fewer than 4 parts", "tensor_parallel_size: 4"),
        (gpus(8, hosts=2, data_parallel_size=2), LLAMA, "data_parallel_size: 2", "ask for more replicas"),
        (gpus(2, hosts=2, distributed_executor_backend="ray"), LLAMA, "backend: ray", "leave it out"),
        (
            gpus(2, hosts=3, tensor_parallel_size=2, pipeline_parallel_size=2),
            LLAMA,
            "4 in all",
            "divisible by the number of hosts",
        ),
        (pool({"kind": "cpu"}, hosts=2), SEVEN, "7 KV heads do not divide by 2", "or ask for 1 host$"),
    ],
)
def test_impossible_division_is_refused_with_a_possible_division(
    pool_config: InferencePoolConfig, model: dict[str, Any], problem: str, remedy: str, described: Describe
) -> None:
    with pytest.raises(BadInput) as refused:
        require_divisible(pool_config, [described(model)])
    assert problem in refused.value.found
    assert re.search(remedy, refused.value.remedy), refused.value.remedy


def test_pool_refuses_before_it_starts_anything(described: Describe) -> None:
    with pytest.raises(BadInput, match="7 KV heads do not divide by 4"), InferencePool(gpus(4), [described(SEVEN)]):
        pass
    with pytest.raises(BadInput, match="hosts: 2"), InferencePool(gpus(1, hosts=2), [described(LLAMA)]):
        pass
    with pytest.raises(ValueError, match=r"nnodes follows from the resources.* as hosts of resource_config"):
        gpus(1, nnodes=2)


def test_whole_machine_computes_where_a_model_allows(described: Describe) -> None:
    for config in (gpus(8), tpu("v6e-8"), gpus(1), pool({"kind": "cpu"})):
        require_divisible(config, [described(LLAMA)])
