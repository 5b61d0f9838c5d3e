"""Every scenario that real engines allow, on a pool of them: `make faults`.

pytest does not collect this file by itself: 2 engines on a CPU take many minutes for the full size, and need the
machine for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.models import write_nano_llama
from fakes.pools import InferencePool
from fakes.tokenizers import write_byte_tokenizer
from faults.scenarios.catalogue import SCENARIOS, check_scenario
from faults.scenarios.outcome import Scale
from faults.scenarios.target import Recipe, Target
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MODEL = "run-1"


@pytest.fixture(scope="module")
def engines(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A pool of 2 vLLM servers with short leases, since a fault is detected only when a lease has run out."""
    folder = write_byte_tokenizer(write_nano_llama(tmp_path_factory.mktemp("engines") / "step-1", hidden=64))
    config = InferencePoolConfig.model_validate(
        {
            "model": {
                "name": "run",
                "engine_kwargs": {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"},
            },
            "resource_config": {"replicas": 2},
            "engine_timeout_seconds": 120,
            "proxy_timeout_seconds": 600,
            "lease_seconds": 6,
            "max_replica_restarts": 100,  # each scenario ends 1 or 2 engines
        }
    )
    checkpoint = Servable.from_uri(MODEL, str(folder))
    with InferencePool(config, [checkpoint], on_event=print) as pool:
        pool.load(MODEL)
        recipe = Recipe(config, (checkpoint,), launcher=None)
        yield Target(pool, MODEL, owner_pid=os.getpid(), recipe=recipe)


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if not scenario.injects])
async def test_scenario_on_real_engines_holds(name: str, engines: Target, scale: Scale) -> None:
    await check_scenario(SCENARIOS[name], engines, scale)
