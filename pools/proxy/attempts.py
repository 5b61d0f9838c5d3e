"""An attempt at a replica: its outcome, and the part of it that the client may see."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pools.journal.answers import AnswerFacts, judge, judge_response, judge_tokens
from pools.proxy.connections.messages import Reply, Responder
from pools.proxy.connections.stream import EventRelay
from pools.proxy.connections.upstream import Call, Lost, NotConnected, TakenAway, TimedOut
from pools.proxy.request import RESPONSES, TOKENIZE, Asked
from pools.proxy.routing import RequestOutcome, RoutedReplica, outcome_of

_QUICKLY_JUDGED_BYTES = 2**18
"""A larger answer is judged in a thread: in the loop, 16 MB blocked it for up to 2 s."""
_JUDGE = ThreadPoolExecutor(1, "judge")  # one at a time: a parsed answer takes ten times its bytes


@dataclass(slots=True)
class Attempt:
    """The end of an attempt: a complete answer in `reply`, or a partly relayed answer in `stream`.

    `facts` and `content_type` are those of a valid answer.
    """

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
        relay.begin(call.status, call.headers)
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
        return Attempt(outcome_of(call.status), reply)
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
