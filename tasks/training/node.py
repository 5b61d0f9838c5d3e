"""The node of a training's job: builds the environment and runs Levanter in it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from resources.environments.environments import ensure_environment
from resources.jobs.announcements import announce
from resources.settings import process_environment, settings
from tasks.evaluators.environments import LEVANTER

_PROGRAM = Path(__file__).parent / "programs" / "run_levanter_train.py"
_JOB_FILE = "job.json"
_REFUSAL_FILE = "refused.json"


def train(train_config: Mapping[str, Any], *, device: str, trained: str | None, digest: str) -> None:
    """Trains, records `digest` in the file `trained`, and ends this process with the training's exit code."""
    python = ensure_environment(LEVANTER[device]).python
    with tempfile.TemporaryDirectory(prefix="assay-training-") as name:
        folder = Path(name)
        job = {"train_config": dict(train_config), "trained": trained, "digest": digest}
        (folder / _JOB_FILE).write_text(json.dumps(job))
        returncode = _run([str(python), "-I", "-u", str(_PROGRAM), _JOB_FILE], folder)
        refusal = folder / _REFUSAL_FILE
        if refusal.is_file():
            announce(refusal.read_text(errors="replace"))
    if returncode:  # signals as in shells (128 + n), which backends distinguish from a training's own exit code
        sys.exit(returncode if returncode > 0 else 128 - returncode)


def _run(command: list[str], folder: Path) -> int:
    variables = process_environment()
    variables.setdefault("JAX_COMPILATION_CACHE_DIR", str(settings().jax_cache_dir))
    variables.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # many small programs take 3 s at a start
    with (
        subprocess.Popen(command, cwd=folder, env=variables, stdin=subprocess.PIPE) as training,
        _passing_on_sigterm(training),
    ):
        return training.wait()


@contextmanager
def _passing_on_sigterm(training: subprocess.Popen[bytes]) -> Iterator[None]:
    if current_thread() is not main_thread():  # a backend may run calls in threads, and handle signals itself
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: training.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
