"""A judge with scripted verdicts, over real HTTP."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Verdict = Callable[[int, str], str | int | dict[str, Any]]
"""Maps the number of the request (0 is the probe) and the prompt to a text, a whole message, an error with its text, or
a status to fail with.
"""


@dataclass
class FakeJudge:
    """An asynchronous context manager. `prompts` are the received prompts, `keys` their API keys."""

    says: Verdict
    prompts: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    bodies: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=1000))
    url: str = ""
    _server: TestServer | None = None

    async def __aenter__(self) -> FakeJudge:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self._answer)])
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = f"http://127.0.0.1:{self._server.port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        fields = json.loads(await request.read())
        self.bodies.append(fields)
        prompt = fields["messages"][-1]["content"]
        reply = self.says(len(self.prompts), prompt)
        self.prompts.append(prompt)
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "a fault was asked for"}}, status=reply)
        if isinstance(reply, dict) and "error" in reply:
            return web.json_response(reply, status=400)
        message = reply if isinstance(reply, dict) else {"content": reply}
        choice = {
            "index": 0,
            "message": {"role": "assistant", **message},
            "logprobs": None,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "j", "object": "chat.completion", "created": 0, "model": "judge", "usage": usage}
        return web.json_response({**answer, "choices": [choice]})
