"""Plans a large run: 10,000 checkpoints and 20 suites, with records of all but the newest checkpoints.

    make bench NAME=plan_scale
    python tests/benchmarks/plan_scale.py [--checkpoints 10000] [--suites 20] [--naive 200] [--store local]

Measures, on local disk and in an emulated object store: a plan before any evaluation, a plan on a machine without a
cache that reads the index next to the records, the same with the index checked against the records, and a plan without
changes; on disk also a plan with a lost index. The naive way, a look into each checkpoint and a read of the record of
each cell, is measured on fewer checkpoints. So is a bare listing of the run by fsspec, for the store's share.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
import pytest

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import Comparison

from fakes.gcs import fake_gcs
from fakes.records import make_record
from pools.weights.model_files import digest_model_folder
from resources.settings import settings
from resources.storage import storage
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.checkpoints.discovery import find_checkpoints
from tasks.checkpoints.run_snapshot import snapshot_run
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import Reconciliation, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.index import keep_rows, record_stamps, row_of
from tasks.records.record import Record, read_record
from tasks.spec.evaluation import EvaluationConfig, digest_of

NEWEST = 10
"""Checkpoints without records, as in a training run."""
_AT_ONCE = 1000
_OUTSIDE_BUCKET = "gs://bucket/"


class Spent(NamedTuple):
    """Wall seconds, processor seconds of this process, and requests if they are counted."""

    wall: float
    cpu: float
    requests: int | None = None


class Place(Protocol):
    """A location of runs and records, and a way to write them without planning."""

    name: str
    root: str

    def put(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Writes files by their locations."""
        ...

    def requests(self) -> int | None:
        """Returns the number of requests since the last call."""
        ...


class Disk:
    name = "local"

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def put(self, files: Iterable[tuple[str, bytes]]) -> None:
        for uri, content in files:
            path = Path(uri)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def requests(self) -> None:
        return


class Bucket:
    """A bucket of an emulated object store in a process of its own, which pages its listings."""

    name = "gcs"
    root = f"{_OUTSIDE_BUCKET}scale"

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def put(self, files: Iterable[tuple[str, bytes]]) -> None:
        # sends batches instead of a request for each file
        pending = ((uri.removeprefix(_OUTSIDE_BUCKET), content) for uri, content in files)
        while batch := list(islice(pending, _AT_ONCE)):
            self._pipe.send(batch)
            self._pipe.recv()

    def requests(self) -> int:
        self._pipe.send([])
        return self._pipe.recv()


def serve(pipe: Connection) -> None:
    """Runs the store: writes files from the pipe, and answers with the number of requests since then."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it logs each missing object
    with fake_gcs("bucket") as store:
        pipe.send(store.address)
        while (files := pipe.recv()) is not None:
            for name, content in files:
                store.put("bucket", name, content)
            asked = len(store.gets)
            store.gets.clear()
            pipe.send(asked)


@contextmanager
def bucket(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    patch.setenv("STORAGE_EMULATOR_HOST", ours.recv())
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        storage.write_bytes(f"{_OUTSIDE_BUCKET}opened", b"")
        yield Bucket(ours)
    finally:
        ours.send(None)
        process.join(30)


def checkpoint_files(run: str, number: int) -> Iterator[tuple[str, bytes]]:
    """Yields files of complete checkpoints with a tensor each."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    files = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
        "tokenizer_config.json": b"{}",
        "tokenizer.json": b"{}",
    }
    for step in range(number):
        folder = f"{run}/hf/step-{step}"
        for name, content in files.items():
            yield f"{folder}/{name}", content
        yield f"{folder}/model.safetensors", struct.pack("<Q", len(header)) + header + struct.pack("<f", step)


def records(run: str, out: str, evaluations: Sequence[WantedEvaluation]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a success of each evaluation for all checkpoints but the newest, with the folder of its cell."""
    content = json.loads(make_record(run="run").model_dump_json())
    for checkpoint in snapshot_run(run)[:-NEWEST]:
        reference = {"uri": checkpoint.uri, "run": "run", "name": checkpoint.name, "step": checkpoint.step}
        reference |= {"digest": digest_of(checkpoint.uri), "weights_digest": "w", "listing": checkpoint.listing}
        for evaluation in evaluations:
            folder = cell_folder(out, checkpoint.uri, checkpoint.step, evaluation)
            cell = storage.basename(folder)
            yield folder, {**content, "checkpoint": reference, "evaluation_hash": evaluation.hash, "cell": cell}


def record_files(entries: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, bytes]]:
    return ((f"{folder}/record.json", json.dumps(record).encode()) for folder, record in entries)


def keep_index(out: str, entries: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Writes the index as plans leave it that added few records each: 200,000 reads from a store take minutes."""
    start = len(f"{out}/run/")
    rows, row = [], None
    for folder, record in entries:
        row = row if row is not None else row_of("", Record.model_validate(record))
        checkpoint = record["checkpoint"]
        changes = {"cell": folder[start:], "checkpoint": checkpoint["name"], "digest": checkpoint["digest"]}
        rows.append(row._replace(**changes, listing=checkpoint["listing"], evaluation_hash=record["evaluation_hash"]))
    keep_rows(f"{out}/run", rows, dict(record_stamps(f"{out}/run")))


def cell_folder(out: str, uri: str, step: int, evaluation: WantedEvaluation) -> str:
    return f"{out}/run/step-{step}/lm_evaluation_harness/demo_facts-{digest_of([evaluation.hash, digest_of(uri)])[:10]}"


def evaluations(run: str, number: int) -> list[WantedEvaluation]:
    """Returns `number` suites of a single evaluation each."""
    content = {"model_path": run, "evals": [{"name": "demo_facts"}], "base_url": "http://127.0.0.1:9/v1"}
    config = EvaluationConfig.model_validate(content)
    rules = (CheckpointRule(which="all"),)
    return [
        WantedEvaluation((f"suite-{index}",), 0, rules, config, digest_of(f"evaluation-{index}"), None)
        for index in range(number)
    ]


def timed(place: Place, action: Callable[[], Any]) -> tuple[Spent, Any]:
    """Returns time and requests of an action, and its result."""
    gc.collect()
    place.requests()
    began, used = time.perf_counter(), time.process_time()
    outcome = action()
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    return Spent(round(wall, 3), round(cpu, 3), place.requests()), outcome


def naively(run: str, out: str, evaluations: Sequence[WantedEvaluation]) -> int:
    """Returns the number of missing cells, by a look at each checkpoint and a read for each cell."""
    open_cells = 0
    for checkpoint in find_checkpoints(run):
        if checkpoint.folder is not None and checkpoint.complete:
            digest_model_folder(checkpoint.folder)
            for evaluation in evaluations:
                record = read_record(cell_folder(out, checkpoint.uri, checkpoint.step, evaluation))
                open_cells += record is None or not record.succeeded
    return open_cells


def bare_listing(run: str) -> int:
    """Lists the files of a run by fsspec only; returns their number."""
    filesystem, path = fsspec.core.url_to_fs(run)
    filesystem.invalidate_cache()
    return len(filesystem.find(path, detail=True))


def measured(
    place: Place, cache: Path, evaluations: Sequence[WantedEvaluation], *, checkpoints: int
) -> dict[str, Spent]:
    """Measures every case, for a run of that size."""
    run, out, suites = f"{place.root}/run", f"{place.root}/out", len(evaluations)
    place.put(checkpoint_files(run, checkpoints))
    content = {"name": "scale", "runs": [run], "suites": ["demo"], "evaluation_path": out}
    policy = Policy.model_validate(content)

    def plan(*, use_index: bool = True) -> Reconciliation:
        return reconcile(
            take_snapshot(policy, use_index=use_index, evaluations_of=lambda _, __: evaluations),
            policy,
            now=time.time(),
        )

    figures: dict[str, Spent] = {}
    figures["nothing_recorded"], planned = timed(place, plan)
    assert len(planned.work) == checkpoints * suites
    place.put(record_files(records(run, out, evaluations)))
    if storage.is_local(out):
        figures["index_lost"], planned = timed(place, plan)
    else:
        keep_index(out, records(run, out, evaluations))
        figures["summary_lost"], planned = timed(place, plan)
    assert len(planned.work) == NEWEST * suites
    shutil.rmtree(cache)
    figures["cold"], planned = timed(place, plan)
    shutil.rmtree(cache)
    figures["compared"], planned = timed(place, lambda: plan(use_index=False))
    figures["unchanged"] = min(timed(place, plan)[0] for _ in range(5))
    assert (planned.done_count, len(planned.work)) == ((checkpoints - NEWEST) * suites, NEWEST * suites)
    figures["bare_listing"], number = timed(place, lambda: bare_listing(run))
    assert number == checkpoints * 4
    return figures


def measured_naively(place: Place, evaluations: Sequence[WantedEvaluation], *, checkpoints: int) -> Spent:
    run, out = f"{place.root}/few/run", f"{place.root}/few-out"
    place.put(checkpoint_files(run, checkpoints))
    place.put(record_files(records(run, out, evaluations)))
    took, left = timed(place, lambda: naively(run, out, evaluations))
    assert left == NEWEST * len(evaluations)
    return took


def report(place: Place, figures: Mapping[str, Spent], naive: Spent, **facts: int) -> None:
    cells, few = facts["checkpoints"] * facts["suites"], facts["naive_checkpoints"] * facts["suites"]
    for name, spent in {**figures, "naive, fewer": naive}.items():
        asked = f", {spent.requests:,} requests" if spent.requests is not None else ""
        print(f"{place.name:>6} {name:>18}: {spent.wall:8.3f} s, on a processor {spent.cpu:8.3f} s{asked}")
    bare = figures["bare_listing"]._asdict()
    for name, spent in figures.items():
        if name != "bare_listing":
            more = {**facts, "spent": spent._asdict(), "naive": naive._asdict(), "bare_listing": bare}
            ours, theirs = spent.wall / cells * 1e6, naive.wall / few * 1e6
            title = f"plan_scale.{place.name}.{name}"
            print(Comparison(title, "microseconds for a cell", ours, theirs, better="less", facts=more).as_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--suites", type=int, default=20)
    parser.add_argument("--naive", type=int, default=200, help="checkpoints of the naive way; a fifth in a store")
    parser.add_argument("--store", choices=["local", "gcs", "both"], default="both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        root = Path(scratch)
        patch.setenv("ASSAY_CACHE_DIR", str(root / "cache"))
        settings.cache_clear()

        def measure(place: Place, naive: int) -> None:
            all_evaluations = evaluations(f"{place.root}/run", options.suites)
            figures = measured(place, root / "cache", all_evaluations, checkpoints=options.checkpoints)
            took = measured_naively(place, all_evaluations, checkpoints=naive)
            facts = {"checkpoints": options.checkpoints, "suites": options.suites, "naive_checkpoints": naive}
            report(place, figures, took, **facts)

        if options.store != "gcs":
            measure(Disk(root), options.naive)
        if options.store != "local":
            with bucket(patch) as place:
                measure(place, max(2 * NEWEST, options.naive // 5))
    settings.cache_clear()


if __name__ == "__main__":
    main()
