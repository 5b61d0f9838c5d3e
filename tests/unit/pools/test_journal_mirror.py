"""The mirror of a cell: a new machine replays the answers of an earlier machine, despite damaged segments."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import orjson
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fakes.journal import FIRST, SECOND, answer, asked, opened, replayed, rows, sampled
from fakes.polling import until
from pools.journal.cells import CellScope
from pools.journal.mirror import LARGEST_ROW_BYTES, SEGMENT_BYTES, SegmentCut, decoded, encoded
from pools.journal.schema import LARGEST_BYTES, Unreadable, sealed, unpacked
from resources.storage import storage


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror" / "cell") if request.param == "local" else f"memory://{uuid.uuid4().hex}/cell"


def segments(folder: str) -> list[str]:
    return [file.uri for file in storage.list_files(folder)]


async def leave(path: Path, folder: str, *, numbers: range = range(3)) -> None:
    """Answers sampled and deterministic requests of a cell, in a journal that is closed afterwards."""
    async with opened(path) as (journal, warnings):
        await journal.cells.open_cell(FIRST, mirror=folder)
        for number in numbers:
            await answer(journal, sampled(), b"%d" % number, cell=FIRST)
            await answer(journal, asked(f"a{number}"), b"%d" % number, cell=FIRST)
        assert not warnings


async def replays_and_warnings(
    path: Path, folder: str, *, numbers: range = range(3)
) -> tuple[list[bytes | None], list[str]]:
    """Returns a second attempt's replays for the same requests, sampled requests first, and the warnings."""
    async with opened(path) as (journal, warnings):
        await journal.cells.open_cell(SECOND, mirror=folder)
        replays = [replayed(journal, sampled(), cell=SECOND) for _ in numbers]
        return replays + [replayed(journal, asked(f"a{number}"), cell=SECOND) for number in numbers], warnings


async def test_new_database_with_the_mirror_gives_the_same_replays(tmp_path: Path, folder: str) -> None:
    await leave(tmp_path / "one.sqlite", folder)
    expected = [b"0", b"1", b"2"] * 2
    assert await replays_and_warnings(tmp_path / "two.sqlite", folder) == (expected, [])
    assert await replays_and_warnings(tmp_path / "one.sqlite", folder) == (expected, [])
    assert len(segments(folder)) == 1


async def test_news_is_exported_while_the_cell_is_open(tmp_path: Path, folder: str) -> None:
    async with opened(tmp_path / "one.sqlite", mirror_seconds=0.05) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=folder)
        for number in range(3):
            await answer(journal, sampled(), b"%d" % number, cell=FIRST)
            await until(lambda: len(segments(folder)) > number)  # noqa: B023 - used up before the next turn
        assert (await replays_and_warnings(tmp_path / "two.sqlite", folder))[0][:3] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("turns", range(5))
async def test_close_when_a_segment_has_just_become_full_ends(tmp_path: Path, turns: int) -> None:
    folder = str(tmp_path / "cell")
    async with opened(tmp_path / "one.sqlite") as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=folder)
        await answer(journal, sampled(), random.Random(0).randbytes(SEGMENT_BYTES), cell=FIRST)
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await journal.close()
    assert len(segments(folder)) == 1


async def test_rows_left_by_a_killed_process_are_exported_by_the_next(tmp_path: Path, folder: str) -> None:
    async with opened(tmp_path / "one.sqlite") as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        await answer(journal, sampled(), b"0", cell=FIRST)
    async with opened(tmp_path / "one.sqlite") as (journal, _):
        await journal.cells.open_cell(SECOND, mirror=folder)
        assert len(segments(folder)) == 1
    assert (await replays_and_warnings(tmp_path / "two.sqlite", folder, numbers=range(1)))[0][0] == b"0"


async def test_two_machines_in_turn_add_to_the_same_mirror(tmp_path: Path, folder: str) -> None:
    await leave(tmp_path / "one.sqlite", folder)
    async with opened(tmp_path / "two.sqlite") as (journal, _):
        await journal.cells.open_cell(SECOND, mirror=folder)
        assert [replayed(journal, sampled(), cell=SECOND) for _ in range(4)][-1] is None
        await answer(journal, sampled("Twice"), b"new", cell=SECOND)
    assert len(segments(folder)) == 2
    async with opened(tmp_path / "one.sqlite") as (journal, _):
        third = CellScope(FIRST.cell, "third")
        await journal.cells.open_cell(third, mirror=folder)
        assert replayed(journal, sampled("Twice"), cell=third) == b"new"
    assert len(segments(folder)) == 2


async def test_segment_cut_anywhere_gives_the_rows_before_and_a_warning(tmp_path: Path) -> None:
    folder = str(tmp_path / "cell")
    await leave(tmp_path / "one.sqlite", folder, numbers=range(20))
    (segment,) = segments(folder)
    content = Path(segment).read_bytes()
    numbers_found = set()
    for part in range(8):
        Path(segment).write_bytes(content[: len(content) * part // 8])
        replays, warnings = await replays_and_warnings(tmp_path / f"{part}.sqlite", folder, numbers=range(20))
        kept = [replay for replay in replays[:20] if replay is not None]
        assert kept == [b"%d" % number for number in range(len(kept))]
        assert len(warnings) == 1 and "damaged" in warnings[0]
        numbers_found.add(len(kept))
    assert max(numbers_found) > 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        zlib.compress(b'{"schema":5}\n', wbits=31),
        zlib.compress(b'{"schema":1}\n{}\n', wbits=31),
        zlib.compress(b'{"schema":5}\n[]\n', wbits=31),
        zlib.compress(b'{"schema":5}\n{"key": "AA=="}\n', wbits=31),
        zlib.compress(b'{"schema":5}\n{"key": 7}\nno json\n', wbits=31),
    ],
)
async def test_segment_of_something_else_is_passed_over(tmp_path: Path, content: bytes) -> None:
    folder = str(tmp_path / "cell")
    await leave(tmp_path / "one.sqlite", folder)
    (tmp_path / "cell" / "segment-000000-00.jsonl.gz").write_bytes(content)
    (tmp_path / "cell" / "notes.txt").write_text("not a segment")
    replays, _ = await replays_and_warnings(tmp_path / "two.sqlite", folder)
    assert replays == [b"0", b"1", b"2"] * 2


def test_segment_with_a_line_that_no_row_needs_is_damaged_and_not_unpacked() -> None:
    stream = zlib.compressobj(1, wbits=31)
    parts = [stream.compress(b'{"schema":5}\n'), *(stream.compress(b" " * 2**20) for _ in range(300)), stream.flush()]
    content = b"".join(parts)
    tracemalloc.start()
    try:
        with pytest.raises(SegmentCut, match="too long"):
            list(decoded(content))
        assert tracemalloc.get_traced_memory()[1] < 3 * LARGEST_BYTES
    finally:
        tracemalloc.stop()


def test_body_that_unpacks_to_more_than_is_ever_kept_is_unreadable() -> None:
    largest = bytes(LARGEST_BYTES)
    assert unpacked(b"\1" + zlib.compress(largest, 1)) == largest
    with pytest.raises(Unreadable, match="too large"):
        unpacked(b"\1" + zlib.compress(bytes(2 * LARGEST_BYTES), 1))


async def test_row_too_large_for_a_segment_stays_on_its_machine(tmp_path: Path) -> None:
    folder = str(tmp_path / "cell")
    async with opened(tmp_path / "one.sqlite") as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=folder)
        for body in (random.Random(0).randbytes(LARGEST_ROW_BYTES), b"1", bytes(LARGEST_BYTES + 1)):
            await answer(journal, sampled(), body, cell=FIRST)
        assert journal.counters.kept == 2
    assert (await replays_and_warnings(tmp_path / "two.sqlite", folder))[0][:3] == [None, b"1", None]


async def test_segment_keeps_no_prompt_and_names_its_schema(tmp_path: Path) -> None:
    folder = str(tmp_path / "cell")
    async with opened(tmp_path / "one.sqlite") as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=folder)
        await answer(journal, asked("a prompt"), b"1", cell=FIRST)
    (segment,) = segments(folder)
    head, row = zlib.decompress(Path(segment).read_bytes(), wbits=31).splitlines()
    assert orjson.loads(head) == {"schema": 5}
    assert orjson.loads(row)["request"] is None and orjson.loads(row)["cell"] == "cell"


async def test_rows_of_a_mirror_answer_their_own_cell_only(tmp_path: Path, folder: str) -> None:
    await leave(tmp_path / "one.sqlite", folder, numbers=range(1))
    other = CellScope("another", "first")
    async with opened(tmp_path / "two.sqlite") as (journal, _):
        await journal.cells.open_cell(SECOND, mirror=folder)
        await journal.cells.open_cell(other, mirror=None)
        assert replayed(journal, asked("a0")) is None
        await answer(journal, asked("a0"), b"asked anew", cell=other)
        assert replayed(journal, asked("a0"), cell=other) == replayed(journal, asked("a0")) == b"asked anew"
        await journal.cells.close_cell(SECOND, drop_mirror=True)
    assert rows(tmp_path / "two.sqlite", "SELECT cell, body FROM answers") == [("another", b"\0asked anew")]


@pytest.mark.parametrize(
    ("content_type", "seal", "warning"),
    [
        pytest.param("text/html\r\nSet-Cookie: a=b", True, "content type", id="a line"),
        pytest.param("text/html\n", True, "content type", id="its end"),
        pytest.param("text/html\0", True, "content type", id="a zero"),
        pytest.param("text/\u20ac", True, "content type", id="no latin-1"),
        pytest.param("a" * 2000, True, "content type", id="long"),
        pytest.param("text/html", False, "checksum", id="changed"),
    ],
)
async def test_row_with_a_wrong_content_type_is_not_imported(
    tmp_path: Path, content_type: str, seal: bool, warning: str
) -> None:
    folder = str(tmp_path / "cell")
    await leave(tmp_path / "one.sqlite", folder, numbers=range(1))
    change_rows(folder, seal=seal, content_type=content_type)
    replays, warnings = await replays_and_warnings(tmp_path / "two.sqlite", folder, numbers=range(1))
    assert replays == [None, None]
    assert len(warnings) == 1 and warning in warnings[0]


def change_rows(folder: str, *, seal: bool = True, **changed: Any) -> None:
    """Changes the rows of the only segment, as any user with write access could."""
    (segment,) = segments(folder)
    changed_rows = [row._replace(imported=0, **changed) for row in decoded(Path(segment).read_bytes())]
    if seal:
        changed_rows = [sealed(row) for row in changed_rows]
    Path(segment).write_bytes(encoded(changed_rows))


async def test_segments_of_another_cell_are_not_taken_up(tmp_path: Path, folder: str) -> None:
    await leave(tmp_path / "one.sqlite", folder)
    other = CellScope("another", "first")
    async with opened(tmp_path / "two.sqlite") as (journal, _):
        await journal.cells.open_cell(other, mirror=folder)
        assert replayed(journal, asked("a0")) is None


async def test_close_of_a_finished_cell_deletes_its_segments_and_nothing_else(tmp_path: Path, folder: str) -> None:
    await leave(tmp_path / "one.sqlite", folder)
    storage.write_bytes(storage.join(folder, "record.json"), b"{}")
    async with opened(tmp_path / "one.sqlite") as (journal, warnings):
        await journal.cells.open_cell(SECOND, mirror=folder)
        await journal.cells.close_cell(SECOND, drop_mirror=True)
        assert not warnings
    assert [storage.basename(uri) for uri in segments(folder)] == ["record.json"]
    assert rows(tmp_path / "one.sqlite", "SELECT count(*) FROM answers WHERE deterministic = 0") == [(0,)]


class FlakyFileSystem(MemoryFileSystem):
    """A store that can be unavailable; its errors have a type that only its client defines."""

    protocol = "flaky"
    away = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def find(self, *arguments: Any, **options: Any) -> Any:
        self._answer()
        return super().find(*arguments, **options)

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        self._answer()
        super().pipe_file(*arguments, **options)

    def _answer(self) -> None:
        if self.away:
            raise RuntimeError("the store is away")


@pytest.fixture
def flaky() -> Iterator[type[FlakyFileSystem]]:
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    yield FlakyFileSystem
    FlakyFileSystem.away = False


async def test_mirror_that_is_away_costs_no_request_and_is_tried_again(
    tmp_path: Path, flaky: type[FlakyFileSystem]
) -> None:
    folder = f"flaky://{uuid.uuid4().hex}"
    await leave(tmp_path / "one.sqlite", folder, numbers=range(1))
    flaky.away = True
    async with opened(tmp_path / "two.sqlite", mirror_seconds=0.05) as (journal, warnings):
        await journal.cells.open_cell(SECOND, mirror=folder)
        await answer(journal, asked("b"), b"1", cell=SECOND)
        assert len(warnings) == 1 and "the store is away" in warnings[0]
        flaky.away = False
        await until(lambda: replayed(journal, asked("a0"), cell=SECOND) == b"0")
        await until(lambda: len(segments(folder)) == 2)
        flaky.away = True
        await answer(journal, asked("c"), b"1", cell=SECOND)
        await until(lambda: len(warnings) == 2)
        flaky.away = False
        await until(lambda: len(segments(folder)) == 3)
        flaky.away = True
        await journal.cells.close_cell(SECOND, drop_mirror=True)
        assert len(warnings) == 3
