"""Remembered listings of a run, which never replace its current content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.models import write_checkpoint
from fakes.policies import wanted_evaluation
from fakes.records import cell_of, make_record, renamed
from resources.settings import settings
from tasks.checkpoints.run_snapshot import SeenCheckpoint, snapshot_run
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import RunListing, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.index import Evaluated, RunRecords
from tasks.records.record import write_record
from tasks.records.usage import IndexedRecord, usage_of
from tasks.running.claims.files import Subject, claims_folder
from tasks.running.claims.leases import Claims


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def test_checkpoint_completed_within_a_tick_of_the_clock_is_seen(tmp_path: Path):
    weights = write_checkpoint(tmp_path / "run" / "step-100") / "model.safetensors"
    whole, before = weights.read_bytes(), weights.stat()

    def looked(content: bytes) -> bool:
        weights.write_bytes(content)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        [checkpoint] = snapshot_run(str(tmp_path / "run"))
        return checkpoint.complete

    assert not looked(bytes(len(whole)))  # final size, but not written yet
    assert looked(whole)


def test_native_checkpoint_becomes_whole_with_its_reference_and_follows_it(tmp_path: Path):
    native, reference = tmp_path / "run" / "checkpoints" / "step-100", tmp_path / "elsewhere"
    (native / "d").mkdir(parents=True)
    (native / "manifest.ocdbt").write_bytes(b"m")
    (native / "d" / "array").write_bytes(b"a")
    (native / "metadata.json").write_text(json.dumps({"step": 100}))
    for path in native.rglob("*"):
        os.utime(path, (1e9, 1e9))
    [checkpoint] = snapshot_run(str(tmp_path / "run"), reference=str(reference))
    assert any("its reference" in problem for problem in checkpoint.problems)
    write_checkpoint(reference)
    [checkpoint] = snapshot_run(str(tmp_path / "run"), reference=str(reference))
    assert checkpoint.complete
    assert snapshot_run(str(tmp_path / "run"), reference=str(reference)) == [checkpoint]
    (reference / "tokenizer.json").write_text("another")
    [changed] = snapshot_run(str(tmp_path / "run"), reference=str(reference))
    assert changed.listing != checkpoint.listing


def test_run_with_a_folder_name_that_is_not_utf8_is_listed(tmp_path: Path):
    write_checkpoint(tmp_path / "run" / "step-100")
    odd = tmp_path / "run" / os.fsdecode(b"mod\xe9l")
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    for _ in range(2):
        assert [checkpoint.complete for checkpoint in snapshot_run(str(tmp_path / "run"))] == [False, True]


def test_run_is_looked_at_where_nothing_can_be_remembered(tmp_path: Path, cache: Path):
    write_checkpoint(tmp_path / "run" / "step-100")
    cache.write_text("a file where a folder should be")
    assert [checkpoint.complete for checkpoint in snapshot_run(str(tmp_path / "run"))] == [True]


def wanted_evaluations(*names: str) -> list[WantedEvaluation]:
    return [wanted_evaluation(name) for name in names]


def policy(tmp_path: Path) -> Policy:
    content = {"name": "p", "runs": [str(tmp_path / "run")], "suites": ["demo"]}
    return Policy.model_validate({**content, "evaluation_path": str(tmp_path / "out")})


def test_records_of_before_and_after_a_copy_count_together(tmp_path: Path):
    usage = usage_of(make_record())
    row = IndexedRecord("c", "run-1", "hash-c", "digest", "original", "failed", 1.0, 1.0, 0.0, 0, "the reason", usage)
    states = [
        Evaluated("digest", "original", frozenset({"hash-a"})),
        Evaluated("digest", "copied", frozenset({"hash-b"})),
        Evaluated("of other weights", "long ago", frozenset({"hash-d"})),
    ]
    seen = SeenCheckpoint("/runs/run/step-1", "run-1", 1, "huggingface", "copied", ())
    listing = RunListing(
        "/runs/run", "run", wanted_evaluations(*"abcd"), [seen], RunRecords({"run-1": states}, [row], {})
    )
    reconciliation = reconcile([listing], policy(tmp_path), now=2.0)
    assert reconciliation.done_count == 2
    assert [cell.evaluation.suites for cell in reconciliation.work] == [("d",)]
    assert [(cell.evaluation.suites, cell.state) for cell in reconciliation.others] == [(("c",), "failed")]
    again = replace(seen, listing="written again")
    reconciliation = reconcile([replace(listing, checkpoints=[again])], policy(tmp_path), now=2.0)
    assert len(reconciliation.work) == 4


def test_cell_that_fails_while_a_plan_is_made_is_not_taken_for_work(tmp_path: Path):
    write_checkpoint(tmp_path / "run" / "step-100")
    subject = Subject(key="step-100.cell", checkpoint="run-100", evaluation_hash="hash-a")
    claims = Claims(claims_folder(str(tmp_path / "out"), "run"), in_background=False)
    claims.__enter__()
    assert claims.acquire([subject]).ours

    def evaluations_of(_: Policy, run: str) -> list[WantedEvaluation]:
        # The other run ends here, after records were read.
        [seen] = snapshot_run(run)
        record = make_record(step=100, run="run", status="failed", evaluation_hash="hash-a")
        reference = record.checkpoint.model_copy(update={"listing": seen.listing})
        record = renamed(record.model_copy(update={"checkpoint": reference}))
        write_record(cell_of(tmp_path / "out", record), record)
        claims.__exit__()
        return wanted_evaluations("a")

    listings = take_snapshot(policy(tmp_path), evaluations_of=evaluations_of)
    assert reconcile(listings, policy(tmp_path), now=claims_time(listings)).work == []
    [cell] = reconcile(
        take_snapshot(policy(tmp_path), evaluations_of=lambda *_: wanted_evaluations("a")), policy(tmp_path), now=0.0
    ).others
    assert cell.state == "failed"


def claims_time(listings: list[RunListing]) -> float:
    return max(claim.holder.renewed for listing in listings for claim in listing.claims if claim.holder)
