"""Names of runs and checkpoints, read from where they lie."""

from __future__ import annotations

import re

from resources import storage

_STEP = re.compile(r"^(?:global_)?(?:step|checkpoint|iter)[-_]?(\d+)$")


def step_of(component: str) -> int | None:
    """The training step that a folder name such as step-2000, checkpoint-500 or global_step_10 stands for."""
    match = _STEP.match(component)
    return int(match.group(1)) if match else None


def name_of(uri: str) -> tuple[str, str, int]:
    """Run, checkpoint name and step behind a location: `$RUN/hf/step-$N` is the checkpoint `$RUN-$N` of `$RUN`.

    A folder without a step is a run of its own at step 0.
    """
    local = str(storage.local_path(uri).absolute()) if storage.is_local(uri) else uri.split("://", 1)[1]
    parts = [part for part in local.split("/") if part]
    step = step_of(parts[-1]) if parts else None
    if step is not None:
        parts = parts[:-1]
    if parts and parts[-1] == "hf":
        parts = parts[:-1]
    run = _as_name(parts[-1]) if parts else "model"
    return run, (f"{run}-{step}" if step is not None else run), step or 0


def _as_name(component: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9._+=@-]", "-", component).lstrip("._+=@-")
    return cleaned or "model"
