"""Code in checkpoints (`auto_map`), which nothing runs without `trust_remote_code`.

transformers runs code of a folder only for a config, model or tokenizer that it has no class of its own for
(`resolve_trust_remote_code` in huggingface/transformers 5.19, dynamic_module_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pools.architectures import has_config, is_listed
from pools.weights.formats import EXPORTERS, package_of, read_json
from pools.weights.model_files import ModelFolder
from pools.weights.tokenizers import SETTINGS_NAME
from resources.errors import BadInput

_ELSEWHERE = "--"  # as in `owner/name--modeling_own.Own`, code in another repository of the hub
_MODEL, _CONFIG, _TOKENIZER = "AutoModelForCausalLM", "AutoConfig", "AutoTokenizer"


def code_needed(folder: ModelFolder) -> str | None:
    """Returns the code of a checkpoint without which no engine or no harness reads it; None if it needs none.

    Raises:
        StorageError: a file in a store cannot be read.
    """
    recipes = [each.made_by for each in (folder, *folder.inputs)]
    if recipe := next((each for each in recipes if each in EXPORTERS), None):
        return f"shards of {package_of(recipe)} (its exporter unpickles without limits) are"
    config = _named(folder.config, _CONFIG)
    model = _named(folder.config, _MODEL) or config
    if model and not is_listed(folder.config):
        return f"config.json names {model}"
    if config and not has_config(folder.config):
        return f"config.json names {config}"
    return _needed_by_tokenizer(folder)


def _needed_by_tokenizer(folder: ModelFolder) -> str | None:
    if SETTINGS_NAME not in folder.files:
        return None
    described = read_json(folder.files[SETTINGS_NAME], [])
    tokenizer, own = _named(described, _TOKENIZER), described.get("tokenizer_class")
    if tokenizer and _ELSEWHERE not in tokenizer and not any(name.endswith(".py") for name in folder.files):
        return None
    if tokenizer and (own is None or tokenizer.rpartition(".")[2].removesuffix("Fast") == own.removesuffix("Fast")):
        return f"{SETTINGS_NAME} names {tokenizer}"
    return None


def require_code_allowed(folders: Iterable[ModelFolder], *, allowed: bool, engine: bool = True) -> None:
    """Raises BadInput for the first checkpoint that needs code of its own, unless that may run. `engine`: False if only
    its tokenizer is read, by a harness, since another server has the model."""
    for folder in folders if not allowed else ():
        if code := code_needed(folder) if engine else _needed_by_tokenizer(folder):
            raise BadInput(
                expected="checkpoints that are read without code of their own, which may do anything as this user",
                found=f"{code}, code {'of that repository, for' if _ELSEWHERE in code else 'in'} {folder.uri}",
                remedy="read that code, and allow it to engine and harness: trust_remote_code: true in engine_kwargs "
                "(--engine trust_remote_code=true)"
                if engine
                else "name a tokenizer without code (--tokenizer), or let Assay serve it with --engine "
                "trust_remote_code=true in place of --base-url",
            )


def _named(content: Mapping[str, Any], kind: str) -> str | None:
    own_code = content.get("auto_map")
    named = own_code.get(kind) if isinstance(own_code, dict) else None
    named = next((name for name in named if name), None) if isinstance(named, list) else named
    return ascii(named)[1:-1] if isinstance(named, str) else None
