"""The journal's file: damaged, full, locked, shared, removed, or its process killed."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fakes.journal import FACTS, FIRST, JSON, SECOND, answer, asked, claim_and_answer, opened, replayed, rows, sampled
from fakes.polling import until
from pools.journal.keys import Question
from pools.journal.store import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "journal.sqlite"


async def test_open_garbage_sets_it_aside_and_starts_an_empty_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 1000)
    async with opened(path, clock=lambda: 0.0) as (journal, warnings):
        await answer(journal, asked("a"), b"1")
        assert replayed(journal, asked("a")) == b"1"
    aside = path.with_name("journal.sqlite.corrupt-19700101T000000Z")
    assert aside.read_bytes().startswith(b"this is no database")
    assert len(warnings) == 1 and aside.name in warnings[0]


@pytest.mark.parametrize("version", [0, 1, 99])
async def test_open_a_file_of_another_version_sets_it_aside(path: Path, version: int) -> None:
    async with opened(path) as (journal, _):
        await answer(journal, asked("a"), b"1")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    async with opened(path) as (journal, warnings):
        assert replayed(journal, asked("a")) is None
        await answer(journal, asked("a"), b"2")
    assert len(warnings) == 1 and len(list(path.parent.glob("*.corrupt-*"))) == 1


BODIES = [b'{"n": %d, "text": "%b"}' % (number, b"word " * number**2) for number in range(16)]
FILES = 240
PAGE_BYTES = 4096


@pytest.mark.parametrize("keep_prompts", [False, True])
async def test_damage_anywhere_in_the_file_never_changes_an_answer(memory: Path, keep_prompts: bool) -> None:
    whole, path = memory / "whole.sqlite", memory / "journal.sqlite"
    async with opened(whole, keep_prompts=keep_prompts) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        for number, body in enumerate(BODIES):
            await answer(journal, question_of(number), body, cell=FIRST)
    content, rng, hits = whole.read_bytes(), random.Random(1), 0
    for number_of_file in range(FILES):
        path.write_bytes(damaged(content, rng))
        async with opened(path) as (journal, _):
            await journal.cells.open_cell(SECOND, mirror=None)
            for number, body in enumerate(BODIES):
                stored = journal.claim(question_of(number), cell=SECOND).stored
                assert stored is None or (stored.content_type, stored.body) == (JSON, body), f"file {number_of_file}"
                hits += stored is not None
        for file in memory.glob("journal.sqlite*"):
            file.unlink()
    assert FILES * len(BODIES) * 0.5 < hits < FILES * len(BODIES)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Returns the content, mostly with a flipped bit; else with overwritten bytes, a zeroed page, or a missing end."""
    changed, page = bytearray(content), PAGE_BYTES * rng.randrange(len(content) // PAGE_BYTES)
    match rng.randrange(8):
        case 0:
            changed[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
        case 1:
            changed[page + 100 : page + 164] = rng.randbytes(64)
        case 2:
            del changed[rng.randrange(len(content)) :]
        case kind:
            size = PAGE_BYTES if kind < 6 else len(content)  # the first page names the tables
            bit = rng.randrange(8 * size)
            changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def question_of(number: int) -> Question:
    """Returns a deterministic question for odd numbers, else a sampled question that is always the same."""
    return asked(str(number)) if number % 2 else sampled()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where writes do not wait for a disk, if /dev/shm is writable."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def damage(path: Path) -> None:
    """Overwrites all pages but the first, in another process: closing the file here would free SQLite's locks."""
    code = "import sys; f = open(sys.argv[1], 'r+b'); n = len(f.read()); f.seek(4096); f.write(b'?' * (n - 4096))"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


async def test_file_damaged_while_open_is_set_aside_and_the_answer_kept(path: Path) -> None:
    async with opened(path) as (journal, _):
        for number in range(50):
            await answer(journal, asked(str(number)), os.urandom(900))
    async with opened(path) as (journal, warnings):
        damage(path)
        await answer(journal, asked("0"), b"1")
        assert replayed(journal, asked("0")) == b"1"
    assert len(warnings) == 1 and "corrupt" in warnings[0]
    assert rows(path, "SELECT count(*) FROM answers") == [(1,)]


async def test_file_removed_while_open_is_followed_by_a_new_file(path: Path) -> None:
    async with opened(path) as (journal, _):
        await answer(journal, asked("a"), b"1")
        for part in path.parent.iterdir():
            part.unlink()
        await until(lambda: replayed(journal, asked("a")) is None)
        await answer(journal, asked("a"), b"2")
    assert rows(path, "SELECT count(*) FROM answers") == [(1,)]


async def test_folder_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    async with opened(blocked / "journal.sqlite", retry_seconds=0.05) as (journal, warnings):
        for number in range(10):
            await answer(journal, asked("a"), b"1")
            await asyncio.sleep(0.02)
            assert journal.counters.errors == number + 1
        assert len(warnings) == 1
        blocked.unlink()
        await kept_at_last(journal)


async def kept_at_last(journal: Journal) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not replayed(journal, asked("at last")):
        assert asyncio.get_running_loop().time() < deadline
        await claim_and_answer(journal, "at last", b"1")
        await asyncio.sleep(0.02)


async def test_full_disk_costs_no_request_and_writing_goes_on_when_there_is_space(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(500_000))
    async with opened(small_disk / "journal.sqlite", retry_seconds=0.05) as (journal, warnings):
        await answer(journal, asked("before"), b"0")
        for number in range(300):
            await answer(journal, asked(str(number)), os.urandom(8000))
            if journal.counters.errors:
                break
        assert journal.counters.errors
        assert len(warnings) == 1
        assert replayed(journal, asked("before")) == b"0"
        (small_disk / "ballast").unlink()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        try:
            await kept_at_last(journal)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_lock_held_by_another_process_never_stops_the_loop(path: Path) -> None:
    async with opened(path) as (journal, warnings):
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            keeping = asyncio.create_task(claim_and_answer(journal, "a", b"1"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not keeping.done()
            other.execute("COMMIT")
            await keeping
        assert replayed(journal, asked("a")) == b"1"
        assert not warnings and not journal.counters.errors


async def test_lock_never_released_is_logged_once_and_costs_no_request(path: Path) -> None:
    async with opened(path, retry_seconds=0.05) as (journal, warnings):
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await asyncio.gather(*(claim_and_answer(journal, str(number), b"1") for number in range(3)))
            assert journal.counters.errors == 3 and len(warnings) == 1
            other.execute("COMMIT")
        await kept_at_last(journal)


async def test_replay_waits_until_its_use_is_committed(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        await answer(journal, sampled(), b"0", cell=FIRST)
        await journal.cells.open_cell(SECOND, mirror=None)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            replaying = asyncio.create_task(journal.claim(sampled(), cell=SECOND).replay())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not replaying.done()  # a kill now loses the mark of use, but the sample was not sent yet
            other.execute("COMMIT")
        stored = await replaying
        assert stored is not None and stored.body == b"0"
        assert rows(path, "SELECT attempt, occurrence FROM replays") == [("second", 0)]


async def test_sample_without_a_committed_use_is_withheld_for_an_engine(path: Path) -> None:
    async with opened(path, retry_seconds=0.05) as (journal, warnings):
        await journal.cells.open_cell(FIRST, mirror=None)
        await answer(journal, sampled(), b"0", cell=FIRST)
        await answer(journal, asked("a"), b"1", cell=FIRST)
        await journal.cells.open_cell(SECOND, mirror=None)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            claim = journal.claim(sampled(), cell=SECOND)
            assert await claim.replay() is None and claim.stored is None
            assert await journal.claim(asked("a"), cell=SECOND).replay()
            other.execute("COMMIT")
        await journal.keep(claim, JSON, b"asked anew", facts=FACTS)
        assert len(warnings) == 1 and (journal.counters.hits, journal.counters.misses) == (1, 1)
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(SECOND, mirror=None)
        assert replayed(journal, sampled(), cell=SECOND) == b"0"  # not sent in this attempt yet


TESTS = str(Path(__file__).parents[2])
CHILD = """
import asyncio, sys
from pathlib import Path
from fakes.journal import asked
from pools.journal.answers import AnswerFacts
from pools.journal.store import Journal

async def main(path, name):
    journal = Journal(Path(path), max_bytes=10**9, keep_prompts=False, warn=lambda text: sys.exit(text))
    async def keep(number):
        claim = journal.claim(asked(f"{name}{number}"), cell=None)
        await journal.keep(claim, "application/json", b"%d" % number, facts=AnswerFacts(0, 0, ()))
        print(number, flush=True)
    for start in range(0, 100_000, 16):
        await asyncio.gather(*(keep(number) for number in range(start, start + 16)))

asyncio.run(main(*sys.argv[1:]))
"""


def writer(path: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(path), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": TESTS})


def acknowledged(process: subprocess.Popen[str], *, at_least: int) -> list[int]:
    assert process.stdout is not None
    numbers = [int(process.stdout.readline()) for _ in range(at_least)]
    process.send_signal(signal.SIGKILL)
    numbers += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    return numbers


async def test_answers_acknowledged_before_a_kill_are_there(path: Path) -> None:
    numbers = acknowledged(writer(path, "a"), at_least=500)
    async with opened(path) as (journal, warnings):
        assert [replayed(journal, asked(f"a{number}")) for number in numbers] == [b"%d" % number for number in numbers]
        assert not warnings


async def test_two_processes_share_a_file(path: Path) -> None:
    with writer(path, "a") as first, writer(path, "b") as other:
        async with opened(path) as (journal, warnings):
            await answer(journal, asked("ours"), b"1")
            for process, name in ((first, "a"), (other, "b")):
                numbers = acknowledged(process, at_least=300)
                await asyncio.sleep(0)  # new rows of other processes are read once a turn of the loop
                for number in numbers:
                    assert replayed(journal, asked(f"{name}{number}")) == b"%d" % number
            assert not warnings and not journal.counters.errors
