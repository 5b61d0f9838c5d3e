"""Delegates the evaluations of a miles training to Assay: `--eval-function-path assay_miles.AssayEvalFn`.

    train_async.py ... --eval-interval 20 --save-interval 20 --save-hf RUN/hf/step_{rollout_id} \\
        --eval-function-path assay_miles.AssayEvalFn

Do not set `--eval-hf-dir`: its snapshots are deleted. Each point appears in miles' own curves as
`eval/skipped_evaluated_by_assay`; the scores are in Assay's records. Read: radixark/miles 31f1ca9
(`rollout/checkpoint_eval.py`, `ray/rollout/{eval_dispatch,rollout_manager}.py`: `evaluate_checkpoint` gets an export
that is marked `.complete`, and `EvalSkip` ends a point without a score).
"""

from __future__ import annotations

from pathlib import Path

from assay_notify import harmless, notify
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnEvalOutput  # pyright: ignore[reportMissingImports]
from miles.rollout.checkpoint_eval import CheckpointEvalFn, EvalSkip  # pyright: ignore[reportMissingImports]


class AssayEvalFn(CheckpointEvalFn):
    """Notifies Assay of each export, which evaluates it."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        pass

    async def evaluate_checkpoint(self, checkpoint_dir: str, input: RolloutFnEvalInput) -> RolloutFnEvalOutput:
        """Called for each due evaluation, with a complete export."""
        _tell(checkpoint_dir)
        raise EvalSkip("evaluated_by_assay")


@harmless
def _tell(checkpoint: str) -> None:
    notify(str(Path(checkpoint).absolute()))
