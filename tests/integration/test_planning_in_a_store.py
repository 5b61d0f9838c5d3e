"""Plans of a run in an object store: read by pages of listings, with the same result as on disk."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import gcsfs
import pytest

from fakes.gcs import FakeGcs, fake_gcs
from fakes.policies import wanted_evaluation
from fakes.records import cell_of, make_record, renamed
from resources.settings import settings
from resources.storage import storage
from resources.storage.listings import bucket_objects
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import Reconciliation, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.record import write_record

CHECKPOINTS = 300
FILES = 4
POLICY = Policy.model_validate(
    {"name": "p", "runs": ["gs://bucket/run"], "suites": ["demo"], "evaluation_path": "gs://bucket/out"}
)
LOOK = 3
"""Number of requests to inspect a checkpoint: its config, and the length and content of its weights' header."""
REST = 10
"""Number of requests for index, news, claims and overrides: a listing or read each, and another where none exists."""


@pytest.fixture(scope="module")
def started() -> Iterator[FakeGcs]:
    with fake_gcs("bucket") as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", store.address)
        gcsfs.GCSFileSystem.clear_instance_cache()
        storage.write_bytes("gs://bucket/opened", b"")
        yield store
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture
def store(started: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    """An empty store, and a machine with an empty cache."""
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    for name in started.names("bucket"):
        started.storage.delete_file("bucket", name)
    started.gets.clear()
    yield started
    settings.cache_clear()


def put_checkpoint(store: FakeGcs, step: int, *, value: float = 0.0, less: str | None = None, cut: int = 0) -> None:
    """Writes a checkpoint with a single tensor: complete, without the file `less`, or without the last `cut` bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + struct.pack("<f", value)
    files = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
        "tokenizer_config.json": b"{}",
        "tokenizer.json": json.dumps({"step": step}).encode(),
        "model.safetensors": weights[: len(weights) - cut],
    }
    for name, content in files.items():
        if name != less:
            store.put("bucket", f"run/hf/step-{step}/{name}", content)


def put_records(steps: range) -> None:
    [listing] = take_snapshot(POLICY, evaluations_of=evaluations_of)
    for seen in listing.checkpoints:
        if seen.step in steps:
            record = make_record(step=seen.step, run="run", evaluation_hash="hash")
            reference = record.checkpoint.model_copy(update={"listing": seen.listing})
            record = renamed(record.model_copy(update={"checkpoint": reference}))
            write_record(cell_of("gs://bucket/out", record), record)


def evaluations_of(_: Policy, run: str) -> list[WantedEvaluation]:
    return [wanted_evaluation("facts", hash_="hash")]


def planned(store: FakeGcs) -> tuple[Reconciliation, int]:
    store.gets.clear()
    plan = reconcile(take_snapshot(POLICY, evaluations_of=evaluations_of), POLICY, now=time.time())
    return plan, len(store.gets)


def pages(objects: int) -> int:
    return -(-objects // 1000)


def test_plan_of_a_run_in_a_store_asks_for_pages_and_not_for_objects(store: FakeGcs):
    for step in range(CHECKPOINTS):
        put_checkpoint(store, step)
    plan, requests = planned(store)
    assert len(plan.work) == CHECKPOINTS
    assert requests <= pages(CHECKPOINTS * FILES) + LOOK + REST
    assert planned(store)[1] <= pages(CHECKPOINTS * FILES) + REST

    put_records(range(20))
    planned(store)  # writes the index
    plan, requests = planned(store)
    assert (plan.done_count, len(plan.work)) == (20, CHECKPOINTS - 20)
    assert requests <= pages(CHECKPOINTS * FILES) + pages(20) + REST


def test_checkpoint_in_a_store_waits_until_it_is_whole_and_is_done_again_once_it_is_changed(store: FakeGcs):
    for step in range(3):
        put_checkpoint(store, step)
    put_checkpoint(store, 3, less="model.safetensors")
    put_checkpoint(store, 4, cut=1)
    put_checkpoint(store, 5, cut=1)
    plan, _ = planned(store)
    assert [cell.checkpoint.step for cell in plan.work] == [0, 1, 2]
    reasons = {cell.checkpoint.step: cell.reason or "" for cell in plan.others}
    assert "no weights" in reasons[3] and "its header says" in reasons[4] and "its header says" in reasons[5]

    put_checkpoint(store, 3)
    put_checkpoint(store, 4)
    assert [cell.checkpoint.step for cell in planned(store)[0].work] == [0, 1, 2, 3, 4]
    put_records(range(5))
    assert planned(store)[0].work == []
    put_checkpoint(store, 2, value=1.0)  # of the same name, size and time
    assert [cell.checkpoint.step for cell in planned(store)[0].work] == [2]


@pytest.mark.parametrize("between", [(), ("run/a", "run/b0500", "run/b0500/x", "run/c"), ("a",), ("z",)])
def test_listing_in_ranges_equals_a_single_listing(store: FakeGcs, between: tuple[str, ...]):
    names = ["run/a/x", *(f"run/b{number:04}" for number in range(1001)), "run/c"]
    for name in [*names, "run", "run-2/x", "other/x", "run/", "run/b/"]:  # the last two represent folders
        store.put("bucket", name, b"x")
    filesystem = gcsfs.GCSFileSystem()
    entries = bucket_objects(filesystem, "bucket/run", between=between)
    assert entries is not None and [entry["name"] for entry in entries] == names
    assert [file.uri for file in storage.list_files("gs://bucket/run")] == [f"gs://bucket/{name}" for name in names]
    assert [file.uri for file in storage.list_files("gs://bucket/run/c")] == ["gs://bucket/run/c"]
    assert storage.list_files("gs://bucket/ru") == []
