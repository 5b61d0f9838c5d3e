"""Pools that outlive the process that started them, with real processes; the deterministic engine replaces vLLM."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import openai
import pytest

from fakes.cli import invoke
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint, write_run
from fakes.polling import eventually, is_alive
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import KeptPool, find, keep_up, list_kept, require, take_down
from pools.pool.session import PoolSession
from resources.backends.current import set_current_client
from resources.backends.local.client import LocalClient
from resources.errors import BadInput, EngineStartFailed, ProxyFailed
from resources.settings import settings

NEVER = 3600.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of the test's own; every pool in it is taken down afterwards."""
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    with set_current_client(LocalClient()):  # the process's default client may use an earlier test's folder
        yield
    for state in list_kept():
        take_down(state.pool.name)
    settings.cache_clear()


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Servable]:
    return [
        Servable.from_uri(f"run-{step}", str(write_checkpoint(tmp_path / f"step-{step}", seed=step)))
        for step in (1, 2, 3)
    ]


def pool_config(**fields: Any) -> InferencePoolConfig:
    return InferencePoolConfig.model_validate({"model": {"name": "run"}, "lease_seconds": 5, **fields})


def kept(folder: Path, checkpoints: list[Servable], *, name: str = "warm", idle_seconds: float = NEVER) -> KeptPool:
    return keep_up(name, pool_config(), checkpoints, idle_seconds=idle_seconds, launcher=FakeLauncher(folder))


def ask(pool: KeptPool, model: str, **options: Any) -> list[float]:
    key = pool.access.key.get_secret_value()
    with openai.OpenAI(base_url=pool.access.address.base_url, api_key=key, **options) as client:
        answer = client.completions.create(
            model=model, prompt="hello", max_tokens=1, temperature=0, logprobs=1, echo=True
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    return list(logprobs.token_logprobs)


def pids_of(pool: KeptPool, folder: Path) -> list[int]:
    engines = [json.loads(path.read_text())["pid"] for path in folder.glob("engine-*.json")]
    return [pool.access.address.pid, *engines]


def test_kept_pool_answers_any_openai_client_for_every_checkpoint_of_the_run_and_lends_no_name_twice(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    pool = kept(tmp_path, checkpoints)
    [file] = settings().pools_dir.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # it contains the key
    key = pool.access.key.get_secret_value()
    with openai.OpenAI(base_url=pool.access.address.base_url, api_key=key) as client:
        assert [model.id for model in client.models.list()] == ["run-1", "run-2", "run-3"]
    answers = {name: ask(pool, name) for name in ("run-1", "run-2", "run-3", "run-1")}
    assert len({tuple(answer) for answer in answers.values()}) == 3
    [state] = list_kept()
    assert state.state == "up" and state.status is not None
    assert state.status.leases == {}
    with pytest.raises(BadInput, match="assay pool down warm"):
        kept(tmp_path, checkpoints)
    assert find("warm") == pool
    other = Servable.from_uri("run-1", checkpoints[1].uri)
    with (
        PoolSession(pool.access, checkpoints[:1], holder="the first"),
        pytest.raises(ProxyFailed, match="the first uses the name run-1"),
        PoolSession(pool.access, [other], holder="the second"),
    ):
        pass


def test_keys_are_written_to_no_file_that_was_there_before_and_the_pool_is_not_up(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch(mode=0o644)
    settings().pools_dir.mkdir(parents=True)
    (settings().pools_dir / "warm.json").symlink_to(elsewhere)
    with pytest.raises(BadInput, match=r"no file warm\.json"):
        kept(tmp_path, checkpoints)
    assert elsewhere.read_text() == "" and list_kept() == []
    assert [job.name for job in LocalClient().jobs() if not job.status.finished] == []


def test_kept_pools_of_the_same_name_started_at_once_leave_a_single_pool(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    def started() -> KeptPool | BadInput:
        try:
            return kept(tmp_path, checkpoints)
        except BadInput as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(lambda context: context.run(started), [copy_context(), copy_context()]))
    [pool] = [outcome for outcome in outcomes if isinstance(outcome, KeptPool)]
    [refused] = [outcome for outcome in outcomes if isinstance(outcome, BadInput)]
    assert pool.access.address.base_url in refused.found
    running = [job.name for job in LocalClient().jobs() if not job.status.finished]
    assert sorted(name.partition("-")[0] for name in running) == ["pool", "proxy", "replica"]
    assert find("warm") == pool
    assert ask(pool, "run-1")


@pytest.mark.parametrize("name", ["x" * 300, "x.json/y", "../x", ""])
def test_name_that_no_pool_can_have_is_refused(tmp_path: Path, name: str) -> None:
    for act in (require, take_down, lambda name: kept(tmp_path, [], name=name)):
        with pytest.raises(BadInput, match="a name for the pool"):
            act(name)


def test_folders_pipes_and_other_files_among_pool_files_are_ignored() -> None:
    folder = settings().pools_dir
    (folder / "a-folder.json").mkdir(parents=True)
    os.mkfifo(folder / "a-pipe.json")
    (folder / "a-text.json").write_text("text")
    assert list_kept() == []
    with pytest.raises(BadInput, match="there: none"):
        require("a-folder")


def test_kept_pool_that_ends_leaves_the_file_of_its_successor(tmp_path: Path, checkpoints: list[Servable]) -> None:
    first = kept(tmp_path, checkpoints)
    [file] = settings().pools_dir.glob("*.json")
    file.unlink()
    second = kept(tmp_path, checkpoints)
    LocalClient().attach(first.job_id).terminate()
    assert find("warm") == second


def test_kept_pool_survives_the_process_that_made_it(tmp_path: Path, checkpoints: list[Servable]) -> None:
    maker = tmp_path / "maker.py"
    maker.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            from pathlib import Path
            from fakes.launcher import FakeLauncher
            from pools.config import InferencePoolConfig
            from pools.pool.kept import keep_up
            from pools.engine.launch import Servable
            folder = Path({str(tmp_path)!r})
            checkpoint = Servable.from_uri("run-1", str(folder / "step-1"))
            config = InferencePoolConfig.model_validate({{"model": {{"name": "run"}}}})
            keep_up("warm", config, [checkpoint], idle_seconds={NEVER}, launcher=FakeLauncher(folder))
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    assert subprocess.run([sys.executable, str(maker)], timeout=60).returncode == -signal.SIGKILL
    pool = require("warm")
    first = ask(pool, "run-1")
    with PoolSession(pool.access, checkpoints[1:], holder="a test") as session:
        session.load("run-3")
        [state] = list_kept()
        assert state.status is not None
        assert [lease.holder for lease in state.status.leases.values()] == ["a test"]
        assert ask(pool, "run-3") != first
    assert ask(pool, "run-1") == first
    pids = pids_of(pool, tmp_path)
    take_down("warm")
    assert find("warm") is None
    assert len(pids) >= 2
    eventually(lambda: not any(is_alive(pid) for pid in pids))  # orphans of the starting process: init reaps them


def test_kept_pool_ends_when_its_last_user_has_gone_for_the_idle_time(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    pool = kept(tmp_path, checkpoints, idle_seconds=2)
    with PoolSession(pool.access, checkpoints, holder="a test") as session:
        session.load("run-1")
        pids = pids_of(pool, tmp_path)
    assert all(is_alive(pid) for pid in pids)
    eventually(lambda: find("warm") is None)
    eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_kept_pool_with_a_killed_owner_leaves_nothing_and_is_not_listed(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    pool = kept(tmp_path, checkpoints)
    ask(pool, "run-1")
    pids = pids_of(pool, tmp_path)
    status = json.loads((settings().jobs_dir / pool.job_id / "status.json").read_text())
    os.kill(status["replicas"][0]["pid"], signal.SIGKILL)
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    eventually(lambda: not list_kept())
    with pytest.raises(BadInput, match="there: none"):
        require("warm")


def test_kept_pool_that_gave_up_is_shown_as_failed_and_tries_again_for_the_next_request(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    config, launcher = pool_config(max_replica_restarts=0), FakeLauncher(tmp_path)
    pool = keep_up("warm", config, checkpoints, idle_seconds=NEVER, launcher=launcher)
    first = ask(pool, "run-1")
    [engine] = tmp_path.glob("engine-*.json")
    os.kill(json.loads(engine.read_text())["pid"], signal.SIGKILL)
    eventually(lambda: [state.state for state in list_kept()] == ["failed"])
    [shown] = json.loads(printed("pool", "ls", "--json"))
    assert shown["state"] == "failed" and "it died, for the 1. time" in shown["reason"]
    assert "warm has given up: replica-0: it died" in printed("pool", "ls")
    assert ask(pool, "run-2") != first
    assert [state.state for state in list_kept()] == ["up"]
    assert launcher.launches == ["run-1", "run-2"]


def test_kept_pool_with_a_failed_first_engine_retries_for_the_next_request(
    tmp_path: Path, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path, scripts=dict.fromkeys((0, 1), "raise SystemExit('no accelerator is free')"))
    pool = keep_up("warm", pool_config(), checkpoints, idle_seconds=NEVER, launcher=launcher)
    with PoolSession(pool.access, checkpoints[:1], holder="a test") as session:
        for name in ("run-1", "run-1"):
            with pytest.raises(EngineStartFailed, match="no accelerator is free"):
                session.load(name)
        assert launcher.launches == ["run-1"]
        with pytest.raises(openai.InternalServerError, match="no accelerator is free"):
            ask(pool, "run-2", max_retries=0)
        assert launcher.launches == ["run-1", "run-2"]
    with PoolSession(pool.access, checkpoints, holder="another") as session:
        session.load("run-3")


def test_kept_pool_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, checkpoints: list[Servable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_INSECURE", "1")
    settings.cache_clear()
    config = pool_config(proxy_host="203.0.113.1")
    with pytest.raises(ProxyFailed, match="to listen on"):
        keep_up("warm", config, checkpoints, idle_seconds=NEVER, launcher=FakeLauncher(tmp_path))
    assert list_kept() == []


@pytest.mark.engine
def test_pool_command_brings_a_pool_up_shows_it_and_takes_it_down(tmp_path: Path, session_cache: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "environments").symlink_to(session_cache / "environments")
    run = write_run(tmp_path / "run-a", [100, 200])
    up = printed("pool", "up", "--model", str(run), "--name", "warm", "--cpu", "1", "--longest-wait", "45")
    assert "warm is up at" in up
    assert require("warm").access.config.longest_wait_seconds == 45
    [shown] = json.loads(printed("pool", "ls", "--json"))
    assert (shown["name"], shown["state"], shown["base_url"] in up.replace("\n", "")) == ("warm", "up", True)
    variables = printed("pool", "env", "warm")
    assert f"export OPENAI_BASE_URL={shown['base_url']}\n" in variables
    [key] = (line.partition("=")[2] for line in variables.splitlines() if line.startswith("export OPENAI_API_KEY="))
    with openai.OpenAI(base_url=shown["base_url"], api_key=key) as client:
        assert {"run-a-100", "run-a-200"} <= {model.id for model in client.models.list()}
    assert printed("pool", "down", "warm") == "warm is down.\n"
    assert json.loads(printed("pool", "ls", "--json")) == []


def printed(*arguments: str) -> str:
    done = invoke(arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout
