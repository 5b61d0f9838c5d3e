"""A door before vLLM's server: only the engine's key opens it, and answers carry the model name that was asked for.

vLLM is told of it with `--middleware engine_door.EngineDoor`. Executed by vLLM's environment.

vLLM's own `--api-key` guards what begins with /v1, /v2, /inference and /cohere. It leaves open what changes an engine:
/collective_rpc, /pause, /sleep, /reset_prefix_cache, /update_weights; so every path is guarded here.
"""

from __future__ import annotations

import contextvars
import hmac
import importlib
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "ASSAY_ENGINE_KEY"
ASKED: contextvars.ContextVar[str | None] = contextvars.ContextVar("asked", default=None)
"""Model name in the request that is being answered."""

Call = Callable[..., Awaitable[None]]


class EngineDoor:
    """Answers 401 to whatever does not carry the key; to everything where there is none.

    Args:
        app: answers the others.
    """

    def __init__(self, app: Call) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ.get(KEY_VARIABLE, '')}".encode()
        answer_with_the_name_asked_for()

    async def __call__(self, scope: dict[str, Any], receive: Call, send: Call) -> None:
        """Passes a call on, or refuses it."""
        if scope["type"] == "lifespan" or self._is_open_to(dict(scope["headers"])):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_open_to(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        return self._expected != b"Bearer " and hmac.compare_digest(given, self._expected)


def answer_with_the_name_asked_for() -> None:
    """Makes `model` in answers the name in the request: one engine answers for checkpoints of many names.

    vLLM writes the first of its served names, whichever was asked. It checks the name of each request, and then asks
    for the one to answer with, in one task.
    """
    serving: Any = importlib.import_module("vllm.entrypoints.serve.engine.serving").BaseServing
    models: Any = importlib.import_module("vllm.entrypoints.openai.models.serving").OpenAIServingModels
    check: Callable[..., Awaitable[Any]] = serving._check_model
    first_name: Callable[..., str] = models.model_name

    async def check_model(self: Any, request: Any) -> Any:
        ASKED.set(request.model)
        return await check(self, request)

    def model_name(self: Any, lora_request: Any = None) -> str:
        return ASKED.get() or first_name(self, lora_request)

    serving._check_model, models.model_name = check_model, model_name
