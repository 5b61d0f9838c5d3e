"""Files that are replaced at once, so that no reader sees half of one."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON object in place of what the file held."""
    replace_text(path, json.dumps(content))


def replace_text(path: Path, text: str) -> None:
    """Writes a text in place of what the file held."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    unfinished.write_text(text)
    unfinished.replace(path)
