"""Files that are replaced at once, so that no reader sees half of one; the ends of those that grow."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

_TAIL_BYTES = 1 << 20


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON object in place of what the file held."""
    replace_text(path, json.dumps(content))


def replace_text(path: Path, text: str) -> None:
    """Writes a text in place of what the file held."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    unfinished.write_text(text)
    unfinished.replace(path)


def tail(path: Path, max_lines: int) -> str:
    """Returns the last lines of a file, a megabyte at most; nothing where it is not there yet."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-max_lines:] if max_lines > 0 else [])
