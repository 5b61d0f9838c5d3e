"""Events of complete checkpoints, sent once each, and the runs that an automation watches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from prefect.events import ResourceSpecification
from prefect.events.schemas.events import Resource
from prefect.settings import PREFECT_API_URL, temporary_settings

from fakes.cli import invoke
from fakes.models import write_checkpoint
from fakes.policies import write_policy
from flows.cli.deployments import duration, watch
from resources.errors import AssayError, BadInput
from tasks.errors import PrefectUnavailable
from tasks.policies.events import CompleteCheckpoint, WatchedRuns, checkpoint_of, resources_of
from tasks.policies.policy import Policy
from tasks.spec.loading import load_config


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_config(str(write_policy(tmp_path, name="watched")), Policy)


def make(folder: Path, step: int, *, run: str = "run-a", seed: int = 0) -> Path:
    return write_checkpoint(folder / run / "hf" / f"step-{step}", seed=seed)


def test_watched_checkpoint_is_reported_once_complete_and_again_when_rewritten(tmp_path: Path, policy: Policy):
    watched = WatchedRuns(policy)
    assert watched.find_new() == []  # no run yet
    for step in (1, 2):
        make(tmp_path, step)
    newest = CompleteCheckpoint(str(tmp_path / "run-a/hf/step-2"), "run-a", "run-a-2", 2, "watched")
    assert watched.find_new() == [newest]  # covers the checkpoint before it
    assert watched.find_new() == []

    weights = make(tmp_path, 3) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert watched.find_new() == []
    weights.write_bytes(whole)
    assert [checkpoint.name for checkpoint in watched.find_new()] == ["run-a-3"]

    shutil.rmtree(tmp_path / "run-a/hf/step-1")
    make(tmp_path, 1, seed=5)
    make(tmp_path, 9, run="run-b")
    assert [checkpoint.name for checkpoint in watched.find_new()] == ["run-a-1", "run-b-9"]


def test_watching_tells_later_what_the_server_could_not_be_told(tmp_path: Path, policy: Policy):
    make(tmp_path, 1)
    reported: list[str] = []
    lines: list[str] = []
    away = iter([True, False, False])

    def tell(checkpoints: list[CompleteCheckpoint]) -> None:
        if next(away):
            raise PrefectUnavailable(expected="the server", found="no server", remedy="wait")
        reported.extend(checkpoint.name for checkpoint in checkpoints)

    watch(policy, every_seconds=5, on_event=lines.append, tell=tell, sleep=lambda seconds: None, looks=3)
    assert reported == ["run-a-1"]
    assert lines[0] == "looking again: no server" and len(lines) == 2


@pytest.mark.parametrize(
    ("run", "checkpoint", "listens"),
    [
        ("gs://bucket/run-a", "gs://bucket/run-a/hf/step-1", True),
        ("gs://bucket/run-a/", "gs://bucket/run-a", True),
        ("gs://bucket/run-a", "gs://bucket/run-ab/hf/step-1", False),
        ("gs://bucket/run-*", "gs://bucket/run-ab/hf/step-1", True),
        ("gs://bucket/run-[ab]/x", "gs://bucket/other/hf/step-1", False),
        ("/runs/run-?", "/runs/run-a/hf/step-1", True),
    ],
)
def test_automation_listens_to_the_checkpoints_of_its_runs(run: str, checkpoint: str, listens: bool):
    resource = Resource(CompleteCheckpoint(checkpoint, "run", "run-1", 1).labels())
    assert ResourceSpecification({"prefect.resource.id": resources_of([run])}).matches(resource) is listens


def test_notification_of_any_file_of_a_checkpoint_finds_it(tmp_path: Path):
    folder = make(tmp_path, 7)
    for uri in (str(folder), f"{folder}/", str(folder / "model.safetensors")):
        checkpoint = checkpoint_of(uri)
        assert checkpoint is not None and (checkpoint.uri, checkpoint.step, checkpoint.complete) == (
            str(folder),
            7,
            True,
        )
    assert checkpoint_of(str(tmp_path / "run-a")) is None
    assert checkpoint_of(str(tmp_path / "nowhere" / "at" / "all")) is None
    (folder / "config.json").unlink()
    checkpoint = checkpoint_of(str(folder / "model.safetensors"))
    assert checkpoint is not None and not checkpoint.complete


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10m", 600), ("1.5h", 5400), ("2d", 172800)])
def test_duration_is_read_as_people_write_it(text: str, seconds: float):
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["10", "m", "0s", "-5m", "1w", "soon"])
def test_duration_that_is_none_is_refused(text: str):
    with pytest.raises(BadInput, match="such as 30s"):
        duration(text)


@pytest.mark.parametrize(
    ("address", "error", "problem"),
    [(None, BadInput, "no PREFECT_API_URL is set"), ("http://127.0.0.1:9/api", PrefectUnavailable, "refused")],
)
def test_complete_checkpoint_cannot_be_told_without_a_server(
    tmp_path: Path, address: str | None, error: type[AssayError], problem: str
):
    folder = make(tmp_path, 7)
    with temporary_settings({PREFECT_API_URL: address} if address else {}, restore_defaults={PREFECT_API_URL}):
        done = invoke(["notify", str(folder)])
    assert isinstance(done.exception, error) and problem in done.exception.found
