"""Files of another user among records: each costs only its own cell, and is neither followed nor waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.cells import make_cell
from resources.errors import IrregularFile
from tasks.policies.policy import read_overrides
from tasks.records.builds import read_qualifications
from tasks.records.index import indexed_records
from tasks.records.record import FoundRecord, find_records, read_record
from tasks.records.samples import SAMPLES_NAME, kept_samples, read_samples
from tasks.records.verdicts import ANSWERED_NAME, find_early
from tasks.reports.page import write_report
from tasks.running.attempt import wanted_early
from tasks.running.claims.files import claims_folder, read_claims


def _link_out(path: Path) -> None:
    path.symlink_to("../../../../../elsewhere.json")


@pytest.mark.parametrize("use_index", [False, True])
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, _link_out, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)],
)
def test_hostile_record_costs_its_own_cell(make: Callable[[Path], None], use_index: bool, tmp_path: Path) -> None:
    evaluations = tmp_path / "evaluations"
    (_, bad), (record, good) = (make_cell(evaluations, step=step) for step in (100, 200))
    run = str(evaluations / "run-a")
    if use_index:
        assert len(indexed_records(run).done) == 2
    (bad / "record.json").rename(tmp_path / "elsewhere.json")
    make(bad / "record.json")
    rejected: dict[str, str] = {}
    assert find_records(str(evaluations), rejected=rejected) == [FoundRecord(str(good), record)]
    assert list(rejected) in ([str(bad)], [])
    assert (read_record(str(bad)), list(indexed_records(run).done)) == (None, ["run-a-200"])


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_hostile_files_next_to_records_count_for_nothing(make: Callable[[Path], None], tmp_path: Path) -> None:
    _, cell = make_cell(tmp_path, step=100)
    run = tmp_path / "run-a"
    names = ["claims/cell.1.json", "claims/holders/a.json", "index/summary.json", "index/1-a.json", "marks/a.json"]
    places = [*(run / name for name in names), cell / "early.json", tmp_path / "qualifications" / "verdicts" / "a.json"]
    for place in [*places, tmp_path / "report.html"]:
        place.parent.mkdir(parents=True, exist_ok=True)
        make(place)
    assert list(indexed_records(str(run)).done) == ["run-a-100"]
    assert [claim.readable for claim in read_claims(claims_folder(str(tmp_path), "run-a"))] == [False]
    assert list(find_early(str(tmp_path))) == []
    assert read_qualifications(str(tmp_path)) == ()
    assert read_overrides(str(run)).by_cell == {}
    page = Path(write_report([], str(tmp_path / "report.html"), title="t"))
    assert page.is_file() and not page.is_symlink()


def test_samples_are_read_through_no_attempt_that_is_a_link_out_of_its_cell(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "named").symlink_to("disk")
    record, cell = make_cell(tmp_path / "named", step=100)
    attempt, stored = cell / record.attempt, FoundRecord(str(cell), record)
    before = kept_samples(stored)
    attempt.rename(cell / "moved")
    attempt.symlink_to("moved")
    assert kept_samples(stored) == before is not None
    attempt.unlink()
    (cell / "moved").rename(tmp_path / "disk" / "elsewhere")
    attempt.symlink_to(tmp_path / "disk" / "elsewhere")
    for read in (lambda: kept_samples(stored), lambda: list(read_samples(f"{attempt}/{SAMPLES_NAME}"))):
        with pytest.raises(IrregularFile, match="leads out"):
            read()
    line = {"batch": 0, "benchmark": "demo_facts", "id": "1", "scores": {"acc": 1.0}}
    (attempt / ANSWERED_NAME).write_text(json.dumps(line))
    before_it: Any = SimpleNamespace(
        cell=SimpleNamespace(early=None, uri=str(cell)), decided_before=SimpleNamespace(attempt=record.attempt)
    )
    assert wanted_early(before_it) is None
