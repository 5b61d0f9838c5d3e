"""An engine of negligible cost, for measuring proxies in front of it: HTTP/1.1 with keep-alive, as vLLM's.

    python tests/benchmarks/stub_engine.py --address-file PATH --replicas 4 --delay-ms 100 --capacity 4

The process listens on a port per replica and then writes {"pid", "ports"} into PATH. Completions get the same few bytes
each time, after the delay, or with --check the result of `answer_to`. With a capacity, a replica works on so many
requests at a time and the others wait, so that it answers at most capacity / delay requests per second.

`GET /stub/counts` on any port returns the number of completion requests of each replica, and with --check `GET
/stub/digests` lists the SHA-256 of every body, in the order of arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import signal
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
MODEL = "tiny"
_BACKLOG = 4096
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "stub"}]}


def answer_to(path: str, body: bytes) -> bytes:
    """Returns a complete answer: a choice for each prompt, and log-probs for each token; a text is a single token."""
    asked = json.loads(body)
    if path == CHAT:
        tokens = [{"token": "ok", "logprob": -1.0, "bytes": None, "top_logprobs": []}]
        content = {"message": {"role": "assistant", "content": "ok"}}
        return _answer(
            "chat.completion", [{**content, "logprobs": {"content": tokens} if asked.get("logprobs") else None}]
        )
    if path == GENERATE:
        return _tokens(asked["token_ids"], asked["sampling_params"])
    prompt = asked["prompt"]
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    echo, scored = bool(asked.get("echo")), isinstance(asked.get("logprobs"), int)
    made = 0 if echo and asked.get("max_tokens") == 0 else 1
    labels = {f"token_id:{token}": -1.0 for token in asked.get("logprob_token_ids") or ()}
    sizes = [1 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    choices = []
    for prompt, size in zip(prompts, sizes, strict=True):
        values = ([None, *[-1.0] * (size - 1)] if echo else []) + [-1.0] * made
        rows = {name: list(values) for name in ("tokens", "token_logprobs", "top_logprobs")}
        if labels:
            rows["top_logprobs"][-1:] = [labels] * made
        text = (prompt if echo and isinstance(prompt, str) else "") + " ok" * made
        choices.append({"text": text, "logprobs": rows if scored else None})
    return _answer("text_completion", choices, prompt_tokens=sum(sizes))


def _tokens(ids: list[int], sampling: dict[str, Any]) -> bytes:
    # a token, and log-probs for each token of the prompt: nothing is cached
    rows = [None, *({str(token): {"logprob": -1.0, "rank": 2, "decoded_token": "a"}} for token in ids[1:])]
    content = {"content": [{"token_id": 1, "logprob": -1.0, "rank": 1, "top_logprobs": []}]}
    choice = {"index": 0, "token_ids": [1], "finish_reason": "length"}
    answer = {
        **{"request_id": "generate-tokens-0", "model": MODEL, "created": 0, "output_mode": "tokens"},
        "choices": [{**choice, "logprobs": content if isinstance(sampling.get("logprobs"), int) else None}],
        "prompt_logprobs": rows if isinstance(sampling.get("prompt_logprobs"), int) else None,
        "usage": {"prompt_tokens": len(ids), "completion_tokens": 1},
    }
    return json.dumps(answer).encode()


def _answer(kind: str, choices: list[dict[str, Any]], *, prompt_tokens: int = 8) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(choices)}
    numbered = [{"index": number, "finish_reason": "length", **choice} for number, choice in enumerate(choices)]
    answer = {"id": "cmpl-0", "object": kind, "created": 0, "model": MODEL, "choices": numbered, "usage": usage}
    return json.dumps(answer).encode()


_SHORT = b'{"prompt": "a", "token_ids": [1], "sampling_params": {}}'
ANSWERS = {path: answer_to(path, _SHORT) for path in (COMPLETIONS, CHAT, GENERATE)}
"""Body of every answer without --check, by path."""


@dataclass
class Replica:
    """A port: its requests so far, and its requests in progress."""

    delay_seconds: float
    capacity: int | None
    requests: int = 0
    busy: int = 0
    waiting: deque[tuple[Connection, bytes]] = field(default_factory=deque)

    def take(self, connection: Connection, reply: bytes) -> None:
        """Answers immediately, after the delay, or when capacity is free."""
        self.requests += 1
        if not self.delay_seconds:
            connection.answer(reply)
        elif self.capacity is None or self.busy < self.capacity:
            self._work_on(connection, reply)
        else:
            self.waiting.append((connection, reply))

    def _work_on(self, connection: Connection, reply: bytes) -> None:
        self.busy += 1
        asyncio.get_running_loop().call_later(self.delay_seconds, self._finish, connection, reply)

    def _finish(self, connection: Connection, reply: bytes) -> None:
        self.busy -= 1
        connection.answer(reply)
        while self.waiting:
            following, its_reply = self.waiting.popleft()
            if not following.is_gone:  # skips requests after their client left, as an engine that aborts does
                self._work_on(following, its_reply)
                return


class Stub:
    def __init__(self, count: int, *, delay_seconds: float, capacity: int | None) -> None:
        self.replicas = [Replica(delay_seconds, capacity) for _ in range(count)]
        self.digests: list[str] = []
        self._fixed = {b"/health": _response(b"", "text/plain"), b"/v1/models": _response(json.dumps(_MODELS).encode())}
        self.completions = {path.encode(): _response(body) for path, body in ANSWERS.items()}

    def page(self, path: bytes) -> bytes:
        if path == b"/stub/counts":
            return _response(json.dumps([replica.requests for replica in self.replicas]).encode())
        if path == b"/stub/digests":
            return _response(json.dumps(self.digests).encode())
        return self._fixed.get(path) or _response(b'{"detail":"Not Found"}', status="404 Not Found")


class Connection(asyncio.Protocol):
    """A client's connection. The parser looks up callbacks by name: undefined callbacks cost nothing."""

    def __init__(self, stub: Stub, replica: Replica) -> None:
        self._stub = stub
        self._replica = replica
        self._url = b""
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)

    @property
    def is_gone(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_message_complete(self) -> None:
        path, self._url = self._url, b""
        reply = self.reply_to(path)
        if reply is not None:
            self._replica.take(self, reply)
        else:
            self.answer(self._stub.page(path))

    def reply_to(self, path: bytes) -> bytes | None:
        """Returns the reply to a completion request; None for other paths."""
        return self._stub.completions.get(path)

    def answer(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)


class CheckedConnection(Connection):
    """A connection that records the digest of each completion request's body, and answers its content."""

    def __init__(self, stub: Stub, replica: Replica) -> None:
        super().__init__(stub, replica)
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def reply_to(self, path: bytes) -> bytes | None:
        body, self._body = self._body, b""
        if path not in self._stub.completions:
            return None
        self._stub.digests.append(hashlib.sha256(body).hexdigest())
        return _response(answer_to(path.decode(), body))


def _response(body: bytes, content_type: str = "application/json", *, status: str = "200 OK") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ndate: Sun, 01 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n\r\n"
    )
    return head.encode() + body


async def serve(stub: Stub, address_file: Path, *, checks: bool) -> None:
    """Listens on a free port per replica until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    kind = CheckedConnection if checks else Connection
    servers = [
        await loop.create_server(lambda replica=replica: kind(stub, replica), "127.0.0.1", 0, backlog=_BACKLOG)
        for replica in stub.replicas
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    unfinished = address_file.with_name(f"{address_file.name}.part")
    unfinished.write_text(json.dumps({"pid": os.getpid(), "ports": ports}))
    unfinished.replace(address_file)
    gc.freeze()
    gc.disable()
    await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address-file", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--capacity", type=int, help="requests a replica works on at once (default: any number)")
    parser.add_argument("--check", action="store_true", help="keep a digest of every body")
    given = parser.parse_args()
    stub = Stub(given.replicas, delay_seconds=given.delay_ms / 1000, capacity=given.capacity)
    uvloop.run(serve(stub, given.address_file, checks=given.check))


if __name__ == "__main__":
    main()
