"""Names of repositories on the Hugging Face hub: `hf://owner/name[@revision][/path]`.

A revision is a branch, a tag or a commit, `main` if none is named; `/` in its name is written as `%2F`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from resources.errors import BadInput

PROTOCOL = "hf"
MAIN = "main"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"({_NAME}/{_NAME})(?:@([^/]+))?(?:/(.*))?", re.DOTALL)
_PLAIN = re.compile(rf"(?=[^@]{{3,96}}(?:@|$))(?![^@]*(?:--|\.\.|[.-]/|[.-](?:@|$)))({_NAME}/{_NAME})(?:@([^@\s]+))?")
_OTHER_REFS = re.compile(r"@(refs)/(pr|convert)/([^/]+)")


class Place(NamedTuple):
    """A repository as `owner/name`, a revision, and a path below it, which may be empty."""

    repository: str
    revision: str
    path: str

    @property
    def uri(self) -> str:
        """The location that names it."""
        revision = f"@{quote(self.revision, safe='')}" if self.revision != MAIN else ""
        return f"{PROTOCOL}://{self.repository}{revision}{'/' if self.path else ''}{self.path}"


def hub_location(text: str) -> str:
    """Returns a location that a user named, with a repository of the hub as `hf://owner/name[@revision]`.

    Plain `owner/name[@revision]` is such a repository if the hub has such names, unless a folder of that name, or of
    the owner's, is here.
    """
    if in_hub(text):
        return place_of(_OTHER_REFS.sub(r"@\1%2F\2%2F\3", text)).uri
    matched = _PLAIN.fullmatch(text)
    if matched is None or Path(text).exists() or Path(text).parent.exists():
        return text
    return Place(matched[1], matched[2] or MAIN, "").uri


def in_hub(uri: str) -> bool:
    """Returns True for a location on the hub."""
    return uri.startswith(f"{PROTOCOL}://")


def place_of(uri: str) -> Place:
    """Returns the parts of a location on the hub; raises BadInput for another form."""
    matched = _REPOSITORY.fullmatch(uri.removeprefix(f"{PROTOCOL}://").rstrip("/"))
    if matched is None:
        raise BadInput(
            expected="a repository of the hub as hf://owner/name, hf://owner/name@revision or with /path behind it",
            found=uri,
            remedy="write it so; for a data set or a bucket, copy the files to a folder or a store",
        )
    return Place(matched[1], unquote(matched[2] or MAIN), matched[3] or "")


def is_repository(uri: str) -> bool:
    """Returns True for a repository of the hub without a revision: its branches and tags may be a run."""
    return in_hub(uri) and place_of(uri)[1:] == (MAIN, "")


def hasher_of(content: str, size: int) -> Any:
    """Returns the beginning of a hash: SHA-256 for a file in large storage, else git's id of a file of `size` bytes.

    Source: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects.
    """
    return hashlib.sha256() if len(content) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
