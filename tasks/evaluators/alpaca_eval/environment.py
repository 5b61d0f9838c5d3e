"""The environment that AlpacaEval runs in."""

from __future__ import annotations

from pathlib import Path

from resources.environments.environments import EnvironmentSpec

_REQUIREMENTS = Path(__file__).parent / "requirements"

ALPACA_EVAL = EnvironmentSpec(
    name="alpaca-eval",
    requirements=_REQUIREMENTS / "alpaca-eval.txt",
    smoke_import="alpaca_eval.main, alpaca_eval.decoders.openai, sklearn.linear_model",
)
