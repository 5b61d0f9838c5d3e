"""A user's session with a real proxy that ends meanwhile and is restarted at its address."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from fakes.models import write_checkpoint
from fakes.proxy import FakeReplica, RunningProxy, running_proxy, session_of
from pools.endpoint import Scoring
from pools.engine.launch import Servable
from pools.pool.access import engine_digest
from pools.protocol import Announcement, DesiredState, RequestCounters

Value = TypeVar("Value")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Servable:
    return Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1")))


def asked_in_vain(proxy: RunningProxy, ask: Callable[[], Value], executor: Executor) -> Future[Value]:
    """Kills the proxy and starts a call to it; returns after the first failed connection."""
    proxy.process.kill()
    proxy.process.wait()
    with socket.create_server((proxy.address.host, proxy.address.port)) as listener:
        asked = executor.submit(ask)
        connection, _ = listener.accept()
        connection.close()
    return asked


def test_session_waits_for_a_proxy_that_is_killed_while_a_cell_is_counted_or_closed(
    tmp_path: Path, checkpoint: Servable
) -> None:
    mirror, journal = tmp_path / "mirror", tmp_path / "journal.sqlite"
    mirror.mkdir()
    (mirror / "segment-000000-abc.jsonl.gz").write_bytes(gzip.compress(b""))
    with ThreadPoolExecutor(1) as threads, running_proxy(tmp_path, journal=journal) as first:
        port = first.address.port
        with session_of(first, checkpoint) as session:
            opened = session.open("run-1", cell="cell", attempt="first", mirror=str(mirror))
            counted = asked_in_vain(first, lambda: session.cell_counts(opened), threads)
            with running_proxy(tmp_path, journal=journal, port=port) as second:
                assert counted.result(timeout=60) == RequestCounters()
                closed = asked_in_vain(second, lambda: session.close_cell(opened, finished=True), threads)
                with running_proxy(tmp_path, journal=journal, port=port):
                    closed.result(timeout=60)
                    assert list(mirror.iterdir()) == [], "the last proxy knew of the cell what it had to drop"


def test_scoring_from_caches_is_what_all_replicas_can_do_and_the_smallest_of_them_holds(
    tmp_path: Path, checkpoint: Servable
) -> None:
    way = Scoring(scores_from_cache=True, kv_cache_tokens=2048, architecture="a", dtype="float32")
    with running_proxy(tmp_path) as proxy, session_of(proxy, checkpoint) as session:
        orders: dict[str, str | None] = {"a": checkpoint.name, "b": checkpoint.name}
        proxy.client.set_state(DesiredState(models={checkpoint.name: checkpoint.served}, orders=orders))
        for name, scoring in (("a", way), ("b", way.model_copy(update={"kv_cache_tokens": 1024}))):
            digest = checkpoint.digests.checkpoint
            ready = Announcement(
                instance=f"{name}2", start=1, url="http://127.0.0.1:9", state="ready", digest=digest, scoring=scoring
            )
            proxy.announce(FakeReplica(name, ready))
        running_scoring = session.open("run-1", cell="cell", attempt="first").running.scoring
        engine = engine_digest(session.access.config, "b")
        assert running_scoring == way.model_copy(update={"kv_cache_tokens": 1024, "engine": engine})
    with running_proxy(tmp_path) as proxy, session_of(proxy, checkpoint) as session:
        assert not session.open("run-1", cell="cell", attempt="first").running.scoring.scores_from_cache
