"""A user's session with a real proxy that ends meanwhile, and is started again where it was."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from fakes.models import write_checkpoint
from fakes.proxy import RunningProxy, running_proxy, session_of
from pools.engine.launch import Servable
from pools.protocol import RequestCounters

Value = TypeVar("Value")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Servable:
    return Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1")))


def asked_in_vain(proxy: RunningProxy, ask: Callable[[], Value], executor: Executor) -> Future[Value]:
    """Kills the proxy and asks what it cannot answer; returns once that was tried."""
    proxy.process.kill()
    proxy.process.wait()
    with socket.create_server((proxy.address.host, proxy.address.port)) as nobody:
        asked = executor.submit(ask)
        connection, _ = nobody.accept()
        connection.close()
    return asked


def test_session_waits_for_a_proxy_that_is_killed_while_a_cell_is_counted_or_closed(
    tmp_path: Path, checkpoint: Servable
) -> None:
    mirror, journal = tmp_path / "mirror", ("--journal", str(tmp_path / "journal.sqlite"))
    mirror.mkdir()
    (mirror / "segment-000000-abc.jsonl.gz").write_bytes(gzip.compress(b""))
    with ThreadPoolExecutor(1) as threads, running_proxy(tmp_path, *journal) as first:
        port = first.address.port
        with session_of(first, checkpoint) as session:
            opened = session.open("run-1", cell="cell", attempt="first", mirror=str(mirror))
            counted = asked_in_vain(first, lambda: session.cell_counts(opened), threads)
            with running_proxy(tmp_path, *journal, port=port) as second:
                assert counted.result(timeout=60) == RequestCounters()
                closed = asked_in_vain(second, lambda: session.close_cell(opened, finished=True), threads)
                with running_proxy(tmp_path, *journal, port=port):
                    closed.result(timeout=60)
                    assert list(mirror.iterdir()) == [], "the last proxy knew of the cell what it had to drop"
