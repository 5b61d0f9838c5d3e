"""Reads the tokenizer of a checkpoint with transformers, for programs of harnesses that have it."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from refusals import Refused

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
