"""The environment that lm-eval runs in."""

from __future__ import annotations

from pathlib import Path

from resources.environments.environments import EnvironmentSpec

_REQUIREMENTS = Path(__file__).parent / "requirements"

LM_EVAL = EnvironmentSpec(
    name="lm-eval",
    requirements=_REQUIREMENTS / "lm-eval.txt",
    smoke_import="lm_eval.evaluator, lm_eval.models.openai_completions, transformers",
)
