"""The pool's proxy process: a single OpenAI-compatible address in front of every replica.

Started as `python -m pools.proxy SETTINGS`, with `ProxySettings` in JSON and its keys in the environment. Once it
listens it announces its address; the pool then sends it the list of replicas (`PUT /admin/state`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import uvloop

from pools.journal.store import Journal
from pools.proxy.client import ProxyAddress, ProxySettings
from pools.proxy.connections.reading import Bounds
from pools.proxy.connections.room import BodyRoom
from pools.proxy.connections.upstream import Upstream
from pools.proxy.connections.wire import Listener, standing_socket
from pools.proxy.counters import Tally
from pools.proxy.forwarding import Forwarder
from pools.proxy.routing import RoutingTable
from pools.proxy.server import ProxyServer
from pools.proxy.users import Cells
from pools.settings import ProxyKeys, proxy_keys
from resources.errors import ProxyFailed
from resources.jobs.addresses import own_address
from resources.jobs.announcements import announce
from resources.settings import settings as assay_settings

SHUTDOWN_GRACE_SECONDS = 0.5
_BORROWING_SECONDS = 30.0
_GARBAGE_THRESHOLD = 20_000  # a collection walks every open connection: at 700 that took 8 % of the time

_log = logging.getLogger("assay.proxy")


async def serve(settings: ProxySettings, keys: ProxyKeys) -> None:
    """Serves until SIGTERM or SIGINT, then refuses waiting requests and ends."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as ending:
        shortest = min(settings.engine_timeout_seconds, settings.probe_timeout_seconds)
        upstream = Upstream(
            connect_timeout_seconds=settings.connect_timeout_seconds, look_seconds=min(1.0, shortest / 10)
        )
        ending.callback(upstream.close)
        journal = None
        if (flags := settings.journal) is not None:
            path = flags.path or assay_settings().journal_path
            journal = Journal(path, max_bytes=flags.max_bytes, keep_prompts=flags.prompts, warn=_log.warning)
        table, tally, cells = RoutingTable(), Tally(), Cells(journal)
        forwarder = Forwarder(upstream, table=table, tally=tally, limits=settings, journal=journal)
        proxy = ProxyServer(forwarder, table=table, tally=tally, cells=cells, settings=settings, keys=keys)
        ending.push_async_callback(proxy.close)
        room = BodyRoom(max(settings.max_buffered_bytes, settings.max_body_bytes))
        bounds = Bounds(settings.max_body_bytes, head_timeout_seconds=settings.head_timeout_seconds, room=room)
        listener = Listener(proxy, bounds=bounds)
        host = own_address() if settings.host == "auto" else settings.host
        ending.push_async_callback(listener.close, SHUTDOWN_GRACE_SECONDS)
        try:
            listening = _borrowed(settings.lender) if settings.lender else standing_socket(host, settings.port)
        except OSError as error:
            raise ProxyFailed(
                expected=f"to listen on {host}:{settings.port}",
                found=str(error),
                remedy="set the proxy's port to 0 for a free port, or its host to an address of this machine",
            ) from error
        host, port, *_ = listening.getsockname()
        await listener.start(listening)
        announce(ProxyAddress(host=host, port=port, pid=os.getpid()).model_dump_json())
        gc.freeze()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        await stop.wait()
        proxy.refuse_all("The proxy is shutting down.")


def _borrowed(path: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_BORROWING_SECONDS)
        asking.connect(str(path))
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise ConnectionError("the lender left")
    return socket.socket(fileno=descriptors[0])


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS rejects "unlimited"
        _log.warning("at most %d files and connections can be open at once", soft)


def main(settings: str) -> int:
    """Runs the proxy with `ProxySettings` in JSON; returns the exit code of the process."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _allow_open_files()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(ProxySettings.model_validate_json(settings), proxy_keys()))
    except ProxyFailed as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
