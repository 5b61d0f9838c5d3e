"""A server between an evaluation and an engine that relays all requests and falsifies some answers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

from faults.truth.lies import Answer, lied

_OF_THE_CONNECTION = {"content-length", "content-encoding", "transfer-encoding", "connection", "date", "server"}
_TRUE_AT_FIRST = 4
_SWAPPED_AT = 10


@dataclass(frozen=True)
class Engine:
    url: str
    model: str
    tokenizer: Path
    max_model_len: int
    key: str | None = None
    later_url: str | None = None
    """Another engine that replaces it from the middle of an evaluation on."""


class Liar:
    """An asynchronous context manager that falsifies a share, and at least 1, of the answers that the lie applies to.

    `lies` counts them. The seed draws the share, in the order of the answers. The first answers, before the evaluation
    begins, are true. The engine's `later_url` takes over at the tenth answer.
    """

    def __init__(self, engine: Engine, lie: str | None, *, share: float, seed: int = 6) -> None:
        self._engine = engine
        self._lie = lie
        self._share = share
        self._drawn = random.Random(seed)
        self._headers = {"Authorization": f"Bearer {engine.key}"} if engine.key else {}
        self._earlier: Answer | None = None
        self._chances = self._answers = 0
        self.lies = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Liar:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(600))
        app = web.Application(client_max_size=256 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        given = {name: value for name, value in request.headers.items() if name.lower() == "content-type"}
        is_answer = request.path.endswith(("/completions", "/generate"))
        self._answers += is_answer
        url = self._engine.url
        if self._answers >= _SWAPPED_AT:
            url = self._engine.later_url or url
        async with self._session.request(
            request.method, f"{url}{request.path_qs}", data=await request.read(), headers=given
        ) as answer:
            body = await answer.read()
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_THE_CONNECTION}
            if answer.status == 200 and is_answer:
                body = self._perhaps_changed(body)
            return web.Response(status=answer.status, body=body, headers=headers)

    def _perhaps_changed(self, body: bytes) -> bytes:
        answer: dict[str, Any] = json.loads(body)
        earlier, self._earlier = self._earlier, answer
        changed = lied(self._lie, answer, earlier, self._drawn) if self._lie else None
        if changed is None:
            return body
        self._chances += 1
        if self._chances <= _TRUE_AT_FIRST or (self.lies and self._drawn.random() >= self._share):
            return body
        self.lies += 1
        return json.dumps(changed).encode()
