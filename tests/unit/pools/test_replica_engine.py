"""A replica's engine: number of restarts after deaths, and files that equal the digested files throughout."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.engine import weights_label
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.processes import free_port, running_program
from pools.config import InferencePoolConfig
from pools.engine.engine_client import EngineClient
from pools.engine.launch import HostPart, Launch, Servable, ServedCheckpoint
from pools.jobs import Restarts
from pools.replica.gang import Gang
from pools.replica.loading import (
    DIED,
    WITHOUT_PREFIX_CACHE,
    Deaths,
    Loading,
    excerpt,
    explained,
    first_error,
    start_failure,
    whole_log,
)
from pools.replica.replica import ReplicaEngine
from pools.weights.staging import Staging
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.errors import AssayError, CheckpointChanged, EngineDied, EngineStartFailed, ModelUnusable, WeightsNotRead
from resources.jobs.jobs import Command, JobRequest


def test_restarts_are_those_of_ten_minutes() -> None:
    times = iter((0.0, 300.0, 601.0, 700.0))
    restarts = Restarts(2, clock=lambda: next(times))
    allowed = [restarts.allow() for _ in range(4)]
    assert allowed == [True, True, True, False]
    assert restarts.last == "for the 3. time in ten minutes"


@pytest.mark.parametrize("most", [0, 1])
def test_death_that_the_load_of_another_checkpoint_overtakes_counts(tmp_path: Path, most: int) -> None:
    first, second = (
        ServedCheckpoint.from_folder(servable.name, Path(servable.uri), servable.digests)
        for seed in (1, 2)
        for servable in [Servable.from_uri(f"run-{seed}", str(write_checkpoint(tmp_path / f"{seed}", seed=seed)))]
    )
    client, launcher = LocalClient(tmp_path / "jobs"), FakeLauncher(tmp_path)
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, "max_replica_restarts": most})
    replica = engine_of(config, launcher, client, drain=lambda: None)
    try:
        replica.load(first, Loading())
        [engine] = tmp_path.glob("engine-*.json")
        os.kill(json.loads(engine.read_text())["pid"], signal.SIGKILL)
        eventually(lambda: replica.engine_ended)
        loading = Loading()
        if most == 0:
            with pytest.raises(EngineDied, match=r"it died, for the 1\. time in ten minutes"):
                replica.load(second, loading)
            assert replica.state == "dead"
            return
        replica.load(second, loading)
        assert (replica.state, loading.how, loading.reason) == ("ready", "restart", "the engine died")
        assert replica.deaths.revived == 1
    finally:
        replica.stop()
        client.shutdown()


def engine_of(
    config: InferencePoolConfig, launcher: FakeLauncher, client: LocalClient, *, drain: Callable[[], None]
) -> ReplicaEngine:
    gang = Gang("replica-0", config, host="127.0.0.1", token="join", start=0)
    options: dict[str, Any] = {"launcher": launcher, "client": client, "on_change": lambda: None}
    return ReplicaEngine("replica-0", config, drain=drain, gang=gang, **options)


VLLM_LOG = """(APIServer pid=7) INFO 11-23 12:00:00 [api_server.py:9] ready
(EngineCore pid=8) ERROR 11-23 12:00:01 [core.py:1] EngineCore encountered a fatal error.
(EngineCore pid=8) ERROR 11-23 12:00:01 [core.py:1] Traceback (most recent call last):
{marked}CPU Generator does not use offset
(APIServer pid=7) ERROR 11-23 12:00:01 [async_llm.py:2] vllm.v1.engine.exceptions.EngineDeadError: EngineCore ended
"""


@pytest.mark.parametrize(
    "marked",
    ["(EngineCore pid=8) ERROR 11-23 12:00:01 [core.py:1] RuntimeError: ", "(EngineCore pid=8) RuntimeError: "],
)
def test_first_error_of_an_engines_log_is_the_root_cause(marked: str) -> None:
    log = VLLM_LOG.format(marked=marked)
    assert first_error(log) == "RuntimeError: CPU Generator does not use offset"
    assert first_error("torch.OutOfMemoryError: " + "x" * 1000) == "torch.OutOfMemoryError: " + "x" * 276
    assert explained(log).startswith("First error in its log: RuntimeError: CPU")
    assert first_error("all is well") is None


def test_first_error_is_looked_for_from_the_beginning() -> None:
    log = VLLM_LOG.format(marked="[core.py:1] TypeError: ") + "INFO later\n" * 600
    assert first_error("ValueError: of a request, before\n" + log) == "TypeError: CPU Generator does not use offset"
    assert first_error(excerpt(log)) == "TypeError: CPU Generator does not use offset"


READING = "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]\n"
LOADING = 'Traceback (most recent call last):\n  File "a.py", line 2, in load_weights\n    assert a.shape == b.shape\n'


@pytest.mark.parametrize(
    ("log", "kind", "problem", "remedy"),
    [
        (
            f"{LOADING}ValueError: There is no module or parameter named 'x'",
            ModelUnusable,
            "ValueError: There",
            "export",
        ),
        (f"{LOADING}AssertionError", ModelUnusable, "AssertionError: assert a.shape == b.shape", "export it again"),
        (f"{LOADING}RuntimeError: start (0) + length (3) exceeds", ModelUnusable, "RuntimeError: start", "export"),
        (f"{LOADING}torch.OutOfMemoryError: no", EngineStartFailed, "First error in its log: torch.Out", "by hand"),
        (f"{LOADING}RuntimeError: can't allocate memory", EngineStartFailed, "First error in its log: Run", "by hand"),
        (f"{READING}{LOADING}safetensors_rust.SafetensorError: F99", WeightsNotRead, "SafetensorError", "by hand"),
        (f"{READING}{LOADING}torch.OutOfMemoryError: no", EngineStartFailed, "torch.Out", "by hand"),
        (f"{READING}Loading weights took 2 s\nTypeError: x", EngineStartFailed, "TypeError: x", "by hand"),
        (READING, EngineStartFailed, "Loading safetensors", "by hand"),
        ("ValueError: the estimated maximum model length is 9.", EngineStartFailed, "ValueError", "max_model_len=8,"),
        ("error: unrecognized arguments: --x", EngineStartFailed, "it ended. Last lines", "by hand:\nvllm serve"),
    ],
)
def test_failed_start_is_the_models_where_the_loader_refuses(
    log: str, kind: type[AssayError], problem: str, remedy: str
) -> None:
    failure = start_failure(log, model="run-1", ended="it ended", by_hand="vllm serve")
    assert type(failure) is kind
    assert problem in failure.found
    assert remedy in failure.remedy


@pytest.mark.parametrize(
    ("script", "says_memory"),
    [("import os; os.kill(os.getpid(), 9)", True), ("raise SystemExit('EngineDeadError: gone')", True), ("", False)],
)
def test_more_memory_is_asked_for_only_after_a_kill(tmp_path: Path, script: str, says_memory: bool) -> None:
    client = LocalClient(tmp_path / "jobs")
    request = JobRequest("engine", Command(sys.executable, ("-c", script)), resources=ResourceConfig(), replicas=1)
    job = client.submit(replace(request, max_retries_preemption=0))
    job.wait(raise_on_failure=False)
    failure = Deaths("replica-0", 0).count(DIED, log=whole_log(job), job=job, held="digest")
    assert failure is not None
    assert ("give the replicas more with --ram" in failure.found) == says_memory
    client.shutdown()


def test_death_of_an_engine_reports_its_first_error_and_no_key(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "staged", max_bytes=10**6)
    with single_replica(tmp_path, FakeLauncher(tmp_path), lambda: None) as replica:
        replica.load(staged(write_checkpoint(tmp_path / "run-1", seed=1), staging), Loading())
        headers = {"Authorization": f"Bearer {replica.key}"}
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{replica.url}/fake/die", json={"error": f"RuntimeError: no, {replica.key}"}, headers=headers)
        eventually(lambda: replica.engine_ended)
        replica.revive("died", still=lambda: True)
        assert (replica.state, replica.deaths.last) == ("ready", "RuntimeError: no, ***")


def staged(folder: Path, staging: Staging) -> ServedCheckpoint:
    servable = Servable.from_uri(folder.name, str(folder))
    held = staging.stage(servable.uri, servable.digests)
    verify = lambda: held.verify()  # noqa: E731 - it keeps the hold, as an agent does
    return ServedCheckpoint.from_folder(servable.name, held.path, servable.digests, verify=verify)


@contextmanager
def single_replica(
    tmp_path: Path, launcher: FakeLauncher, drain: Callable[[], None], **fields: Any
) -> Iterator[ReplicaEngine]:
    client = LocalClient(tmp_path / "jobs")
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, **fields})
    replica = engine_of(config, launcher, client, drain=drain)
    try:
        yield replica
    finally:
        replica.stop()
        client.shutdown()


def flip_last_byte(weights: Path) -> None:
    """Changes the last byte, but neither size nor time of writing."""
    before, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_files_that_change_while_an_engine_starts_are_not_served(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run-1", seed=1)

    class Changing(FakeLauncher):
        # Changes the files between their check and the engine's start.

        def launch(self, checkpoint: ServedCheckpoint, *, port: int, part: HostPart | None = None) -> Launch:
            flip_last_byte(folder / "model.safetensors")
            return super().launch(checkpoint, port=port, part=part)

    staging = Staging(tmp_path / "staged", max_bytes=10**6)
    with single_replica(tmp_path, Changing(tmp_path), lambda: None) as replica:
        with pytest.raises(CheckpointChanged, match="other contents: weights"):
            replica.load(staged(folder, staging), Loading())
        assert replica.state == "dead"


def test_files_that_change_while_requests_are_drained_leave_the_former_checkpoint(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / f"run-{seed}", seed=seed) for seed in (1, 2))
    staging, launcher = Staging(tmp_path / "staged", max_bytes=10**6), FakeLauncher(tmp_path)
    with single_replica(tmp_path, launcher, lambda: flip_last_byte(second / "model.safetensors")) as replica:
        former = staged(first, staging)
        replica.load(former, Loading())
        with pytest.raises(CheckpointChanged):
            replica.load(staged(second, staging), Loading())
        assert replica.standing == ("ready", former)
        assert launcher.launches == ["run-1"]


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        ({"unwritten": {"lm_head.weight": "8 of 16"}}, r"nothing wrote: lm_head\.weight \(8 of 16 numbers\)"),
        ({"composes": True}, r"ids \[195, 132, .*gives \[65, 204, .*in 'A\u0308pfel .*PreTrainedTokenizerFast"),
    ],
)
def test_engine_that_misreads_a_checkpoint_condemns_it(tmp_path: Path, faults: dict[str, Any], problem: str) -> None:
    staging = Staging(tmp_path / "staged", max_bytes=10**6)
    with single_replica(tmp_path, FakeLauncher(tmp_path, faults=faults), lambda: None) as replica:
        with pytest.raises(ModelUnusable, match=re.compile(problem, re.DOTALL)):
            replica.load(staged(write_checkpoint(tmp_path / "run-1", seed=1), staging), Loading())
        assert replica.state == "dead"


@pytest.mark.parametrize(
    ("said", "model", "again"),
    [
        ("Padding mamba page size by 62.03%", {}, True),
        ("out of memory", {}, False),
        ("Padding mamba page size by 62.03%", {"engine_kwargs": {"enable_prefix_caching": True}}, False),
    ],
)
def test_engine_of_a_model_with_a_state_that_ends_is_started_without_prefix_cache(
    tmp_path: Path, said: str, model: dict[str, Any], again: bool
) -> None:
    staging = Staging(tmp_path / "staged", max_bytes=10**6)
    launcher = FakeLauncher(tmp_path, scripts={0: f"print({said!r}); raise SystemExit(1)"})
    with single_replica(tmp_path, launcher, lambda: None, model={"name": "run", **model}) as replica:
        loading = Loading()
        with nullcontext() if again else pytest.raises(EngineStartFailed, match="ended before its model answered"):
            replica.load(staged(write_checkpoint(tmp_path / "run-1", seed=1), staging), loading)
        assert (replica.state, loading.reason) == (("ready", WITHOUT_PREFIX_CACHE) if again else ("dead", None))
        assert len(launcher.launches) == 1 + again


def test_engine_with_an_occupied_port_starts_at_another_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, launcher = Staging(tmp_path / "staged", max_bytes=10**6), FakeLauncher(tmp_path)
    checkpoint, other = (staged(write_checkpoint(tmp_path / f"run-{seed}", seed=seed), staging) for seed in (1, 2))
    ports = iter([taken := free_port()])
    monkeypatch.setattr("pools.replica.replica.free_port", lambda: next(ports, None) or free_port())
    stranger = launcher.launch(other, port=taken)
    with running_program(*stranger.arguments), single_replica(tmp_path, launcher, lambda: None) as replica:
        eventually(lambda: EngineClient(f"http://127.0.0.1:{taken}").healthy())
        replica.load(checkpoint, Loading())
        label = httpx.get(f"{replica.url}/fake/stats").json()["label"]
        assert (replica.state, label) == ("ready", weights_label(checkpoint.folder))
        assert launcher.launches == ["run-2", "run-1", "run-1"]


def test_reload_that_answers_otherwise_than_before_is_a_restart(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / f"run-{seed}", seed=seed) for seed in (1, 2))
    staging, launcher = (
        Staging(tmp_path / "staged", max_bytes=10**6),
        FakeLauncher(tmp_path, identity="answers otherwise"),
    )
    with single_replica(tmp_path, launcher, lambda: None, reload_audit_share=0) as replica:

        def load(folder: Path) -> Loading:
            loading = Loading()
            replica.load(staged(folder, staging), loading)
            label = httpx.get(f"{replica.url}/fake/stats").json()["label"]
            assert (replica.state, label) == ("ready", weights_label(folder))
            return loading

        assert [load(folder).how for folder in (first, second, first, second)] == [
            *("cold start", "restart", "reload", "reload")
        ]
        httpx.put(f"{replica.url}/fake/faults", json={"partial_reload": True}).raise_for_status()
        again = load(first)
        assert again.how == "restart" and re.search(
            "differed by up to .* nats from those of the same files", again.reason or ""
        )
