"""A file system of fsspec that reads ranges of files, and refuses to write."""

from __future__ import annotations

from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ReadOnlyFiles(AbstractFileSystem):
    """Files that are read by `cat_file`; without this, fsspec would take what is written to them, and drop it."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> AbstractBufferedFile:  # pyright: ignore[reportIncompatibleMethodOverride]
        if mode != "rb":
            raise OSError(f"{self.unstrip_protocol(path)} can be read only")
        return super()._open(path, mode, **options)
