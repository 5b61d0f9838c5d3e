"""Invalid requests drawn from a seed: bytes that are hardly HTTP, and invalid bodies."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

_PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff\xfe", b"%", b"/", b"0", b"\r\n\r\n", b"a" * 200),
    *(b"Content-Length: 3\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n"),
    *(
        b"Host: other\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
        b"HTTP/0.9",
        b"HTTP/9.9",
        b"ffffffffffffffff\r\n",
    ),
)
_ODD_VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.0, 1e308, -1e-320, float("nan"), float("inf")),
    *("", " ", "\0", "\ud800", "é" * 50, "a" * 5000, "[DONE]", "data: x\n\n", "Infinity", "../../etc/passwd"),
    *([], {}, [[]], [{}], [None], ["a", 1], [1, "a"], [[1, 2], [3]], [-1], [2**40], {"a": {"b": []}}),
)
_FIELDS = (
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "n",
        "best_of",
        "stop",
        "logprobs",
        "echo",
        "seed",
        "stream",
    ),
    *("stream_options", "top_p", "user", "logit_bias", "response_format", "prompt_logprobs", "", "\0", "é"),
)


def odd_bytes(generator: random.Random, request: bytes) -> bytes:
    """Returns a request with a few of its bytes replaced, left out or doubled, or (1 in 10) random bytes."""
    if generator.random() < 0.1:
        return generator.randbytes(generator.randrange(400))
    changed = request
    for _ in range(generator.randrange(1, 4)):
        at = generator.randrange(len(changed) + 1)
        length = generator.randrange(12)
        piece = generator.choice(_PIECES) if generator.random() < 0.7 else generator.randbytes(generator.randrange(5))
        changed = changed[:at] + piece + changed[at + length :]
    if generator.random() < 0.2:
        changed = changed[: generator.randrange(len(changed) + 1)]
    return changed


def odd_body(generator: random.Random, model: str) -> bytes:
    """Returns a body for a completion that is invalid, or only strange."""
    roll = generator.random()
    if roll < 0.1:
        return generator.randbytes(generator.randrange(300))
    if roll < 0.15:
        return json.dumps(generator.choice(_ODD_VALUES)).encode()
    if roll < 0.2:
        depth = generator.choice((10, 500, 5000))
        return b"[" * depth + b"]" * generator.choice((depth, depth - 1))
    fields: dict[str, Any] = {"model": model, "prompt": "why", "max_tokens": 2, "temperature": 0}
    for _ in range(generator.randrange(1, 4)):
        fields[generator.choice(_FIELDS)] = generator.choice(_ODD_VALUES)
    if generator.random() < 0.2:
        fields.pop(generator.choice(("model", "prompt", "max_tokens")), None)
    text = json.dumps(fields, ensure_ascii=generator.random() < 0.5)
    body = text.encode(errors="surrogatepass")
    if generator.random() < 0.2:
        at = generator.randrange(len(body) + 1)
        body = body[:at] + generator.randbytes(generator.randrange(4)) + body[at + generator.randrange(4) :]
    return body
