"""Questions and answers as delivered to the page: from records and samples, by a server, and in a single file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from aiohttp.test_utils import TestClient, TestServer

from fakes.cli import invoke
from fakes.records import make_metric, make_record, publish
from resources.errors import StorageError
from resources.jobs.addresses import own_address
from resources.storage import storage
from tasks.records.details import MergedInput, MergeReference
from tasks.records.record import FoundRecord, find_records
from tasks.records.samples import SAMPLES_NAME, Sample
from tasks.records.search import RecordFilter
from tasks.reports.viewer import view as viewing
from tasks.reports.viewer.boards import boards_of_sample
from tasks.reports.viewer.columns import CUT, NO_SCORE, SHORTENED, UNSCORED, Found, Scale, as_bytes, is_right
from tasks.reports.viewer.kept import KeptColumns, kept_at, make_room
from tasks.reports.viewer.page import page_files, single_file, write_next_to_report
from tasks.reports.viewer.reading import BLOCK, Column
from tasks.reports.viewer.server import application
from tasks.reports.viewer.view import IN_MEMORY, View
from tasks.verdicts.comparison import compare

TOKEN = "a-token"
HOSTILE = "</script><img src=x onerror=alert(1)>"


def asked(number: int, right: bool, **others: Any) -> Sample:
    fields: dict[str, Any] = {
        "benchmark": "made",
        "id": f"question {number}",
        "prompt": f"Which colour is number {number}?",
        "output": "green" if right else "red",
        "target": "green",
        "scores": {"acc": float(right)},
    }
    return Sample(**fields | others)


def published(folder: Path, step: int, answers: Sequence[Sample], **others: Any) -> str:
    scores = [sample.scores["acc"] for sample in answers if "acc" in sample.scores]
    metric = make_metric("made", sum(scores) / max(1, len(scores)), n=len(scores))
    fields: dict[str, Any] = {"metrics": (metric,), "benchmarks": ("made",), "samples": len(answers)}
    return publish(folder, make_record(step=step, **fields | others), answers)


@contextmanager
def viewed(location: Path | str) -> Iterator[tuple[View, str]]:
    """Yields a view of a folder with its samples read, and the key of its first benchmark."""
    view = View(find_records(str(location)), title="made", location=str(location))
    try:
        key = next(iter(view.boards))
        view.read(key)
        yield view, key
    finally:
        view.close()


def had(view: View, name: str) -> Any:
    content = view.answer(name)
    assert content is not None, name
    return json.loads(content)


def grid(view: View, key: str, name: str) -> list[list[int]]:
    content = view.answer(f"{key}/{name}.bin")
    assert content is not None
    questions = len(had(view, f"{key}/questions.json")["ids"])
    return np.frombuffer(content, np.uint8).reshape(-1, questions).tolist()


def test_scores_become_bytes_between_the_ends_of_their_metric():
    scale = Scale("bpb", False, 1.0, 3.0)
    encoded = as_bytes(np.array([1.0, 2.0, 3.0, 9.0, np.nan]), scale)
    assert encoded.tolist() == [0, 127, 254, 254, NO_SCORE]
    assert is_right(encoded, scale).tolist() == [True, False, False, False, False]
    assert is_right(encoded, Scale("acc", True, 1.0, 3.0)).tolist() == [False, True, True, True, False]
    assert as_bytes(np.array([2.0, np.nan]), Scale("bpb", None, 2.0, 2.0)).tolist() == [0, NO_SCORE]


def test_index_names_checkpoints_with_and_without_a_score_from_records_alone(tmp_path: Path):
    cell = published(tmp_path, 100, [asked(1, True), asked(2, False)])
    published(tmp_path, 200, [asked(1, True), asked(2, True)], status="withheld", reason="1 answer to 2 questions")
    published(tmp_path, 300, [], status="failed", reason="the harness ended with 1", samples=None)
    Path(cell, "attempt-1", SAMPLES_NAME).unlink()
    view = View(find_records(str(tmp_path)), title="made", location=str(tmp_path))
    [benchmark] = had(view, "index.json")["benchmarks"]
    assert re.fullmatch("[a-z0-9-]+", benchmark["key"])
    assert (benchmark["benchmark"], benchmark["metrics"]) == ("made", ["acc"])
    shown = [(c["step"], c["status"], c["note"], c["samples"], list(c["scores"])) for c in benchmark["checkpoints"]]
    assert shown == [
        (100, "succeeded", None, True, ["acc"]),
        (200, "withheld", "1 answer to 2 questions", True, []),
        (300, "failed", "the harness ended with 1", False, []),
    ]


def test_merged_checkpoints_are_columns_of_a_run_of_their_own_and_say_how_they_were_made(tmp_path: Path):
    inputs = tuple(
        MergedInput(uri=f"checkpoints/{step}", run="run-a", step=step, digest=f"{step}", weight=0.5)
        for step in (100, 200)
    )
    merged = make_record(step=200).checkpoint.model_copy(
        update={"name": "merged", "digest": "e" * 64, "merge": MergeReference(kind="mean", inputs=inputs)}
    )
    published(tmp_path, 200, [asked(1, True)], checkpoint=merged, cell="merged-cell")
    for step in (100, 200, 300):
        published(tmp_path, step, [asked(1, step > 200)])
    with viewed(tmp_path) as (view, key):
        [benchmark] = had(view, "index.json")["benchmarks"]
        assert [(c["run"], c["step"], c["merge"]) for c in benchmark["checkpoints"]] == [
            ("run-a", 100, None),
            ("run-a", 200, None),
            ("run-a", 300, None),
            ("run-a (merged: mean of 2)", 200, "mean of 2: run-a 100, 200"),
        ]
        assert grid(view, key, "scores/0") == [[0], [0], [254], [254]]


def test_grid_has_scores_and_flags_in_the_same_order_of_questions(tmp_path: Path):
    first = [asked(1, True), asked(2, False, finish="length"), asked(3, True, truncated=True)]
    second = [asked(3, False), asked(4, True), asked(1, True), asked(2, False, scores={})]
    published(tmp_path, 100, first)
    published(tmp_path, 200, second)
    published(tmp_path, 300, [asked(2, True)], status="withheld", reason="too few")
    with viewed(tmp_path) as (view, key):
        assert had(view, f"{key}/questions.json")["ids"] == [f"question {number}" for number in (3, 4, 1, 2)]
        assert grid(view, key, "scores/0") == [
            [254, NO_SCORE, 254, 0],
            [0, 254, 254, NO_SCORE],
            [NO_SCORE, NO_SCORE, NO_SCORE, 254],
        ]
        assert grid(view, key, "flags") == [[SHORTENED, 0, 0, CUT], [0, 0, 0, UNSCORED], [0, 0, 0, UNSCORED]]


def test_question_has_its_answers_at_every_checkpoint_and_what_was_asked_otherwise(tmp_path: Path):
    published(tmp_path, 100, [asked(0, True), asked(1, True, log_likelihoods=(-1.0, -2.5))])
    other = asked(1, False, prompt="Put differently: number 1?", finish="stop")
    published(tmp_path, 200, [other, asked(1, True, prompt="Put differently: number 1?")])
    published(tmp_path, 300, [asked(0, True)])
    with viewed(tmp_path) as (view, key):
        number = had(view, f"{key}/questions.json")["ids"].index("question 1")
        [question] = had(view, f"{key}/part/{number}.json")["questions"]
    assert (question["prompt"], question["target"]) == ("Which colour is number 1?", "green")
    first, second, third = question["answers"]
    assert [(a["output"], a["log_likelihoods"], a["prompt"]) for a in first] == [("green", [-1.0, -2.5], None)]
    assert [(a["output"], a["scores"], a["finish"]) for a in second] == [
        ("red", {"acc": 0.0}, "stop"),
        ("green", {"acc": 1.0}, None),
    ]
    assert {a["prompt"] for a in second} == {"Put differently: number 1?"} and third == []


def test_question_that_was_asked_repeatedly_has_the_mean_of_its_scores(tmp_path: Path):
    published(tmp_path, 100, [asked(1, True), asked(2, False), asked(1, False)])
    with viewed(tmp_path) as (view, key):
        assert grid(view, key, "scores/0") == [[127, 0]]


def test_questions_beyond_a_block_are_found_where_they_are(tmp_path: Path):
    number = 2 * BLOCK + 5
    published(tmp_path, 100, [asked(each, each % 3 == 0) for each in range(number)])
    published(tmp_path, 200, [asked(each, each % 2 == 0) for each in reversed(range(number))])
    with viewed(tmp_path) as (view, key):
        ids = had(view, f"{key}/questions.json")["ids"]
        for place in (0, BLOCK - 1, BLOCK, number - 1):
            own = int(ids[place].split()[1])
            [question] = had(view, f"{key}/part/{place}.json")["questions"]
            assert question["prompt"] == f"Which colour is number {own}?"
            outputs = [answers[0]["output"] for answers in question["answers"]]
            assert outputs == ["green" if own % 3 == 0 else "red", "green" if own % 2 == 0 else "red"]
        assert view.answer(f"{key}/part/{number}.json") is None


def test_group_shows_the_questions_of_its_parts(tmp_path: Path):
    samples = [asked(1, True, benchmark=part) for part in ("north", "other", "south")]
    metrics = (
        make_metric("other", 1.0),
        make_metric("world", 1.0).model_copy(update={"parts": {"north": 0.5, "pole": 0.5}}),
        make_metric("pole", 1.0).model_copy(update={"parts": {"south": 1.0}}),
        *(make_metric(part, 1.0) for part in ("north", "south")),
    )
    publish(tmp_path, make_record(metrics=metrics, benchmarks=("other", "world"), samples=3), samples)
    with viewed(tmp_path) as (view, _):
        other, world = (board.shown for board in view.boards.values())
        questions = had(view, f"{world.key}/questions.json")
        assert (other.benchmark, world.benchmark) == ("other", "world")
        assert (questions["ids"], questions["parts"], questions["part"]) == (
            ["question 1", "question 1"],
            ["north", "south"],
            [0, 1],
        )
        assert grid(view, world.key, "scores/0") == [[254, 254]]
        assert had(view, f"{other.key}/questions.json")["ids"] == ["question 1"]


def test_group_and_a_part_of_it_that_were_both_asked_for_have_the_questions_of_the_part(tmp_path: Path):
    for step, rights in ((100, (False, True)), (200, (True, False))):
        samples = [asked(1, right, benchmark=part) for part, right in zip(("north", "south"), rights, strict=True)]
        parts = [make_metric(part, float(right), n=1) for part, right in zip(("north", "south"), rights, strict=True)]
        world = make_metric("world", 0.5, n=2).model_copy(update={"parts": {"north": 0.5, "south": 0.5}})
        record = make_record(step=step, metrics=(world, *parts), benchmarks=("world", "south"), samples=2)
        publish(tmp_path, record, samples)
    with viewed(tmp_path) as (view, _):
        boards = {board.shown.benchmark: board.shown.key for board in view.boards.values()}
        pairs = {name: had(view, f"{key}/pairs/0-0-1.json") for name, key in boards.items()}
        assert grid(view, boards["world"], "scores/0") == [[0, 254], [254, 0]]
        assert grid(view, boards["south"], "scores/0") == [[254], [0]]
    assert [pairs["world"][name] for name in ("won", "lost", "difference")] == [[0], [1], 0.0]
    assert [pairs["south"][name] for name in ("won", "lost")] == [[], [0]]


@pytest.mark.parametrize(
    ("benchmarks", "measured", "shown"),
    [
        (("tag",), (), ["tag"]),
        (("made", "tag"), ("made", "part.of"), ["tag"]),
        (("made", "other"), ("made", "other"), []),
        (("made", "other"), (), []),
        (("made", "part"), ("made", "part"), ["part"]),
    ],
)
def test_questions_of_a_benchmark_that_was_not_named_are_shown_where_there_is_no_doubt(
    benchmarks: tuple[str, ...], measured: tuple[str, ...], shown: list[str]
):
    metrics = tuple(make_metric(name, 1.0) for name in measured)
    assert boards_of_sample(make_record(benchmarks=benchmarks, metrics=metrics), "part.of") == shown


def test_metrics_outside_of_0_to_1_have_the_ends_of_all_checkpoints(tmp_path: Path):
    for step, values in ((100, (2.5, 4.5)), (200, (0.5, 3.0))):
        samples = [
            asked(number, True, scores={"acc": 1.0, "bpb": value}) for number, value in enumerate(values)
        ]  # fmt: skip
        published(tmp_path, step, samples)
    with viewed(tmp_path) as (view, key):
        scales = had(view, f"{key}/questions.json")["metrics"]
        assert [(scale["name"], scale["low"], scale["high"]) for scale in scales] == [
            ("acc", 0.0, 1.0),
            ("bpb", 0.5, 4.5),
        ]
        assert grid(view, key, "scores/1") == [[127, 254], [0, 159]]


def test_perplexities_of_single_texts_differ_by_their_ratio(tmp_path: Path):
    samples = [
        asked(number, True, scores={}, ratios={"bits_per_byte": (-float(number), 1.0)}) for number in range(1, 101)
    ]
    metric = make_metric("made", 1.0, name="bits_per_byte", higher_is_better=False)
    publish(tmp_path, make_record(metrics=(metric,), samples=100), samples)
    with viewed(tmp_path) as (view, key):
        [scale] = had(view, f"{key}/questions.json")["metrics"]
        [column] = grid(view, key, "scores/0")
    assert scale["higher_is_better"] is False and 1.4 < scale["low"] < scale["high"] < 144.3
    assert column == sorted(column) and set(column) >= {0, 254}


@pytest.mark.filterwarnings("error")
def test_perplexity_beyond_what_a_score_can_hold_is_the_worst_of_all(tmp_path: Path):
    likelihoods = [-1.0] * 100 + [-90.0, -600.0]
    samples = [
        asked(number, True, scores={}, ratios={"word_perplexity": (likelihood, 1.0)})
        for number, likelihood in enumerate(likelihoods)
    ]
    metric = make_metric("made", 3.0, name="word_perplexity", higher_is_better=False)
    publish(tmp_path, make_record(metrics=(metric,), samples=len(samples)), [*samples, samples[-1]])
    with viewed(tmp_path) as (view, key):
        [scale] = had(view, f"{key}/questions.json")["metrics"]
        [column] = grid(view, key, "scores/0")
    assert scale["low"] < 3.0 < scale["high"] and column[-2:] == [254, 254]


@pytest.mark.parametrize("clusters", [False, True])
def test_two_checkpoints_have_the_numbers_of_assay_compare(tmp_path: Path, clusters: bool):
    rights = np.random.default_rng(0).random((2, 60)) < [[0.4], [0.7]]
    for step, right in zip((100, 200), rights.tolist(), strict=True):
        passage = (lambda number: f"passage {number // 3}") if clusters else lambda number: None
        published(tmp_path, step, [asked(n, good, cluster=passage(n)) for n, good in enumerate(right)])
    with viewed(tmp_path) as (view, key):
        pair = had(view, f"{key}/pairs/0-0-1.json")
        records = view.boards[key].records
    [metric] = compare([records[0]], [records[1]], labels=("a", "b"), filters=RecordFilter(), adjustment="none").metrics
    won, lost = (~rights[0] & rights[1]).nonzero()[0].tolist(), (rights[0] & ~rights[1]).nonzero()[0].tolist()
    assert (pair["won"], pair["lost"]) == (won, lost)
    assert len(pair["both"]) == (rights[0] & rights[1]).sum() and len(pair["neither"]) == (~rights).all(0).sum()
    finding = metric.finding
    assert [pair[name] for name in ("difference", "low", "high", "p", "test")] == pytest.approx(
        [finding.difference, finding.low, finding.high, finding.p, finding.test]
    )
    exact = None if clusters else scipy.stats.binomtest(len(won), len(won) + len(lost)).pvalue
    assert pair["exact_p"] == (exact if exact is None else pytest.approx(exact))


def test_two_checkpoints_with_a_withheld_value_are_counted_not_tested(tmp_path: Path):
    published(tmp_path, 100, [asked(1, True), asked(2, False)])
    published(tmp_path, 200, [asked(1, True), asked(2, True)], status="withheld", reason="too few")
    with viewed(tmp_path) as (view, key):
        pair = had(view, f"{key}/pairs/0-0-1.json")
    assert (pair["won"], pair["p"], pair["reason"]) == ([1], None, "it has no published value")


@pytest.mark.parametrize(
    ("text", "in_questions", "in_answers"),
    [
        ("COLOUR is number 2", [1], []),
        ('said "blue"\nlike Ünder', [], [0]),
        ("green", [0, 1, 2], [0, 2]),
        ("output", [], []),
        ("passage", [2], []),
    ],
)
def test_search_finds_texts_of_questions_and_of_answers(
    tmp_path: Path, text: str, in_questions: list[int], in_answers: list[int]
):
    published(tmp_path, 100, [asked(1, True), asked(2, False), asked(3, True, context="A Passage. ")])
    second = [asked(2, False), asked(1, False, output='It said "Blue"\nlike Ünder'), asked(3, False)]
    published(tmp_path, 200, second)
    with viewed(tmp_path) as (view, key):
        matches = view.search(key, text)
    assert (matches.in_questions, matches.in_answers, matches.complete) == (in_questions, in_answers, True)


def test_search_ends_when_a_newer_search_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published(tmp_path, 100, [asked(number, True) for number in range(BLOCK + 1)])
    with viewed(tmp_path) as (view, key):
        newer: list[Found] = []
        texts = view.columns(key)._kept.texts

        def slow(digest: bytes) -> bytes:
            if not newer:
                newer.append(Found([], [], complete=False))
                newer[0] = view.search(key, "number 64")
            return texts(digest)

        monkeypatch.setattr(view.columns(key)._kept, "texts", slow)
        older = view.search(key, "colour")
    assert (newer[0].in_questions, newer[0].complete) == ([64], True)
    assert (older.in_questions, older.complete) == (list(range(BLOCK)), False)


def test_damaged_or_missing_samples_of_a_checkpoint_leave_the_others_theirs(tmp_path: Path):
    published(tmp_path, 100, [asked(1, True)])
    cell = published(tmp_path, 200, [asked(1, True)])
    Path(cell, "attempt-1", SAMPLES_NAME).write_bytes(gzip.compress(b'{"benchmark": "made"}\n'))
    published(tmp_path, 300, [asked(1, False)])
    Path(published(tmp_path, 400, [asked(1, True)]), "attempt-1", SAMPLES_NAME).unlink()
    with viewed(tmp_path) as (view, key):
        assert grid(view, key, "scores/0") == [[254], [NO_SCORE], [0], [NO_SCORE]]
        assert had(view, f"{key}/pairs/0-0-1.json")["reason"] == "its samples cannot be read"
        assert [name for name in view.contents(questions_per_part=1) if "pairs" in name] == [f"{key}/pairs/0-0-2.json"]
        unreadable = had(view, f"{key}/questions.json")["unreadable"]
        assert list(unreadable) == ["1", "3"] and SAMPLES_NAME in unreadable["1"]
        assert "no such file" in unreadable["3"]


def test_records_in_a_store_are_viewed_as_those_in_a_folder(tmp_path: Path):
    published(tmp_path / "here", 100, [asked(1, True), asked(2, False)])
    storage.copy_from_local(tmp_path / "here", f"memory://{tmp_path.name}/evaluations")
    with viewed(f"memory://{tmp_path.name}/evaluations") as (view, key):
        assert grid(view, key, "scores/0") == [[254, 0]]


def test_large_records_are_read_once_by_processes_and_kept_below_the_cache(tmp_path: Path):
    cells = [
        published(tmp_path, step, [asked(1, True), asked(2, step > 100)], samples=IN_MEMORY) for step in (100, 200)
    ]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with viewed(tmp_path) as (view, key):
        assert grid(view, key, "scores/0") == [[254, 0], [254, 254]]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for cell in cells:
        Path(cell, "attempt-1", SAMPLES_NAME).unlink()
    with viewed(tmp_path) as (view, key):
        assert grid(view, key, "scores/0") == [[254, 0], [254, 254]]
    kept = kept_at(str(tmp_path))
    assert kept is not None
    kept.write_bytes(b"no database" * 1000)
    for side_file in (f"{kept}-wal", f"{kept}-shm"):
        Path(side_file).unlink(missing_ok=True)
    with viewed(tmp_path) as (view, key):
        assert had(view, f"{key}/questions.json")["ids"] == []


def test_columns_that_were_not_opened_for_longest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.reports.viewer.kept._MOST_BYTES", 0)
    for name in ("old", "open", "own"):
        KeptColumns(tmp_path / f"{name}.sqlite").close()
    (tmp_path / "damaged.sqlite").write_bytes(b"no database" * 1000)
    (tmp_path / "gone.sqlite").symlink_to("removed by another")
    used = KeptColumns(tmp_path / "open.sqlite")
    make_room(tmp_path / "own.sqlite")
    used.close()
    assert sorted(path.name for path in tmp_path.glob("*.sqlite") if path.exists()) == ["open.sqlite", "own.sqlite"]


def test_columns_that_others_write_for_long_are_refused_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.reports.viewer.kept._SECONDS", 0.0)
    path = tmp_path / "columns.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("create table theirs (a)")
        other.execute("begin exclusive")
        with pytest.raises(StorageError, match="locked"):
            KeptColumns(path)
        other.execute("commit")
        assert path.exists()


def test_large_records_with_columns_beyond_the_bound_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.reports.viewer.kept._MOST_BYTES", 0)
    cell = published(tmp_path, 100, [asked(1, True)], samples=IN_MEMORY + 1)
    with viewed(tmp_path):
        Path(cell, "attempt-1", SAMPLES_NAME).unlink()
    with viewed(tmp_path) as (view, key):
        assert grid(view, key, "scores/0") == [[254]]


def test_columns_that_find_no_space_are_refused_whole(tmp_path: Path):
    kept = KeptColumns(tmp_path / "columns.sqlite")
    kept._connection.execute("pragma max_page_count = 12")
    column = Column(b"q", 1, (), b"", b"\0", (), (b"answer" * 20_000,))
    with pytest.raises(StorageError, match="full"):
        kept.take("place", {"made": column}, {})
    assert kept.missing(["place"]) == ["place"] and kept.column("place", "made") is None
    kept.close()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    """A client with a browser's headers for a server of a single benchmark."""
    published(tmp_path, 100, [asked(1, True), asked(2, False)])
    view = View(find_records(str(tmp_path)), title="made", location=str(tmp_path))
    server = TestServer(application(view, token=TOKEN, host="assay.test"))
    async with TestClient(server, headers={"Accept-Encoding": "gzip"}) as client:
        yield client
    view.close()


async def test_server_sends_the_page_and_columns_to_holders_of_the_address(client: TestClient[Any, Any]):
    page = await client.get(f"/{TOKEN}/")
    assert page.status == 200 and page.content_type == "text/html"
    index = await (await client.get(f"/{TOKEN}/index.json")).json()
    key = index["benchmarks"][0]["key"]
    scores = await client.get(f"/{TOKEN}/{key}/scores/0.bin")
    assert (await scores.read(), scores.headers["Content-Encoding"]) == (bytes([254, 0]), "gzip")
    matches = await (await client.get(f"/{TOKEN}/{key}/search.json?text=number%202")).json()
    assert matches["in_questions"] == [1]


@pytest.mark.parametrize("failures", [[BrokenProcessPool("a worker died")], [None]], ids=["failed", "ended-early"])
async def test_server_tells_of_a_reading_that_failed_and_reads_again(
    client: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch, failures: list[Exception | None]
):
    read = View.read

    def fails(view: View, key: str) -> None:
        if not failures:
            read(view, key)
        elif failure := failures.pop():
            raise failure

    monkeypatch.setattr(View, "read", fails)
    index = await (await client.get(f"/{TOKEN}/index.json")).json()
    name = f"/{TOKEN}/{index['benchmarks'][0]['key']}/questions.json"
    refused = await client.get(name)
    assert (refused.status, list(await refused.json())) == (500, ["error"])
    assert "Content-Security-Policy" in refused.headers
    assert (await client.get(name)).status == 200


async def test_server_answers_with_what_is_read_so_far_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = (100, 200, 300, 400, 500)
    for step in steps:
        published(tmp_path, step, [asked(step if step == 400 else 1, step > 200), asked(2, True)])
    view = View(find_records(str(tmp_path)), title="made", location=str(tmp_path))
    key, [board] = f"/{TOKEN}/{next(iter(view.boards))}", view.boards.values()
    gates = {item.record.checkpoint.step: threading.Event() for item in board.records}
    read = viewing._read
    begun: list[int] = []

    def reads(item: FoundRecord, kept: KeptColumns) -> None:
        begun.append(item.record.checkpoint.step)
        assert gates[begun[-1]].wait(30)
        read(item, kept)

    monkeypatch.setattr(viewing, "_read", reads)
    server = TestServer(application(view, token=TOKEN, host="assay.test"))
    async with TestClient(server) as client:

        async def sent(name: str) -> Any:
            answer = await client.get(f"{key}/{name}")
            assert answer.status == 200, name
            return await (answer.json() if ".json" in name else answer.read())

        async def had_read(number: int) -> Any:
            while len((questions := await sent("questions.json"))["unread"]) > len(steps) - number:
                pass
            return questions

        assert (await client.get(f"{key}/questions.json")).status == 202, "nothing is read yet"
        gates[500].set()
        while (await client.get(f"{key}/questions.json")).status == 202:
            pass
        first = await sent("questions.json")
        assert (first["ids"], first["unread"]) == (["question 1", "question 2"], [0, 1, 2, 3])
        assert await sent("scores/0.bin?unread=4") == bytes([NO_SCORE] * 8 + [254, 254])
        assert len(await sent("scores/0.bin?unread=0")) == 10, "which is not kept for when all are read"
        for name in ("pairs/0-0-4.json", "search.json?text=number"):
            assert (await client.get(f"{key}/{name}")).status == 202
        for gate in gates.values():
            gate.set()
        whole = await had_read(5)
        assert whole["unread"] == [] and len(whole["ids"]) == 3
        assert (await client.get(f"{key}/pairs/0-0-4.json")).status == 200
        assert len(await sent("scores/0.bin")) == 15
        assert await sent("scores/0.bin?unread=4") == bytes([NO_SCORE] * 8 + [254, 254]), (
            "as of when so many were unread"
        )
        assert (await sent("part/0.json?unread=4"))["questions"][0]["answers"][:4] == [[]] * 4
    assert begun == [500, 100, 300, 400, 200], "the newest, then from all over the run"
    view.close()


@pytest.mark.parametrize("name", ["", "index.json", "main.js", "nothing"])
@pytest.mark.parametrize(("path", "host"), [("", None), ("another", None), (TOKEN, "evil.test"), (TOKEN, "")])
async def test_server_refuses_requests_without_the_token_or_by_another_name(
    client: TestClient[Any, Any], path: str, host: str | None, name: str
):
    headers = {} if host is None else {"Host": host}
    answer = await client.get(f"/{path}/{name}".replace("//", "/"), headers=headers)
    assert answer.status == 403 and list(await answer.json()) == ["error"]


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "assay.test:80", "ASSAY.test"])
async def test_server_answers_by_numbers_and_by_its_own_name(client: TestClient[Any, Any], host: str):
    assert (await client.get(f"/{TOKEN}/index.json", headers={"Host": host})).status == 200


@pytest.mark.parametrize("name", ["scores/{}.bin", "part/{}.json", "pairs/0-0-{}.json"])
async def test_server_has_nothing_by_a_number_of_thousands_of_digits(client: TestClient[Any, Any], name: str):
    key = (await (await client.get(f"/{TOKEN}/index.json")).json())["benchmarks"][0]["key"]
    assert (await client.get(f"/{TOKEN}/{key}/{name.format('9' * 5000)}")).status == 404
    assert (await client.get(f"/{TOKEN}/{key}/{name.format('9' * 9)}")).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_server_can_only_be_read(client: TestClient[Any, Any], method: str):
    assert (await client.request(method, f"/{TOKEN}/index.json")).status == 405


@pytest.mark.parametrize(
    "name",
    ["../columns.py", "%2e%2e/columns.py", "..%2fview.py", "/etc/passwd", "made/questions.json", "a/part/-1.json"],
)
async def test_server_has_nothing_but_the_page_and_its_columns(client: TestClient[Any, Any], name: str):
    answer = await client.get(f"/{TOKEN}/{name}")
    assert answer.status in (403, 404) and b"import" not in await answer.read()


@pytest.mark.parametrize("path", [f"/{TOKEN}/", f"/{TOKEN}/index.json", f"/{TOKEN}/nothing", "/"])
async def test_every_answer_forbids_foreign_scripts_and_content_guesses(client: TestClient[Any, Any], path: str):
    headers = (await client.get(path)).headers
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


def embedded(page: str) -> Mapping[str, bytes]:
    """Returns content by name, as the page's script reads it."""
    scripts = re.findall(r'<script type="application/octet-stream" data-name="([^"]+)">([^<]+)</script>', page)
    return {name: gzip.decompress(base64.b64decode(content)) for name, content in scripts}


def test_single_file_holds_everything_and_runs_only_its_own_script(tmp_path: Path):
    hostile = [asked(n, n > 1, id=f"{HOSTILE} {n}", output=HOSTILE, target=HOSTILE) for n in range(40)]
    published(tmp_path, 100, hostile)
    published(tmp_path, 200, [sample.model_copy(update={"scores": {"acc": 1.0}}) for sample in hostile])
    with viewed(tmp_path) as (view, key):
        contents = view.contents(questions_per_part=32)
        page = single_file(contents).decode()
        again = single_file(view.contents(questions_per_part=32)).decode()
    names = ["questions.json", "flags.bin", "scores/0.bin", "pairs/0-0-1.json", "part/0.json", "part/1.json"]
    assert embedded(page) == contents and contents.keys() >= {"index.json", *(f"{key}/{name}" for name in names)}
    assert HOSTILE not in page and page == again
    assert json.loads(contents[f"{key}/questions.json"])["questions_per_part"] == 32
    assert len(json.loads(contents[f"{key}/part/1.json"])["questions"]) == 8
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for kind, tag in (("script-src", '<script type="module">'), ("style-src", "<style>")):
        texts = re.findall(rf"{tag}(.*?)</{tag[1:].split()[0].rstrip('>')}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert texts and rules[kind] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert rules["default-src"] == "'none'"


def test_modules_of_the_page_share_a_script_with_unique_names():
    page = single_file({}).decode()
    script = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)[0]
    assert not re.findall(r"^(?:import|export)\b", script, re.MULTILINE)
    declared = re.findall(r"^(?:async )?(?:const|let|class|function\*?) (\w+)", script, re.MULTILINE)
    assert declared and len(declared) == len(set(declared))
    modules = [content.decode() for name, content in page_files().items() if name.endswith(".js")]
    named = [
        re.findall(r"^export (?:async )?(?:const|let|class|function\*?) (\w+)", text, re.MULTILINE) for text in modules
    ]
    assert {name for names in named for name in names} <= set(declared)


def test_report_of_a_small_run_has_a_page_of_its_questions(tmp_path: Path):
    published(tmp_path / "evaluations", 100, [asked(1, True), asked(2, False)])
    report = tmp_path / "my report.html"
    done = invoke(["report", str(tmp_path / "evaluations"), "--output", str(report)], catch_exceptions=False)
    assert done.exit_code == 0 and 'href="my%20report-questions.html"' in report.read_text()
    assert json.loads(embedded((tmp_path / "my report-questions.html").read_text())["index.json"])["searches"] is False


def test_report_of_a_large_run_says_how_its_questions_are_opened(tmp_path: Path):
    published(tmp_path / "evaluations", 100, [asked(1, True)], samples=30_000)
    report = tmp_path / "report.html"
    invoke(["report", str(tmp_path / "evaluations"), "--output", str(report)], catch_exceptions=False)
    assert f"<code>assay view {tmp_path / 'evaluations'}</code>" in report.read_text()
    assert not (tmp_path / "report-questions.html").exists()


def test_records_without_samples_have_no_page_of_questions(tmp_path: Path):
    publish(tmp_path, make_record())
    assert write_next_to_report(find_records(str(tmp_path)), str(tmp_path / "r.html"), title="t", location="") is None


def test_single_file_of_a_large_run_is_refused_before_reading(tmp_path: Path):
    published(tmp_path / "evaluations", 100, [asked(1, True)], samples=IN_MEMORY + 1)
    output = tmp_path / "questions.html"
    done = invoke(["view", str(tmp_path / "evaluations"), "--output", str(output)])
    assert done.exit_code and "100,001" in str(done.exception) and not output.exists()


def test_page_in_a_single_file_holds_only_the_named_benchmarks(tmp_path: Path):
    samples = [asked(1, True), asked(2, True, benchmark="confidential", prompt="A secret", output="A secret")]
    metrics = (make_metric("made", 1.0), make_metric("confidential", 1.0))
    record = make_record(metrics=metrics, benchmarks=("confidential", "made"), samples=2)
    publish(tmp_path / "evaluations", record, samples)
    output = tmp_path / "questions.html"
    argv = ["view", str(tmp_path / "evaluations"), "--output", str(output), "--benchmark"]
    done = invoke([*argv, "ma*"], catch_exceptions=False)
    contents = embedded(output.read_text())
    assert done.exit_code == 0 and b"Which colour" in b"".join(contents.values())
    assert not [name for name, content in contents.items() if b"secret" in content or b"confidential" in content]
    output.unlink()
    done = invoke([*argv, "other"])
    assert "take back a filter" in str(done.exception) and not output.exists()


def test_page_of_long_answers_is_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published(tmp_path / "evaluations", 100, [asked(1, True)])
    records, report = find_records(str(tmp_path / "evaluations")), str(tmp_path / "report.html")
    size = next((tmp_path / "evaluations").rglob(SAMPLES_NAME)).stat().st_size
    monkeypatch.setattr("tasks.reports.viewer.page.MOST_BYTES_NEXT_TO_A_REPORT", size - 1)
    monkeypatch.setattr("flows.cli.reports.MOST_BYTES", size - 1)
    assert write_next_to_report(records, report, title="made", location="") is None
    output = tmp_path / "questions.html"
    done = invoke(["view", str(tmp_path / "evaluations"), "--output", str(output)])
    assert f"{size:,} bytes" in str(done.exception) and not output.exists()
    monkeypatch.setattr("tasks.reports.viewer.page.MOST_BYTES_NEXT_TO_A_REPORT", size)
    assert write_next_to_report(records, report, title="made", location="") is not None


def test_command_that_listens_everywhere_prints_an_address_that_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    published(tmp_path, 100, [asked(1, True)])
    monkeypatch.setattr(
        "flows.cli.reports.serve", lambda view, *, host, port, on_address: on_address(f"http://{host}:80/{TOKEN}/")
    )
    done = invoke(["view", str(tmp_path), "--host", "0.0.0.0"], catch_exceptions=False)
    assert f"http://{own_address()}:80/{TOKEN}/" in done.stdout
