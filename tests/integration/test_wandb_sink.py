"""Records in Weights & Biases: offline runs read back from the files that `wandb sync` sends, and servers that fail."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fakes.alerts import known_alert
from fakes.broken_servers import Way, broken_server
from fakes.cells import make_cell
from fakes.wandb_files import OfflineRun, read_offline_run
from fakes.wandb_server import fake_wandb
from tasks.records.record import read_records
from tasks.sinks.announcement import ALERT, SEVERAL_BUILDS, Announcement
from tasks.sinks.publishing import publish_alerts, publish_record, publish_report
from tasks.sinks.weights_and_biases import WeightsAndBiasesSink

KEY = "f00dfacef00dfacef00dfacef00dfacef00dface"
NAME = "run-a lm_evaluation_harness demo_facts, demo_backwards 5f0c2a7b"
OFFLINE = WeightsAndBiasesSink(project="p", entity="team", mode="offline", tags=("nightly",))


def runs_below(folder: Path) -> list[OfflineRun]:
    return [read_offline_run(path) for path in sorted(folder.rglob("*.wandb"))]


def test_checkpoints_of_a_series_are_a_single_run_without_keys_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # As in the environment of a training job that evaluates itself.
    monkeypatch.setenv("WANDB_RUN_ID", "the-training-run")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    cells = [make_cell(tmp_path, step=step, tags=("mine",)) for step in (200, 100)]
    with ThreadPoolExecutor(2) as threads:
        states = list(threads.map(lambda cell: publish_record(cell[0], str(cell[1]), (OFFLINE,)), cells))
    assert {state[OFFLINE.name].status for state in states} == {"published"}
    runs = runs_below(tmp_path)
    assert len({run.id for run in runs}) == 1 and all(run.resumes and run.finished for run in runs)
    assert {(run.name, run.project, tuple(run.tags)) for run in runs} == {(NAME, "p", ("mine", "nightly"))}
    assert all(run.step_metrics["*"] == "training_step" for run in runs)
    assert sorted(line["training_step"] for run in runs for line in run.history) == [100, 200]
    assert all(run.config["evaluation_hash"] == cells[0][0].evaluation_hash for run in runs)
    assert "record" in {kind for run in runs for kind in run.artifacts.values()}
    assert len(read_records(str(tmp_path))) == 2, "W&B's files are not taken for records"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [file for file in open_files() if file.is_relative_to(tmp_path)]
    assert len(files) > len(runs) and not [path for path in files if KEY.encode() in path.read_bytes()]


def open_files() -> set[Path]:
    """Returns files that processes of this machine hold open, as far as the system tells them."""
    files: set[Path] = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it was closed meanwhile, or is another user's
            files.add(link.readlink())
    return files


@pytest.mark.parametrize(("most", "rows"), [(4, 4), (0, None)])
def test_table_of_samples_is_bounded(tmp_path: Path, most: int, rows: int | None):
    record, cell = make_cell(tmp_path, questions=10)
    sink = OFFLINE.model_copy(update={"max_samples": most, "folder": str(tmp_path / "files")})
    publish_record(record, str(cell), (sink,))
    (run,) = runs_below(tmp_path / "files")
    assert run.history[0].get("samples/step-100/nrows") == rows
    tables = [json.loads(path.read_text()) for path in (tmp_path / "files").rglob("*.table.json")]
    assert [len(table["data"]) for table in tables] == ([rows] if rows else [])
    if rows:
        assert tables[0]["data"][0][:4] == [100, "demo_facts", "0", "Question 0?"]


def test_try_that_was_cut_off_is_made_again_not_added_to_and_the_report_joins_the_same_run(tmp_path: Path):
    record, cell = make_cell(tmp_path)
    folder = Path(str(publish_record(record, str(cell), (OFFLINE,))[OFFLINE.name].where))
    (folder / ".finished").unlink()
    assert publish_record(record, str(cell), (OFFLINE,))[OFFLINE.name].status == "published"
    assert [line["training_step"] for run in runs_below(tmp_path) for line in run.history] == [100]
    (tmp_path / "run-a" / "report.html").write_text("<html>")
    publish_report(Announcement.of(record, str(cell)), (OFFLINE,))
    runs = runs_below(tmp_path)
    assert len({run.id for run in runs}) == 1
    assert "report" in {kind for run in runs for kind in run.artifacts.values()}


def test_server_s_run_is_resumed_and_takes_a_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with fake_wandb() as server:
        sink = WeightsAndBiasesSink(project="p", entity="team", base_url=server.address, tags=("nightly",))
        others = {100: {"versions": {"lm_eval": "0.5.0"}}, 200: {}}
        cells = {step: make_cell(tmp_path, step=step, **others[step]) for step in (200, 100)}
        states = [
            publish_record(cells[step][0], str(cells[step][1]), (sink,))[sink.name]
            for step in (200, 100, 100)  # the last repeats a send after the loss of its state
        ]
        for _ in range(2):
            record, cell = cells[100]
            states += publish_alerts(Announcement.of(record, str(cell)), (sink,), [known_alert(record)]).values()
    assert [(state.status, state.reason) for state in states] == [("published", None)] * 5
    ((id_, run),) = server.runs.items()
    assert {state.where for state in states} == {f"{server.address}/team/p/runs/{id_}"}
    assert run.name == NAME and {*run.tags} == {"nightly", SEVERAL_BUILDS, ALERT}
    measured = [(line["training_step"], line["demo_facts/acc"]) for line in run.lines if "demo_facts/acc" in line]
    assert measured == [(200, 0.5), (100, 0.5)]
    assert [line.get("demo_facts/acc_alert") for line in run.lines] == [None, None, -0.25]
    assert "NotifyScriptableRunAlert" in server.asked
    assert run.summary["training_step"] == 200, "the latest step, not the latest arrival"
    assert all(len(versions) == 1 for versions in server.artifacts.values())
    assert server.keys == {KEY}


def test_offline_files_of_remote_records_need_a_folder():
    from fakes.records import make_record

    cell = "memory://bucket/evaluations/run-a/step-100/lm_evaluation_harness/x-1"
    reason = publish_record(make_record(), cell, (OFFLINE,))[OFFLINE.name].reason
    assert reason is not None and "name a folder in the sink" in reason


@pytest.mark.parametrize("way", ["hanging", "500", "401"])
def test_server_that_does_not_work_is_reported_in_time_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    record, cell = make_cell(tmp_path)
    with broken_server(way) as broken:
        sink = WeightsAndBiasesSink(project="p", base_url=broken, timeout_seconds=8)
        state: Any = publish_record(record, str(cell), (sink,))[sink.name]
    assert state.status == "failed" and KEY not in state.reason
    assert "WANDB_API_KEY" in state.reason or "within 8 s" in state.reason
    assert not list(tmp_path.rglob("*.wandb")), "nothing is left where the evaluation runs"


def test_sink_without_a_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    record, cell = make_cell(tmp_path)
    with broken_server("500") as broken:
        sink = WeightsAndBiasesSink(project="p", base_url=broken, timeout_seconds=20)
        reason = publish_record(record, str(cell), (sink,))[sink.name].reason
    assert reason is not None and "API key" in reason
