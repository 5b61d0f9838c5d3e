"""`assay pool up`: the checkpoints that it cannot serve, and how it says so; what it takes of the limit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fakes.models import write_run
from flows.cli.options.groups import EvaluationOptions
from flows.cli.pools import accelerators_counted, checkpoints_to_serve, start_pool
from pools.pool import kept
from resources.environments import environments
from resources.errors import NoCheckpoints


def test_pool_up_names_checkpoints_left_out_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run-a", [1, 2, 3])
    binary, adapter = run / "hf" / "step-2", run / "hf" / "step-3"
    (binary / "model.safetensors").rename(binary / "pytorch_model.bin")
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "config.json").rename(adapter / "adapter_config.json")
    assert [checkpoint.step for checkpoint in checkpoints_to_serve(str(run))] == [1]
    shown = capsys.readouterr().err
    assert f"left out {binary}: weights are in pytorch_model*.bin; save them as safetensors" in shown
    assert f"left out {adapter}: config.json is missing; an adapter without its model" in shown


def test_pool_up_without_a_complete_checkpoint_says_why_of_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1])
    (run / "hf" / "step-1" / "model.safetensors").rename(run / "hf" / "step-1" / "pytorch_model.bin")
    with pytest.raises(NoCheckpoints, match=r"step-1: weights are in pytorch_model\*\.bin"):
        checkpoints_to_serve(str(run))


@pytest.mark.parametrize(("gpu", "reserved"), [("H100:2", accelerators_counted), (None, nullcontext)])
def test_pool_up_takes_its_accelerators_of_the_limit(
    gpu: str | None, reserved: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run-a", [1])
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(kept, "keep_up", lambda name, config, *_, **options: asked.append({"name": name, **options}))
    monkeypatch.setattr(environments, "ensure_environment", lambda spec: None)
    options = EvaluationOptions(model=str(run), gpu=gpu)
    start_pool(options, pool_name=None, idle_minutes=2, longest_wait_seconds=60)
    assert asked == [{"name": "run-a", "idle_seconds": 120, "reserved": reserved}]
