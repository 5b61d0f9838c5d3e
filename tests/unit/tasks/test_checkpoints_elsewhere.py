"""Checkpoints of another region: every read is refused, or paid for where that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import gcsfs
import pytest

from fakes.gcs import fake_gcs
from fakes.models import write_checkpoint
from fakes.pools import InferencePool
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.access import PoolAccess
from pools.pool.kept import keep_up
from pools.pool.session import PoolSession
from pools.proxy.client import ProxyAddress
from pools.settings import ProxyKeys
from resources.errors import WrongRegion
from resources.regions.region_check import check_reads
from resources.settings import settings
from tasks.generation.config import GenerationConfig
from tasks.generation.generate import PlannedGeneration, Target, pool_of
from tasks.generation.output import AnswerFolder
from tasks.generation.prompts import plan_prompts
from tasks.generation.worker import SharedColumns
from tasks.running.provisioning import provisioned
from tasks.spec.evaluation import EvaluationConfig

BUCKET, HERE = "marin-eu-west4", ("us-central2",)
THERE = f"gs://{BUCKET}/run/step-1"
POOL = InferencePoolConfig.model_validate({"model": {"name": "run"}, "resource_config": {"regions": HERE}})
KEYS = ProxyKeys.new()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servable]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "step-1")
    with fake_gcs(BUCKET) as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", store.address)
        gcsfs.GCSFileSystem.clear_instance_cache()
        for path in folder.iterdir():
            gcsfs.GCSFileSystem().pipe_file(f"{THERE}/{path.name}", path.read_bytes())
        yield Servable.from_uri("run-1", THERE)
    gcsfs.GCSFileSystem.clear_instance_cache()


def evaluate(checkpoint: Servable, folder: Path) -> None:
    config = EvaluationConfig.model_validate(
        {"model_path": THERE, "evals": [{"name": "arc_easy"}], "evaluation_path": str(folder), "pool_config": POOL}
    )
    with provisioned([config], [checkpoint]):
        pass


def evaluate_by_levanter(checkpoint: Servable, folder: Path) -> None:
    config = EvaluationConfig.model_validate(
        {
            "model_path": THERE,
            "evals": [{"name": "arc_easy"}],
            "evaluation_path": str(folder),
            "evaluator": {"name": "levanter_lm_evaluation_harness"},
            "resource_config": {"regions": HERE},
        }
    )
    with provisioned([config], [checkpoint]):
        pass


def generate(checkpoint: Servable, folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    config = GenerationConfig.model_validate(
        {"model_path": THERE, "pool_config": POOL, "prompts": {"files": [str(prompts)]}, "output_path": str(folder)}
    )
    output, origin = AnswerFolder(str(folder), "jsonl"), SharedColumns("run-1", "d", "pool", "p")
    target = Target("run-1", checkpoint, output, origin, {})
    plan = plan_prompts(config.prompts, prompts_per_shard=config.prompts_per_shard)
    with pool_of(PlannedGeneration(config, plan, (target,)), [target], lost=False):
        pass


def start_a_pool(checkpoint: Servable, folder: Path) -> None:
    with InferencePool(POOL, [checkpoint]):
        pass


def keep_a_pool_up(checkpoint: Servable, folder: Path) -> None:
    keep_up("elsewhere", POOL, [checkpoint], idle_seconds=1)


def use_a_kept_pool(checkpoint: Servable, folder: Path) -> None:
    address = ProxyAddress(host="127.0.0.1", port=9, pid=1)
    access = PoolAccess(address=address, key=KEYS.client, admin_key=KEYS.admin, config=POOL, engine_build="b")
    PoolSession(access, [checkpoint], holder="a test")


WAYS = [evaluate, evaluate_by_levanter, generate, start_a_pool, keep_a_pool_up, use_a_kept_pool]


@pytest.mark.parametrize("way", WAYS)
def test_checkpoint_of_another_region_is_refused_before_anything_starts(
    way: Callable[[Servable, Path], None], checkpoint: Servable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    with pytest.raises(WrongRegion) as caught:
        way(checkpoint, tmp_path)
    assert "in the region us-central2" in caught.value.expected
    assert f"{THERE} is in europe-west4; reading " in caught.value.found and " GB once costs " in caught.value.found
    assert "ASSAY_MAX_EGRESS_USD=0.01" in caught.value.remedy
    assert not (settings().jobs_dir.exists() or settings().environments_dir.exists())


def test_checkpoint_of_another_region_is_read_where_that_costs_no_more_than_allowed(
    checkpoint: Servable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_MAX_EGRESS_USD", str(Decimal("0.01")))
    settings.cache_clear()
    check_reads([THERE], POOL.resource_config, backend=None)
