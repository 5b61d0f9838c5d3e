"""Architectures that an engine can write text with, and the part of a config.json that describes its language model.

`architectures.json` has vLLM's own list, by version: `pools/engine/programs/list_architectures.py` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LISTS = Path(__file__).with_name("architectures.json")
_LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
_OWN_CODE = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq")


@cache
def listed() -> dict[str, dict[str, frozenset[str]]]:
    """Returns names of architectures by engine version, and by `text` or `multimodal`; with `configs`, types of
    models with configs that it reads."""
    lists = json.loads(LISTS.read_bytes())
    return {
        version: {kind: frozenset(names if isinstance(names, list) else names.split()) for kind, names in kinds.items()}
        for version, kinds in lists.items()
    }


def why_not_served(config: Mapping[str, Any]) -> str | None:
    """Returns the reason that no engine writes text with a config's architectures, or None.

    Code of the checkpoint's own may define a model that the list lacks; the engine decides about it.
    """
    names = _architectures(config)
    own_code = config.get("auto_map")
    if isinstance(own_code, dict) and any(name in own_code for name in _OWN_CODE):
        return None
    if is_listed(config):
        return None
    named = ", ".join(ascii(name)[1:-1] for name in names)
    versions = ", ".join(listed())
    return f"config.json names {named or 'no architecture'}, which vLLM {versions} does not list as able to write text"


def is_listed(config: Mapping[str, Any]) -> bool:
    """Returns True if an engine has code of its own for a config's architectures."""
    names = _architectures(config)
    return any(name in kinds[kind] for kinds in listed().values() for kind in ("text", "multimodal") for name in names)


def has_config(config: Mapping[str, Any]) -> bool:
    """Returns True if an engine has a class of its own for a config, by its `model_type`."""
    return any(config.get("model_type") in kinds["configs"] for kinds in listed().values())


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Returns True if an engine would leave room for images, video or sound."""
    return any(name in kinds["multimodal"] for kinds in listed().values() for name in _architectures(config))


def language_path(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the keys that lead to the part of a config with the sizes of its language model; () for all of it."""
    for name in _LANGUAGE_MODELS:
        if isinstance(part := config.get(name), dict):
            return name, *language_path(part)
    return ()


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config with the sizes of its language model."""
    for name in language_path(config):
        config = config[name]
    return config


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
