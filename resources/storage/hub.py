"""Repositories of the Hugging Face hub as files: `hf://owner/name[@revision][/path]`, for reading only.

A revision is a branch, a tag or a commit, `main` if none is named; `/` in its name is written as `%2F`. A listing asks
for the commits of all branches and tags; listings within two seconds share the answer. A commit never changes: its
files are listed once per machine, small files are read once for each content, and files in the hub's own cache are not
downloaded. With `HF_HUB_OFFLINE` only that cache is read. Endpoint, token and cache are those of `huggingface_hub`.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, unquote

import orjson
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from resources.errors import BadInput, StorageError, suggestion
from resources.settings import settings
from resources.storage.files import written_aside
from resources.storage.regular_files import read_cached

PROTOCOL = "hf"
_MAIN = "main"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"({_NAME}/{_NAME})(?:@([^/]+))?(?:/(.*))?", re.DOTALL)
_PLAIN = re.compile(rf"({_NAME}/{_NAME})(?:@([^@\s]+))?")
_OTHER_REFS = re.compile(r"@(refs)/(pr|convert)/([^/]+)")
_COMMIT = re.compile("[0-9a-f]{40}")
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_AT_ONCE = 8
_SMALL_BYTES = 2**25
_KEPT_BYTES = 2**27  # of small files, in memory
_BLOCK_BYTES = 2**22
_JUST_SECONDS = 2.0  # in which each of a run's checkpoints is listed by itself


class Place(NamedTuple):
    """A repository as `owner/name`, a revision, and a path below it, which may be empty."""

    repository: str
    revision: str
    path: str

    @property
    def uri(self) -> str:
        """The location that names it."""
        revision = f"@{quote(self.revision, safe='')}" if self.revision != _MAIN else ""
        return f"{PROTOCOL}://{self.repository}{revision}{'/' if self.path else ''}{self.path}"


def hub_location(text: str) -> str:
    """Returns a location that a user named, with a repository of the hub as `hf://owner/name[@revision]`.

    Plain `owner/name[@revision]` is such a repository unless a folder of that name, or of the owner's, is here.
    """
    if text.startswith(f"{PROTOCOL}://"):
        return place_of(_OTHER_REFS.sub(r"@\1%2F\2%2F\3", text)).uri
    matched = _PLAIN.fullmatch(text)
    if matched is None or Path(text).exists() or Path(text).parent.exists():
        return text
    return Place(matched[1], matched[2] or _MAIN, "").uri


def in_hub(uri: str) -> bool:
    """Returns True for a location on the hub."""
    return uri.startswith(f"{PROTOCOL}://")


def place_of(uri: str) -> Place:
    """Returns the parts of a location on the hub.

    Raises:
        BadInput: it has no such form.
    """
    matched = _REPOSITORY.fullmatch(uri.removeprefix(f"{PROTOCOL}://").rstrip("/"))
    if matched is None:
        raise BadInput(
            expected="a repository of the hub as hf://owner/name, hf://owner/name@revision or with /path behind it",
            found=uri,
            remedy="write it so; for a data set or a bucket, copy the files to a folder or a store",
        )
    return Place(matched[1], unquote(matched[2] or _MAIN), matched[3] or "")


def is_repository(uri: str) -> bool:
    """Returns True for a repository of the hub without a revision: its branches and tags may be a run."""
    return in_hub(uri) and place_of(uri)[1:] == (_MAIN, "")


def in_cache(uri: str, content: str, size: int) -> Path | None:
    """Returns the file in the hub's own cache with this SHA-256 (or git id), if it is there, whole and unchanged."""
    if not in_hub(uri) or not _HASH.fullmatch(content):
        return None
    blob = _cached(place_of(uri).repository) / "blobs" / content
    try:
        with blob.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            hasher = hasher_of(content, size)
            while block := file.read(_BLOCK_BYTES):
                hasher.update(block)
    except OSError:
        return None
    return blob if hasher.hexdigest() == content else None


def hasher_of(content: str, size: int) -> Any:
    """Returns the beginning of a hash: SHA-256 for a file in large storage, else git's id of a file of `size` bytes.

    Source: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects.
    """
    if len(content) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


class HubFiles(AbstractFileSystem):
    """Read access to repositories of the hub; `invalidate_cache` makes the next call ask for the commits again."""

    protocol = PROTOCOL

    cachable = False  # fsspec keeps an instance for each thread
    _lock = threading.Lock()
    _turns: ClassVar[dict[str, threading.Lock]] = {}
    _refs: ClassVar[dict[str, tuple[float, dict[str, str]]]] = {}  # and when they were asked for
    _trees: ClassVar[dict[tuple[str, str], dict[str, dict[str, Any]]]] = {}
    _contents: ClassVar[OrderedDict[str, bytes]] = OrderedDict()

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forgets the commits of branches and tags, unless the hub was just asked."""
        now = time.monotonic()
        with self._lock:
            for name in [name for name, known in self._refs.items() if now >= known[0] + _JUST_SECONDS]:
                del self._refs[name]

    def refs(self, repository: str) -> dict[str, str]:
        """Returns the commit of every branch and tag."""
        with self._turns.setdefault(repository, threading.Lock()):
            if (known := self._refs.get(repository)) is None:
                refs = _kept_refs(repository) if _offline() else _asked_refs(repository)
                known = self._refs[repository] = time.monotonic(), refs
        return known[1]

    def run(self, repository: str, belongs: Callable[[str], bool]) -> dict[str, dict[str, dict[str, Any]]]:
        """Returns the files of `main` and of each branch and tag of a run, by location and path."""
        refs = self.refs_of_run(repository, belongs)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            trees = threads.map(lambda ref: self._tree(repository, ref[1]), refs)
            return {Place(repository, name, "").uri: tree for (name, _), tree in zip(refs, trees, strict=True)}

    def refs_of_run(self, repository: str, belongs: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Returns name and commit of `main`, and of each branch and tag of a run."""
        return [ref for ref in sorted(self.refs(repository).items()) if ref[0] == _MAIN or belongs(ref[0])]

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        """Lists the files at or below a path, from the tree of its commit; folders are no entries."""
        path = str(self._strip_protocol(path))
        repository, revision, inside = place_of(path)
        tree = self._tree(repository, self._commit(repository, revision))
        root = path.removesuffix(f"/{inside}") if inside else path
        files = {
            f"{root}/{name}": info
            for name, info in tree.items()
            if not inside or name == inside or name.startswith(f"{inside}/")
        }
        return files if detail else list(files)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = str(self._strip_protocol(path))
        files = self.find(path, detail=True).items()
        held = [{"name": name, **info} for name, info in files if "/" not in name[len(path) + 1 :]]
        return held if detail else [info["name"] for info in held]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = str(self._strip_protocol(path))
        files = self.find(path, detail=True)
        if not files and place_of(path).path:
            raise FileNotFoundError(f"{PROTOCOL}://{path}")
        return {"name": path, "size": 0, "type": "directory", **files.get(path, {})}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Reads a file, or its bytes from `start` up to `end`, of the commit that was listed last."""
        place = place_of(str(self._strip_protocol(path)))
        if end is not None and end <= (start or 0):
            return b""
        commit = self._commit(place.repository, place.revision)
        if _offline():
            with (_snapshot(place.repository, commit) / place.path).open("rb") as file:
                file.seek(start or 0)
                return file.read(-1 if end is None else end - (start or 0))
        listed = self._trees.get((place.repository, commit), {}).get(place.path)
        whole = listed is not None and listed["content_id"] and not start and (end is None or end >= listed["size"])
        if listed is None or not whole or listed["size"] > _SMALL_BYTES:
            return _downloaded(place, commit, start, end)
        return self._small_file(place, commit, listed)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> AbstractBufferedFile:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _HubFile(self, path, mode, size=self.info(path)["size"], **options)

    def _commit(self, repository: str, revision: str) -> str:
        if _COMMIT.fullmatch(revision):
            return revision
        refs = self.refs(repository)
        if commit := refs.get(revision):
            return commit
        if _offline():
            raise _not_kept(repository, revision)
        from huggingface_hub import HfApi

        with _reported(repository, revision, refs):
            commit = str(HfApi().model_info(repository, revision=revision).sha)
        refs[revision] = commit
        return commit

    def _tree(self, repository: str, commit: str) -> dict[str, dict[str, Any]]:
        if (tree := self._trees.get((repository, commit))) is None:
            tree = _kept_tree(repository, commit) if _offline() else _listed_tree(repository, commit)
            self._trees[repository, commit] = tree
        return tree

    def _small_file(self, place: Place, commit: str, listed: Mapping[str, Any]) -> bytes:
        content_id = str(listed["content_id"])
        with self._turns.setdefault(content_id, threading.Lock()):
            with self._lock:
                if (content := self._contents.get(content_id)) is not None:
                    self._contents.move_to_end(content_id)
                    return content
            blob = in_cache(place.uri, content_id, listed["size"])
            content = blob.read_bytes() if blob else _downloaded(place, commit, None, None)
            hasher = hasher_of(content_id, len(content))
            hasher.update(content)
            if hasher.hexdigest() != content_id:
                raise OSError(f"{len(content)} bytes arrived, with another hash than the hub's")
            with self._lock:
                self._contents[content_id] = content
                while sum(map(len, self._contents.values())) > _KEPT_BYTES and len(self._contents) > 1:
                    self._contents.popitem(last=False)
            return content


class _HubFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start=start, end=end)


def _asked_refs(repository: str) -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    with _reported(repository, _MAIN):  # as HfApi.list_repo_refs, which gives up at the first 429
        answer = http_backoff(
            "GET", f"{endpoint()}/api/models/{repository}/refs", headers=build_hf_headers(), max_retries=3
        )
        hf_raise_for_status(answer)
        listed = answer.json()
    return {
        str(ref["name"]): str(ref["targetCommit"])
        for ref in (*listed.get("tags", ()), *listed.get("branches", ()))  # a branch before a tag, as git has it
        if _COMMIT.fullmatch(str(ref["targetCommit"]))
    }


def _listed_tree(repository: str, commit: str) -> dict[str, dict[str, Any]]:
    from huggingface_hub.hf_api import HfApi, RepoFile

    memory = settings().cache_dir / "hub-listings" / repository.replace("/", "--") / f"{commit}.json"
    with suppress(OSError, ValueError):
        return orjson.loads(read_cached(memory))
    with _reported(repository, commit):
        entries = list(HfApi().list_repo_tree(repository, revision=commit, recursive=True))
    tree = {
        str(entry.path): _info(int(entry.size), entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile) and not {"", ".", ".."} & set(str(entry.path).split("/"))
    }
    with suppress(OSError), written_aside(memory, orjson.dumps(tree), mode=0o644) as written:
        written.replace(memory)
    return tree


def _info(size: int, content_id: str) -> dict[str, Any]:
    return {"size": size, "type": "file", "content_id": content_id if _HASH.fullmatch(content_id) else None}


def _downloaded(place: Place, commit: str, start: int | None, end: int | None) -> bytes:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = hf_hub_url(place.repository, place.path, revision=commit, endpoint=endpoint())
    headers = {"Accept-Encoding": "identity", **build_hf_headers()}
    if start or end is not None:
        headers["Range"] = f"bytes={start or 0}-{'' if end is None else end - 1}"
    with _reported(place.repository, place.revision):
        answer = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        hf_raise_for_status(answer)
    return answer.content if answer.status_code == 206 else answer.content[start:end]


def _cached(repository: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def _kept_refs(repository: str) -> dict[str, str]:
    folder = _cached(repository) / "refs"
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    refs = {str(file.relative_to(folder)): file.read_text(errors="replace").strip() for file in files}
    kept = {name: commit for name, commit in refs.items() if _COMMIT.fullmatch(commit)}
    if not kept:
        raise _not_kept(repository, _MAIN)
    return kept


def _snapshot(repository: str, commit: str) -> Path:
    folder = _cached(repository) / "snapshots" / commit
    if not folder.is_dir():
        raise _not_kept(repository, commit)
    return folder


def _kept_tree(repository: str, commit: str) -> dict[str, dict[str, Any]]:
    folder = _snapshot(repository, commit)
    tree = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.resolve()  # a file of the folder `blobs`, named after its hash
            tree[str(file.relative_to(folder))] = _info(content.stat().st_size, content.name)
    return tree


def endpoint() -> str:
    """Returns the address of the hub, without a slash at its end."""
    from huggingface_hub import constants

    return constants.ENDPOINT.rstrip("/")


def _offline() -> bool:
    from huggingface_hub import constants

    return settings().offline or constants.is_offline_mode()


@contextmanager
def _reported(repository: str, revision: str, refs: Iterable[str] = ()) -> Iterator[None]:
    from httpx2 import HTTPError
    from huggingface_hub import errors, get_token

    page = f"{endpoint()}/{repository}"
    token = f"{'another' if get_token() else 'a'} token of an account that may read it"
    try:
        yield
    except errors.GatedRepoError:
        raise BadInput(
            expected=f"access to {repository} on the hub",
            found="its terms were not accepted",
            remedy=f"accept the terms at {page}, and set HF_TOKEN to {token}",
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInput(
            expected=f"a folder {repository}, or a repository of that name at {endpoint()}",
            found="neither, or a private repository",
            remedy=f"check the name; for a private repository, set HF_TOKEN to {token}",
        ) from None
    except errors.RevisionNotFoundError:
        raise BadInput(
            expected=f"a branch, tag or commit {revision} of {repository}",
            found=f"no such revision; {suggestion(revision, refs)}",
            remedy=f"name one of those at {page}/tree/main behind the @",
        ) from None
    except errors.EntryNotFoundError as error:
        raise FileNotFoundError(f"a file of {repository}@{revision}") from error
    except HTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise StorageError(
            expected=f"an answer of the hub about {repository}@{revision}",
            found=f"status {status}" if status else f"{type(error).__name__} at {endpoint()}",
            remedy="set HF_TOKEN to a valid token of an account that may read it"
            if status in (401, 403)
            else "check the network and HF_ENDPOINT, and run again; with HF_HUB_OFFLINE=1 only the hub's cache is read",
        ) from None


def _not_kept(repository: str, revision: str) -> BadInput:
    return BadInput(
        expected=f"{repository}@{revision} in the hub's cache, since the hub must not be asked (HF_HUB_OFFLINE)",
        found=f"nothing of it in {_cached(repository)}",
        remedy=f"unset HF_HUB_OFFLINE, or get it first: hf download {repository} --revision {revision}",
    )
