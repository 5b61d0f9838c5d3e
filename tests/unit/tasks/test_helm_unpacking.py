"""Archives that HELM unpacks on a Python without filters in its standard library."""

from __future__ import annotations

import io
import runpy
import tarfile
import zipfile
from pathlib import Path

import pytest

import tasks

UNPACK = runpy.run_path(str(Path(tasks.__file__).parent / "evaluators/helm/programs/helm_unpacking.py"))[
    "unpack_archive"
]


def packed(path: Path, *links: tuple[str, bytes, str], name: str = "folder/text") -> str:
    """Writes an archive of links (name, type, target), and of a file after them."""
    with tarfile.open(path, "w:gz") as archive:
        for link, kind, target in links:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = 5, 0o4777
        archive.addfile(entry, io.BytesIO(b"words"))
    return str(path)


def test_archive_with_files_and_links_inside_is_unpacked(tmp_path: Path):
    archive = packed(tmp_path / "a.tar.gz", ("folder/link", tarfile.SYMTYPE, "text"))
    UNPACK(archive, str(tmp_path / "out"), "gztar", filter=None)
    assert (tmp_path / "out" / "folder" / "link").read_text() == "words"
    assert not (tmp_path / "out" / "folder" / "text").stat().st_mode & 0o7000


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ([], "../outside"),
        ([], "/tmp/outside-of-everything"),
        ([("link", tarfile.SYMTYPE, "..")], "link/outside"),
        ([("link", tarfile.LNKTYPE, "../outside")], "text"),
        ([("pipe", tarfile.FIFOTYPE, "")], "text"),
    ],
    ids=["parent", "absolute", "through a link", "hard link", "no file"],
)
def test_entry_that_leads_outside_is_refused_and_nothing_is_written_there(
    tmp_path: Path, links: list[tuple[str, bytes, str]], name: str
):
    with pytest.raises(tarfile.ExtractError, match="inside the archive"):
        UNPACK(packed(tmp_path / "a.tar.gz", *links, name=name), str(tmp_path / "out"), "tar", filter="data")
    assert not (tmp_path / "outside").exists() and not Path("/tmp/outside-of-everything").exists()


def test_zip_file_is_unpacked_as_ever(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("text", "words")
    UNPACK(str(tmp_path / "a.zip"), str(tmp_path / "out"), "zip", filter=None)
    assert (tmp_path / "out" / "text").read_text() == "words"
