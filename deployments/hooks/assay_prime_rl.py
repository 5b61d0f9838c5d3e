"""Makes checkpoints of prime-rl's weight broadcasts in a separate process, and notifies Assay of them.

    python assay_prime_rl.py RUN_DIR MODEL_FOLDER [EVERY]

prime-rl has no callbacks and exports no checkpoints; `broadcasts/step_N` contains the weights, is marked with `STABLE`
when complete, and is soon deleted. Each marked broadcast, or each of every EVERY steps, becomes `RUN_DIR/hf/step_N`:
its weights by hard links, which copy nothing, with config and tokenizer of MODEL_FOLDER, the initial model of the
training. Train with `[weight_broadcast] type = "filesystem"` and without LoRA, since its broadcasts are adapters. Ends
with Ctrl-C. Read: PrimeIntellect-ai/prime-rl 559b447, v0.8.1.dev67 (`transports/weights/filesystem.py`,
`trainer/utils.py`: a broadcast is deleted two steps later, unless it is due for a checkpoint too; `utils/weights.py`:
files are renamed into place, never overwritten, so a link keeps its content).
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path

from assay_notify import harmless, notify

POLL_SECONDS = 1.0
WEIGHTS = (".safetensors", ".safetensors.index.json")
COPIED_SUFFIXES = {".json", ".jinja", ".model", ".txt"}


@harmless
def tell(broadcast: Path, model: Path, *, every: int) -> None:
    """Makes the checkpoint of a broadcast, unless it exists, and notifies Assay of it."""
    checkpoint = broadcast.parents[1] / "hf" / broadcast.name
    weights = sorted((f for f in broadcast.iterdir() if f.name.endswith(WEIGHTS)), key=lambda f: f.suffix == ".json")
    if int(broadcast.name.removeprefix("step_")) % every != 0 or _shows(checkpoint, weights):
        return
    if not weights or (broadcast / "adapter_config.json").exists():
        raise ValueError(f"{broadcast} has no whole model: broadcast through files, and without LoRA")
    shutil.rmtree(checkpoint, ignore_errors=True)  # a leftover of the same step from before the training was resumed
    checkpoint.mkdir(parents=True)
    try:
        for file in model.iterdir():
            if file.suffix in COPIED_SUFFIXES and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, checkpoint / file.name)
        for file in weights:  # last, and their index at the very end, so that an incomplete checkpoint lacks a file
            os.link(file, checkpoint / file.name)
    except OSError:  # the broadcast was deleted in the meantime, or is on another disk
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise
    notify(str(checkpoint))


def _shows(checkpoint: Path, weights: list[Path]) -> bool:
    linked = [checkpoint / file.name for file in weights]
    return bool(linked) and all(f.exists() and f.samefile(w) for f, w in zip(linked, weights, strict=True))


def follow(
    run: Path, model: Path, *, every: int = 1, looks: int | None = None, pause_seconds: float = POLL_SECONDS
) -> None:
    """Notifies Assay of each marked broadcast, and again if it was rewritten; `looks` limits the number of polls."""
    seen: set[tuple[str, int]] = set()
    while looks is None or looks > 0:
        for mark in run.glob("broadcasts/step_*/STABLE"):
            try:
                state = (mark.parent.name, mark.stat().st_mtime_ns)
            except FileNotFoundError:  # deleted in the meantime
                continue
            if state not in seen:
                seen.add(state)
                tell(mark.parent, model, every=every)
        looks = None if looks is None else looks - 1
        if looks != 0:
            time.sleep(pause_seconds)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    follow(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), every=int((*sys.argv, "1")[3]))
