"""The environments that harnesses run in; Levanter's are for trainings too, with JAX built for each kind of device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from resources.environments.environments import EnvironmentSpec

_FOLDER = Path(__file__).parent


def _spec(evaluator: str, name: str, smoke_import: str, *, python: str | None = None) -> EnvironmentSpec:
    return EnvironmentSpec(
        name, _FOLDER / evaluator / "requirements" / f"{name}.txt", smoke_import=smoke_import, python=python
    )


ALPACA_EVAL = _spec("alpaca_eval", "alpaca-eval", "alpaca_eval.main, alpaca_eval.decoders.openai, sklearn.linear_model")
HELM = replace(
    _spec("helm", "helm", "helm.benchmark.run, helm.benchmark.presentation.summarize, helm.clients.openai_client"),
    overrides=_FOLDER / "helm" / "requirements" / "helm-overrides.in",
)
INSPECT_AI = _spec("inspect_ai", "inspect-ai", "inspect_ai.model._providers.openai_compatible_completions")
LM_EVAL = _spec("lm_eval", "lm-eval", "lm_eval.evaluator, lm_eval.models.openai_completions, transformers")
_OF_LEVANTER = "levanter.eval_harness, levanter.models.llama, levanter.checkpoint"
LEVANTER = {
    "cpu": _spec("levanter", "levanter", _OF_LEVANTER),
    "gpu": _spec("levanter", "levanter-cuda", _OF_LEVANTER, python="3.12"),
    "tpu": _spec("levanter", "levanter-tpu", _OF_LEVANTER, python="3.12"),
}
