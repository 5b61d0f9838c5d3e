"""Refusing the earlier form of an evaluation, in which options of every evaluator stood beside `evaluator`."""

from __future__ import annotations

from math import inf
from typing import Any

import yaml

from tasks.spec.evaluators import EvaluatorOptions, spelled_out

_LM_EVAL, _LEVANTER = "lm_evaluation_harness", "levanter_lm_evaluation_harness"
_FIELDS = {"lm_eval": _LM_EVAL, "helm": "helm", "alpaca_eval": "alpaca_eval", "levanter": _LEVANTER}
_FALLBACK = "without_prompt_logprobs"


def refuse_earlier_form(values: Any) -> Any:
    """Return the values of an evaluation that are written as now.

    Raises:
        ValueError: they hold options beside `evaluator`; it says how to write them.
    """
    if not isinstance(values, dict):
        return values
    found = [name for name in (*_FIELDS, _FALLBACK) if name in values]
    if not found:
        return values
    evaluator = values.get("evaluator", {})
    content = evaluator.model_dump(exclude_unset=True) if isinstance(evaluator, EvaluatorOptions) else evaluator
    content = spelled_out(content)
    given = [name for name in found if isinstance(values[name], dict)]
    shown = {**content, **{key: value for name in given for key, value in _moved(name, values, content).items()}}
    if content["name"] == _LM_EVAL and values.get(_FALLBACK, "refuse") != "refuse":
        shown[_FALLBACK] = values[_FALLBACK]
    foreign = [name for name in given if values[name] and not _moved(name, values, content)]
    raise ValueError(
        f"expected the options of one evaluator, in `evaluator`, found {', '.join(found)} beside it: "
        f"write instead `evaluator: {_as_yaml(shown)}`"
        + (f", and leave out {', '.join(foreign)}, which {content['name']} does not take" if foreign else "")
    )


def _moved(field: str, values: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = values[field]
    if _FIELDS[field] == content["name"]:
        return given
    if field == "lm_eval" and content["name"] == _LEVANTER:
        return {name: given[name] for name in ("long_prompts", "allow_code_execution") if name in given}
    if field == "levanter" and content["name"] == _LM_EVAL and values.get(_FALLBACK) == "levanter":
        return {"levanter": given}
    return {}


def _as_yaml(content: dict[str, Any]) -> str:
    if set(content) == {"name"}:
        return content["name"]
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}
    return yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=inf).strip()
