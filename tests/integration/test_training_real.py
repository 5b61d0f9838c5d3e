"""Levanter's `train_lm` itself, on a nano Llama, as a job of this machine and as a job of Iris."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.clients import CLIENTS
from fakes.polling import eventually
from fakes.training import nano_training, trainers_of, write_training_data
from resources.errors import BadInput
from resources.jobs.jobs import Client, JobStatus
from resources.settings import settings
from tasks.checkpoints.discovery import find_checkpoints
from tasks.spec.training import TrainLmOnPodConfig
from tasks.training.job import finished, is_trained, plan_training, run_levanter_train_lm, training

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[Any]:
    """Creates clients of backends, and ends each with everything that it runs."""
    made: list[Client] = []

    def make(backend: str) -> Client:
        made.append(CLIENTS[backend](tmp_path))
        return made[-1]

    yield make
    for client in made:
        client.shutdown()


def config(data: Path, output: Path, *, steps: int, every: int, **trainer: Any) -> TrainLmOnPodConfig:
    return TrainLmOnPodConfig.model_validate(nano_training(data, output, steps=steps, every=every, **trainer))


def exported(output: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(str(output / "hf")) if checkpoint.complete]


def test_training_on_a_cluster_exports_checkpoints_and_says_last_that_it_is_done(
    client_of: Any, data: Path, tmp_path: Path
) -> None:
    job_config = config(data, tmp_path / "short", steps=9, every=4)
    # The workers run on this machine with another home: without this they would build the environment again.
    job_config = job_config.model_copy(update={"env_vars": {"ASSAY_CACHE_DIR": str(settings().cache_dir)}})
    assert run_levanter_train_lm(job_config, client=client_of("iris")) is JobStatus.SUCCEEDED
    assert exported(tmp_path / "short") == [4, 8]
    assert (tmp_path / "short" / "checkpoints" / "step-8" / "metadata.json").is_file()
    assert is_trained(plan_training(job_config))
    written = json.loads((tmp_path / "short" / "trained.json").read_text())
    assert (written["run_id"], written["steps"]) == ("short", 9)


def test_training_that_is_killed_goes_on_where_it_was(client_of: Any, data: Path, tmp_path: Path) -> None:
    job_config = config(data, tmp_path / "killed", steps=60, every=20)
    with training(job_config, client=client_of("local")) as job:
        weights = tmp_path / "killed" / "hf" / "step-20" / "model.safetensors"
        eventually(lambda: weights.exists() and 20 in exported(tmp_path / "killed"))
        [trainer] = trainers_of("killed")
        os.kill(trainer, signal.SIGKILL)
        assert finished(job) is JobStatus.SUCCEEDED
    assert job.details().preemptions == 1
    assert "Resuming training from step" in job.logs(100_000)
    assert exported(tmp_path / "killed") == [20, 40, 59]
    assert is_trained(plan_training(job_config)) and trainers_of("killed") == []


def test_configuration_that_levanter_does_not_read_is_bad_input(client_of: Any, data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="bogus"):
        run_levanter_train_lm(config(data, tmp_path / "bogus", steps=9, every=4, bogus=1), client=client_of("local"))


def test_training_that_is_stopped_leaves_no_process(client_of: Any, data: Path, tmp_path: Path) -> None:
    job_config = config(data, tmp_path / "endless", steps=10**6, every=10**6)
    with training(job_config, client=client_of("local")) as job:
        eventually(lambda: trainers_of("endless"))
    assert job.status() is JobStatus.STOPPED and trainers_of("endless") == []
