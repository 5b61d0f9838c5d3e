"""The environment that Inspect runs in."""

from __future__ import annotations

from pathlib import Path

from resources.environments.environments import EnvironmentSpec

INSPECT_AI = EnvironmentSpec(
    name="inspect-ai",
    requirements=Path(__file__).parent / "requirements" / "inspect-ai.txt",
    smoke_import="inspect_ai.model._providers.openai_compatible_completions",
)
