"""Middleware of vLLM's server: requires the engine's key, and puts the requested model name into answers.

Installed with `--middleware engine_door.EngineDoor`. Executed by vLLM's environment.

vLLM's own `--api-key` guards the paths that begin with /v1, /v2, /inference and /cohere. It leaves calls open that
change an engine: /collective_rpc, /pause, /sleep, /reset_prefix_cache, /update_weights; so every path is guarded here.
"""

from __future__ import annotations

import contextvars
import hmac
import importlib
import os
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

KEY_VARIABLE = "ASSAY_ENGINE_KEY"
ASKED: contextvars.ContextVar[str | None] = contextvars.ContextVar("asked", default=None)
"""Model name in the request that is being answered."""

Call = Callable[..., Awaitable[None]]


class EngineDoor:
    """Answers 401 to requests without the key; to every request if no key is set."""

    def __init__(self, app: Call) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ.get(KEY_VARIABLE, '')}".encode()
        answer_with_the_name_asked_for()

    async def __call__(self, scope: dict[str, Any], receive: Call, send: Call) -> None:
        if scope["type"] == "lifespan" or self._is_open_to(dict(scope["headers"])):
            await (tell_reading if scope.get("path") == "/assay_read" else self._app)(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_open_to(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        return self._expected != b"Bearer " and hmac.compare_digest(given, self._expected)


async def tell_reading(scope: dict[str, Any], receive: Call, send: Call) -> None:
    """Answers with the reading of a `text` by the tokenizer.json of a `folder`; empty if the folder has none."""
    asked = await importlib.import_module("starlette.requests").Request(scope, receive).json()
    file = Path(asked["folder"]) / "tokenizer.json"
    answer = reading(file.read_bytes(), asked["text"]) if file.is_file() else {}
    await importlib.import_module("starlette.responses").JSONResponse(answer)(scope, receive, send)


@lru_cache(maxsize=1)
def reading(content: bytes, text: str) -> dict[str, Any]:
    """Returns the ids of a text without and with special tokens, and of the former the decoded text and offsets."""
    tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain, special = (tokenizer.encode(text, add_special_tokens=special) for special in (False, True))
    read = {"ids": plain.ids, "special": special.ids, "starts": [start for start, _ in plain.offsets]}
    return {**read, "text": tokenizer.decode(plain.ids, skip_special_tokens=False)}


def answer_with_the_name_asked_for() -> None:
    """Sets `model` in answers to the name in the request, since an engine serves checkpoints of many names.

    vLLM writes the first of its served names. It checks each request's name, and gets the answer's name in the same
    task.
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
