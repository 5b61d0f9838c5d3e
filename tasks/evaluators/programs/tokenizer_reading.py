"""Reads the tokenizer of a checkpoint with transformers, and its config.json, for programs of harnesses."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

from refusals import Refused

LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Entries of config.json that describe a language model, as in `pools/architectures.py`."""
_log = logging.getLogger(__name__)


def read_tokenizer(folder: str, *, trusted: bool) -> Any:
    """Returns the tokenizer in a folder, by transformers; refuses if it cannot be read. `trusted`: its code may run."""
    transformers: Any = importlib.import_module("transformers")
    try:
        if not Path(folder).is_dir():  # else the hub would be searched for its name
            raise FileNotFoundError(f"no folder {folder}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        tokenizer("a")
    except Exception as error:  # errors of damaged files have no common type
        _log.error("the tokenizer cannot be loaded", exc_info=error)
        code = "Read the tokenizer's code, and allow it: trust_remote_code: true in engine_kwargs"
        files = (
            "Put the tokenizer's files of the training run into the checkpoint, whole, or name others by --tokenizer"
        )
        raise Refused(
            expected=f"a tokenizer that loads in {folder}",
            found=f"{type(error).__name__}: {error}"[:1000],
            remedy=code if "trust_remote_code" in str(error) else files,
        ) from error
    return tokenizer


def shape_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the config.json in a folder, with the entries of its language model in place of the whole's."""
    shape: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    while part := next((shape.pop(name) for name in LANGUAGE_MODELS if isinstance(shape.get(name), dict)), None):
        shape = {**shape, **part}
    return shape
