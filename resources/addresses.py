"""Addresses hold no user's name, password or token: they come into records, logs, reports and Prefect's database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from resources.errors import BadInput

# Before the @ of other addresses may be a container, a user of kubectl or of git: there only a password is refused.
_USER = re.compile(r"\s*(?:\w+\+)?(?:https?|wss?|grpcs?|tcp|ray|iris)://[^/?#\s]*@", re.IGNORECASE)
_PASSWORD = re.compile(r"\w://[^/?#\s@]*:[^/?#\s]*@")


def refuse_user_information(value: Any, *, place: str) -> None:
    """Refuses user information in an address, or in those inside a value; says where it is, not what."""
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
