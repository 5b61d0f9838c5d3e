"""Announcements: a short text from a job's process to the holders of the job's handle, such as its address."""

from __future__ import annotations

from resources.errors import BadInput
from resources.settings import announcement_path
from resources.storage.files import replace_text

MAX_BYTES = 4096


def announce(text: str) -> None:
    """Sets the text that `JobHandle.announced()` returns for this replica, until the next announcement."""
    path = announcement_path()
    if path is None or len(text.encode()) > MAX_BYTES:
        raise BadInput(
            expected=f"a text of at most {MAX_BYTES} bytes, announced by a process of a job",
            found="no job" if path is None else f"{len(text.encode())} bytes",
            remedy="Submit it with a job client, and announce an address rather than content.",
        )
    replace_text(path, text)
