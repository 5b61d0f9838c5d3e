"""An object store that is a local folder behind fsspec; a test can count, delay and corrupt its reads.

`store:///tmp/x` shows the folder `/tmp/x`. All state lies in the class, since fsspec makes the instances; a child made
by `fork` has the same state, and logs its reads into the same file.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import fsspec
import google_crc32c
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

HashKind = Literal["md5", "crc32c", "etag"]


def _leave(content: bytes) -> bytes:
    return content


class FolderStore(AbstractFileSystem):
    """The store of this module. `before_read` may raise or wait; `spoil` changes the bytes that a read returns."""

    protocol = ("store", "s3a")
    cachable = False

    log: ClassVar[Path]
    hash_kind: ClassVar[HashKind | None]
    before_read: ClassVar[Callable[[Path, int], None]]
    spoil: ClassVar[Callable[[bytes], bytes]]
    encryption: ClassVar[str | None]
    parts: ClassVar[int]

    @classmethod
    def reset(cls, log: Path) -> None:
        """Resets to correct reads, no hashes, and an empty log."""
        cls.log = log
        cls.log.write_text("")
        cls.hash_kind = None
        cls.before_read = staticmethod(lambda file, start: None)
        cls.spoil = staticmethod(_leave)
        cls.encryption = None
        cls.parts = 1

    @classmethod
    def ranges(cls, name: str) -> list[tuple[int, int]]:
        """Returns the byte ranges read of `*name` files, in order, without headers of safetensors files."""
        read = [line.split("\t") for line in cls.log.read_text().splitlines()]
        spans = [(int(start), int(end)) for file, start, end in read if file.endswith(name)]
        return [span for span in spans if span != (0, 8) and span[0] != 8]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = Path(self._local(path))
        if not folder.exists():
            raise FileNotFoundError(path)
        entries = [self.info(f"{path.rstrip('/')}/{child.name}") for child in sorted(folder.iterdir())]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = str(self._strip_protocol(path))
        file = Path(self._local(path))
        stat = file.stat()
        if file.is_dir():
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": stat.st_size, "type": "file", "mtime": stat.st_mtime} | self._hashes(file)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        file = Path(self._local(str(self._strip_protocol(path))))
        first, last = start or 0, file.stat().st_size if end is None else end
        type(self).before_read(file, first)
        with file.open("rb") as opened:
            opened.seek(first)
            content = opened.read(last - first)
        with type(self).log.open("a") as log:
            log.write(f"{file}\t{first}\t{last}\n")
        return content if (first, last) == (0, 8) or first == 8 else type(self).spoil(content)

    def call_s3(self, method: str, *, Bucket: str, Key: str) -> dict[str, Any]:
        assert method == "head_object"
        assert Path(self._local(f"{Bucket}/{Key}")).is_file()
        return {"ServerSideEncryption": self.encryption} if self.encryption else {}

    @staticmethod
    def _local(path: str) -> str:
        return f"/{path.lstrip('/')}"

    def _hashes(self, file: Path) -> dict[str, str]:
        match self.hash_kind:
            case "md5":
                return {"md5Hash": base64.b64encode(hashlib.md5(file.read_bytes()).digest()).decode()}
            case "crc32c":
                value = google_crc32c.value(file.read_bytes())
                return {"crc32c": base64.b64encode(value.to_bytes(4, "big")).decode()}
            case "etag":
                parts = f"-{self.parts}" if self.parts > 1 else ""
                return {"ETag": f'"{hashlib.md5(file.read_bytes()).hexdigest()}{parts}"'}
            case None:
                return {}


@contextmanager
def folder_store(log: Path) -> Iterator[type[FolderStore]]:
    """Registers the store as `store://`, and as `s3a://` for features of S3 only, for the block."""
    before = _registry.get("s3a")
    FolderStore.reset(log)
    for protocol in FolderStore.protocol:
        fsspec.register_implementation(protocol, FolderStore, clobber=True)
    try:
        yield FolderStore
    finally:
        _registry.pop("store", None)
        _registry.pop("s3a", None)
        if before is not None:
            _registry["s3a"] = before


def failing_after(reads: int, name: str) -> Callable[[Path, int], None]:
    """Returns a `before_read` that fails for a file after some reads."""
    left = [reads]

    def fail(file: Path, start: int) -> None:
        if file.name == name and start > 8:
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionResetError("the store is gone")

    return fail


def waiting_until(path: Path, *, name: str, start: int) -> Callable[[Path, int], None]:
    """Returns a `before_read` that blocks reads of a file from `start` on until `path` exists, in any process."""

    def wait(file: Path, first: int) -> None:
        if file.name == name and first >= start:
            path.with_name(f"{path.name}.reached").touch()
            while not path.exists():
                time.sleep(0.01)

    return wait
