"""The ingress to an engine for a proxy on another machine.

An engine listens on loopback, since access to it allows loading any weights. For a remote proxy the replica's agent
listens on the machine's address instead: it closes connections that do not send the ingress's key as their first line,
and relays the bytes of all others unchanged in both directions. The number of connections that have not sent the key is
bounded, and so is the memory for each.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import socket
import threading
from collections.abc import Callable

_LONGEST_KEY_LINE = 256
_KEY_SECONDS = 10.0
_MOST_STRANGERS = 256  # many: an evaluation's first requests arrive all at once
_SHARE_OF_DESCRIPTORS = 4
_GRACE_SECONDS = 0.5
_ROOM_POLL_SECONDS = 0.005
_BACKLOG = 512
_PAUSE_SECONDS = 1.0
_CHUNK_BYTES = 2**18
_log = logging.getLogger("assay.agent")


class Ingress:
    """A relay in a thread of its own; close it after use. `engine_port` is None while there is no engine."""

    def __init__(self, host: str, engine_port: Callable[[], int | None]) -> None:
        self.key = secrets.token_urlsafe(24)
        self._host = host
        self._engine_port = engine_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_strangers = max(1, min(_MOST_STRANGERS, descriptors // _SHARE_OF_DESCRIPTORS))
        self._strangers: dict[asyncio.Task[None], float] = {}
        self._tasks = {self._loop.create_task(self._accept())}
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-ingress", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._listener.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("connections are not accepted now: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = self._loop.create_task(self._relay(connection))
            self._strangers[task] = self._loop.time()
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            while len(self._strangers) >= self._most_strangers:  # ends the oldest after enough time to send its key
                oldest, since = next(iter(self._strangers.items()))
                if self._loop.time() - since >= _GRACE_SECONDS:
                    del self._strangers[oldest]
                    oldest.cancel()
                else:
                    await asyncio.sleep(_ROOM_POLL_SECONDS)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)

    async def _relay(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            with connection:
                async with asyncio.timeout(_KEY_SECONDS):
                    line, behind = await self._first_line(connection)
                    if not secrets.compare_digest(line.strip(), self.key.encode()):
                        _log.warning("a connection without the ingress's key was closed")
                        return
                    self._strangers.pop(task, None)
                    port = self._engine_port()
                    if port is None:
                        return
                    engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK_BYTES)
                    reader, writer = await asyncio.open_connection(sock=connection.dup(), limit=_CHUNK_BYTES)
            engine_writer.write(behind)
            await _both_ways((reader, engine_writer), (engine_reader, writer))
        except OSError:  # includes TimeoutError
            pass

    async def _first_line(self, connection: socket.socket) -> tuple[bytes, bytes]:
        content = b""
        while b"\n" not in content and len(content) < _LONGEST_KEY_LINE:
            piece = await self._loop.sock_recv(connection, _LONGEST_KEY_LINE - len(content))
            if not piece:
                raise ConnectionError
            content += piece
        line, _, behind = content.partition(b"\n")
        return line, behind


async def _both_ways(*directions: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
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
