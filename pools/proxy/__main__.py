"""The pool's proxy process: a single OpenAI-compatible address in front of every replica.

Started as `python -m pools.proxy …`, with its keys in the environment. Once it listens it announces its address, or
writes it to the file named by `--address-file`; the pool then sends it the list of replicas (`PUT /admin/state`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from pools.journal.store import Journal
from pools.protocol import ProxyLimits
from pools.proxy.cells import Cells
from pools.proxy.client import JournalFlags
from pools.proxy.connections.listener import Listener
from pools.proxy.connections.reading import Bounds
from pools.proxy.connections.room import BodyRoom
from pools.proxy.connections.upstream import Upstream
from pools.proxy.counters import Tally
from pools.proxy.engine_metrics import EngineMetrics
from pools.proxy.forwarding import Forwarder
from pools.proxy.routing import RoutingTable
from pools.proxy.server import ProxyServer
from pools.proxy.standing_socket import borrowed
from resources.errors import ProxyFailed
from resources.jobs.addresses import own_address
from resources.jobs.announcements import announce
from resources.settings import ProxyKeys, pool_description, proxy_keys, settings
from resources.storage.files import replace_text

SHUTDOWN_GRACE_SECONDS = 0.5
_JOURNAL_BYTES = 4 * 2**30
_GARBAGE_THRESHOLD = 20_000  # a collection walks every open connection: at 700 that took 8 % of the time

_log = logging.getLogger("assay.proxy")


async def serve(
    host: str,
    port: int,
    *,
    limits: ProxyLimits,
    keys: ProxyKeys,
    tell: Callable[[str, int], None],
    journal: JournalFlags | None = None,
    lender: Path | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then refuses waiting requests and ends.

    Calls `tell` with the bound address once it accepts connections. `lender` is the Unix socket path at which a
    listening socket is lent; None opens a new socket. `journal` None keeps no journal.

    Raises:
        ProxyFailed: the address cannot be listened on.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as ending:
        shortest = min(limits.engine_timeout_seconds, limits.probe_timeout_seconds)
        upstream = Upstream(
            connect_timeout_seconds=limits.connect_timeout_seconds, look_seconds=min(1.0, shortest / 10)
        )
        ending.callback(upstream.close)
        kept = None
        if journal is not None:
            kept = Journal.open(
                journal.path or settings().journal_path,
                max_bytes=journal.max_bytes,
                keep_prompts=journal.prompts,
                warn=_log.warning,
            )
        table, tally, cells = RoutingTable(), Tally(), Cells(kept)
        forwarder = Forwarder(upstream, table=table, tally=tally, limits=limits, journal=kept)
        proxy = ProxyServer(
            forwarder,
            table=table,
            tally=tally,
            cells=cells,
            engine_metrics=EngineMetrics(upstream, table=table),
            limits=limits,
            keys=keys,
            description=pool_description(),
        )
        ending.push_async_callback(proxy.close)
        room = BodyRoom(max(limits.max_buffered_bytes, limits.max_body_bytes))
        bounds = Bounds(limits.max_body_bytes, head_timeout_seconds=limits.head_timeout_seconds, room=room)
        listener = Listener(proxy, bounds=bounds)
        ending.push_async_callback(listener.close, SHUTDOWN_GRACE_SECONDS)
        try:
            listening = borrowed(lender) if lender is not None else None
            bound = await listener.start(host, port, listening=listening)
        except OSError as error:
            raise ProxyFailed(
                expected=f"to listen on {host}:{port}",
                found=str(error),
                remedy="set the proxy's port to 0 for a free port, or its host to an address of this machine",
            ) from error
        tell(*bound)
        gc.freeze()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        await stop.wait()
        proxy.refuse_all("The proxy is shutting down.")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop has no Windows build
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _telling(address_file: Path | None) -> Callable[[str, int], None]:
    def tell(host: str, port: int) -> None:
        address = json.dumps({"host": host, "port": port, "pid": os.getpid()})
        if address_file is None:
            announce(address)
        else:
            replace_text(address_file, address)

    return tell


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS rejects "unlimited"
        _log.warning("at most %d files and connections can be open at once", soft)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the proxy; returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m pools.proxy", description="The proxy of an Assay pool.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; auto is this machine's")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free port")
    parser.add_argument("--lender", type=Path, help="where a socket is lent that listens at that host and port")
    parser.add_argument("--address-file", type=Path, help="where to write the bound address")
    for name, limit in ProxyLimits.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=limit.default, help=limit.description)
    parser.add_argument("--journal", nargs="?", const="", help="keep a journal, in this file, or in the default file")
    parser.add_argument("--journal-max-bytes", type=int, default=_JOURNAL_BYTES, help="size of the journal at most")
    parser.add_argument("--journal-prompts", action="store_true", help="store the prompts with their answers")
    given = vars(parser.parse_args(arguments))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _allow_open_files()
    try:
        limits = ProxyLimits(**{name: given[name] for name in ProxyLimits.model_fields})
        host = own_address() if given["host"] == "auto" else given["host"]
        tell = _telling(given["address_file"])
        journal = None
        if given["journal"] is not None:
            size, prompts = given["journal_max_bytes"], given["journal_prompts"]
            file = Path(given["journal"]) if given["journal"] else None
            journal = JournalFlags(path=file, max_bytes=size, prompts=prompts)
        where, keys = (host, given["port"]), proxy_keys()
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(serve(*where, limits=limits, keys=keys, tell=tell, journal=journal, lender=given["lender"]))
    except ValidationError as error:
        parser.error(str(error))
    except ProxyFailed as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
