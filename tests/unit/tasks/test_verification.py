"""Records that were changed after writing are noticed by all code that decides by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import invoke
from fakes.records import FIRST, make_metric, make_record, make_samples, publish, sealed
from resources.errors import BadInput
from resources.settings import settings
from tasks.records.record import Metric, Record, SinkState, broken_seal, find_records, integrity, note_sinks
from tasks.records.samples import SAMPLES_NAME, write_samples
from tasks.records.verdicts import Verdict
from tasks.records.verification import verified
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import judge, judged_checkpoints

BOUND = {"benchmark": "demo_facts", "metric": "acc", "at_least": 0.9}


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Sets or removes this machine's key."""

    def use(key: str | None) -> None:
        monkeypatch.setenv("ASSAY_RECORDS_KEY", key) if key else monkeypatch.delenv("ASSAY_RECORDS_KEY", raising=False)
        settings.cache_clear()

    use(None)
    yield use
    monkeypatch.undo()
    settings.cache_clear()


def scored(folder: Path, *, step: int = 100, right: int = 4) -> Path:
    """Publishes a record with `right` of ten questions correct; returns its folder."""
    metric = make_metric(value=right / 10, n=10).model_copy(update={"recomputed": True})
    scores = [1.0] * right + [0.0] * (10 - right)
    return Path(publish(folder, make_record(step=step, metrics=(metric,)), make_samples(scores)))


def edited(cell: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((cell / "record.json").read_text())
    change(content)
    (cell / "record.json").write_text(json.dumps(content))


def set_value(content: dict[str, Any]) -> None:
    content["metrics"][0]["value"] = 0.965


def verdict(folder: Path, **rule: Any) -> Verdict:
    records = find_records(str(folder))
    return judge(Gate.model_validate({"rules": [rule]}), judged_checkpoints(records), evaluation_path=str(folder))


def verify(folder: Path, *arguments: str) -> tuple[int, str]:
    done = invoke(["records", str(folder), "--verify", *arguments])
    return (getattr(done.exception, "exit_code", 0) if done.exception else done.exit_code), done.stdout


def test_edited_value_is_no_go_for_a_gate_and_named(tmp_path: Path) -> None:
    cell = scored(tmp_path)
    assert not verdict(tmp_path, **BOUND).go
    edited(cell, set_value)
    judgement = verdict(tmp_path, **BOUND)
    assert not judgement.go
    assert any("record.json was changed" in refusal.found for refusal in judgement.refusals)
    assert any("acc is 0.965, and its samples give 0.4" in refusal.found for refusal in judgement.refusals)


def test_value_edited_with_its_digest_still_disagrees_with_its_samples(tmp_path: Path) -> None:
    cell = scored(tmp_path)
    edited(cell, set_value)
    [place] = find_records(str(tmp_path))
    (cell / "record.json").write_text(sealed(place.record).model_dump_json())
    [refusal] = verdict(tmp_path, **BOUND).refusals
    assert refusal.found.endswith("demo_facts · acc is 0.965, and its samples give 0.4")


def test_edited_samples_are_noticed(tmp_path: Path) -> None:
    cell = scored(tmp_path)
    write_samples(cell / "attempt-1" / SAMPLES_NAME, make_samples([1.0] * 10))
    [refusal] = verdict(tmp_path, **BOUND | {"at_least": 0.1}).refusals
    assert "its samples were changed" in refusal.found and "its samples give 1" in refusal.found


@pytest.mark.parametrize("edited_step", [100, 200])
def test_edited_record_is_not_compared_and_no_baseline(tmp_path: Path, edited_step: int) -> None:
    cells = {step: scored(tmp_path, step=step) for step in (100, 200)}
    edited(cells[edited_step], set_value)
    arguments = ["compare", "run-a-100", "run-a-200", "--path", str(tmp_path)]
    refused = invoke(arguments)
    assert isinstance(refused.exception, BadInput) and f"run-a-{edited_step}, demo_facts" in str(refused.exception)
    shown = " ".join(invoke([*arguments, "--anyway"], catch_exceptions=False).stdout.split())
    assert f"run-a-{edited_step}, demo_facts: record.json was changed" in shown
    rule = {
        "benchmark": "demo_facts",
        "metric": "acc",
        "anyway": True,
        "not_worse_than": "run-a@100",
        "by_more_than": 1.0,
    }
    assert not verdict(tmp_path, **rule).go


def test_group_with_an_edited_value_disagrees_with_its_parts(tmp_path: Path) -> None:
    parts = tuple(
        make_metric(name, value, n=2).model_copy(update={"recomputed": True}) for name, value in (("x", 1.0), ("y", 0))
    )
    group = make_metric("g", 0.9).model_copy(update={"parts": {"x": 0.5, "y": 0.5}, "recomputed": True})
    samples = [*make_samples([1.0, 1.0], benchmark="x"), *make_samples([0.0, 0.0], benchmark="y")]
    publish(tmp_path, make_record(metrics=(*parts, group), benchmarks=("g",)), samples)
    [stored] = find_records(str(tmp_path))
    assert verified(stored).findings == ("g · acc is 0.9, and its parts give 0.5",)


def test_verify_names_each_problem_and_exits_with_1(tmp_path: Path) -> None:
    cells = [scored(tmp_path, step=step) for step in (100, 200, 300)]
    assert verify(tmp_path) == (0, "3 records as written, 0 changed, 0 not verifiable\n")
    edited(cells[1], set_value)
    code, shown = verify(tmp_path)
    assert code == 1
    assert shown.splitlines()[0].startswith(f"{cells[1]}: run-a-200, demo_facts: record.json was changed")
    assert shown.splitlines()[-1] == "2 records as written, 1 changed, 0 not verifiable"
    assert verify(tmp_path, "--steps", "300")[0] == 0
    (cells[2] / "record.json").write_text("{")
    assert f"{cells[2]}: record.json cannot be read" in verify(tmp_path)[1]
    rows = json.loads(verify(tmp_path, "--json")[1])
    assert [row["integrity"] for row in rows] == ["intact", "changed", "changed"]


def test_samples_that_were_not_kept_make_values_unverifiable(tmp_path: Path) -> None:
    cell = scored(tmp_path)
    (cell / "attempt-1" / SAMPLES_NAME).unlink()
    code, shown = verify(tmp_path)
    assert (code, shown.splitlines()[-1]) == (0, "0 records as written, 0 changed, 1 not verifiable")
    assert verdict(tmp_path, **BOUND | {"at_least": 0.1}).go


def test_what_became_of_a_record_at_sinks_changes_no_digest(
    tmp_path: Path, keyed: Callable[[str | None], None]
) -> None:
    keyed("a key of the team's")
    cell = scored(tmp_path)
    assert note_sinks(str(cell), {"mlflow": SinkState(status="published", at=FIRST)}) is not None
    assert verify(tmp_path)[0] == 0


def test_failures_are_sealed_with_their_number(tmp_path: Path) -> None:
    for _ in range(2):
        publish(tmp_path, make_record(status="infra_failed"))
    [stored] = find_records(str(tmp_path))
    assert (stored.record.infra_failures, integrity(stored.record)) == (2, "intact")


def test_record_that_lost_its_digest_counts_as_changed_and_fields_of_a_later_version_do_not() -> None:
    record = make_record()
    without = record.model_copy(update={"digests": record.digests.model_copy(update={"record": None})})
    assert (integrity(record), integrity(without)) == ("intact", "changed")

    class LaterMetric(Metric):
        colour: str = "none"

    class LaterRecord(Record):
        watts: float | None = None
        metrics: tuple[LaterMetric, ...]  # pyright: ignore[reportIncompatibleVariableOverride]

    assert broken_seal(LaterRecord.model_validate_json(make_record().model_dump_json())) is None


def test_with_a_key_only_what_was_signed_with_it_holds(tmp_path: Path, keyed: Callable[[str | None], None]) -> None:
    scored(tmp_path, step=100)
    keyed("a key of the team's")
    cell = scored(tmp_path, step=200)
    code, shown = verify(tmp_path)
    assert code == 1 and "run-a-100, demo_facts: record.json is not signed" in shown and "1 changed" in shown
    edited(cell, set_value)
    [place] = [place for place in find_records(str(tmp_path)) if place.record.checkpoint.step == 200]
    keyed("another key")
    (cell / "record.json").write_text(sealed(place.record).model_dump_json())
    keyed("a key of the team's")
    assert "run-a-200, demo_facts: record.json was signed with another key, or changed" in verify(tmp_path)[1]
    keyed(None)
    assert "1 changed" in verify(tmp_path)[1]  # by its unchanged samples
