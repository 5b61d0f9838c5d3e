"""View of records: responses to all requests of the page, by name, and the comparison of two checkpoints."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import islice, pairwise, product
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from resources.errors import StorageError
from resources.storage import storage
from tasks.records.builds import build_of
from tasks.records.record import FoundRecord
from tasks.records.samples import SAMPLES_NAME, KeptSamples, kept_samples, samples_content
from tasks.records.search import RecordFilter
from tasks.reports.viewer.boards import BoardColumns, boards_of, boards_of_sample
from tasks.reports.viewer.columns import NO_SCORE, Found, Index, Pair, Part, Progress, Scale, is_right
from tasks.reports.viewer.kept import KeptColumns, TextKeeper, kept_at, make_room, place_of
from tasks.reports.viewer.reading import columns_in
from tasks.verdicts.statistics.composition import compare_compositions, composition_of
from tasks.verdicts.statistics.paired import mcnemar_p

if TYPE_CHECKING:
    import numpy as np

IN_MEMORY = 100_000
"""Total questions over all checkpoints up to which columns stay in memory, and no further process reads samples."""
_SEARCH_SECONDS = 10.0
_NAME = re.compile(
    r"([a-z0-9-]+)/(?:(questions|flags)|(scores|part|pairs)/(\d{1,9}(?:-\d{1,9}-\d{1,9})?))\.(?:json|bin)"
)


class View:
    """Records as shown by the page. The samples of a benchmark are read at its first request.

    `location` is the folder of the records; above `IN_MEMORY` samples, its columns are stored in a file. `filters`
    selects benchmarks.
    """

    def __init__(
        self, entries: Sequence[FoundRecord], *, title: str, location: str, filters: RecordFilter | None = None
    ) -> None:
        takes = (filters or RecordFilter()).takes
        boards = (board for board in boards_of(entries) if takes(board.shown.benchmark, ""))
        self.boards = {board.shown.key: board for board in boards}
        self.title = title
        samples = sum(entry.record.samples or 0 for entry in entries)
        self._path = kept_at(location) if samples > IN_MEMORY else None
        if self._path is not None:
            make_room(self._path)
        self._kept = KeptColumns(self._path)
        self._unreadable: dict[str, str] = {}
        self._ended = threading.Event()
        self._samples = lru_cache(maxsize=4)(self._read_samples)
        self._so_far: dict[str, dict[str, None]] = {}  # keys of samples read, by benchmark, in the order of reading
        self._joined = lru_cache(maxsize=4)(self._join)
        self._joining = threading.Lock()
        self._newest_search = object()

    def close(self) -> None:
        self._kept.close()

    def unread(self, key: str) -> Progress | None:
        """Returns the progress of reading a benchmark's files; None if all are read."""
        places, missing = self._missing(key)
        return Progress(len(places) - len(missing), len(places)) if missing else None

    def read(self, key: str) -> None:
        """Reads the unread samples of a benchmark: newest first, then spread over the run. Skips unreadable files."""
        entries, missing = self._missing(key)
        missing = _spread(missing)
        at_once = missing if self._path is None else missing[:1]  # the first alone: the fastest way to show something
        for place in at_once:
            if self._ended.is_set():
                return
            self._take(place, partial(_read, entries[place], self._kept))
        left = missing[len(at_once) :]
        if self._path is None or not left:
            return
        workers = ProcessPoolExecutor(
            max_workers=min(len(os.sched_getaffinity(0)), len(left)),
            mp_context=get_context("spawn"),
            initializer=_begin,
            initargs=(self._path,),
        )
        try:
            futures = {workers.submit(_work, entries[place]): place for place in left}
            for future in as_completed(futures):
                self._take(futures[future], future.result)
                if self._ended.is_set():
                    return
        finally:
            workers.shutdown(wait=True, cancel_futures=True)

    def end_reading(self) -> None:
        """Makes `read` return after the current file."""
        self._ended.set()

    def _missing(self, key: str) -> tuple[dict[str, FoundRecord], list[str]]:
        board = self.boards[key]
        entries = {place_of(board.records[number]): board.records[number] for number in board.with_samples}
        return entries, [place for place in self._kept.missing(list(entries)) if place not in self._unreadable]

    def _take(self, place: str, read: Callable[[], None]) -> None:
        try:
            read()
        except StorageError as error:
            self._unreadable[place] = str(error)

    def index(self, *, searches: bool = True) -> Index:
        return Index(self.title, searches, [board.shown for board in self.boards.values()])

    def has_scores(self, key: str) -> bool:
        """Returns True if any scores of a benchmark are read."""
        return bool(self.columns(key).scales)

    def answer(self, name: str, *, unread: int | None = None) -> bytes | None:
        """Returns the uncompressed content of a name in `columns`; None for an unknown name.

        `unread` selects the state with that number of unread checkpoints, by default the current state.
        """
        if name == "index.json":
            return orjson.dumps(self.index())
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in self.boards:
            return None
        key, whole, kind, numbers = match.groups()
        asked = [int(number) for number in (numbers or "").split("-") if number]
        try:
            if whole == "questions":
                return orjson.dumps(self.columns(key).questions)
            if whole == "flags" or kind == "scores":
                return self._bytes_of(key, asked[0] if asked else None, unread=unread)
            if kind == "part":
                return orjson.dumps(self.part(key, asked[0], unread=unread))
            return orjson.dumps(self.pair(key, *asked)) if len(asked) == 3 else None
        except IndexError:
            return None

    def part(self, key: str, number: int, *, questions: int = 1, unread: int | None = None) -> Part:
        """Returns texts and answers of consecutive questions; raises `IndexError` after the last."""
        columns = self.columns(key, unread=unread)
        first, last = number * questions, min((number + 1) * questions, len(columns.questions.ids))
        if first >= last:
            raise IndexError(number)
        return Part(first, [columns.question(at) for at in range(first, last)])

    def pair(self, key: str, metric: int, first: int, second: int) -> Pair:
        """Compares the second of two checkpoints with the first in a metric; all are given by index."""
        columns = self.columns(key)
        scale = columns.scales[metric]
        before, after = (columns.scores_at(number, metric) for number in (first, second))
        won, lost, both, neither = _sorted(before, after, scale)
        entries = [columns.board.records[number] for number in (first, second)]
        benchmark = columns.board.shown.benchmark
        builds = [build_of(entry.record, benchmark) for entry in entries]
        counted = Pair(won, lost, both, neither, changes=builds[0].changes(builds[1]))
        compositions = []
        for entry, number in zip(entries, (first, second), strict=True):
            names = benchmark, scale.name
            published = next((m for m in entry.record.metrics if (m.benchmark, m.name) == names), None)
            samples = self._samples(key, number)
            if published is None or samples is None:
                return replace(counted, reason="it has no published value" if samples else "its samples cannot be read")
            composition = composition_of(published, samples.questions, entry.record.metrics)
            if isinstance(composition, str):
                return replace(counted, reason=composition)
            compositions.append(composition)
        paired = compare_compositions(*compositions)
        if isinstance(paired, str):
            return replace(counted, reason=paired)
        finding = paired.finding
        return replace(
            counted,
            values=paired.values,
            difference=finding.difference,
            low=finding.low,
            high=finding.high,
            p=finding.p,
            exact_p=mcnemar_p(len(won), len(lost)).exact if finding.test == "McNemar, mid-p" else None,
            test=finding.test,
        )

    def search(self, key: str, text: str) -> Found:
        """Searches questions for a text; returns partial results after 10 s, or when a newer search begins."""
        ends = time.monotonic() + _SEARCH_SECONDS
        this = self._newest_search = object()
        return self.columns(key).search(
            text, is_over=lambda: time.monotonic() > ends or self._newest_search is not this
        )

    def contents(self, *, questions_per_part: int) -> dict[str, bytes]:
        """Returns the content of every name, for a file; reads unread samples first."""
        contents = {"index.json": orjson.dumps(self.index(searches=False))}
        for key, board in self.boards.items():
            self.read(key)
            questions = replace(self.columns(key).questions, questions_per_part=questions_per_part)
            contents[f"{key}/questions.json"] = orjson.dumps(questions)
            contents[f"{key}/flags.bin"] = self._bytes_of(key, None)
            readable = [number for number in board.with_samples if str(number) not in questions.unreadable]
            pairs = dict.fromkeys([*pairwise(readable), (readable[0], readable[-1])] if len(readable) > 1 else [])
            for metric in range(len(questions.metrics)):
                contents[f"{key}/scores/{metric}.bin"] = self._bytes_of(key, metric)
            for ends, metric in product(pairs, range(len(questions.metrics))):
                contents[f"{key}/pairs/{metric}-{ends[0]}-{ends[1]}.json"] = orjson.dumps(self.pair(key, metric, *ends))
            for number in range(math.ceil(len(questions.ids) / questions_per_part)):
                part = self.part(key, number, questions=questions_per_part)
                contents[f"{key}/part/{number}.json"] = orjson.dumps(part)
        return contents

    def columns(self, key: str, *, unread: int | None = None) -> BoardColumns:
        """Returns the columns of a benchmark as far as read; concurrent requests share them."""
        with self._joining:
            entries, unread_places = self._missing(key)
            missing = set(unread_places)
            so_far = self._so_far.setdefault(key, {})
            so_far.update(dict.fromkeys(place for place in entries if place not in missing))
            most = len(entries) if unread is None else max(0, len(entries) - unread)
            return self._joined(key, min(len(so_far), most))

    def _join(self, key: str, count: int) -> BoardColumns:
        read = set(islice(self._so_far[key], count))
        unreadable = {place: reason for place, reason in self._unreadable.items() if place in read}
        return BoardColumns(self.boards[key], self._kept, read=read, unreadable=unreadable)

    def _read_samples(self, key: str, checkpoint: int) -> KeptSamples | None:
        try:
            return kept_samples(self.boards[key].records[checkpoint])
        except StorageError:  # the page shows the error at the checkpoint
            return None

    def _bytes_of(self, key: str, metric: int | None, *, unread: int | None = None) -> bytes:
        columns = self.columns(key, unread=unread)
        return (columns.flags() if metric is None else columns.scores(metric)).tobytes()


def _spread(places: Sequence[str]) -> list[str]:
    width = len(places).bit_length()
    return [places[-1 - number] for number in sorted(range(len(places)), key=lambda n: f"{n:0{width}b}"[::-1])]


def _read(entry: FoundRecord, kept: KeptColumns) -> None:
    uri = storage.join(entry.cell_uri, entry.record.attempt, SAMPLES_NAME)
    keep = TextKeeper(kept)
    try:
        content = samples_content(uri)
    except FileNotFoundError as error:
        raise StorageError(
            expected=f"samples in {uri}",
            found="no such file",
            remedy="evaluate the cell again: delete its record.json first",
        ) from error
    columns = columns_in(content, uri=uri, shown_by=cache(partial(boards_of_sample, entry.record)), keep=keep)
    kept.take(place_of(entry), columns, keep.new)


_kept: list[KeptColumns] = []


def _begin(path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process too
    _kept.append(KeptColumns(path))
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(entry: FoundRecord) -> None:
    _read(entry, _kept[0])


def _sorted(before: np.ndarray, after: np.ndarray, scale: Scale) -> list[list[int]]:
    import numpy as np

    common = (before != NO_SCORE) & (after != NO_SCORE)
    more = (after.astype(int) - before) * (-1 if scale.higher_is_better is False else 1)
    right = is_right(after, scale)
    kinds = (more > 0, more < 0, (more == 0) & right, (more == 0) & ~right)
    return [np.flatnonzero(common & kind).tolist() for kind in kinds]
