"""Unpacking for HELM, which passes a `filter`, on Python before 3.11.4, such as Debian 12's, which lacks it."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

plain_unpack_archive = shutil.unpack_archive


def support_filters() -> None:
    """Replaces the standard function if it does not support filters."""
    if not hasattr(tarfile, "data_filter"):
        shutil.unpack_archive = unpack_archive


def unpack_archive(filename: str, extract_dir: str, format: str, *, filter: Any = None) -> None:
    """Unpacks files, folders and links that stay inside `extract_dir`, always like the filter "data"."""
    if "tar" not in format:
        plain_unpack_archive(filename, extract_dir, format)  # of a ZIP file it skips entries outside the folder
        return
    folder = Path(extract_dir).resolve()
    with tarfile.open(filename) as archive:
        for entry in archive:
            if not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()) or not _stays_in(folder, entry):
                raise tarfile.ExtractError(f"{entry.name} is no file, folder or link inside the archive {filename}")
            archive.extract(entry, folder, set_attrs=False)


def _stays_in(folder: Path, entry: tarfile.TarInfo) -> bool:
    places = [Path(entry.name)]
    if entry.issym():
        places.append(Path(entry.name).parent / entry.linkname)
    elif entry.islnk():
        places.append(Path(entry.linkname))
    return all((folder / place).resolve().is_relative_to(folder) for place in places)
