"""The division of a model over what its replica gets: by default, by engine_kwargs, and where a model cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pools.config import InferencePoolConfig
from pools.engine.engines import engine_flags, engine_kwargs
from pools.engine.launch import Servable
from pools.engine.parallelism import require_divisible, why_not_divided
from pools.pool.inference import InferencePool
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


def pool(device: dict[str, Any], **kwargs: Any) -> InferencePoolConfig:
    model = {"name": "run", "engine_kwargs": kwargs}
    return InferencePoolConfig.model_validate({"resource_config": {"device": device}, "model": model})


def gpus(count: int, **kwargs: Any) -> InferencePoolConfig:
    return pool({"kind": "gpu", "count": count}, **kwargs)


def tpu(variant: str, **kwargs: Any) -> InferencePoolConfig:
    return pool({"kind": "tpu", "variant": variant}, **kwargs)


@pytest.mark.parametrize("variant", TPU_TOPOLOGIES)
def test_replica_on_a_slice_takes_all_its_chips_or_is_refused(variant: str, described: Describe) -> None:
    slice_ = TPU_TOPOLOGIES[variant]
    config, model = tpu(variant), described({**LLAMA, "num_attention_heads": 16384, "num_key_value_heads": 16384})
    flags = engine_flags(engine_kwargs(config))
    taken = int(flags[flags.index("--tensor-parallel-size") + 1]) if "--tensor-parallel-size" in flags else 1
    assert taken == slice_.chips
    if slice_.vms == 1:
        require_divisible(config, [model])
        return
    with pytest.raises(BadInput, match=rf"{slice_.chips} chips are on {slice_.vms} VMs") as refused:
        require_divisible(config, [model])
    smaller = refused.value.remedy.split()[1].rstrip(",")
    assert TPU_TOPOLOGIES[smaller].vms == 1
    assert smaller.split("-")[0] == variant.split("-")[0]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_replica_with_several_gpus_divides_each_tensor_over_them(count: int) -> None:
    assert engine_kwargs(gpus(count)).get("tensor_parallel_size", 1) == count


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
        (
            {"num_attention_heads": [8, 16], "num_hidden_layers": 2},
            8,
            2,
            None,
        ),  # it differs by layer: the engine's to say
        ({}, 8, 4, None),
    ],
)
def test_model_is_divided_where_its_heads_and_layers_allow(
    config: dict[str, Any], tensor: int, pipeline: int, reason: str | None
) -> None:
    assert why_not_divided(config, tensor=tensor, pipeline=pipeline) == reason


@pytest.mark.parametrize(
    ("pool_config", "model", "found", "remedy"),
    [
        (gpus(8), SEVEN, "7 KV heads do not divide by 8", "tensor_parallel_size: 1 and pipeline_parallel_size: 8"),
        (gpus(8), {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 12}, "12 attention", "size: 4 and .* 2 "),
        (tpu("v6e-8"), SEVEN, "7 KV heads", "tensor_parallel_size: 1 in engine_kwargs, or ask for 1 chip$"),
        (gpus(4, pipeline_parallel_size=4), {"num_hidden_layers": 2}, "2 layers are fewer than 4", "size: 4 alone"),
        (gpus(4, tensor_parallel_size=8), LLAMA, "tensor_parallel_size: 8", "is taken$"),
        (tpu("v6e-1", pipeline_parallel_size=2), LLAMA, "pipeline_parallel_size: 2", "ask for more"),
        (gpus(4, tensor_parallel_size="all"), LLAMA, "'all'", "correct engine_kwargs"),
        (gpus(4, data_parallel_size=0), LLAMA, "0", "correct engine_kwargs"),
    ],
)
def test_division_that_cannot_be_is_refused_with_one_that_can(
    pool_config: InferencePoolConfig, model: dict[str, Any], found: str, remedy: str, described: Describe
) -> None:
    with pytest.raises(BadInput) as refused:
        require_divisible(pool_config, [described(model)])
    assert found in refused.value.found
    assert re.search(remedy, refused.value.remedy), refused.value.remedy


def test_pool_refuses_before_it_starts_anything(described: Describe) -> None:
    with pytest.raises(BadInput, match="7 KV heads do not divide by 4"), InferencePool(gpus(4), [described(SEVEN)]):
        pass
    with pytest.raises(BadInput, match="16 chips are on 4 VMs"), InferencePool(tpu("v5e-16"), [described(LLAMA)]):
        pass


def test_whole_machine_computes_where_a_model_allows(described: Describe) -> None:
    for config in (gpus(8), tpu("v6e-8"), gpus(1), pool({"kind": "cpu"})):
        require_divisible(config, [described(LLAMA)])
