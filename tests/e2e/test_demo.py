"""The main job as a newcomer meets it: real training, real Prefect, real vLLM, real lm-eval."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fakes.demo import Demo
from tasks.records import Record, read_records

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]


def records_of(demo: Demo) -> dict[int, Record]:
    return {record.checkpoint.step: record for record in read_records(str(demo.folder / "evaluations"))}


def test_demo_evaluates_every_checkpoint_and_scores_improve(demo: Demo) -> None:
    records = records_of(demo)
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (demo.folder / "checkpoints" / "hf").iterdir())
    assert sorted(records) == steps
    assert len(steps) >= 5
    for record in records.values():
        assert record.succeeded
        assert record.counts is not None
        assert record.counts.requested == record.counts.answered == record.counts.scored == 220
        assert record.requests["answered"] >= 220
        assert record.requests["server_errors"] == 0
    assert [records[step].served["how"] for step in steps] == ["cold start", *["reload"] * (len(steps) - 1)]
    for first, last in zip(records[steps[0]].metrics, records[steps[-1]].metrics, strict=True):
        assert (first.benchmark, first.name) == (last.benchmark, last.name)
        assert last.stderr is not None
        assert last.value > first.value + 3 * last.stderr, f"{last.benchmark} {last.name} did not improve"


def test_demo_shows_a_table_and_writes_a_page_that_needs_nothing_else(demo: Demo) -> None:
    assert "demo_facts" in demo.output
    assert "±" in demo.output
    assert "What to try next" in demo.output
    page = (demo.folder / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_demo_again_evaluates_nothing_and_says_so(demo: Demo) -> None:
    before = records_of(demo)
    done = demo.run("demo", "--folder", str(demo.folder))
    assert done.returncode == 0, done.stderr
    assert f"Nothing to evaluate: all {len(before)} checkpoints have succeeded records." in done.stdout
    assert records_of(demo) == before


def test_deleted_record_is_the_only_one_evaluated_again(demo: Demo) -> None:
    before = records_of(demo)
    deleted = sorted(before)[2]
    [path] = (demo.folder / "evaluations").glob(f"**/step-{deleted}/**/record.json")
    path.unlink()
    done = demo.run("demo", "--folder", str(demo.folder), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["evaluated"], told["already_recorded"]) == (1, len(before) - 1)
    after = records_of(demo)
    assert [step for step in after if after[step] != before[step]] == [deleted]
    assert after[deleted].metrics == before[deleted].metrics


def test_everything_the_demo_makes_lies_in_its_folder(demo: Demo) -> None:
    assert [path.name for path in demo.folder.parent.iterdir()] == ["demo"]
    made = {path.name for path in Path(demo.folder).iterdir()}
    assert made == {"checkpoints", "evaluations", "prefect", "report.html"}
