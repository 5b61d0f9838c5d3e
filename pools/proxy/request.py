"""A request for an engine, and an attempt at a replica: its outcome, and the part that the client may see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import orjson

from pools.endpoint import GENERATE as _GENERATE
from pools.journal.answers import AnswerFacts, judge, judge_response, judge_tokens
from pools.journal.terms import NO_TERMS, Terms, TokenTerms, terms_of, token_terms_of
from pools.proxy.connections.messages import OURS_TO_KEEP, Header, Refusal, Reply, Request, Responder, error_body
from pools.proxy.connections.room import AnswerShare
from pools.proxy.connections.upstream import KEPT_BYTES, Call, Lost, NotConnected, TakenAway, TimedOut
from pools.proxy.replicas import RequestOutcome, RoutedReplica

COMPLETIONS, CHAT, RESPONSES, TOKENIZE = b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/tokenize"
GENERATE = _GENERATE.encode()
"""Paths of engines that clients may request."""
_MOST_VALUES = 2**22
"""Maximum of commas and brackets, a bracket counts as four: parsing them blocks the loop for 0.3 s at most."""
_SLOWLY_PARSED_BYTES = 2**20
"""Limit for json's parser, which takes 22 ms for this size, and 0.4 s for 16 MiB."""
_QUICKLY_JUDGED_BYTES = 2**18
"""A larger answer is judged in a thread: in the loop, 16 MB blocked it for up to 2 s."""
_JUDGE = ThreadPoolExecutor(1, "judge")  # one at a time: a parsed answer takes ten times its bytes
_DONE = b"[DONE]"
_LAST_EVENTS = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_END_BYTES = 1024
_ODD = "NaN, Infinity or half of a surrogate pair"


@dataclass(slots=True, eq=False)
class Asked:
    """A client's request. `target` is its path; `headers` are those for the replica."""

    target: bytes
    headers: Sequence[Header]
    body: bytes = field(repr=False)
    model: str
    stream: bool
    fields: dict[str, Any] = field(repr=False)
    """The parsed body."""
    share: AnswerShare = field(repr=False)
    """Part of the room for bodies that its answer takes."""
    tries_after: int | None = None
    """Number of the pool's failures before the request; None if it must not make the pool try again."""

    @property
    def terms(self) -> Terms | TokenTerms:
        """Terms that it sets for its answer; parsed from the body, since `fields` may be gone by then."""
        try:
            fields = orjson.loads(self.body)
        except orjson.JSONDecodeError:  # a body that only json parses is not parsed twice
            return NO_TERMS
        return token_terms_of(fields) if self.target == GENERATE else terms_of(fields, chat=self.target == CHAT)

    @property
    def is_completion(self) -> bool:
        """True if the journal keeps answers to such requests."""
        return self.target in (COMPLETIONS, CHAT, GENERATE)


def asked_in(request: Request, *, target: bytes, trace: bytes | None = None) -> Asked:
    """Parses a request for an engine, for the path `target`; `trace` is the `traceparent` if the request has none."""
    fields = _parsed(request.body)
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(model, str):
        raise Refusal(400, "The body must be a JSON object with the name of a model.", param="model")
    headers = [header for header in request.head.headers if header[0].lower() not in OURS_TO_KEEP]
    if trace is not None and request.head.header(b"traceparent") is None:
        headers = [*headers, (b"traceparent", trace)]
    return Asked(target, headers, request.body, model, bool(fields.get("stream")), fields, request.share)


def _parsed(body: bytes) -> Any:
    if len(body) > _MOST_VALUES // 4 and body.count(b",") + 4 * sum(map(body.count, (b"[", b"{"))) > _MOST_VALUES:
        raise Refusal(
            413, f"The body has more than {_MOST_VALUES} commas and brackets, where a bracket counts as four."
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    if len(body) > _SLOWLY_PARSED_BYTES:
        raise Refusal(
            400, f"The body is not valid JSON, or is larger than {_SLOWLY_PARSED_BYTES} bytes and has {_ODD}."
        )
    try:
        return json.loads(body)  # accepts the same as engines: NaN, unbounded numbers, lone surrogates
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is not valid JSON.") from None


@dataclass(slots=True)
class Attempt:
    """The end of an attempt: a complete answer in `reply`, or a partly relayed answer in `stream`."""

    outcome: RequestOutcome
    reply: Reply | None = None
    stream: EventRelay | None = None
    facts: AnswerFacts | None = None
    content_type: str = ""

    @property
    def body(self) -> bytes | None:
        """All bytes of the answer; None if they were too many to be kept."""
        if self.stream is not None:
            return self.stream.relayed
        return self.reply.body if self.reply is not None else None


async def attempt(call: Call, replica: RoutedReplica, asked: Asked, *, responder: Responder) -> Attempt:
    """Sends a request to a replica; a stream goes to the client as it arrives. The caller closes the call."""
    relay: EventRelay | None = None
    try:
        await call.ask(b"POST", asked.target, headers=asked.headers, body=asked.body, stream=asked.stream)
        if not call.is_stream:
            return await _judged(call, asked)
        chunk = await call.read()
        if not chunk:
            return Attempt(RequestOutcome.SERVER_ERROR)
        relay = EventRelay(responder, of_response=asked.target == RESPONSES)
        responder.begin(call.status, call.headers)  # from now on no other replica can answer
        while chunk:
            await relay.send(chunk)
            chunk = await call.read()
    except NotConnected:
        return Attempt(RequestOutcome.UNREACHED)
    except TakenAway:
        return Attempt(RequestOutcome.TAKEN_AWAY, stream=relay)
    except Lost:
        return Attempt(RequestOutcome.LOST, stream=relay)
    except TimedOut:
        return Attempt(RequestOutcome.LOST if replica.gone else RequestOutcome.TIMED_OUT, stream=relay)
    if not relay.is_done:
        return Attempt(RequestOutcome.SERVER_ERROR, stream=relay)
    body, content_type = relay.relayed, call.content_type.decode("latin-1")
    facts = await _facts(asked, content_type, body, stream=True) if body is not None else None
    if facts is None and body is not None and asked.is_completion:
        return Attempt(RequestOutcome.SERVER_ERROR, stream=relay)
    return Attempt(RequestOutcome.ANSWERED, stream=relay, facts=facts, content_type=content_type)


async def _judged(call: Call, asked: Asked) -> Attempt:
    reply = Reply(call.status, call.body, call.headers)
    if call.status != 200:
        return Attempt(RequestOutcome.SERVER_ERROR if call.status >= 500 else RequestOutcome.ANSWERED, reply)
    content_type = call.content_type.decode("latin-1")
    facts = await _facts(asked, content_type, reply.body)
    if facts is None:
        return Attempt(RequestOutcome.SERVER_ERROR)
    return Attempt(RequestOutcome.ANSWERED, reply, facts=facts, content_type=content_type)


async def _facts(asked: Asked, content_type: str, body: bytes, *, stream: bool = False) -> AnswerFacts | None:
    judging = (asked, content_type, body, stream)
    if len(body) <= _QUICKLY_JUDGED_BYTES:
        return _facts_now(*judging)
    return await asyncio.get_running_loop().run_in_executor(_JUDGE, _facts_now, *judging)


def _facts_now(asked: Asked, content_type: str, body: bytes, stream: bool) -> AnswerFacts | None:
    if asked.target == RESPONSES:
        return judge_response(body, stream=stream)
    if asked.target == TOKENIZE:
        return judge_tokens(body)
    return judge(content_type, body, stream=stream, terms=asked.terms)


class EventRelay:
    """A stream to a client. Passes bytes on as they arrive, except for an incomplete line and the end.

    So a stream that breaks in the middle of a line never shows the client half an event: the rest of the line is
    dropped and an error event follows. And a client that has received `data: [DONE]` has the complete answer: that line
    is held back until `finish`. Streams of `/v1/responses` (`of_response`) end with an event of a certain name instead.
    """

    def __init__(self, responder: Responder, *, of_response: bool = False) -> None:
        self._responder = responder
        self._of_response = of_response
        self._held = b""
        self._between_events = True
        self._kept: list[bytes] | None = []
        self._kept_bytes = 0
        self.is_done = False

    async def send(self, chunk: bytes) -> None:
        self._keep(chunk)
        data = self._held + chunk if self._held else chunk
        ended = self.is_done and (self._of_response or b"\n" in self._held)  # by a complete line; the rest is ignored
        end = 0 if ended else _end_of_stream(data)
        whole = data.rfind(b"\n") + 1 if end is None else end
        if self._of_response:  # the event's name has its own line, and needs the line that follows to be an event
            whole = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        self.is_done = end is not None or (self._of_response and _has_the_end(data[:whole]))
        self._held = data[whole:]
        if whole:
            await self._write(data[:whole] if self._held else data)

    async def finish(self) -> None:
        if self._held:
            await self._write(self._held)
        self._responder.end()

    async def break_off(self, message: str) -> None:
        """Ends a broken stream: an error event, then a clean end for HTTP."""
        event = b"data: %b\n\n" % error_body(502, message)
        await self._write((b"" if self._between_events else b"\n") + event)
        self._responder.end()

    @property
    def relayed(self) -> bytes | None:
        """All bytes from the engine; None if they are too many to be kept."""
        return None if self._kept is None else b"".join(self._kept)

    def _keep(self, chunk: bytes) -> None:
        if self._kept is None:
            return
        self._kept_bytes += len(chunk)
        if self._kept_bytes > KEPT_BYTES:
            self._kept = None
        else:
            self._kept.append(chunk)

    async def _write(self, payload: bytes) -> None:
        self._between_events = payload.endswith((b"\n\n", b"\r\n\r\n"))
        await self._responder.write(payload)


def _end_of_stream(data: bytes) -> int | None:
    at = data.rfind(b"data:", max(0, len(data) - _END_BYTES))
    begins_line = at == 0 or (at > 0 and data[at - 1] in b"\r\n")
    return at if begins_line and data[at + len(b"data:") :].partition(b"\n")[0].strip() == _DONE else None


def _has_the_end(events: bytes) -> bool:
    names = (event.partition(b"\n")[0].partition(b":") for event in events.split(b"\n\n"))
    return any(name == b"event" and value.strip() in _LAST_EVENTS for name, _, value in names)
