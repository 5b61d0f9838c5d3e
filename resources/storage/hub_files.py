"""Files of repositories on the Hugging Face hub, for reading only; its client is loaded with this module.

A listing asks for the commits of all branches and tags; listings within two seconds share the answer. A commit never
changes: its files are listed once per machine, small files are read once for each content, and files in the hub's own
cache are not downloaded. With `HF_HUB_OFFLINE` only that cache is read. Endpoint, token and cache are the client's.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Condition
from typing import Any

import httpx2
import orjson
from cachetools import LRUCache, cached
from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from resources.errors import BadInput, StorageError, suggestion
from resources.settings import settings
from resources.storage import storage
from resources.storage.files import remove_oldest
from resources.storage.hub import MAIN, PROTOCOL, Place, hasher_of, place_of
from resources.storage.read_only import ReadOnlyFiles
from resources.storage.regular_files import read_cached

_COMMIT = re.compile("[0-9a-f]{40}")
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_SMALL_BYTES = 2**25
_JUST_SECONDS = 2.0  # in which each of a run's checkpoints is listed by itself
_FIRST_ANSWER = httpx2.Timeout(10.0, connect=3.0)  # seconds; a mistyped path is asked about, too
_BROKEN_OFF = (httpx2.ReadError, httpx2.RemoteProtocolError)  # tried again, unlike a hub that is out of reach
_KEPT_TREES, _KEPT_BYTES, _UNTRIMMED = 2**14, 2**26, 64  # on disk

Tree = dict[str, dict[str, Any]]
"""Files of a commit by path, each with its size and, unless unknown, the hub's hash of its content."""
_refs: dict[str, tuple[float, dict[str, str]]] = {}  # by repository, with the time of the answer
_trees: LRUCache[Any, Tree] = LRUCache(2**18, getsizeof=len)  # by repository and commit; counted in files
_contents: LRUCache[str, bytes] = LRUCache(2**27, getsizeof=len)  # of small files, by hash
_written = count()


class HubFiles(ReadOnlyFiles):
    """Read access to repositories of the hub; `invalidate_cache` makes the next call ask for the commits again."""

    protocol = PROTOCOL
    cachable = False  # fsspec keeps an instance for each thread

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forgets the commits of branches and tags, unless the hub was just asked."""
        for name, (asked, _) in list(_refs.items()):
            if time.monotonic() >= asked + _JUST_SECONDS:
                _refs.pop(name, None)

    def refs_of_run(self, repository: str, belongs: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Returns location and commit of `main`, and of each branch and tag with a name that belongs to a run."""
        refs = sorted(_asked(repository)[1].items())
        return [(Place(repository, name, "").uri, commit) for name, commit in refs if name == MAIN or belongs(name)]

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        """Lists the files at or below a path, from the tree of its commit; folders are no entries."""
        path = str(self._strip_protocol(path))
        repository, revision, inside = place_of(path)
        root, below = path.removesuffix(f"/{inside}"), f"{inside}/".lstrip("/")
        tree = _tree(repository, _commit(repository, revision)).items()
        files = {f"{root}/{name}": info for name, info in tree if f"{name}/".startswith(below)}
        return {name: {"name": name, **info} for name, info in files.items()} if detail else list(files)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = str(self._strip_protocol(path))
        held = [info for name, info in self.find(path, detail=True).items() if "/" not in name[len(path) + 1 :]]
        return held if detail else [info["name"] for info in held]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = str(self._strip_protocol(path))
        files = self.find(path, detail=True)
        if not files and place_of(path).path:
            raise FileNotFoundError(f"{PROTOCOL}://{path}")
        return files.get(path, {"name": path, "size": 0, "type": "directory"})

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Reads a file, or its bytes from `start` up to `end`, of the commit that was listed last."""
        place = place_of(path)
        commit = _commit(place.repository, place.revision)
        listed = _tree(place.repository, commit).get(place.path)
        if listed is None:
            raise FileNotFoundError(place.uri)
        size = listed["size"]
        first, last = start or 0, size if end is None else min(end, size)
        if first >= last:
            return b""
        if _offline():
            kept = _snapshot(place.repository, commit) / place.path
            return storage.read_bytes(str(kept), start=first, end=last)
        if last - first == size <= _SMALL_BYTES and listed["content_id"]:
            return _small_file(place, commit, listed["content_id"], size)
        return _downloaded(place, commit, first, last)


def in_cache(repository: str, content: str, size: int) -> Path | None:
    """Returns the file in the hub's own cache with this SHA-256 (or git id), if it is there, whole and unchanged."""
    blob, hasher = _cache(repository) / "blobs" / content, hasher_of(content, size)
    try:
        if not _HASH.fullmatch(content) or blob.stat().st_size != size:
            return None
        with blob.open("rb") as file:
            return blob if hashlib.file_digest(file, lambda: hasher).hexdigest() == content else None
    except OSError:
        return None


def _commit(repository: str, revision: str) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    refs = _asked(repository)[1]
    if revision not in refs:
        if _offline():
            raise _not_kept(repository, revision)
        with _reported(repository, revision, refs):
            refs[revision] = str(HfApi().model_info(repository, revision=revision).sha)
    return refs[revision]


@cached(_refs, key=str, condition=Condition())
def _asked(repository: str) -> tuple[float, dict[str, str]]:
    if _offline():
        folder = _cache(repository) / "refs"
        files = [file for file in folder.rglob("*") if file.is_file()]
        refs = {str(file.relative_to(folder)): file.read_text(errors="replace").strip() for file in files}
        if not refs:
            raise _not_kept(repository, MAIN)
    else:
        with _reported(repository, MAIN):  # as HfApi.list_repo_refs, which gives up at the first 429
            answer = http_backoff(
                "GET", f"{_endpoint()}/api/models/{repository}/refs", headers=build_hf_headers(),
                timeout=_FIRST_ANSWER, max_retries=3, base_wait_time=0.2, retry_on_exceptions=_BROKEN_OFF,
            )  # fmt: skip
            hf_raise_for_status(answer)
        listed = answer.json()
        named = (*listed.get("tags", ()), *listed.get("branches", ()))  # a branch before a tag, as git has it
        refs = {str(ref["name"]): str(ref["targetCommit"]) for ref in named}
    return time.monotonic(), {name: commit for name, commit in refs.items() if _COMMIT.fullmatch(commit)}


@cached(_trees, condition=Condition())
def _tree(repository: str, commit: str) -> Tree:
    if _offline():
        folder = _snapshot(repository, commit)
        held = {str(file.relative_to(folder)): file.resolve() for file in sorted(folder.rglob("*")) if file.is_file()}
        return {name: _info(blob.stat().st_size, blob.name) for name, blob in held.items()}
    memory = settings().cache_dir / "hub-listings" / f"{repository.replace('/', '--')}--{commit}.json"
    with suppress(OSError, ValueError):
        return orjson.loads(read_cached(memory))
    with _reported(repository, commit):
        entries = list(HfApi().list_repo_tree(repository, revision=commit, recursive=True))
    tree = {
        str(entry.path): _info(int(entry.size), entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile) and not {"", ".", ".."} & set(str(entry.path).split("/"))
    }
    with suppress(OSError, StorageError):
        storage.write_bytes(str(memory), orjson.dumps(tree))
        if next(_written) % _UNTRIMMED == 0:
            remove_oldest(memory.parent, most_files=_KEPT_TREES, most_bytes=_KEPT_BYTES)
    return tree


def _info(size: int, content_id: str) -> dict[str, Any]:
    return {"size": size, "type": "file", "content_id": content_id if _HASH.fullmatch(content_id) else None}


@cached(_contents, key=lambda place, commit, content_id, size: content_id, condition=Condition())
def _small_file(place: Place, commit: str, content_id: str, size: int) -> bytes:
    blob = in_cache(place.repository, content_id, size)
    content = blob.read_bytes() if blob else _downloaded(place, commit, 0, size)
    hasher = hasher_of(content_id, size)
    hasher.update(content)
    if hasher.hexdigest() != content_id:
        raise OSError(f"{len(content)} bytes arrived, with another hash than the hub's")
    return content


def _downloaded(place: Place, commit: str, start: int, end: int) -> bytes:
    url = hf_hub_url(place.repository, place.path, revision=commit, endpoint=_endpoint())
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}", **build_hf_headers()}
    with _reported(place.repository, place.revision):
        answer = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        hf_raise_for_status(answer)
    return answer.content if answer.status_code == 206 else answer.content[start:end]


def _cache(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def _snapshot(repository: str, commit: str) -> Path:
    folder = _cache(repository) / "snapshots" / commit
    if not folder.is_dir():
        raise _not_kept(repository, commit)
    return folder


def _endpoint() -> str:
    return constants.ENDPOINT.rstrip("/")


def _offline() -> bool:
    return settings().offline or constants.is_offline_mode()


def _not_kept(repository: str, revision: str) -> BadInput:
    return BadInput(
        expected=f"a folder {repository}, or {repository}@{revision} in the hub's cache: offline, the hub is not asked",
        found=f"no such folder here, and nothing of it in {_cache(repository)}",
        remedy=f"check the path, or unset HF_HUB_OFFLINE; or first: hf download {repository} --revision {revision}",
    )


@contextmanager
def _reported(repository: str, revision: str, refs: Iterable[str] = ()) -> Iterator[None]:
    token = f"set HF_TOKEN to {'another' if get_token() else 'a'} token of an account that may read it"
    try:
        yield
    except errors.GatedRepoError:
        raise BadInput(
            expected=f"access to {repository} on the hub",
            found="its terms were not accepted",
            remedy=f"accept the terms at {_endpoint()}/{repository}, and {token}",
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInput(
            expected=f"a folder {repository}, or a repository of that name at {_endpoint()}",
            found="neither, or a private repository",
            remedy=f"check the name; for a private repository, {token}",
        ) from None
    except errors.RevisionNotFoundError:
        raise BadInput(
            expected=f"a branch, tag or commit {revision} of {repository}",
            found=f"no such revision; {suggestion(revision, refs)}",
            remedy=f"name one of those at {_endpoint()}/{repository}/tree/main behind the @",
        ) from None
    except httpx2.HTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"status {status}" if status else f"{type(error).__name__} at {_endpoint()}"
        unreachable = "check the path, the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1 only the hub's cache is read"
        remedies = {401: token, 403: token, 429: "wait some minutes and run again; with HF_TOKEN the hub allows more"}
        raise StorageError(
            expected=f"a folder {repository}, or an answer of the hub about {repository}@{revision}",
            found=f"no such folder here, and {reason}",
            remedy=remedies.get(status or 0, unreachable),
        ) from None
