"""A deterministic OpenAI-compatible engine that speaks real HTTP, in a test's own loop or as a process.

In a test: `async with FakeEngine(models=("m",)) as engine: … engine.url …`, with faults set on `engine.faults`. As a
process: `python tests/fakes/engine.py --port 0 --model m --address-file PATH` writes {"host", "port", "pid", "url"}
into PATH once it listens; `PUT /fake/faults` sets faults and `GET /fake/stats` returns the counts.

A token is a UTF-8 byte, as with a byte-level tokenizer. Log-probabilities and texts are functions of the weights' label
and the text before. It has vLLM's development endpoints, with the same shapes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes.engine_answers import Completion, chat_prompt, completions_of, prompts_of
from fakes.malformed import malformed, malformed_tokens
from fakes.token_answers import GENERATE, PrefixCache, completion_fields, token_answer, token_pieces

COMPLETIONS = ("/v1/completions", "/v1/chat/completions", GENERATE)


@dataclass
class Faults:
    """Faults of completion requests; each occurrence lowers its count until it is 0."""

    delay_seconds: float = 0.0
    """Minimal duration of every answer."""
    status: int = 500
    """Status of the next `status_count` answers."""
    status_count: int = 0
    refuse: int = 0
    """Requests with a connection reset before the answer begins."""
    die_mid_body: int = 0
    """Requests with an answer and connection that end half-way."""
    die_mid_stream: int = 0
    """Streams that end in the middle of a line after `stream_events_before_death` events."""
    stream_events_before_death: int = 2
    malformed: int = 0
    """Answers with status 200, the right length and incomplete JSON."""
    aborted: int = 0
    """Answers with status 200 and aborted choices, as vLLM sends them when paused with `mode=abort`."""
    malformation: str = ""
    """Kind of malformed answers, one of `fakes.malformed.KINDS`; empty for right answers."""
    malformed_every: int = 1
    """Share of malformed answers among non-streams: 1 of so many."""
    fresh_samples: bool = False
    """Sampled requests without a seed get another answer each time."""
    any_length: bool = False
    """Prompts may be longer than `max_model_len`."""
    hang: int = 0
    """Requests that are never answered."""
    hang_health: bool = False
    """`/health` is never answered."""
    unhealthy: bool = False
    """`/health` answers 503."""
    echo: bool = False
    """Answers hold the received body as base64 under `body`, and the headers under `headers`."""
    canned: bool = False
    """Every answer is the same few bytes, without parsing the request: for measuring the proxy in front."""
    skip_reload: bool = False
    """`assay_reload` reports success without reloading."""
    partial_reload: bool = False
    """`assay_reload` takes over only a part of the weights, as an engine with a stale packed layer does."""
    stale_output_layer: bool = False
    """Reloads keep the output layer of the start; the answers do not show it."""
    wrong_tensor: bool = False
    """Reloads leave a tensor with other bytes; no answer shows it."""
    unwritten: dict[str, str] = field(default_factory=dict)
    """Parameters left unwritten at the start, with the amount."""
    composes: bool = False
    """Composes accents before reading a text, unlike its tokenizer.json."""
    forgets_name: bool = False
    """The engine ignores the name of its weights."""
    fail_reload: bool = False
    """`assay_reload` answers 500."""
    no_echo: bool = False
    """Prompts are not echoed, as with engines without prompt log-probabilities."""
    no_reload: bool = False
    """There is no `collective_rpc`, as with disabled development endpoints."""
    deadly: str = ""
    """Text of a request that ends the process after `delay_seconds`, with an error in its log; empty for none."""
    only_chat: bool = False
    """Prompts that are not conversations get 404."""
    no_generate: bool = False
    """Token ids are refused, as without `--enable-scale-out`."""

    def take(self, count: str) -> bool:
        """Returns True if a fault is due, and lowers its count."""
        left = getattr(self, count)
        setattr(self, count, max(0, left - 1))
        return left > 0


@dataclass
class Stats:
    requests: int = 0
    answered: int = 0
    """Completion requests with a complete answer, of any status."""
    aborted: int = 0
    """Completion requests that the client left before the answer was complete."""
    died: int = 0
    """Completion requests with a connection closed by a fault."""
    in_flight: int = 0
    max_in_flight: int = 0
    health_checks: int = 0
    reloads: int = 0
    prefix_cache_resets: int = 0


@dataclass
class FakeEngine:
    """An engine server; an asynchronous context manager. `port` is the bound port once it is entered.

    With `weights`, a folder, the label of the weights is a digest of its model.safetensors, else `label`. `models` are
    the served names; empty accepts any.
    """

    models: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    """Required on every path except `/fake`, if set."""
    label: str = "w0"
    weights: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    max_model_len: int = 4096
    vocabulary_size: int | None = None
    """Token ids from this number on are refused, if set."""
    faults: Faults = field(default_factory=Faults)
    stats: Stats = field(default_factory=Stats)
    bodies: deque[bytes] = field(default_factory=lambda: deque(maxlen=1000))
    """The last bodies of completion requests, as received."""
    targets: deque[str] = field(default_factory=lambda: deque(maxlen=1000))
    """The last paths of completion requests, with their queries."""
    traceparents: deque[str | None] = field(default_factory=lambda: deque(maxlen=1000))
    """Parent spans of the last completion requests, from their headers."""
    asked_file: Path | None = None
    """Gets a line for each completion request: the time in nanoseconds, and its body."""
    ranks: int = 1
    """Number of parts; each must load the weights of a folder of its own."""
    cache: PrefixCache = field(default_factory=PrefixCache)
    metrics: str = ""
    """Page of its metrics, in place of its counters."""
    _wholes: int = 0
    _weights_name: str = "default"
    _runner: web.AppRunner | None = None
    _listener: socket.socket | None = field(default=None, repr=False)
    _running: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> FakeEngine:
        if self.weights is not None:
            self.label = weights_label(self.weights)
        self._first_label = self.label
        self._running.set()
        self._idle.set()
        app = web.Application(client_max_size=256 * 2**20, middlewares=[self._door])
        app.add_routes(
            [
                *(web.post(path, self._complete) for path in COMPLETIONS),
                web.post("/v1/responses", self._respond),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/assay_read", self._read_by_file),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/update_weight_version", self._name_weights),
                web.get("/weight_info", self._weight_info),
                web.post("/fake/die", self._end_process),
                web.put("/fake/faults", self._set_faults),
                web.get("/fake/stats", self._get_stats),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        self._listener = socket.create_server((self.host, self.port), backlog=4096)
        await web.SockSite(self._runner, self._listener, backlog=4096).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Closes every connection and stops listening; entering again takes the same port."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            if self._listener is not None:  # asyncio leaves a connection open that is accepted while the server closes
                asyncio.get_running_loop().remove_reader(self._listener)
                for _ in range(_TURNS_OF_AN_ACCEPT):
                    await asyncio.sleep(0)
            if runner.server is not None:
                for connection in runner.server.connections:
                    connection.force_close()
            await runner.cleanup()

    @web.middleware
    async def _door(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.key is not None and given != f"Bearer {self.key}" and not request.path.startswith("/fake/"):
            return web.Response(status=401)
        return await handler(request)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        stats = self.stats
        stats.requests += 1
        stats.in_flight += 1
        stats.max_in_flight = max(stats.max_in_flight, stats.in_flight)
        self._idle.clear()
        try:
            response = await self._answer(request)
            if request.transport is None or request.transport.is_closing():
                stats.died += 1
            else:
                stats.answered += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            stats.aborted += 1
            raise
        finally:
            stats.in_flight -= 1
            if stats.in_flight == 0:
                self._idle.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.faults.canned:
            await request.read()
            return web.Response(body=CANNED, content_type="application/json")
        body = await request.read()
        self.bodies.append(body)
        self.targets.append(request.path_qs)
        self.traceparents.append(request.headers.get("traceparent"))
        if self.asked_file is not None:
            with self.asked_file.open("ab", buffering=0) as asked:  # a single write: several engines share the file
                asked.write(f"{time.time_ns()} ".encode() + body.replace(b"\n", b" ") + b"\n")
        await self._running.wait()
        if self.faults.take("hang"):
            await asyncio.Event().wait()
        if self.faults.take("refuse"):
            return self._die(request)
        if self.faults.delay_seconds:
            await asyncio.sleep(self.faults.delay_seconds)
        if self.faults.deadly and self.faults.deadly.encode() in body:
            print("IndexError: piece id is out of range", file=sys.stderr, flush=True)
            os._exit(1)
        if self.faults.take("status_count"):
            return _error(self.faults.status, "a fault was asked for")
        if self.faults.echo:
            headers = {name.lower(): value for name, value in request.headers.items()}
            answer = {"body": base64.b64encode(body).decode(), "headers": headers}
            return web.json_response(answer, headers={"X-Fake-Engine": "echo"})
        chat, generates = request.path.startswith("/v1/chat"), request.path == GENERATE
        if self.faults.only_chat and not chat:
            return _error(404, "Not Found")
        if generates and self.faults.no_generate:
            return _error(403, "Scale-out endpoints are disabled.")
        try:
            fields = json.loads(body)
            if generates:
                fields = completion_fields(fields)
            _check(fields)
            prompts = [chat_prompt(fields["messages"])] if chat else prompts_of(fields["prompt"], self.vocabulary_size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return _error(400, f"{type(error).__name__}: {error}")
        if self.models and fields.get("model") not in self.models:
            return _error(404, f"The model `{fields.get('model')}` does not exist.", param="model")
        new_tokens = max(fields.get("max_completion_tokens") or fields.get("max_tokens") or 0, 0)
        if not self.faults.any_length and any(len(prompt) + new_tokens > self.max_model_len for prompt in prompts):
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        if self.faults.fresh_samples and fields.get("temperature") and fields.get("seed") is None:
            fields |= {"seed": secrets.randbits(32), "fresh_samples": True}
        if self.faults.no_echo:
            fields["echo"] = False
        completions = completions_of(self.label, prompts, fields, chat=chat)
        cached = self._read(completions)
        if generates:
            return await self._give_tokens(request, fields, completions, cached=cached)
        if fields.get("stream"):
            pieces = (piece for completion in completions for piece in completion.pieces())
            return await self._stream(request, fields, _head(chat, fields, completions), pieces)
        answer = {**_head(chat, fields, completions), "choices": [c.choice for c in completions]}
        self._wholes += 1
        if self.faults.malformation and self._wholes % self.faults.malformed_every == 0:
            turned = [prompt[::-1] for prompt in prompts]
            asked = {**fields, "prompt": [list(prompt) for prompt in turned]}
            others = completions_of(self.label, turned, asked, chat=chat)
            other = {**answer, "choices": [c.choice for c in others]}
            answer = malformed(self.faults.malformation, answer, other=other)
        return await self._whole(request, answer)

    def _read(self, completions: list[Completion]) -> int:
        cached = self.cache.read(completions[0].prompt) if completions else 0
        for completion in completions:
            self.cache.keep(completion.prompt + completion.made[:-1])
        return cached

    async def _give_tokens(
        self, request: web.Request, fields: dict[str, Any], completions: list[Completion], *, cached: int
    ) -> web.StreamResponse:
        head, choices = token_answer(fields, completions, cached=cached, version=self._weights_name)
        if fields.get("stream"):
            pieces = (piece for choice in choices for piece in token_pieces(choice))
            return await self._stream(request, fields, {**head, "prompt_logprobs": None}, pieces)
        self._wholes += 1
        answer = {**head, "choices": choices}
        if self.faults.malformation and self._wholes % self.faults.malformed_every == 0:
            answer = malformed_tokens(self.faults.malformation, answer)
        return await self._whole(request, answer)

    async def _whole(self, request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        if self.faults.take("aborted"):
            answer["choices"] = [{**choice, "finish_reason": "abort"} for choice in answer["choices"]]
        payload = json.dumps(answer).encode()
        if self.faults.take("malformed"):
            return web.Response(body=payload[: len(payload) // 2], content_type="application/json")
        if not self.faults.take("die_mid_body"):
            return web.Response(body=payload, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(payload))})
        await response.prepare(request)
        await response.write(payload[: len(payload) // 2])
        return self._die(request, response)

    async def _stream(
        self, request: web.Request, fields: dict[str, Any], head: dict[str, Any], pieces: Iterator[dict[str, Any]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        dying = self.faults.take("die_mid_stream")
        usage = head.pop("usage")
        for sent, choice in enumerate(pieces):
            event = b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
            if dying and sent == self.faults.stream_events_before_death:
                await response.write(event[: len(event) // 2])
                return self._die(request, response)
            await response.write(event)
            await asyncio.sleep(self.faults.delay_seconds)
        if (fields.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _die(self, request: web.Request, sent: web.StreamResponse | None = None) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return sent or web.Response()

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        self.stats.requests += 1
        self.targets.append(request.path_qs)
        fields = {"max_tokens": fields.get("max_output_tokens", 16), **fields}
        [made] = completions_of(self.label, [str(fields["input"]).encode()], fields, chat=False)
        text = {"type": "output_text", "text": made.choice["text"], "annotations": []}
        message = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        usage = {
            **{"input_tokens": made.prompt_tokens, "output_tokens": len(made.made)},
            **{"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
            "total_tokens": made.prompt_tokens + len(made.made),
        }
        answer = {"id": "resp_0", "object": "response", "created_at": 0, "model": fields.get("model")}
        begun = {**answer, "status": "in_progress", "output": []}
        whole = {**answer, "status": "completed", "output": [message], "usage": usage}
        if not fields.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        dying = self.faults.take("die_mid_stream")
        for kind, said in (("created", begun), ("in_progress", begun), ("completed", whole)):
            name = f"response.{kind}"
            event = f"event: {name}\ndata: {json.dumps({'type': name, 'response': said})}\n\n".encode()
            if dying and kind == "completed":
                await response.write(event[: len(event) // 2])
                return self._die(request, response)
            await response.write(event)
        await response.write_eof()
        return response

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        prompt = str((await request.json())["prompt"])
        tokens = list((unicodedata.normalize("NFC", prompt) if self.faults.composes else prompt).encode())
        return web.json_response({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"prompt": bytes((await request.json())["tokens"]).decode()})

    async def _read_by_file(self, request: web.Request) -> web.StreamResponse:
        text = str((await request.json())["text"])
        ids = list(text.encode())
        starts = [place for place, character in enumerate(text) for _ in character.encode()]
        return web.json_response({"ids": ids, "special": ids, "text": text, "starts": starts})

    async def _health(self, _request: web.Request) -> web.Response:
        self.stats.health_checks += 1
        if self.faults.hang_health:
            await asyncio.Event().wait()
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _models(self, _request: web.Request) -> web.Response:
        entry = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [{"id": name, **entry} for name in self.models]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.metrics:
            return web.Response(text=self.metrics)
        text = f"vllm:num_requests_running {self.stats.in_flight}\nvllm:request_success_total {self.stats.answered}\n"
        cache = f'block_size="{self.cache.block_size}",kv_cache_size_tokens="{KV_CACHE_TOKENS}",num_gpu_blocks="9"'
        return web.Response(text=f"{text}vllm:cache_config_info{{{cache}}} 1.0\n")

    async def _pause(self, request: web.Request) -> web.Response:
        self._running.clear()
        if request.query.get("mode", "abort") == "wait":
            await self._idle.wait()
        return web.json_response({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self._running.is_set()})

    async def _reset_prefix_cache(self, _request: web.Request) -> web.Response:
        self.stats.prefix_cache_resets += 1
        self.cache.clear()
        return web.Response()

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        if self.faults.no_reload:
            return _error(404, "Not Found")
        if call.get("method") == "assay_output_layer":
            label = self._first_label if self.faults.stale_output_layer else self.label
            values = [-float(digit) for digit in hashlib.sha256(label.encode()).digest()]
            return web.json_response({"results": [{"dtype": "float32", "log_probabilities": values}]})
        if call.get("method") == "assay_weights":
            wrong = self.faults.wrong_tensor and self.stats.reloads
            return web.json_response({"results": [{"all": self.label, "head": "wrong" if wrong else self.label}]})
        if call.get("method") == "assay_unwritten":
            return web.json_response({"results": [self.faults.unwritten] * self.ranks})
        if call.get("method") != "assay_reload":
            return _error(400, f"no method {call.get('method')}")
        folders = [Path(folder) for folder in call.get("kwargs", {}).get("folders", [])]
        fits = len(folders) == self.ranks and all((folder / "model.safetensors").is_file() for folder in folders)
        if self.faults.fail_reload or not fits or len(set(map(weights_label, folders))) != 1:
            return _error(500, f"{RPC_FAILED}they do not fit")
        folder = folders[0]
        self.stats.reloads += 1
        if self.faults.partial_reload:
            self.label = f"{weights_label(folder)} in part, else {self.label}"
        elif not self.faults.skip_reload:
            self.label = weights_label(folder)
        return web.json_response({"results": [None] * self.ranks})

    async def _name_weights(self, request: web.Request) -> web.Response:
        if not self.faults.forgets_name:
            self._weights_name = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _weight_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._weights_name})

    async def _end_process(self, request: web.Request) -> web.Response:
        # ends the process as an engine after an error: with a line in its log
        print((await request.json())["error"], file=sys.stderr, flush=True)
        os._exit(1)

    async def _set_faults(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            if name not in {fault.name for fault in dataclasses.fields(Faults)}:
                return _error(400, f"no fault {name}")
            setattr(self.faults, name, value)
        return web.Response()

    async def _get_stats(self, _request: web.Request) -> web.Response:
        return web.json_response({**dataclasses.asdict(self.stats), "label": self.label})


KV_CACHE_TOKENS = 32_768
_TURNS_OF_AN_ACCEPT = 3
"""Turns of the loop until a server registers a connection that asyncio has accepted."""
CANNED = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "text": " canned", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()


def weights_label(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "seed"), (int,)),
    **dict.fromkeys(("temperature", "top_p"), (int, float)),
    **dict.fromkeys(("stream", "echo"), (bool,)),
    "stop": (str, list),
    "stream_options": (dict,),
}
_MOST = {"n": 16, "logprobs": 100, "top_logprobs": 100, "max_tokens": 2**20, "max_completion_tokens": 2**20}


def _check(fields: dict[str, Any]) -> None:
    for name, kinds in _KINDS.items():
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is of a wrong type")
        if name in _MOST and not (1 if name == "n" else 0) <= value <= _MOST[name]:
            raise ValueError(f"{name} is out of bounds")
    for stop in fields.get("stop") or []:
        if not isinstance(stop, str) or not stop.encode():
            raise ValueError("stop must be texts")


RPC_FAILED = "Call to collective_rpc method failed: "
"""Start of vLLM's message when a method of its worker raised an error."""


def _error(status: int, message: str, *, param: str | None = None) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return web.json_response({"error": error}, status=status)


def _head(chat: bool, fields: dict[str, Any], completions: list[Completion]) -> dict[str, Any]:
    asked = sum(completion.prompt_tokens for completion in completions if completion.number == 0)
    made = sum(len(completion.made) for completion in completions)
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": "chatcmpl-0" if chat else "cmpl-0",
        "object": f"{kind}.chunk" if chat and fields.get("stream") else kind,
        "created": 0,
        "model": fields.get("model"),
        "usage": {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made},
    }


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    yield


async def _serve(engine: FakeEngine, address_file: Path) -> None:
    stop = asyncio.Event()
    with _stopped_by_signals(stop):
        async with engine:
            address = {"host": engine.host, "port": engine.port, "pid": os.getpid(), "url": engine.url}
            unfinished = address_file.with_name(f"{address_file.name}.part")
            unfinished.write_text(json.dumps(address), encoding="utf-8")
            unfinished.replace(address_file)
            await stop.wait()


def meet(parts: int, *, address: str, port: int, label: str) -> None:
    """Waits for the parts on other hosts, which must have the same weights; ends the process when a part is gone."""
    listener = socket.create_server((address, port))
    for _ in range(parts):
        part, _ = listener.accept()
        if (theirs := part.recv(64).decode()) != label:
            sys.exit(f"RuntimeError: a part of the engine has weights {theirs}, not {label}")
        threading.Thread(target=_end_after, args=(part,), daemon=True).start()


def _end_after(part: socket.socket) -> None:
    with contextlib.suppress(OSError):
        part.recv(1)
    print("RuntimeError: a part of the engine is gone", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--address-file", type=Path, required=True)
    parser.add_argument("--model", action="append", default=[], help="served name; may be given again")
    parser.add_argument("--label", default="w0", help="label of the weights where there is no --weights")
    parser.add_argument("--weights", type=Path, help="folder with model.safetensors")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=1, help="parts of the engine, each on a host of its own")
    parser.add_argument("--meeting", nargs=2, help="address and port where parts on further hosts come")
    parser.add_argument("--asked-file", type=Path, help="gets a line for each completion request")
    parser.add_argument("--faults", type=json.loads, default={}, help="JSON object of faults to begin with")
    given = parser.parse_args()
    if given.ranks > 1:
        meet(given.ranks - 1, address=given.meeting[0], port=int(given.meeting[1]), label=weights_label(given.weights))
    engine = FakeEngine(
        models=tuple(given.model),
        label=given.label,
        weights=given.weights,
        key=os.environ.get("ASSAY_ENGINE_KEY"),
        host=given.host,
        port=given.port,
        max_model_len=given.max_model_len,
        asked_file=given.asked_file,
        ranks=given.ranks,
        faults=Faults(**given.faults),
    )
    asyncio.run(_serve(engine, given.address_file))


if __name__ == "__main__":
    main()
