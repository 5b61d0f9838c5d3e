"""Comparisons of a reload with a cold start: trusted comparisons, and lookalikes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.launcher import FakeLauncher
from fakes.models import CONFIG, write_checkpoint
from pools.config import InferencePoolConfig
from pools.engine.launch import ServedCheckpoint
from pools.engine.reload_trust import ROUNDING_NATS, Reading, ReloadTrust, Verdict, compare
from pools.replica.gang import Gang
from pools.replica.replica import Loading, ReplicaEngine
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.backends.local.client import LocalClient
from resources.settings import settings

BEFORE = Reading("float32", (-1.0, -2.0), (-3.0, -4.0))
COLD = Reading("float32", (-1.5, -2.0), (-3.0, -4.5), {"head": "b"})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()


def trust(**engine: Any) -> ReloadTrust:
    return ReloadTrust.for_engine(engine=engine, architecture=("config", "names"))


def test_reload_that_computes_like_a_cold_start_is_proved_right_and_remembered() -> None:
    verdict = trust().judge(before=BEFORE, reloaded=COLD, cold=COLD)
    assert (verdict.proves, verdict.change, verdict.outcome) == (True, 0.5, "they agree (0 nats)")
    remembered = trust().recall()
    assert remembered is not None
    assert remembered.proves
    assert trust(version="other").recall() is None


@pytest.mark.parametrize(
    "before",
    [
        replace(BEFORE, canary=(-1.45, -2.0)),
        replace(BEFORE, output_layer=(-3.0, -4.45)),
        replace(BEFORE, output_layer=()),
    ],
    ids=["nearly equal", "output layer nearly equal", "output layer unknown"],
)
def test_comparison_of_checkpoints_that_are_nearly_equal_proves_nothing_and_is_forgotten(before: Reading) -> None:
    verdict = trust().judge(before=before, reloaded=COLD, cold=COLD)
    assert verdict.agrees
    assert not verdict.proves
    assert "proves nothing" in verdict.outcome
    assert trust().recall() is None


@pytest.mark.parametrize(
    "reloaded",
    [
        replace(COLD, output_layer=(-3.0, -4.499)),  # a five-hundredth of the change
        replace(COLD, canary=(-1.499, -2.0)),
        replace(COLD, canary=(-1.5,)),
        replace(COLD, weights={"head": "a"}),
        replace(COLD, weights={}),
        replace(COLD, dtype="bfloat16"),
    ],
    ids=["output layer", "canary", "fewer tokens", "stale bytes", "unknown bytes", "other dtype"],
)
def test_reload_that_differs_by_more_than_rounding_is_never_trusted(reloaded: Reading) -> None:
    for before in (BEFORE, COLD):
        assert not trust().judge(before=before, reloaded=reloaded, cold=COLD).agrees
        remembered = trust().recall()
        assert remembered is not None
        assert "they differ" in remembered.outcome


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8"])
def test_bound_is_the_rounding_of_the_dtype(dtype: str) -> None:
    bound = ROUNDING_NATS.get(dtype, 0.0)
    before, cold = replace(BEFORE, dtype=dtype), replace(COLD, dtype=dtype)

    def verdict(difference: float) -> Verdict:
        return compare(before=before, reloaded=replace(cold, canary=(-1.5 + difference, -2.0)), cold=cold)

    assert verdict(0.9 * bound).proves
    assert not verdict(1.1 * bound + 1e-6).agrees


def test_verdict_of_older_rules_is_not_read() -> None:
    trust().path.parent.mkdir(parents=True)
    trust().path.write_text('{"agrees": true, "difference": 0.0, "change": 9.0, "proved_by": "a share"}')
    assert trust().recall() is None


def served(folder: Path, **kwargs: Any) -> ServedCheckpoint:
    write_checkpoint(folder, **kwargs)
    return ServedCheckpoint.from_folder(folder.name, folder, digest_model_folder(inspect_model_folder(str(folder))))


def loads(
    folder: Path, checkpoints: list[ServedCheckpoint], *, faults: dict[str, Any] | None = None, **config: Any
) -> list[Loading]:
    client = LocalClient()
    pool = InferencePoolConfig.model_validate({"model": {"name": "run", **config}, "reload_audit_share": 0})
    replica = ReplicaEngine(
        "replica",
        pool,
        launcher=FakeLauncher(folder, faults=faults or {}),
        client=client,
        on_change=lambda: None,
        drain=lambda: None,
        gang=Gang("replica", pool, host="127.0.0.1", token="join", start=0),
    )
    done = []
    try:
        for checkpoint in checkpoints:
            done.append(Loading())
            replica.load(checkpoint, done[-1])
    finally:
        replica.stop()
        client.shutdown()
    return done


def test_checkpoints_that_share_a_tensor_are_no_ground_for_trust_until_two_that_differ_have_proved_it(
    tmp_path: Path,
) -> None:
    first = served(tmp_path / "first", seed=1)
    shares = served(tmp_path / "shares", seed=1, reseeded={"lm_head.weight": 2})
    others = [served(tmp_path / f"other-{seed}", seed=seed) for seed in (3, 4)]
    second, third, fourth, *later = loads(tmp_path, [first, shares, first, *others, shares, first])[1:]
    assert [load.how for load in (second, third, fourth)] == ["restart"] * 3
    assert "reload" not in second.phases
    assert second.reason == (
        "reloads of this architecture are not proved right yet, and model.embed_tokens.weight is the same in both "
        "checkpoints"
    )
    assert third.reason == second.reason
    assert fourth.reason == "the first reload of this architecture is compared with a cold start: they agree (0 nats)"
    assert [(load.how, load.reason) for load in later] == [("reload", None)] * 3


def test_engine_with_a_stale_packed_output_layer_is_always_restarted(tmp_path: Path) -> None:
    checkpoints = [served(tmp_path / f"step-{seed}", seed=seed) for seed in (1, 2, 3)]
    second, third = loads(tmp_path, checkpoints, faults={"stale_output_layer": True})[1:]
    assert second.reason is not None and "they differ" in second.reason
    assert third.reason is not None and "a reload differed from a cold start before" in third.reason


def test_dtype_of_the_config_is_a_difference(tmp_path: Path) -> None:
    checkpoints = [
        served(tmp_path / dtype, seed=seed, config={**CONFIG, "torch_dtype": dtype})
        for seed, dtype in enumerate(("bfloat16", "float16"))
    ]
    [_, second] = loads(tmp_path, checkpoints)
    assert (second.how, second.reason) == ("restart", "its config differs (torch_dtype)")


def test_engine_without_our_calls_in_its_workers_is_always_restarted(tmp_path: Path) -> None:
    checkpoints = [served(tmp_path / f"step-{seed}", seed=seed) for seed in (1, 2)]
    [_, second] = loads(tmp_path, checkpoints, engine_kwargs={"worker_extension_cls": "of.theirs"})
    assert second.reason == "reloads of this engine cannot be compared with cold starts"
