"""Notifies Assay of complete checkpoints from within a training, without blocking or failing it. Standard library only.

`assay notify` runs in a thread, for at most `NOTIFY_SECONDS`. Before that, checkpoints are prepared one at a time, for
example exported; a checkpoint that is not prepared within `PREPARE_SECONDS` of the call is skipped. Errors are logged
by the logger `assay`. A training that ends waits for running threads.

Environment variables of the training locate Assay: `ASSAY`, its command (`assay` when unset), and `PREFECT_API_URL`.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

NOTIFY_SECONDS = 90.0  # it takes 4 s, or as long as Prefect's client retries an unreachable server
PREPARE_SECONDS = 3600.0

Arguments = ParamSpec("Arguments")
LOG = logging.getLogger("assay")
_PREPARING = threading.Lock()  # each export has a model in memory


def harmless(hook: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Logs exceptions of a hook, so that the training goes on."""

    @wraps(hook)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:  # the boundary between a hook and its training
            LOG.exception("Assay was not notified of a checkpoint")

    return guarded


def notify(
    checkpoint: str,
    *,
    prepare: Callable[[float], None] | None = None,
    seconds: float = NOTIFY_SECONDS,
    prepare_seconds: float = PREPARE_SECONDS,
) -> threading.Thread:
    """Starts a thread that prepares a checkpoint folder, if needed, and notifies Assay that it is complete.

    `prepare` gets its deadline in the time of `time.monotonic()`. `seconds` bounds the notification, `prepare_seconds`
    the preparation with its wait for other preparations.
    """

    deadline = time.monotonic() + prepare_seconds

    @harmless
    def work() -> None:
        if prepare is not None:
            if not _PREPARING.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{checkpoint} waited {prepare_seconds:g} s for others to be prepared")
            try:
                prepare(deadline)
            finally:
                _PREPARING.release()
        _say(checkpoint, seconds=seconds)

    thread = threading.Thread(target=work, name=f"assay notify {checkpoint}")
    thread.start()
    return thread


def _say(checkpoint: str, *, seconds: float) -> None:
    argv = [*shlex.split(os.environ.get("ASSAY", "assay")), "notify", checkpoint, "--json"]
    # Variables for the training's Python must not affect Assay's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        LOG.error("Assay was not notified of %s: %s", checkpoint, done.stderr.strip() or f"exit code {done.returncode}")
        return
    answer = json.loads(done.stdout)
    if answer["sent"]:
        listening = ", ".join(answer["automations"]) or "no policy that is deployed with --on-event"
        LOG.info("Assay was notified of %s; it begins: %s", answer["checkpoint"], listening)
    else:
        LOG.error("Assay was not notified of %s: %s", checkpoint, "; ".join(answer["problems"]))
