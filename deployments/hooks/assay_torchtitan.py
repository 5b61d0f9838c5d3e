"""Exports every checkpoint of a torchtitan training to Hugging Face format and notifies Assay of it.

In the configuration, in place of `CheckpointManager.Config(...)`:

    checkpoint=AssayCheckpointManager.Config(enable=True, interval=500, model_name="llama3", model_flavor="8B")

The first process exports in a thread, with torchtitan's own script, on the CPU: a copy of the model in float32 must fit
in the host's memory. Start the training in torchtitan's repository, which has `scripts/`, with `checkpoint.folder` on
this machine or a mount. Read: pytorch/torchtitan b5bcd76 (`components/checkpointer/{base,dcp}.py`: `_save` returns
whether a checkpoint was written or, in asynchronous modes, staged; `scripts/checkpoint_conversion/convert_to_hf.py`
copies neither config nor tokenizer). Tested with this version, with PyTorch 2.13.0, on its debug model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from assay_notify import harmless, notify
from torchtitan.components.checkpointer import CheckpointManager  # pyright: ignore[reportMissingImports]

SCRIPT = "scripts/checkpoint_conversion/convert_to_hf.py"


class AssayCheckpointManager(CheckpointManager):
    """Saves as torchtitan does, and exports each checkpoint to `hf/` next to it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's configuration, with the model's name and flavor for its script."""

        model_name: str
        model_flavor: str

    def __init__(self, config: Config, **parts: object) -> None:
        super().__init__(config, **parts)
        self._model = ["--model_name", config.model_name, "--model_flavor", config.model_flavor]

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = super()._save(curr_step, last_step)
        if saved and dist.get_rank() == 0:
            self._tell(curr_step, exported=last_step and self.last_save_in_hf)
        return saved

    @harmless
    def _tell(self, step: int, *, exported: bool) -> None:
        state = Path(self._create_checkpoint_id(step)).absolute()
        assets, export = Path(self.sd_adapter.hf_assets_path).absolute(), state.parent / "hf" / state.name
        before = _whole_after(state)

        def prepare(deadline: float) -> None:
            if not exported:
                _wait(state, before, deadline=deadline)
                _convert(state, export, ["--hf_assets_path", str(assets), *self._model], deadline=deadline)
            for file in assets.iterdir():
                if file.suffix in {".json", ".jinja", ".model", ".txt"} and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, (state if exported else export) / file.name)

        notify(str(state if exported else export), prepare=prepare)


def _whole_after(state: Path) -> set[str]:
    steps = {file.parent.name.removeprefix("step-") for file in state.parent.glob("step-*/.metadata")}
    return {step for step in steps if step.isdigit() and int(step) > int(state.name.removeprefix("step-"))}


def _wait(state: Path, before: set[str], *, deadline: float) -> None:
    while True:
        later, late = _whole_after(state) - before, time.monotonic() > deadline
        if (state / ".metadata").exists():
            return
        # torchtitan saves one at a time: a complete later save means that this save failed
        if later or late:
            raise TimeoutError(f"{state} is not whole, and {'later saves are' if later else 'its time is over'}")
        time.sleep(1)


def _convert(state: Path, export: Path, options: list[str], *, deadline: float) -> None:
    subprocess.run(
        [sys.executable, SCRIPT, str(state), str(export), *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=max(0.0, deadline - time.monotonic()),
        check=True,
    )
