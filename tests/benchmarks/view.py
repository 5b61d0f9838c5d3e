"""Opens 14,000 questions at 200 checkpoints: `assay view` against a script that reads the samples itself.

    make bench NAME=view
    python tests/benchmarks/view.py [--questions 14000] [--checkpoints 200] [--plain-checkpoints 20]

The script finds questions that flip: it reads every line of every file with `gzip` and `json`, and keeps the
correctness. Ours is the data of the page's first picture, from the start of the command: names of questions, scores and
flags read so far, and then again until those of all checkpoints are read. It is measured when first opened, reading all
samples, and when opened again. Both are measured in processor time, which other load on the machine changes least; wall
seconds are given too. The script reads some checkpoints, and its time is extrapolated to all; both must find the same
flips. Memory is the peak of each process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import orjson

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import BENCH, Comparison, environment_of_a_user, say

from fakes.records import make_metric, make_record, publish
from tasks.records.record import RECORD_NAME
from tasks.records.samples import SAMPLES_NAME, Sample
from tasks.reports.viewer.columns import NO_SCORE

_SUBJECTS = 57
_WORDS = (
    *("energy", "force", "river", "cell", "market", "treaty", "angle", "vector", "acid", "planet", "verb", "court"),
    *("enzyme", "matrix", "signal", "ocean"),
)
_STARTED_SECONDS = 60.0
_POLL_SECONDS = 0.05
_DRAWN_AGAIN_SECONDS = 1.5


def make_run(folder: Path, *, questions: int, checkpoints: int, seed: int = 0) -> None:
    """Writes records with samples like those of MMLU: 5 examples before each question, 4 choices, 1 token each."""
    source = random.Random(seed)
    shots = [" ".join(source.choices(_WORDS, k=220)) for _ in range(_SUBJECTS)]
    texts = [
        {
            "benchmark": "made",
            "id": str(number),
            "prompt": f"{' '.join(source.choices(_WORDS, k=60))}?\nAnswer:",
            "target": "ABCD"[number % 4],
            "choices": [" A", " B", " C", " D"],
            "context": shots[number % _SUBJECTS],
        }
        for number in range(questions)
    ]
    with multiprocessing.get_context("fork").Pool() as workers:
        made = ((folder, texts, number, checkpoints, seed) for number in range(checkpoints))
        for _ in workers.imap_unordered(_make_checkpoint, made):
            pass


def _make_checkpoint(given: tuple[Path, Sequence[Mapping[str, Any]], int, int, int]) -> None:
    folder, texts, number, checkpoints, seed = given
    known = np.random.default_rng(seed)
    learned = known.integers(0, 2 * checkpoints, len(texts))
    own = np.random.default_rng(seed + 1 + number)
    right = (number >= learned) ^ (own.random(len(texts)) < 0.05)
    weights = np.round(own.normal(-3.0, 1.0, (len(texts), 4)), 6).tolist()
    metric = make_metric("made", float(right.mean()), n=len(texts))
    record = make_record(step=1000 * (number + 1), metrics=(metric,), samples=len(texts), benchmarks=("made",))
    cell = Path(publish(folder, record, []))
    lines = (
        orjson.dumps(
            {**text, "output": " A" if good else " B", "scores": {"acc": float(good)}, "log_likelihoods": likelihoods}
        )
        for text, good, likelihoods in zip(texts, right.tolist(), weights, strict=True)
    )
    samples = cell / record.attempt / SAMPLES_NAME
    samples.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", compresslevel=1))
    with gzip.open(samples) as file:
        Sample.model_validate_json(file.readline())  # checks that the made samples have the real form


def flips_by_a_script(folder: Path, *, checkpoints: int) -> np.ndarray:
    """Returns numbers of questions that flip between neighbours, by reading every line."""
    right: list[dict[str, bool]] = []
    for record in sorted(folder.glob(f"*/*/*/*/{RECORD_NAME}"), key=_step)[:checkpoints]:
        attempt = json.loads(record.read_text())["attempt"]
        with gzip.open(record.parent / attempt / SAMPLES_NAME, "rt", encoding="utf-8") as lines:
            samples = map(json.loads, lines)
            right.append({sample["id"]: sample["scores"]["acc"] == 1.0 for sample in samples})
    flips = [[before[name] != after[name] for name in before] for before, after in pairwise(right)]
    return np.array(flips).sum(0)


def _step(record: Path) -> int:
    return int(record.parts[-4].removeprefix("step-"))


class Opened(NamedTuple):
    """Seconds from a command's start to its address, to the first picture and to all; its processor time; MiB."""

    address: float
    picture: float
    whole: float
    cpu: float
    mebibytes: float
    scores: np.ndarray


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[tuple[str, int]]:
    argv = [Path(sys.executable).parent / "assay", "view", folder]
    env = environment_of_a_user({"ASSAY_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"})
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], _STARTED_SECONDS)[0], "assay view printed no address"
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(_STARTED_SECONDS) == 0


def opened(folder: Path, cache: Path) -> Opened:
    """Opens records as the page does for its first picture."""
    began, most, spent = time.perf_counter(), [0.0], _cpu_of_children()
    with served(folder, cache) as (address, pid):
        addressed = time.perf_counter() - began
        ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(pid, most, ended))
        watcher.start()
        try:
            [benchmark] = orjson.loads(_sent(f"{address}index.json"))["benchmarks"]
            names, scores, flags = _drawn(f"{address}{benchmark['key']}/")
            picture = time.perf_counter() - began
            while names["unread"]:
                time.sleep(_DRAWN_AGAIN_SECONDS)
                names, scores, flags = _drawn(f"{address}{benchmark['key']}/")
        finally:
            ended.set()
            watcher.join()
        whole = time.perf_counter() - began
    assert len(flags) == len(scores) == len(names["ids"]) * len(benchmark["checkpoints"])
    cpu = _cpu_of_children() - spent
    return Opened(
        addressed, picture, whole, cpu, most[0], np.frombuffer(scores, np.uint8).reshape(-1, len(names["ids"]))
    )


def _drawn(of: str) -> tuple[dict[str, Any], bytes, bytes]:
    names = orjson.loads(_sent(f"{of}questions.json"))
    as_of = f"?unread={len(names['unread'])}" if names["unread"] else ""
    return names, _sent(f"{of}scores/0.bin{as_of}"), _sent(f"{of}flags.bin{as_of}")


def answered(folder: Path, cache: Path, *, part: int) -> dict[str, float]:
    """Returns milliseconds of single requests to a server that has read its samples."""
    with served(folder, cache) as (address, _):
        [benchmark] = orjson.loads(_sent(f"{address}index.json"))["benchmarks"]
        of, last = f"{address}{benchmark['key']}/", len(benchmark["checkpoints"]) - 1
        _sent(f"{of}questions.json")
        names = {
            "question": f"part/{part}.json",
            "pair": f"pairs/0-0-{last}.json",
            "pair_again": f"pairs/0-0-{last}.json",
            "search": "search.json?text=vector%20acid%20planet",
        }
        times = {}
        for name, asked in names.items():
            began = time.perf_counter()
            _sent(of + asked)
            times[f"{name}_ms"] = round(1000 * (time.perf_counter() - began), 1)
    return times


def _cpu_of_children() -> float:
    # includes all descendants that have ended
    used = os.times()
    return used.children_user + used.children_system


def _sent(address: str) -> bytes:
    while True:
        with urlopen(Request(address, headers={"Accept-Encoding": "gzip"})) as answer:
            if answer.status != 202:
                return gzip.decompress(answer.read())
        time.sleep(_POLL_SECONDS)


def _watch(pid: int, most: list[float], ended: threading.Event) -> None:
    # keeps the peak memory of a process or its children
    while not ended.wait(_POLL_SECONDS):
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for each in (pid, *children):
            try:
                status = Path(f"/proc/{each}/status").read_text()
            except OSError:
                continue
            if held := re.search(r"VmHWM:\s+(\d+)", status):
                most[0] = max(most[0], int(held[1]) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--questions", type=int, default=14_000)
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--plain-checkpoints", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder that keeps the run")
    options = parser.parse_args()
    BENCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH) as scratch:
        folder, cache = options.keep or Path(scratch) / "evaluations", Path(scratch) / "cache"
        if not folder.exists():
            make_run(folder, questions=options.questions, checkpoints=options.checkpoints)
            say(f"made {options.checkpoints} checkpoints of {options.questions:,} questions")
        first = opened(folder, cache)
        again = opened(folder, cache)
        requests = answered(folder, cache, part=options.questions // 20)
        kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        began, spent = time.perf_counter(), time.process_time()
        flips = flips_by_a_script(folder, checkpoints=options.plain_checkpoints)
        more = options.checkpoints / options.plain_checkpoints
        plain, plain_seconds = more * (time.process_time() - spent), more * (time.perf_counter() - began)
        held = sum(file.stat().st_size for file in folder.rglob(SAMPLES_NAME))
        if options.keep is None:
            shutil.rmtree(folder)
    own = again.scores[: options.plain_checkpoints]
    assert not (own == NO_SCORE).any() and (first.scores == again.scores).all()
    assert ((own[1:] != own[:-1]).sum(0) == flips).all(), "the script found other flips"
    facts = {
        "questions": options.questions,
        "checkpoints": options.checkpoints,
        "plain_checkpoints": options.plain_checkpoints,
        "samples_megabytes": round(held / 1e6),
        "kept_megabytes": round(kept / 1e6),
        "plain_seconds": round(plain_seconds, 1),
    }
    for name, opening in (("first", first), ("again", again)):
        own_facts = {"picture_seconds": round(opening.picture, 2), "address_seconds": round(opening.address, 2)}
        own_facts |= {"whole_seconds": round(opening.whole, 2), "mebibytes": round(opening.mebibytes), **facts}
        own_facts |= requests if name == "again" else {}
        print(
            Comparison(f"view.{name}", "s of a processor", opening.cpu, plain, better="less", facts=own_facts).as_json()
        )


if __name__ == "__main__":
    main()
