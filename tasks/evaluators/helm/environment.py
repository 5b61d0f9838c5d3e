"""The environment that HELM runs in."""

from __future__ import annotations

from pathlib import Path

from resources.environments.environments import EnvironmentSpec

_REQUIREMENTS = Path(__file__).parent / "requirements"

HELM = EnvironmentSpec(
    name="helm",
    requirements=_REQUIREMENTS / "helm.txt",
    overrides=_REQUIREMENTS / "helm-overrides.in",
    smoke_import="helm.benchmark.run, helm.benchmark.presentation.summarize, helm.clients.openai_client",
)
