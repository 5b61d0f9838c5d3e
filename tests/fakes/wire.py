"""Raw HTTP for tests of the proxy: an application to serve, and an engine that follows a script."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pools.proxy.connections.messages import Head, Refusal, Reply, Request, Responder


@dataclass
class EchoApplication:
    """Echoes requests. Paths: /refused, /hang, /fail, /half, /stream, /large, /split, any other."""

    refused: list[Head] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    cancelled: int = 0
    written: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def refuse(self, head: Head) -> Reply | None:
        if head.path != "/refused":
            return None
        self.refused.append(head)
        return Refusal(401, "no").reply()

    async def answer(self, request: Request, responder: Responder) -> None:
        self.requests.append(request)
        try:
            await self._answer(request, responder)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: Request, responder: Responder) -> None:
        match request.head.path:
            case "/hang":
                await self.release.wait()
                responder.send(Reply(200, b"hung"))
            case "/fail":
                raise ValueError(request.body)
            case "/half":
                responder.begin(200, [])
                await responder.write(b"half")
                raise ValueError(request.body)
            case "/stream":
                responder.begin(200, [(b"Content-Type", b"text/plain")])
                for piece in (b"one", b"", b"two"):
                    await responder.write(piece)
                responder.end()
            case "/endless":
                responder.begin(200, [])
                while True:
                    await responder.write(b"x" * 65536)
                    self.written += 65536
            case "/split":
                responder.send(Reply(200, b"{}", [(b"Content-Type", request.body)]))
            case "/large":
                request.share.hold(2**25)
                request.share.complete()
                responder.send(Reply(200, b"x" * 2**25))
            case path:
                digest = hashlib.sha256(request.body).hexdigest()[:16]
                responder.send(Reply(200, f"{request.head.method} {path} {len(request.body)} {digest}".encode()))


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted_engine(script: Script) -> AsyncIterator[str]:
    """Runs a server that calls the script for each connection; yields its address."""
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            # A closed writer has no loop to abort on; a closing writer with bytes to send does.
            if not writer.transport.is_closing() or writer.transport.get_write_buffer_size():
                writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return head, await reader.readexactly(length)
