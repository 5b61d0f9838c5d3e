"""The tokenizer of the model in `run_lm_eval.py`, and the arguments that depend on it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lm_eval.models.utils import resolve_max_length
from refusals import Refused, no_chat_template

DEFAULT_GENERATED = 256
_log = logging.getLogger("lm_eval.models.api_models")


def load_tokenizer(job: dict[str, Any]) -> Any:
    """Returns the checkpoint's tokenizer; refuses if it is missing or damaged, or lacks a template that is needed."""
    from transformers import AutoTokenizer

    folder = job["model_args"]["tokenizer"]
    try:
        if not Path(folder).is_dir():  # else the hub would be searched for its name
            raise FileNotFoundError(f"no folder {folder}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer("a")
    except Exception as error:
        _log.error("the tokenizer cannot be loaded", exc_info=error)
        raise Refused(
            expected=f"a tokenizer that loads in {folder}",
            found=f"{type(error).__name__}: {error}"[:1000],
            remedy="Put the tokenizer's files of the training run into the checkpoint, whole",
        ) from error
    if job["apply_chat_template"] and not job["conversations"] and not tokenizer.chat_template:
        raise no_chat_template(folder)
    return tokenizer


def complete_model_args(job: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns model arguments with the lengths that the tokenizer and the model allow."""
    held = job["max_model_len"] or context_of(Path(job["model_args"]["tokenizer"]), tokenizer)
    # As in `--model hf`: tokens read at once; our engines also hold the token that they generate.
    max_length = held - 1 if job["pool"] else held
    given = job["model_args"]
    if job["conversations"]:
        given = {key: value for key, value in given.items() if not key.startswith("token")}
    max_gen_toks = min(job["max_gen_toks"] or DEFAULT_GENERATED, max_length // 2)
    return {**given, "max_length": max_length, "max_gen_toks": max_gen_toks}


def context_of(checkpoint: Path, tokenizer: Any) -> int:
    """Returns the tokens that the model holds, by its own configuration; lm-eval's default without a configuration."""
    try:
        described = json.loads((checkpoint / "config.json").read_text())
        return resolve_max_length(PretrainedShape(described), tokenizer)
    except (OSError, ValueError, AttributeError, TypeError):
        return resolve_max_length(None, tokenizer)


class PretrainedShape:
    """The numbers in a config.json, in the form in which lm-eval finds a context length."""

    def __init__(self, described: dict[str, Any]) -> None:
        below = described.get("text_config")
        self.__dict__.update({**described, "text_config": PretrainedShape(below) if below else None})
