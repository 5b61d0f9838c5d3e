"""Tells Assay of every checkpoint of NeMo's Megatron-Bridge: `pretrain(..., callbacks=[AssayCallback()])`.

`config.checkpoint.also_save_hf_checkpoint = True` makes an export in each, for which the training waits; without it
there is nothing that Assay could evaluate, and the log says so. Read: NVIDIA-NeMo/Megatron-Bridge 067f987, 0.7.0
(`training/{callbacks,checkpointing}.py`: all ranks call `on_checkpoint_save` once the first of them has named the
iteration in `latest_checkpointed_iteration.txt`, steps after it was begun where `async_save` is set; what a callback
raises ends the training).
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from assay_notify import harmless, notify
from megatron.bridge.training.callbacks import Callback, CallbackContext  # pyright: ignore[reportMissingImports]


class AssayCallback(Callback):
    """Tells Assay of the iteration that was named last."""

    @harmless
    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Called by all ranks after a checkpoint was saved."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            save = Path(context.state.cfg.checkpoint.save).absolute()
            iteration = int((save / "latest_checkpointed_iteration.txt").read_text())
            notify(str(save / f"iter_{iteration:07d}" / "hf"))
