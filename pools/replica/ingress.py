"""The ingress to an engine, for a proxy on another machine.

An engine listens on loopback, since whoever reaches it can make it load anything. Where the proxy runs elsewhere, the
replica's agent listens on the machine's address instead: a connection whose first line is not the ingress's key is
closed, and of every other one the bytes go to the engine and back as they are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable

_LONGEST_KEY_LINE = 256
_KEY_SECONDS = 10.0
_CHUNK_BYTES = 2**18
_log = logging.getLogger("assay.agent")


class Ingress:
    """A relay in a thread of its own. Close it at the end.

    Args:
        host: address of this machine to listen on; a free port is taken.
        engine_port: the port on loopback where the engine listens now, None while there is none.
    """

    def __init__(self, host: str, engine_port: Callable[[], int | None]) -> None:
        self.key = secrets.token_urlsafe(24)
        self._host = host
        self._engine_port = engine_port
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._relay, host, 0, limit=_CHUNK_BYTES))
        self._port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-ingress", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the engine for the proxy, without a path."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    def close(self) -> None:
        """Ends every connection; safe to call twice."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(_KEY_SECONDS):
                line = await reader.readuntil(b"\n")
                if len(line) > _LONGEST_KEY_LINE or not secrets.compare_digest(line.strip(), self.key.encode()):
                    _log.warning("a connection without the ingress's key was closed")
                    return
                port = self._engine_port()
                if port is None:
                    return
                engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK_BYTES)
            await _both_ways((reader, engine_writer), (engine_reader, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # a TimeoutError is an OSError
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def _both_ways(*directions: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copies until one side ends; then both do, so that an engine stops working for a client that has left."""
    copies = [asyncio.ensure_future(_copy(reader, writer)) for reader, writer in directions]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        for _, writer in directions:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_CHUNK_BYTES):
        writer.write(piece)
        await writer.drain()
