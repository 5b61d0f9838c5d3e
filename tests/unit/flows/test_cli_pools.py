"""The checkpoints that `assay pool up` cannot serve, and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.models import write_run
from flows.cli.pools import checkpoints_to_serve
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
