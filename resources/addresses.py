"""Rejects user names, passwords and tokens in addresses, which go into records, logs, reports and Prefect's data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from resources.errors import BadInput

# In other addresses a container, or a user of kubectl or git, may precede the @: only a password is refused there.
_USER = re.compile(r"\s*(?:\w+\+)?(?:https?|wss?|grpcs?|tcp|ray|iris)://[^/?#\s]*@", re.IGNORECASE)
_PASSWORD = re.compile(r"\w://[^/?#\s@]*:[^/?#\s]*@")


def refuse_user_information(value: Any, *, place: str) -> None:
    """Raises `BadInput` for user information in an address or inside a value; reports its path, not its text."""
    for inside, text in _texts(value, place):
        if "@" in text and (_USER.match(text) or _PASSWORD.search(text)):
            raise BadInput(
                expected="addresses without user information",
                found=f"something between :// and @ in {inside}",
                remedy="take it out: passwords and keys belong into the environment, see docs/reference.md#settings",
            )


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(part, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, place)
