"""Sizes of a checkpoint's language model, which a part of its config.json may describe. Executed by harnesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""As in `pools/architectures.py`."""


def shape_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the config.json in a folder, with the entries of its language model in place of the whole's."""
    shape: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    while part := next((shape.pop(name) for name in LANGUAGE_MODELS if isinstance(shape.get(name), dict)), None):
        shape = {**shape, **part}
    return shape
