"""`InferencePool` with its real proxy and real processes; the deterministic engine replaces vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.fault_target import inject
from fakes.launcher import FakeLauncher
from fakes.models import CONFIG, PARAMETERS, write_checkpoint, write_safetensors
from fakes.polling import eventually, is_alive
from fakes.pools import InferencePool
from fakes.web_proxy import web_proxy
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Servable
from pools.protocol import LoadReport
from resources.backends.local.client import LocalClient
from resources.errors import (
    CheckpointChanged,
    EngineDied,
    EngineStartFailed,
    ModelUnusable,
    ProxyFailed,
    WeightsNotRead,
)
from resources.settings import settings


@dataclass(frozen=True)
class FirstReloads:
    """Loads and answers of a pool from before its engine's reloads were compared with a cold start."""

    cache: Path
    loads: list[LoadReport]
    answers: list[Any]


@pytest.fixture(scope="module")
def first_reloads(tmp_path_factory: pytest.TempPathFactory) -> FirstReloads:
    """Fills a cache in which the first reload of the fake engine was compared with a cold start."""
    folder = tmp_path_factory.mktemp("judged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_CACHE_DIR", str(folder / "cache"))
        settings.cache_clear()
        served, loads, answers, client = write_checkpoints(folder), [], [], LocalClient()
        with InferencePool(pool_config(), served, client=client, launcher=FakeLauncher(folder)) as pool:
            for checkpoint in served:
                running, report = pool.load(checkpoint.name)
                loads.append(report)
                answers.append(ask(running).json()["choices"])
        client.shutdown()
    return FirstReloads(folder / "cache", loads, answers)


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, first_reloads: FirstReloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A cache in which reloads are trusted already, except in tests marked `first_reload`."""
    cache = tmp_path / "cache"
    if "first_reload" not in request.keywords:
        shutil.copytree(first_reloads.cache / "reloads", cache / "reloads")
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(cache))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def client() -> Iterator[LocalClient]:
    made = LocalClient()
    yield made
    made.shutdown()


def write_checkpoints(folder: Path) -> list[Servable]:
    return [
        Servable.from_uri(f"run-{step}", str(write_checkpoint(folder / f"step-{step}", seed=step)))
        for step in (1, 2, 3)
    ]


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Servable]:
    return write_checkpoints(tmp_path)


def pool_config(**fields: Any) -> InferencePoolConfig:
    return InferencePoolConfig.model_validate(
        {
            "model": {"name": "run"},
            "engine_timeout_seconds": 60,
            "proxy_timeout_seconds": 120,
            "lease_seconds": 3,
            **fields,
        }
    )


def test_unfit_checkpoint_before_any_other_is_refused_and_costs_no_engine(
    checkpoints: list[Servable], client: LocalClient, tmp_path: Path
) -> None:
    launcher = FakeLauncher(tmp_path, unfit="extra.weight")
    folder = write_checkpoint(tmp_path / "step-0", parameters={**PARAMETERS, "extra.weight": (2, 2)})
    served = [Servable.from_uri("run-0", str(folder)), *checkpoints]
    with InferencePool(pool_config(), served, client=client, launcher=launcher) as pool:
        ways = []
        for name in ("run-0", "run-1", "run-0", "run-1"):
            try:
                ways.append(pool.load(name)[1].how)
            except ModelUnusable as error:
                ways.append(error.found)
        assert ways == ["extra.weight is of no use", "cold start", "extra.weight is of no use", "already loaded"]
        assert launcher.launches == ["run-1"]


def ask(
    running: RunningModel, prompt: str = "hello", *, model: str | None = None, timeout_seconds: float | None = None
) -> httpx.Response:
    return httpx.post(
        f"{running.base_url}/completions",
        json={"model": model or running.model, "prompt": prompt, "max_tokens": 4, "logprobs": 1, "echo": True},
        headers={"Authorization": f"Bearer {running.api_key}"},
        timeout=timeout_seconds,  # held requests wait for engines that restart
        verify=False,  # reading certificates would take most of the time
    )


def answered(running: RunningModel, model: str, timeout_seconds: float | None) -> bool:
    try:
        return ask(running, model=model, timeout_seconds=timeout_seconds).status_code == 200
    except httpx.TimeoutException:
        return False


def asked_thrice(running: RunningModel, prompt: str) -> int:
    """Returns the status after at most two immediate retries; 0 if all three tries fail."""
    for _ in range(3):
        try:
            return ask(running, prompt).status_code
        except httpx.TransportError:
            continue
    return 0


NAN_ENGINE = """
import http.server, sys
class Engine(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200 if self.path == "/health" or self.headers["Authorization"] else 401, b"{}")
    def do_POST(self):
        self.answer(400, b'{"error": {"message": "Out of range float values are not JSON compliant"}}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""


def engine_pids(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in folder.glob("engine-*.json")]


def test_first_reload_is_compared_with_a_cold_start_and_trusted_afterwards(first_reloads: FirstReloads) -> None:
    assert [report.how for report in first_reloads.loads] == ["cold start", "restart", "reload"]
    assert "compared with a cold start: they agree" in (first_reloads.loads[1].reason or "")


def test_pool_that_trusts_reloads_loads_checkpoints_in_place_when_asked_for_and_each_answers_with_its_own_weights(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path)
    answers = []
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        for checkpoint in checkpoints:
            running, loaded = pool.load(checkpoint.name)
            answers.append(ask(running).json()["choices"][0]["logprobs"]["token_logprobs"])
            assert loaded.how == ("cold start" if checkpoint is checkpoints[0] else "reload")
            assert running.prompt_logprobs
            assert pool.proxy_status().models[checkpoint.name].answered == 1
        again, loaded = pool.load("run-1")
        assert ask(again).json()["choices"][0]["logprobs"]["token_logprobs"] == answers[0]
        assert pool.load("run-1")[1].how == "already loaded"
        unasked_for = ask(again, model="run-2")  # held until the pool has swapped
        assert unasked_for.json()["choices"][0]["logprobs"]["token_logprobs"] == answers[1]
        assert ask(again, model="run-9").status_code == 404
        pids = engine_pids(tmp_path)
    assert launcher.launches == ["run-1"]
    assert len({tuple(answer) for answer in answers}) == 3
    assert pids
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("journal", [True, False])
def test_pool_writes_nothing_of_a_request_where_it_keeps_no_journal(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable], journal: bool
) -> None:
    secret, mirror = f"confidential-{journal}", tmp_path / "mirror"
    launcher = FakeLauncher(tmp_path)
    with InferencePool(pool_config(journal=journal), checkpoints[:1], client=client, launcher=launcher) as pool:
        opened = pool.session.open("run-1", cell="cell", attempt="first", mirror=str(mirror))
        assert secret in ask(opened.running, secret).json()["choices"][0]["text"]
        pool.session.close_cell(opened, finished=False)
    files = (path for folder in (tmp_path, settings().cache_dir) for path in folder.rglob("*") if path.is_file())
    assert {path.name for path in files if secret.encode() in path.read_bytes()} == (
        {"journal.sqlite"} if journal else set()
    )
    assert mirror.exists() == journal


def test_pool_asks_nothing_of_the_networks_proxy(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable], monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_proxy() as proxy:
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        launcher = FakeLauncher(tmp_path)
        with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
            running, _ = pool.load("run-1")
            engine = EngineClient(running.base_url.removesuffix("/v1"), running.api_key)
            assert len(engine.canary("run-2", prompt_logprobs=True)) > 2
        assert not proxy.was_asked


@pytest.mark.first_reload
def test_engine_that_reloads_only_a_part_is_never_trusted_and_always_restarted(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable], first_reloads: FirstReloads
) -> None:
    launcher = FakeLauncher(tmp_path, faults={"partial_reload": True})
    answers = []
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        for name in ("run-1", "run-2", "run-3"):
            running, loaded = pool.load(name)
            answers.append(ask(running).json()["choices"])
    assert loaded.how == "restart"
    assert "differed from a cold start" in (loaded.reason or "")
    assert answers == first_reloads.answers


def test_reload_that_goes_wrong_or_cannot_go_right_is_followed_by_a_restart(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    wider = Servable.from_uri("wider", str(write_checkpoint(tmp_path / "wider", config={**CONFIG, "hidden_size": 9})))
    launcher = FakeLauncher(tmp_path, faults={"skip_reload": True})
    with InferencePool(pool_config(), [*checkpoints, wider], client=client, launcher=launcher) as pool:
        pool.load("run-1")
        _, stale = pool.load("run-2")
        assert (stale.how, stale.reason) == ("restart", "the engine still answered with the former weights")
        inject(pool.engine_urls()[0], {"fail_reload": True})
        running, failed = pool.load("run-3")
        assert failed.how == "restart"
        assert failed.reason == "reloading in place failed: they do not fit"
        assert ask(running).status_code == 200
        assert pool.load("wider")[1].reason == "its config differs (hidden_size)"  # without a try
    assert launcher.launches == ["run-1", "run-2", "run-3", "wider"]


def test_engine_without_reload_is_restarted_each_time_and_that_is_said_once(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    events: list[str] = []
    launcher = FakeLauncher(tmp_path, faults={"no_reload": True})
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher, on_event=events.append) as pool:
        loaded = [pool.load(name)[1] for name in ("run-1", "run-2", "run-3")]
        assert ask(pool.load("run-3")[0]).status_code == 200
    assert [load.how for load in loaded] == ["cold start", "restart", "restart"]
    assert {"reload" in load.phases for load in loaded[2:]} == {False}
    assert sum("cannot reload weights" in event for event in events) == 1


def test_sampled_reload_is_compared_with_a_cold_start_and_differences_end_trust(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    config = pool_config(reload_audit_share=1)
    served = [*checkpoints, Servable.from_uri("run-4", str(write_checkpoint(tmp_path / "step-4", seed=4)))]
    with InferencePool(config, served, client=client, launcher=FakeLauncher(tmp_path)) as pool:
        pool.load("run-1")
        audited = pool.load("run-2")[1]
        assert audited.how == "restart"
        assert audited.reason == "this reload is among those compared with a cold start: they agree (0 nats)"
        inject(pool.engine_urls()[0], {"partial_reload": True})
        first, second = pool.load("run-3")[1], pool.load("run-4")[1]
    assert "they differ" in (first.reason or "")
    assert "a reload differed from a cold start before" in (second.reason or "")


def test_next_checkpoint_of_a_store_is_staged_while_the_present_is_served(tmp_path: Path, client: LocalClient) -> None:
    remote = [
        Servable.from_uri(
            f"run-{step}", f"simplecache::file://{write_checkpoint(tmp_path / f'step-{step}', seed=step)}"
        )
        for step in (1, 2)
    ]
    with InferencePool(pool_config(), remote, client=client, launcher=FakeLauncher(tmp_path)) as pool:
        pool.load("run-1")
        staged = {servable.name: settings().staging_dir / servable.digests.checkpoint for servable in remote}
        assert (staged["run-1"] / "model.safetensors").is_file()
        pool.session.want("run-2")
        eventually((staged["run-2"] / "model.safetensors").is_file)
        [replica] = pool.proxy_status().replicas
        assert [load.model for load in replica.announcement.loads] == ["run-1"]
        pool.session.unwant("run-1")
        running, _ = pool.session.load("run-2")
        assert ask(running).status_code == 200


def test_checkpoints_are_spread_over_two_replicas_and_survive_a_single_loss(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    config = pool_config(resource_config={"replicas": 2}, max_replica_restarts=0)
    with InferencePool(config, checkpoints, client=client, launcher=FakeLauncher(tmp_path)) as pool:
        running, _ = pool.load("run-1")
        assert running.capacity == 64
        eventually(lambda: [seen.announcement.state for seen in pool.proxy_status().replicas] == ["ready", "ready"])
        with ThreadPoolExecutor(6) as threads:
            names = ["run-1", "run-2"] * 15
            answers = list(threads.map(lambda name: ask(running, model=name).status_code, names))
        assert set(answers) == {200}
        assert {replica.announcement.model for replica in pool.proxy_status().replicas} == {"run-1", "run-2"}
        reports = [load for replica in pool.proxy_status().replicas for load in replica.announcement.loads]
        assert sum(load.model == "run-2" for load in reports) == 1
        pool.session.want("run-2")  # otherwise its replica would get run-1 with a new engine before the loss is noticed
        first, second = engine_pids(tmp_path)
        os.kill(first, signal.SIGKILL)
        assert {ask(running, f"prompt {index}").status_code for index in range(20)} == {200}
        pool.session.check("run-1")
        eventually(lambda: len(pool.proxy_status().replicas) == 1)
        os.kill(second, signal.SIGKILL)
        assert ask(running).status_code == 503
        with pytest.raises(EngineDied, match=r"it died, for the 1\. time"):
            pool.session.check("run-1")


@pytest.mark.parametrize("timeout_seconds", [None, 0.3])
def test_requests_for_another_checkpoint_wait_at_most_the_bound(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable], timeout_seconds: float | None
) -> None:
    config = pool_config(longest_wait_seconds=1.0)
    stop = threading.Event()
    with InferencePool(config, checkpoints, client=client, launcher=FakeLauncher(tmp_path)) as pool:
        running, _ = pool.load("run-1")
        refused: list[int] = []

        def keep_busy() -> None:
            while not stop.is_set():
                status = ask(running, model="run-1").status_code
                if status != 200:
                    refused.append(status)

        busy = [threading.Thread(target=keep_busy) for _ in range(2)]
        for thread in busy:
            thread.start()
        try:
            eventually(lambda: answered(running, "run-2", timeout_seconds))
        finally:
            stop.set()
            for thread in busy:
                thread.join(timeout=30)
        assert not refused
        loads = [load.model for replica in pool.proxy_status().replicas for load in replica.announcement.loads]
        assert loads[:2] == ["run-1", "run-2"]


def test_proxy_that_is_killed_under_load_fails_no_request_of_a_client_that_tries_thrice_at_once(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path, faults={"delay_seconds": 0.02})
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        running, _ = pool.load("run-1")
        killed, stop = pool.proxy_pid, threading.Event()
        answers: list[int] = []

        def asks(number: int) -> None:
            while not stop.is_set():
                answers.append(asked_thrice(running, f"{number} {len(answers)}"))

        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(asks, number) for number in range(8)]
            try:
                eventually(lambda: len(answers) > 40)
                os.kill(killed, signal.SIGKILL)
                eventually(lambda: pool.proxy_pid != killed)
                before = len(answers)
                eventually(lambda: len(answers) > before + 40)
            finally:
                stop.set()
        for thread in asking:
            thread.result()
        assert set(answers) == {200}


def test_pool_that_is_closed_ends_all_waits_for_its_proxy(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    with InferencePool(pool_config(), checkpoints, client=client, launcher=FakeLauncher(tmp_path)) as pool:
        address = pool.access.address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))


def agent_pid(folder: Path) -> int:
    return json.loads((folder / "status.json").read_text())["replicas"][0]["pid"]


def test_engine_agent_or_proxy_that_is_killed_is_started_again_and_answers_as_before(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path)
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        running, _ = pool.load("run-1")
        before = ask(running).json()["choices"]
        os.kill(engine_pids(tmp_path)[0], signal.SIGKILL)
        answer = ask(running)
        assert answer.status_code == 200
        assert answer.json()["choices"] == before
        pool.session.check("run-1")
        assert launcher.launches == ["run-1", "run-1"]
        engines = engine_pids(tmp_path)
        [job] = [folder for folder in settings().jobs_dir.glob("replica-0-*") if is_alive(agent_pid(folder))]
        os.kill(agent_pid(job), signal.SIGKILL)
        answer = ask(running)
        assert answer.status_code == 200
        assert answer.json()["choices"] == before
        eventually(lambda: not any(is_alive(pid) for pid in engines))
        eventually(lambda: [replica.announcement.start for replica in pool.proxy_status().replicas] == [2])
        address = pool.base_url
        os.kill(pool.proxy_pid, signal.SIGKILL)

        def answers() -> bool:
            try:
                return ask(running).json()["choices"] == before
            except httpx.TransportError:
                return False

        eventually(answers)
        assert pool.base_url == address
        assert ask(running, model="run-2").status_code == 200
        pool.session.check("run-2")  # as evaluations do continuously: it registers with a new proxy
        assert [lease.holder for lease in pool.proxy_status().leases.values()] == ["the pool's owner"]


def test_replica_with_an_engine_that_dies_at_start_retries_while_others_answer(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    die = tmp_path / "die"
    script = f"import os, time\nwhile not os.path.exists({str(die)!r}): time.sleep(0.05)\nraise SystemExit(3)"
    launcher = FakeLauncher(tmp_path, scripts={1: script})
    config = pool_config(resource_config={"replicas": 2})
    with InferencePool(config, checkpoints, client=client, launcher=launcher) as pool:
        running, _ = pool.load("run-1")
        die.touch()
        eventually(
            lambda: [replica.announcement.state for replica in pool.proxy_status().replicas] == ["ready", "ready"]
        )
        assert pool.proxy_status().unusable == {}
        assert ask(running).status_code == 200
        loads = [load for replica in pool.proxy_status().replicas for load in replica.announcement.loads]
        assert sorted(load.failure is None for load in loads) == [False, True, True]


def test_engine_that_dies_at_start_shows_its_log_and_the_command(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path, scripts={0: "print('no such kernel'); raise SystemExit(3)"})
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        with pytest.raises(EngineStartFailed, match="no such kernel") as caught:
            pool.load("run-1")
        assert "it ended before its model answered" in caught.value.found
        assert sys.executable in caught.value.remedy
        with pytest.raises(EngineStartFailed, match="no such kernel"):
            pool.load("run-1")
        assert launcher.launches == ["run-1"]
        assert ask(pool.load("run-2")[0]).status_code == 200


LOADER_LOG = """
Traceback (most recent call last):
  File "model.py", line 218, in load_weights
    loaded_weight = loaded_weight.narrow(
ValueError: There is no module or parameter named '_orig_mod' in LlamaForCausalLM."""


def test_two_checkpoints_that_end_their_engines_while_they_are_read_fail_alone(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    log = "Loading safetensors checkpoint shards:   0%\nsafetensors_rust.SafetensorError: F99 at 0"
    launcher = FakeLauncher(tmp_path, scripts=dict.fromkeys((0, 1), f"raise SystemExit({log!r})"))
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        for name in ("run-1", "run-2"):
            with pytest.raises(WeightsNotRead, match="F99"):
                pool.load(name)
        assert ask(pool.load("run-3")[0]).status_code == 200
    assert launcher.launches == ["run-1", "run-2", "run-3"]


def test_checkpoint_that_the_loader_refuses_fails_alone(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path, scripts={0: f"raise SystemExit({LOADER_LOG!r})"})
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        for checkpoint in checkpoints:
            pool.session.want(checkpoint.name)
        with pytest.raises(ModelUnusable, match="named '_orig_mod' in LlamaForCausalLM"):
            pool.session.load("run-1")
        for name in ("run-2", "run-3"):
            assert ask(pool.load(name)[0]).status_code == 200
    assert launcher.launches[:2] == ["run-1", "run-2"]


def test_two_checkpoints_with_the_same_error_are_the_pools_fault(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    script = "import os; raise SystemExit(f'RuntimeError: no device {os.getpid()}')"
    launcher = FakeLauncher(tmp_path, scripts=dict.fromkeys(range(9), script))
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        for name, reason in zip(("run-1", "run-2", "run-3"), ("run-1", "run-2", "so it is the pool's"), strict=True):
            with pytest.raises(EngineStartFailed, match="no device") as caught:
                pool.load(name)
            assert reason in str(caught.value)
    assert launcher.launches == ["run-1", "run-2"]


def test_checkpoint_that_two_engines_died_of_leaves_the_pool_to_others(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path)
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        for deaths in (1, 2):
            pool.load("run-1")
            with pytest.raises(httpx.TransportError):
                httpx.post(f"{pool.engine_urls()[0]}/fake/die", json={"error": "IndexError: piece id is out of range"})
            eventually(lambda restarts=deaths: pool.proxy_status().replicas[0].announcement.restarts == restarts)
        eventually(lambda: pool.proxy_status().unusable)
        with pytest.raises(EngineDied, match="IndexError: piece id"):
            pool.session.check("run-1")
        assert ask(pool.load("run-2")[0]).status_code == 200
        pool.session.check("run-2")


def test_checkpoint_with_useless_or_changed_weights_fails_alone_and_an_error_in_the_block_ends_every_process(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    changed = Servable.from_uri("changed", str(write_checkpoint(tmp_path / "changed", seed=4)))
    launcher = FakeLauncher(tmp_path, scripts={1: NAN_ENGINE})
    pool = InferencePool(pool_config(), [*checkpoints, changed], client=client, launcher=launcher)
    with pytest.raises(ZeroDivisionError), pool:
        pool.load("run-1")
        write_safetensors(tmp_path / "changed" / "model.safetensors", seed=77)
        with pytest.raises(CheckpointChanged, match="changed since it was planned"):
            pool.load("changed")
        inject(pool.engine_urls()[0], {"fail_reload": True})
        with pytest.raises(ModelUnusable, match="diverged"):
            pool.load("run-2")
        running, loaded = pool.load("run-3")
        assert loaded.how == "cold start"
        assert ask(running).status_code == 200
        pool.session.check("run-3")
        assert any(is_alive(pid) for pid in engine_pids(tmp_path))
        raise ZeroDivisionError
    assert not any(is_alive(pid) for pid in engine_pids(tmp_path))
    assert not is_alive(pool.proxy_pid)


def test_request_that_engines_die_of_fails_alone(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path, faults={"deadly": "poison", "delay_seconds": 0.3})
    with InferencePool(pool_config(), checkpoints, client=client, launcher=launcher) as pool:
        running, _ = pool.load("run-1")
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda prompt: ask(running, prompt), ["poison", *"abcde"]))
        assert [answer.status_code for answer in answers] == [422, *[200] * 5]
        assert "three deaths, the last time alone (IndexError: piece id" in answers[0].json()["error"]["message"]
        assert ask(running, "poison").status_code == 422  # without another death
        assert [ask(running, f"poison {number}").status_code for number in range(2)] == [422, 422]
        pool.session.check("run-1")
        assert pool.proxy_status().replicas[0].announcement.restarts == 9
        assert ask(running, "fine").status_code == 200


def test_engine_that_hangs_at_start_is_given_up_after_its_time(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    launcher = FakeLauncher(tmp_path, scripts={0: "import time; print('still loading', flush=True); time.sleep(600)"})
    config = pool_config(startup_timeout_seconds=1.5)
    with (
        InferencePool(config, checkpoints, client=client, launcher=launcher) as pool,
        pytest.raises(EngineStartFailed, match="did not answer within") as caught,
    ):
        pool.load("run-1")
    assert "still loading" in caught.value.found


def test_port_in_use_is_said_and_nothing_is_left(
    tmp_path: Path, client: LocalClient, checkpoints: list[Servable]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = pool_config(proxy_port=taken.getsockname()[1])
        pool = InferencePool(config, checkpoints, client=client, launcher=FakeLauncher(tmp_path))
        with pytest.raises(ProxyFailed, match="0 for a free port"), pool:
            pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])  # SIGTERM ends it as SIGKILL does
def test_signal_to_the_owner_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    write_checkpoint(tmp_path / "step-1", seed=1)
    owner = tmp_path / "owner.py"
    owner.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            from pathlib import Path
            from fakes.launcher import FakeLauncher
            from pools.config import InferencePoolConfig
            from fakes.pools import InferencePool
            from pools.engine.launch import Servable
            folder = Path({str(tmp_path)!r})
            checkpoint = Servable.from_uri("run-1", str(folder / "step-1"))
            config = InferencePoolConfig.model_validate({{"model": {{"name": "run"}}}})
            with InferencePool(config, [checkpoint], launcher=FakeLauncher(folder)) as pool:
                pool.load("run-1")
                (folder / "proxy.pid").write_text(str(pool.proxy_pid))
                time.sleep(120)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(owner)])
    try:
        proxy = int(eventually(lambda: (tmp_path / "proxy.pid").is_file() and (tmp_path / "proxy.pid").read_text()))
        pids = [proxy, *engine_pids(tmp_path)]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        process.send_signal(number)
        process.wait(timeout=20)
        eventually(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        process.kill()
        process.wait()
