"""The journal: the answers that it keeps, and the requests that it replays them to."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import zlib
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

import pytest

from fakes.journal import (
    FACTS,
    FIRST,
    JSON,
    SECOND,
    SUBJECT,
    answer,
    asked,
    claim_and_answer,
    opened,
    replayed,
    rows,
    sampled,
)
from fakes.polling import until
from pools.journal import cells
from pools.journal.answers import AnswerFacts
from pools.journal.cells import CellScope


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "journal.sqlite"


@pytest.mark.parametrize("keep_prompts", [False, True])
@pytest.mark.parametrize(
    "body", [b"", b"{ }", b"x" * 5000, os.urandom(100_000)], ids=["empty", "short", "long", "random"]
)
async def test_claim_of_an_answered_request_gives_exactly_its_bytes(
    path: Path, body: bytes, keep_prompts: bool
) -> None:
    async with opened(path, keep_prompts=keep_prompts) as (journal, _):
        await answer(journal, asked("a"), body)
        stored = journal.claim(asked("a"), cell=None).stored
        assert stored is not None and (stored.content_type, stored.body) == (JSON, body)
        assert replayed(journal, asked("b")) is None
    async with opened(path, keep_prompts=not keep_prompts) as (journal, warnings):
        assert replayed(journal, asked("a"), cell=FIRST) == body
        assert not warnings


async def test_counters_tell_what_happened(path: Path) -> None:
    async with opened(path) as (journal, _):
        await answer(journal, asked("a"), b"1")
        await journal.claim(asked("a"), cell=None).replay()
        claim = journal.claim(asked("b"), cell=None)
        await claim.replay()
        claim.refuse()
        counters = journal.counters
        assert (counters.hits, counters.misses, counters.kept, counters.refused) == (1, 1, 1, 1)
        assert counters.errors == counters.dropped == 0


async def test_claim_of_a_sampled_request_outside_a_cell_is_never_answered(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        for cell in (None, SECOND):
            await answer(journal, sampled(), b"1", cell=cell)
            assert replayed(journal, sampled(), cell=cell) is None
        assert journal.counters.kept == 0


async def test_claim_in_a_later_attempt_replays_by_occurrence(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        claims = [journal.claim(sampled(), cell=FIRST) for _ in range(3)]
        for claim in reversed(claims):
            await journal.keep(claim, JSON, b"%d" % claim.occurrence, facts=FACTS)
        assert replayed(journal, sampled(), cell=FIRST) is None
        await journal.cells.open_cell(SECOND, mirror=None)
        assert [replayed(journal, sampled(), cell=SECOND) for _ in range(4)] == [b"0", b"1", b"2", None]
        other = CellScope("another", "first")
        await journal.cells.open_cell(other, mirror=None)
        assert replayed(journal, sampled(), cell=other) is None


async def test_requests_alone_open_no_more_than_so_many_cells(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "MOST_CELLS", 2)
    async with opened(path) as (journal, _):
        for name in ("one", "two", "three"):
            await journal.cells.go_on(CellScope(name, "first"))
        await journal.cells.open_cell(FIRST, mirror=None)
        assert [journal.cells.is_open(name) for name in ("one", "two", "three", FIRST.cell)] == [
            True,
            True,
            False,
            True,
        ]
        await journal.cells.close_cell(CellScope("one", "first"), drop_mirror=False)
        await journal.cells.go_on(SECOND)
        assert replayed(journal, sampled(), cell=SECOND) is None
        assert journal.claim(sampled(), cell=FIRST).scope == FIRST


async def test_keep_in_an_attempt_that_is_over_stores_nothing(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        claim = journal.claim(sampled(), cell=FIRST)
        await journal.cells.open_cell(SECOND, mirror=None)
        await journal.keep(claim, JSON, b"late", facts=FACTS)
        assert journal.claim(sampled(), cell=FIRST).keeps is False
        assert replayed(journal, sampled(), cell=SECOND) is None


async def test_keep_that_is_overtaken_by_the_next_attempt_stores_nothing(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        claim = journal.claim(sampled(), cell=FIRST)
        keeping = asyncio.create_task(journal.keep(claim, JSON, bytes(100_000), facts=FACTS))
        await asyncio.sleep(0)
        await journal.cells.open_cell(SECOND, mirror=None)
        await keeping
        assert journal.counters.kept == 0


async def test_release_gives_the_occurrence_to_the_retry(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        claims = [journal.claim(sampled(), cell=FIRST) for _ in range(4)]
        assert [claim.occurrence for claim in claims] == [0, 1, 2, 3]
        claims[2].release()
        claims[1].refuse()
        claims[1].release()
        assert [journal.claim(sampled(), cell=FIRST).occurrence for _ in range(3)] == [1, 2, 4]


async def test_release_after_the_client_left_gives_the_retry_the_same_answer(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        claim = await answer(journal, sampled(), b"0", cell=FIRST)
        claim.release()
        again = journal.claim(sampled(), cell=FIRST)
        assert again.stored is not None and again.stored.body == b"0"
        again.release()
        assert replayed(journal, sampled(), cell=FIRST) == b"0"
        assert replayed(journal, sampled(), cell=FIRST) is None


async def test_attempt_that_goes_on_in_a_new_process_gets_no_answer_twice(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        for number in range(4):
            await answer(journal, sampled(), b"%d" % number, cell=FIRST)
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(SECOND, mirror=None)
        assert [replayed(journal, sampled(), cell=SECOND) for _ in range(2)] == [b"0", b"1"]
        await journal.cells.open_cell(SECOND, mirror=None)
        lost = journal.claim(sampled(), cell=SECOND)
        lost.release()
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(SECOND, mirror=None)
        assert [replayed(journal, sampled(), cell=SECOND) for _ in range(3)] == [b"2", b"3", None]


async def test_attempt_that_goes_on_asks_again_for_what_was_in_flight(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        journal.claim(sampled(), cell=FIRST)
        await answer(journal, sampled(), b"1", cell=FIRST)
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        assert [journal.claim(sampled(), cell=FIRST).occurrence for _ in range(3)] == [0, 2, 3]


async def test_close_of_a_finished_cell_drops_its_sampled_answers_only(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        for number in range(100):
            await answer(journal, sampled(), b"%d" % number, cell=FIRST)
        await answer(journal, asked("a"), b"greedy", cell=FIRST)
        await journal.cells.close_cell(FIRST, drop_mirror=True)
        assert replayed(journal, asked("a")) == b"greedy"
    assert rows(path, "SELECT deterministic, count(*) FROM answers") == [(1, 1)]


@pytest.mark.parametrize("keep_prompts", [False, True])
async def test_file_keeps_no_prompt_unless_told_to(path: Path, keep_prompts: bool) -> None:
    question = asked("a prompt")
    async with opened(path, keep_prompts=keep_prompts) as (journal, _):
        await answer(journal, question, b"1")
    assert b"a prompt" not in path.read_bytes()
    [(request,)] = rows(path, "SELECT request FROM answers")
    assert (zlib.decompress(request) if request else None) == (question.body if keep_prompts else None)


@pytest.mark.parametrize("exists", [False, True])
async def test_file_and_its_log_are_for_their_owner_alone(path: Path, exists: bool) -> None:
    if exists:
        path.parent.mkdir()
        path.touch(mode=0o644)
    async with opened(path) as (journal, _):
        await answer(journal, asked("a"), b"1")
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == dict.fromkeys((path.name, f"{path.name}-wal", f"{path.name}-shm"), 0o600)


async def test_file_is_readable_by_its_documented_schema(path: Path) -> None:
    async with opened(path, keep_prompts=True, clock=lambda: 1e9) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        await answer(journal, asked("a"), b"1", cell=FIRST)
    columns = "deterministic, cell, attempt, occurrence, target, model, weights, tokenizer, engine, content_type"
    assert rows(path, f"SELECT {columns}, finish_reasons, prompt_tokens, completion_tokens, created FROM answers") == [
        (1, "cell", "first", 0, "/v1/completions", "run-100", *astuple(SUBJECT), JSON, "stop,length", 3, 5, 10**9)
    ]


async def test_keep_of_texts_that_are_no_unicode_works(path: Path) -> None:
    broken = "\ud800"
    facts = AnswerFacts(0, 0, (broken,))
    async with opened(path) as (journal, _):
        await journal.keep(journal.claim(asked("a", model=broken), cell=None), JSON, b"1", facts=facts)
        assert replayed(journal, asked("a", model=broken)) == b"1"
        scope = CellScope(broken, "first")
        await journal.cells.open_cell(scope, mirror=None)
        await answer(journal, asked("b"), b"1", cell=scope)  # the cell's name is invalid as a file name
        assert replayed(journal, asked("b")) is None


@pytest.mark.parametrize(
    "change",
    [
        "body = CAST(x'07' || substr(body, 2) AS BLOB)",
        "body = CAST(substr(body, 1, 1) || x'39' AS BLOB)",
        "body = substr(body, 2)",
        "body = x''",
        "body = 'a text'",
        "body = 1",
        "body = CAST(body AS TEXT)",
        "content_type = 'text/html'",
        "content_type = CAST(content_type AS BLOB)",
        "content_type = CAST(x'ff' AS TEXT)",
        "request = CAST(x'00' AS BLOB)",
        "request = NULL",
        "model = 'another'",
        "created = created + 1",
        "imported = 1",
    ],
)
async def test_row_with_a_changed_column_is_asked_again(path: Path, change: str) -> None:
    async with opened(path, keep_prompts=True) as (journal, _):
        await answer(journal, asked("a"), b"1")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE answers SET {change}")
    async with opened(path) as (journal, warnings):
        await journal.cells.open_cell(SECOND, mirror=None)
        assert replayed(journal, asked("a"), cell=SECOND) is None
        await answer(journal, asked("a"), b"2")
        assert replayed(journal, asked("a")) == b"2"
        assert not warnings


async def test_sample_that_moved_to_another_place_is_not_given(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        await answer(journal, sampled(), b"0", cell=FIRST)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE answers SET cell = 'another'")
    other = CellScope("another", "second")
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(other, mirror=None)
        assert replayed(journal, sampled(), cell=other) is None


async def test_answer_under_the_key_of_another_request_is_not_given(path: Path) -> None:
    async with opened(path) as (journal, _):
        await answer(journal, asked("a"), b"1")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE answers SET key = ?", (asked("b").key,))
    async with opened(path) as (journal, _):
        assert replayed(journal, asked("b")) is None
        assert journal.counters.dropped == 1


async def test_file_stays_within_its_bound_and_keeps_the_newest(path: Path) -> None:
    async with opened(path, max_bytes=400_000) as (journal, _):
        for number in range(300):
            await answer(journal, asked(str(number)), os.urandom(5000))
    assert journal.counters.dropped > 200
    async with opened(path, max_bytes=400_000) as (journal, _):
        assert 0 < journal.counters.bytes <= 400_000
        kept = [number for number in range(300) if replayed(journal, asked(str(number)))]
        assert kept == list(range(300 - len(kept), 300)) and 20 < len(kept) < 90
    assert path.stat().st_size < 1_600_000


async def test_key_filter_has_all_keys_of_the_file_and_of_other_processes(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.cells.open_cell(FIRST, mirror=None)
        old = [asked(f"{number}") for number in range(2100)]
        draws = [sampled(f"{number}") for number in range(1500)]
        await asyncio.gather(*(answer(journal, question, b"1") for question in old))
        await asyncio.gather(*(answer(journal, question, b"1", cell=FIRST) for question in draws))
    async with opened(path) as (journal, _), opened(path) as (other, _):
        await journal.cells.open_cell(SECOND, mirror=None)
        assert replayed(journal, old[-1]) == b"1"  # before all keys are read
        await until(lambda: journal._database._keys._complete)
        assert all(replayed(journal, question) == b"1" for question in old)
        assert all(replayed(journal, question, cell=SECOND) == b"1" for question in draws)
        await answer(other, asked("news"), b"2")
        assert replayed(journal, asked("news")) == b"2"


async def test_log_is_moved_into_the_file_next_to_the_loop(path: Path) -> None:
    async with opened(path) as (journal, _):
        await answer(journal, asked("a"), os.urandom(100_000))
        assert path.stat().st_size < 100_000
        await until(lambda: path.stat().st_size > 100_000)


async def test_keep_many_at_once_while_cancelled_clients_leave_loses_no_other(path: Path) -> None:
    async with opened(path) as (journal, _):
        tasks = [asyncio.create_task(claim_and_answer(journal, str(number), b"%d" % number)) for number in range(64)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(not task.cancelled() for task in tasks[1::2])
        assert [replayed(journal, asked(str(number))) for number in range(64)] == [
            b"%d" % number for number in range(64)
        ]


async def test_close_twice_is_safe_and_answers_after_it_are_not_kept(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.close()
        await answer(journal, asked("a"), b"1")
    assert not path.with_name(f"{path.name}-wal").exists()
    assert rows(path, "SELECT count(*) FROM answers") == [(0,)]
