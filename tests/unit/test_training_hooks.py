"""Hooks of trainings: their notifications to Assay, and a training that never fails or waits because of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fakes.models import write_checkpoint
from fakes.training_frameworks import ASSAY, CONVERT_TO_HF, CheckpointManager, EvalSkip, install_frameworks
from tasks.checkpoints.discovery import find_checkpoints

HOOKS = Path(__file__).parents[2] / "deployments" / "hooks"
NAMES = sorted(path.stem for path in HOOKS.glob("*.py"))

Load = Callable[..., ModuleType]


class Told:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        (folder / "assay.py").write_text(ASSAY)
        self.answers("complete")

    def answers(self, mode: str) -> None:
        command = [sys.executable, str(self._folder / "assay.py"), mode, str(self._folder / "told.jsonl")]
        self._patch.setenv("ASSAY", shlex.join(command))

    def checkpoints(self) -> list[str]:
        """Returns the reported checkpoints after the end of all threads."""
        for thread in threading.enumerate():
            if thread.name.startswith("assay notify"):
                thread.join(30)
        log = self._folder / "told.jsonl"
        asked = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        assert all((first, last) == ("notify", "--json") for first, _, last in asked)
        return [uri for _, uri, _ in asked]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path, monkeypatch)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a hook as a training with the folder on its path does."""

    def imported(name: str, *, rank: int = 0) -> Any:
        install_frameworks(monkeypatch, rank=rank)
        monkeypatch.syspath_prepend(str(HOOKS))
        for hook in NAMES:
            monkeypatch.delitem(sys.modules, hook, raising=False)
        return importlib.import_module(name)

    return imported


@pytest.mark.parametrize("name", NAMES)
def test_hook_loads_and_names_the_version_that_was_read(name: str, load: Load):
    documented = load(name).__doc__
    assert documented is not None
    assert name == "assay_notify" or "Read: " in documented or "Read and run: " in documented


@pytest.mark.parametrize(
    ("mode", "logged"),
    [("away", "Expected a Prefect server; found none"), ("incomplete", "no weights"), ("hangs", "timed out")],
)
def test_checkpoint_that_cannot_be_told_is_logged(
    told: Told, load: Load, caplog: pytest.LogCaptureFixture, mode: str, logged: str
):
    told.answers(mode)
    load("assay_notify").notify("/runs/a/step-1", seconds=0.5 if mode == "hangs" else 60).join(30)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("assay", logging.ERROR)
    assert logged in caplog.text and "/runs/a/step-1" in caplog.text


def test_missing_command_and_a_preparation_that_fails_are_logged_and_raise_nothing(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    hook = load("assay_notify")
    monkeypatch.setenv("ASSAY", "/nowhere/assay")
    hook.notify("/runs/a/step-1").join(30)
    hook.notify("/runs/a/step-2", prepare=lambda deadline: Path("/nowhere/model").unlink()).join(30)
    assert "'/nowhere/assay'" in caplog.text and "'/nowhere/model'" in caplog.text


def test_training_goes_on_during_a_notification_of_assay(told: Told, load: Load):
    hook, going_on = load("assay_notify"), threading.Event()

    def prepare(deadline: float) -> None:
        assert going_on.wait(5)

    hook.notify("/runs/a/step-1", prepare=prepare)
    going_on.set()
    assert told.checkpoints() == ["/runs/a/step-1"]


def test_preparations_wait_for_each_other_no_longer_than_their_own_time(
    told: Told, load: Load, caplog: pytest.LogCaptureFixture
):
    hook, going_on, deadlines = load("assay_notify"), threading.Event(), list[float]()

    def prepare(deadline: float) -> None:
        assert going_on.wait(5)
        deadlines.append(deadline)

    for step in (1, 2):
        hook.notify(f"/runs/a/step-{step}", prepare=prepare)
    called = time.monotonic()
    hook.notify("/runs/a/step-3", prepare=prepare, prepare_seconds=0.01).join(30)
    assert "/runs/a/step-3 waited 0.01 s" in caplog.text
    going_on.set()
    assert sorted(told.checkpoints()) == ["/runs/a/step-1", "/runs/a/step-2"]
    assert len(deadlines) == 2 and max(deadlines) <= called + hook.PREPARE_SECONDS


def test_python_of_the_training_is_not_that_of_assay(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "json.py").write_text("raise ImportError('of the training')")
    hook = load("assay_notify")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    hook.notify("/runs/a/step-1").join(30)
    assert told.checkpoints() == ["/runs/a/step-1"]


@pytest.mark.parametrize(("first", "expected"), [(True, 1), (False, 0)])
def test_trainer_tells_of_the_folder_it_saved_on_the_first_process(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, expected: int
):
    monkeypatch.chdir(tmp_path)
    state = SimpleNamespace(global_step=500, is_world_process_zero=first)
    load("assay_transformers").AssayCallback().on_save(
        SimpleNamespace(output_dir="run"), state, SimpleNamespace(), model=None, processing_class=None
    )
    assert told.checkpoints() == [str(tmp_path / "run" / "checkpoint-500")] * expected


def titan(load: Load, folder: Path, *, rank: int = 0, last_save_in_hf: bool = False) -> CheckpointManager:
    write_checkpoint(folder / "assets")
    (folder / "scripts" / "checkpoint_conversion").mkdir(parents=True)
    (folder / "scripts" / "checkpoint_conversion" / "convert_to_hf.py").write_text(CONVERT_TO_HF)
    manager = load("assay_torchtitan", rank=rank).AssayCheckpointManager
    return manager(
        manager.Config(enable=True, model_name="llama3", model_flavor="8B", last_save_in_hf=last_save_in_hf),
        **dict.fromkeys(("dataloader", "optimizers", "lr_schedulers")),
        model_parts=[],
        states={},
        sd_adapter=SimpleNamespace(hf_assets_path="assets"),
        base_folder=str(folder / "run"),
    )


def test_torchtitan_exports_what_it_saves_and_tells_of_the_export(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    manager = titan(load, tmp_path)
    assert [manager.save(step) for step in (9, 10)] == [False, True]
    export = tmp_path / "run" / "checkpoint" / "hf" / "step-10"
    assert told.checkpoints() == [str(export)]
    assert (export / "model.safetensors.index.json").read_text() == "weights of step-10"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} < {file.name for file in export.iterdir()}


def test_torchtitan_completes_and_tells_of_a_last_checkpoint_that_it_saves_in_hugging_face_format(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert titan(load, tmp_path, last_save_in_hf=True).save(20, last_step=True)
    saved = tmp_path / "run" / "checkpoint" / "step-20"
    assert told.checkpoints() == [str(saved)]
    assert (saved / "config.json").exists() and not saved.with_name("hf").exists()


def test_torchtitan_skips_gone_or_failed_checkpoints_before_a_whole_checkpoint(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    manager, going_on = titan(load, tmp_path), threading.Event()
    states = tmp_path / "run" / "checkpoint"
    (states / "step-90").mkdir(parents=True)
    (states / "step-90" / ".metadata").touch()  # from before the training was resumed
    sys.modules["assay_notify"].notify("/runs/a", prepare=lambda deadline: bool(going_on.wait(5)))
    for step in (10, 20, 30):
        assert manager.save(step)
    shutil.rmtree(states / "step-10")
    (states / "step-20" / ".metadata").unlink()
    going_on.set()
    assert told.checkpoints() == ["/runs/a", str(states / "hf" / "step-30")]
    assert all(f"{states / name} is not whole, and later saves are" in caplog.text for name in ("step-10", "step-20"))


def test_torchtitan_tells_nothing_from_other_ranks(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert titan(load, tmp_path, rank=1).save(10)
    assert told.checkpoints() == []


def test_torchtitan_goes_on_where_its_export_fails(
    told: Told, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    manager = titan(load, tmp_path)
    (tmp_path / "scripts" / "checkpoint_conversion" / "convert_to_hf.py").write_text("raise SystemExit(7)")
    assert manager.save(10)
    assert told.checkpoints() == [] and "returned non-zero exit status 7" in caplog.text


def broadcast(run: Path, step: int, *, seed: int = 0, shards: int = 2) -> Path:
    """Writes weights as prime-rl broadcasts them, with their mark."""
    folder = write_checkpoint(run / "broadcasts" / f"step_{step}", seed=seed, shards=shards)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "STABLE").touch()
    return folder


def test_marked_broadcasts_become_checkpoints_and_stay_when_prime_rl_deletes_them(
    told: Told, load: Load, tmp_path: Path
):
    run, model = tmp_path / "run", write_checkpoint(tmp_path / "model", seed=9)
    for step in (10, 15, 20):
        broadcast(run, step, seed=step)
    (run / "broadcasts" / "step_20" / "STABLE").unlink()
    follow = load("assay_prime_rl").follow
    for _ in range(2):
        follow(run, model, every=10, looks=1)
    shutil.rmtree(run / "broadcasts")
    assert told.checkpoints() == [str(run / "hf" / "step_10")]
    [checkpoint] = find_checkpoints(str(run))
    assert (checkpoint.name, checkpoint.complete) == ("run-10", True)


def test_broadcast_of_a_resumed_training_takes_the_place_of_the_former(told: Told, load: Load, tmp_path: Path):
    run, model = tmp_path / "run", write_checkpoint(tmp_path / "model")
    hook = load("assay_prime_rl")
    for seed in (1, 2):
        shutil.rmtree(run / "broadcasts", ignore_errors=True)
        weights = broadcast(run, 10, seed=seed, shards=1) / "model.safetensors"
        hook.follow(run, model, looks=1)
        assert (run / "hf" / "step_10" / "model.safetensors").read_bytes() == weights.read_bytes()
    assert told.checkpoints() == [str(run / "hf" / "step_10")] * 2


@pytest.mark.parametrize("held", ["nothing", "adapter"])
def test_broadcast_without_a_whole_model_is_logged_once(
    told: Told, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture, held: str
):
    run, model = tmp_path / "run", write_checkpoint(tmp_path / "model")
    folder = broadcast(run, 10)
    if held == "adapter":
        (folder / "adapter_config.json").touch()
    else:
        for file in folder.glob("model*"):
            file.unlink()
    load("assay_prime_rl").follow(run, model, looks=2, pause_seconds=0)
    assert told.checkpoints() == [] and not (run / "hf").exists()
    assert len(caplog.records) == 1 and "broadcast through files, and without LoRA" in caplog.text


def test_miles_hands_each_export_over_and_skips_the_point(told: Told, load: Load, tmp_path: Path):
    evaluate = load("assay_miles").AssayEvalFn(SimpleNamespace(args=None, data_source=None))
    with pytest.raises(EvalSkip) as skipped:
        asyncio.run(evaluate(SimpleNamespace(evaluation=True, rollout_id=7, hf_dir=str(tmp_path / "hf" / "step_7"))))
    assert skipped.value.reason == "evaluated_by_assay"
    assert told.checkpoints() == [str(tmp_path / "hf" / "step_7")]


@pytest.mark.parametrize(("rank", "expected"), [(0, 1), (1, 0)])
def test_megatron_bridge_tells_of_the_iteration_that_it_named_last(
    told: Told, load: Load, tmp_path: Path, rank: int, expected: int
):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    config = SimpleNamespace(checkpoint=SimpleNamespace(save=str(tmp_path)))
    state = SimpleNamespace(cfg=config, train_state=SimpleNamespace(step=44))
    load("assay_nemo", rank=rank).AssayCallback().on_checkpoint_save(SimpleNamespace(state=state, model=[]))
    assert told.checkpoints() == [str(tmp_path / "iter_0000040" / "hf")] * expected


def test_training_goes_on_where_a_trainer_saves_elsewhere(load: Load, caplog: pytest.LogCaptureFixture):
    load("assay_transformers").AssayCallback().on_save(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
    assert "AttributeError" in caplog.text
    state = SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(save=None)))
    load("assay_nemo").AssayCallback().on_checkpoint_save(SimpleNamespace(state=state, model=[]))
    assert "TypeError" in caplog.text
