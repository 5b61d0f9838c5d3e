"""Tells Assay of every checkpoint of a `transformers` training: `Trainer(..., callbacks=[AssayCallback()])`.

Give the trainer its tokenizer as `processing_class`: only then is it in the checkpoints, which can be evaluated with it
alone. Read and run: transformers 5.19.0, whose `Trainer` calls `on_save` after the folder `checkpoint-N` is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay_notify import harmless, notify
from transformers import (  # pyright: ignore[reportMissingImports]
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class AssayCallback(TrainerCallback):
    """Tells Assay of a checkpoint once the first process has saved it."""

    @harmless
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by all processes after a save."""
        if state.is_world_process_zero:
            notify(str(Path(args.output_dir, f"checkpoint-{state.global_step}").absolute()))
