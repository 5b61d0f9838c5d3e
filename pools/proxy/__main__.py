"""The pool's proxy, a process of its own: one OpenAI-compatible address in front of every replica.

Started as `python -m pools.proxy --address-file PATH …`, with its keys in the environment. It writes its address to
that file once it listens; the pool then tells it what replicas there are (`PUT /admin/state`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from pydantic import ValidationError

from pools.proxy.server import Answerer, ProxyServer
from pools.proxy.state import ProxyLimits
from resources.errors import ProxyFailed
from resources.settings import ProxyKeys, proxy_keys

ENGINE_KEEPALIVE_SECONDS = 4  # vLLM's server closes idle connections after 5
SHUTDOWN_GRACE_SECONDS = 0.5
_BACKLOG = 4096

_log = logging.getLogger("assay.proxy")
_silent = logging.getLogger("assay.proxy.http")
_silent.setLevel(logging.CRITICAL + 1)  # aiohttp quotes the bytes of requests it cannot parse, and so keys


async def serve(
    host: str, port: int, *, limits: ProxyLimits, keys: ProxyKeys, announce: Callable[[str, int], None]
) -> None:
    """Serves until SIGTERM or SIGINT, then answers what it can at once and ends.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        limits: bounds and time-outs.
        keys: of clients and of the pool.
        announce: called with the bound address once connections are accepted.

    Raises:
        ProxyFailed: the address cannot be listened on.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEPALIVE_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_seconds),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    ) as session:
        proxy = ProxyServer(session, limits=limits, keys=keys)
        runner = web.ServerRunner(_http_server(proxy.answer, limits), shutdown_timeout=SHUTDOWN_GRACE_SECONDS)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
            except OSError as error:
                raise ProxyFailed(
                    expected=f"to listen on {host}:{port}",
                    found=str(error),
                    remedy="set the proxy's port to 0 for a free one, or its host to an address of this machine",
                ) from error
            announce(*runner.addresses[0][:2])
            await stop.wait()
            proxy.refuse_all("The proxy is shutting down.")
        finally:
            await runner.cleanup()
            await proxy.close()


def _http_server(answer: Answerer, limits: ProxyLimits) -> web.Server:
    loop = asyncio.get_running_loop()

    def make_request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        size = limits.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

    # Cancellation is what ends an engine's work when the client leaves.
    return web.Server(
        answer,
        request_factory=make_request,
        handler_cancellation=True,
        access_log=None,
        logger=_silent,
        auto_decompress=False,
    )


def _announce_in(path: Path) -> Callable[[str, int], None]:
    def announce(host: str, port: int) -> None:
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        unfinished.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}), encoding="utf-8")
        unfinished.replace(path)

    return announce


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS takes no unlimited number
        _log.warning("at most %d files and connections can be open at once", soft)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the proxy; returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m pools.proxy", description="The proxy of an Assay pool.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--address-file", type=Path, required=True, help="where to write the bound address")
    for name, limit in ProxyLimits.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=limit.default, help=limit.description)
    given = vars(parser.parse_args(arguments))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _allow_open_files()
    try:
        limits = ProxyLimits(**{name: given[name] for name in ProxyLimits.model_fields})
        announce = _announce_in(given["address_file"])
        asyncio.run(serve(given["host"], given["port"], limits=limits, keys=proxy_keys(), announce=announce))
    except ValidationError as error:
        parser.error(str(error))
    except ProxyFailed as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
