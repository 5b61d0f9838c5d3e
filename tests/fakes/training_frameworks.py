"""Training frameworks as far as a hook sees them: names, signatures and order of calls of the named sources.

pytorch/torchtitan b5bcd76, radixark/miles 31f1ca9, NVIDIA-NeMo/Megatron-Bridge 067f987, transformers 5.19.0.
"""

from __future__ import annotations

import abc
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ASSAY = """\
import json, pathlib, sys, time
mode, log, *argv = sys.argv[1:]
with pathlib.Path(log).open("a") as file:
    file.write(json.dumps(argv) + "\\n")
if mode == "hangs":
    time.sleep(60)
if mode == "away":
    sys.exit("Expected a Prefect server; found none")
problems = ["no weights"] if mode == "incomplete" else []
print(json.dumps({"checkpoint": argv[1], "sent": not problems, "automations": [], "problems": problems}))
"""
"""Replaces `assay notify`: logs its arguments, then answers, refuses or hangs."""

CONVERT_TO_HF = """\
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("input_dir", type=pathlib.Path)
parser.add_argument("output_dir", type=pathlib.Path)
parser.add_argument("--hf_assets_path", type=pathlib.Path)
parser.add_argument("--model_name", nargs="?")
parser.add_argument("--model_flavor", nargs="?")
parser.add_argument("--export_dtype", nargs="?", choices=["float16", "bfloat16", "float32"])
args = parser.parse_args()
assert (args.input_dir / ".metadata").exists() and args.model_name == "llama3" and args.model_flavor == "8B"
args.output_dir.mkdir(parents=True)
args.output_dir.joinpath("model.safetensors.index.json").write_text("weights of " + args.input_dir.name)
"""
"""torchtitan's script, without the weights."""


class TrainerCallback:
    """transformers' `TrainerCallback`; `Trainer` calls its `on_save` after a folder is written."""


class CheckpointManager:
    """torchtitan's checkpoint manager: trainers call `save`, shared by all managers; each overrides `_save`."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        enable: bool = False
        folder: str = "checkpoint"
        last_save_in_hf: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.folder = f"{base_folder}/{config.folder}"
        self.last_save_in_hf = config.last_save_in_hf
        self.sd_adapter = sd_adapter

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step % 10:
            return False
        state = Path(self._create_checkpoint_id(curr_step))
        state.mkdir(parents=True)
        mark = "model.safetensors.index.json" if last_step and self.last_save_in_hf else ".metadata"
        (state / mark).touch()
        return True

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return f"{folder or self.folder}/step-{step}"


class EvalSkip(Exception):
    """miles' exception for a point without a score."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CheckpointEvalFn(abc.ABC):
    """miles' external evaluation; constructed once, called for each export."""

    @abc.abstractmethod
    async def evaluate_checkpoint(self, checkpoint_dir: str, input: Any) -> Any: ...

    async def __call__(self, input: Any) -> Any:
        assert input.evaluation and input.hf_dir is not None
        return await self.evaluate_checkpoint(input.hf_dir, input)


class Callback:
    """Megatron-Bridge's callback; its manager compares the functions behind methods to find overridden methods."""

    def on_checkpoint_save(self, context: Any) -> None: ...


def install_frameworks(patch: pytest.MonkeyPatch, *, rank: int = 0) -> None:
    """Installs these modules in place of the real frameworks; `rank` is that of this process."""
    held: dict[str, dict[str, Any]] = {
        "transformers": {
            "TrainerCallback": TrainerCallback,
            **dict.fromkeys(("TrainerControl", "TrainerState", "TrainingArguments"), SimpleNamespace),
        },
        "torch": {},
        "torch.distributed": {"get_rank": lambda: rank, "is_initialized": lambda: True},
        "torchtitan": {},
        "torchtitan.components": {},
        "torchtitan.components.checkpointer": {"CheckpointManager": CheckpointManager},
        "miles": {},
        "miles.rollout": {},
        "miles.rollout.base_types": dict.fromkeys(
            ("RolloutFnConstructorInput", "RolloutFnEvalInput", "RolloutFnEvalOutput"), Namespace
        ),
        "miles.rollout.checkpoint_eval": {"CheckpointEvalFn": CheckpointEvalFn, "EvalSkip": EvalSkip},
        "megatron": {},
        "megatron.bridge": {},
        "megatron.bridge.training": {},
        "megatron.bridge.training.callbacks": {"Callback": Callback, "CallbackContext": SimpleNamespace},
    }
    for name, content in held.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        patch.setitem(sys.modules, name, module)
        outer, _, own = name.rpartition(".")
        if outer:
            patch.setattr(sys.modules[outer], own, module, raising=False)
