"""Notifies Assay of every checkpoint of a `transformers` training: `Trainer(..., callbacks=[AssayCallback()])`.

Pass the tokenizer to the trainer as `processing_class`: it is needed for evaluation, and only then in the checkpoints.
Read and run: transformers 5.19.0 (`Trainer` calls `on_save` after the folder `checkpoint-N` is written).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay_notify import harmless, notify
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # pyright: ignore[reportMissingImports]


class AssayCallback(TrainerCallback):
    """Notifies Assay of a checkpoint after the first process has saved it."""

    @harmless
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            notify(str(Path(args.output_dir, f"checkpoint-{state.global_step}").absolute()))
