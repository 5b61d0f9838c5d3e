"""Texts that a benchmark scores whole: fetched once from a repository at a fixed commit, and written as JSON lines.

The benchmarks' own files are in `suite_data/<name>/`, next to `source.yaml`, which gives the source of the texts. The
output is an ordinary folder of benchmarks: YAML files, and the data files that they name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resources.config import Config
from resources.errors import BadInput, StorageError
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.spec.benchmark_sets import SUITE_DATA

_SOURCE = "source.yaml"
_DONE = "staged.json"
_ATTEMPTS = 8
_SECONDS = 120
_UNTOLD_WAIT_SECONDS = 30.0
_LONGEST_WAIT_SECONDS = 900.0
_PASSING = frozenset({None, 408, 429, 500, 502, 503, 504})  # None: no answer


class TextFile(Config):
    """A file of texts: a JSON list of strings, or of objects with a field `text`."""

    path: str
    """Path of the file below `base`."""
    blob: str | None = None
    """Git's blob id of the content; unchecked when unset."""


class TextSource(Config):
    """The source of the texts of some benchmarks."""

    name: str
    """Name of the folder they are staged into."""
    revision: str
    """Commit of their repository."""
    base: str
    """Folder of the files: an http address, or any location that fsspec reads."""
    files: dict[str, TextFile]
    """Files by the name of the data file that is written."""


def text_source(name: str) -> TextSource:
    """Returns the source with that name that ships with Assay."""
    return TextSource.model_validate(load_yaml((SUITE_DATA / name / _SOURCE).read_text(encoding="utf-8")))


def stage_texts(source: TextSource, folder: Path, *, on_event: Callable[[str], None]) -> dict[str, Any]:
    """Writes a folder of benchmarks and texts atomically, unless it exists; returns revision, documents and bytes."""
    content = source.model_dump(mode="json")
    try:
        done = json.loads((folder / _DONE).read_text())
        if done["source"] == content:
            return done["staged"]
    except (OSError, ValueError, KeyError):
        pass
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    staged: dict[str, Any] = {"revision": source.revision, "files": {}}
    for name, file in source.files.items():
        lines = _lines(source, file, unfinished / f"{name}.original")
        target = unfinished / f"{name}.jsonl"
        target.write_text("".join(lines), encoding="utf-8")
        staged["files"][name] = {"documents": len(lines), "bytes": target.stat().st_size}
        on_event(f"{source.name}: {name}, {len(lines)} documents")
    for original in unfinished.glob("*.original"):
        original.unlink()
    for benchmark in (SUITE_DATA / source.name).glob("*.yaml"):
        if benchmark.name != _SOURCE:
            shutil.copyfile(benchmark, unfinished / benchmark.name)
    (unfinished / _DONE).write_text(json.dumps({"source": content, "staged": staged}, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return staged


def _lines(source: TextSource, file: TextFile, kept: Path) -> list[str]:
    uri = storage.join(source.base, file.path)
    content = kept.read_bytes() if kept.is_file() else b""
    if not content or (file.blob is not None and _blob(content) != file.blob):
        content = _read(uri)
        storage.write_bytes(str(kept), content)
    if file.blob is not None and _blob(content) != file.blob:
        kept.unlink()
        raise BadInput(
            expected=f"the content with Git's id {file.blob} at {uri}",
            found=f"content with {_blob(content)}",
            remedy="name a source that holds the same revision",
        )
    try:
        texts = json.loads(content)
        documents = [text if isinstance(text, str) else text["text"] for text in texts]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            expected=f"a JSON list of texts at {uri}",
            found=f"{type(error).__name__}: {error}",
            remedy="see what is there",
        ) from error
    # An empty text has no likelihood, and its benchmark no score.
    numbered = ({"id": number, "text": text} for number, text in enumerate(documents) if text.strip())
    return [json.dumps(document, ensure_ascii=False) + "\n" for document in numbered]


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _read(uri: str) -> bytes:
    if not uri.startswith(("http://", "https://")):
        try:
            return storage.read_bytes(uri, within="/")
        except FileNotFoundError:
            raise _missing(uri) from None
    attempt = 1
    while True:
        try:
            with urllib.request.urlopen(uri, timeout=_SECONDS) as answer:
                return answer.read()
        except OSError as error:  # an answer with an error's status, too
            status = error.code if isinstance(error, urllib.error.HTTPError) else None
            if status == 404:
                raise _missing(uri) from None
            if status not in _PASSING or attempt == _ATTEMPTS:
                raise StorageError(
                    expected=f"to read {uri}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="see that this machine reaches it, or name a mirror; files that were read are kept",
                ) from error
            seconds = min(2.0**attempt, _UNTOLD_WAIT_SECONDS) if status is None else _UNTOLD_WAIT_SECONDS
            retry_after = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
            if retry_after.isdigit():
                seconds = min(float(retry_after), _LONGEST_WAIT_SECONDS)
        attempt += 1
        time.sleep(seconds)


def _missing(uri: str) -> BadInput:
    return BadInput(expected=f"a file at {uri}", found="nothing there", remedy="correct the source, or its revision")
