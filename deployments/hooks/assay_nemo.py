"""Notifies Assay of every checkpoint of NeMo's Megatron-Bridge: `pretrain(..., callbacks=[AssayCallback()])`.

`config.checkpoint.also_save_hf_checkpoint = True` adds an export to each checkpoint, for which the training waits;
without it Assay has nothing to evaluate, which is logged. Read: NVIDIA-NeMo/Megatron-Bridge 067f987, 0.7.0
(`training/{callbacks,checkpointing}.py`: all ranks call `on_checkpoint_save` after the first rank has written the
iteration to `latest_checkpointed_iteration.txt`, with `async_save` some steps after the save began; an exception of a
callback ends the training).
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from assay_notify import harmless, notify
from megatron.bridge.training.callbacks import Callback, CallbackContext  # pyright: ignore[reportMissingImports]


class AssayCallback(Callback):
    """Notifies Assay of the latest saved iteration."""

    @harmless
    def on_checkpoint_save(self, context: CallbackContext) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            save = Path(context.state.cfg.checkpoint.save).absolute()
            iteration = int((save / "latest_checkpointed_iteration.txt").read_text())
            notify(str(save / f"iter_{iteration:07d}" / "hf"))
