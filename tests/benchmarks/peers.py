"""Targets of the scripts' load: the stub engine, Assay's proxy in front of it, and the compared router."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # imported by a script, which has only this folder on its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from load import LoadResult
from side_by_side import background, environment_of_a_user, give_up, say, wait_until
from stub_engine import MODEL

from fakes.engine import FakeEngine
from fakes.processes import free_port
from fakes.proxy import CLIENT_KEY as CLIENT_KEY
from fakes.proxy import RunningProxy, running_proxy, state_of
from resources.environments.environments import EnvironmentSpec, ensure_environment

_HERE = Path(__file__).resolve().parent
VLLM_ROUTER = EnvironmentSpec(
    name="vllm-router",
    requirements=_HERE / "requirements" / "vllm-router.txt",
    smoke_import="vllm_router.launch_router",
)


@dataclass(frozen=True)
class Stub:
    ports: tuple[int, ...]
    """Ports of its replicas."""

    def counts(self) -> list[int]:
        return self._page("counts")

    def digests(self) -> list[str]:
        """Returns the SHA-256 of every body, in the order of arrival; needs a stub that checks."""
        return self._page("digests")

    def _page(self, name: str) -> list[Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0]}/stub/{name}", timeout=30) as response:
            return json.loads(response.read())


@contextmanager
def stub_engine(
    folder: Path, *, delay_ms: float = 0, replicas: int = 1, capacity: int | None = None, checks: bool = False
) -> Iterator[Stub]:
    """Runs a process with stub replicas.

    Args:
        delay_ms: time per answer.
        capacity: requests that a replica works on at a time; any number when None.
        checks: keeps a digest of every body.
    """
    address_file, log = folder / "stub.json", folder / "stub.log"
    address_file.unlink(missing_ok=True)
    command = [sys.executable, _HERE / "stub_engine.py", "--address-file", address_file]
    command += ["--replicas", str(replicas), "--delay-ms", str(delay_ms)]
    command += ["--capacity", str(capacity)] if capacity is not None else []
    command += ["--check"] if checks else []
    with background(command, log=log, env=environment_of_a_user({})) as process:
        wait_until(address_file.exists, process=process, log=log)
        yield Stub(ports=tuple(json.loads(address_file.read_text())["ports"]))


@contextmanager
def our_proxy(folder: Path, *, keeps_journal: bool = True) -> Iterator[RunningProxy]:
    """Runs the proxy as a pool does, with its key and an empty journal, and without replicas yet."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "journal.sqlite" if keeps_journal else None
    with running_proxy(folder, journal=journal) as proxy:
        yield proxy


def tell(proxy: RunningProxy, ports: Sequence[int], *, model: str = MODEL) -> None:
    proxy.tell(state_of(model, *(FakeEngine(port=port) for port in ports)))


@contextmanager
def vllm_router(folder: Path, ports: Sequence[int]) -> Iterator[int]:
    """Runs vllm-router in front of the replicas on these ports, with the cheapest of its policies; yields its port.

    The first use builds it from the registry into an environment of its own.
    """
    environment = ensure_environment(VLLM_ROUTER, on_progress=say)
    port, metrics_port = free_port(), free_port()
    command = [environment.directory / "bin" / "vllm-router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(f"http://127.0.0.1:{replica}" for replica in ports)]
    command += ["--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--worker-startup-check-interval", "1"]
    log = folder / "vllm-router.log"
    with background(command, log=log, env=environment_of_a_user({})) as process:
        wait_until(lambda: is_healthy(port), process=process, log=log)
        yield port


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def add_journal_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-journal", action="store_true", help="let our proxy keep no journal of what was answered")


def check_all_answered(side: str, result: LoadResult) -> None:
    """Ends the script unless all requests got 200: errors would invalidate the rate."""
    if result.errors or not result.requests:
        give_up(f"{side} answered {result.requests} requests and not all that it got: {result.errors}")
