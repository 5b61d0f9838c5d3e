"""Sending a client's request to a replica: holding it, trying again, and giving back what the engine said."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from pools.proxy.counters import CLIENT_LEFT, Tally
from pools.proxy.probes import Probes
from pools.proxy.replies import HOP_BY_HOP, Refusal, passed_on, unknown_model
from pools.proxy.request import Asked, read_request
from pools.proxy.routing import Outcome, Replica, RoutingTable, may_retry, outcome_of
from pools.proxy.state import ProxyLimits
from pools.proxy.stream import EVENT_STREAM, ClientGone, EventRelay

SERVER_ERROR_PAUSE_SECONDS = 0.1
_SENT_IN_PIECES_BYTES = 2**20  # aiohttp sends more than this in one write only with a warning

_log = logging.getLogger("assay.proxy")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How one attempt ended: what to tell the client, if anything, and the status to count it under."""

    outcome: Outcome
    response: web.StreamResponse | None = None
    status: int = 0
    begun: bool = False


class Forwarder:
    """Answers the completion endpoints from the replicas of a table.

    Args:
        session: for requests to replicas, without time-outs of its own.
        table: models and replicas; whoever changes it calls `table_changed`.
        tally: counts what was done.
        limits: bounds and time-outs.
    """

    def __init__(
        self, session: aiohttp.ClientSession, *, table: RoutingTable, tally: Tally, limits: ProxyLimits
    ) -> None:
        self._session = session
        self._table = table
        self._tally = tally
        self._limits = limits
        self._probes = Probes(session, limits=limits, on_recovery=self._wake_held)
        self._loop = asyncio.get_running_loop()
        self._running: dict[asyncio.Timeout, Replica] = {}
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._request_numbers = itertools.count(1)
        self.held = 0

    def table_changed(self, lost: list[Replica]) -> None:
        """Looks again at held requests, and takes what `lost` replicas were working on away from them."""
        for scope, replica in self._running.items():
            if replica in lost and not scope.expired():
                scope.reschedule(self._loop.time())
        self._probes.drop_settled()
        self._wake_held()

    async def close(self) -> None:
        """Ends what runs beside requests."""
        await self._probes.close()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to one completion request, an error of the proxy's own included."""
        started = self._loop.time()
        number = next(self._request_numbers)
        asked: Asked | None = None
        status, turned_away = CLIENT_LEFT, False
        try:
            asked = await read_request(request, limit_bytes=self._limits.max_body_bytes)
            response, status = await self._forward(request, asked)
        except Refusal as refusal:
            response, status, turned_away = refusal.response(), refusal.status, True
        except ClientGone:
            response = web.Response()  # nobody is there to read it
        except Exception:
            status, turned_away = 500, True
            raise
        finally:
            self._count(number, asked, status=status, turned_away=turned_away, started=started)
        return response

    def _count(self, number: int, asked: Asked | None, *, status: int, turned_away: bool, started: float) -> None:
        seconds = self._loop.time() - started
        self._tally.finished(status, seconds=seconds)
        known = asked is not None and asked.model in (self._table.models or {})
        model = asked.model if asked is not None and known else "-"
        if known:
            self._tally.model(model).count(status, turned_away=turned_away)
        if status >= 400:
            _log.warning("request=%d model=%s status=%d seconds=%.3f", number, model, status, seconds)

    async def _forward(self, request: web.BaseRequest, asked: Asked) -> tuple[web.StreamResponse, int]:
        tried: dict[str, Outcome] = {}
        attempts = 0
        while True:
            replica = await self._admit(asked.model, tried)
            attempts += 1
            attempt = await self._attempt(replica, request, asked)
            tried[replica.name] = attempt.outcome
            if attempt.begun or not may_retry(attempt.outcome, attempts=attempts):
                break
            if attempt.outcome is Outcome.TIMED_OUT and self._choose(asked.model, tried) is None:
                break
            if attempt.outcome is Outcome.SERVER_ERROR:
                await asyncio.sleep(SERVER_ERROR_PAUSE_SECONDS)
            self._tally.model(asked.model).retried += 1
        if attempt.response is not None:
            return attempt.response, attempt.status
        if attempt.outcome is Outcome.TIMED_OUT:
            raise Refusal(504, f"No engine answered in {self._limits.engine_timeout_seconds:g} s.")
        raise Refusal(502, f"Engines broke the connection before they had answered, {attempts} times.")

    def _choose(self, model: str, tried: Mapping[str, Outcome]) -> Replica | None:
        table = self._table
        if table.failed is not None:
            raise Refusal(503, table.failed)
        if table.models is None:
            return None
        digest = table.models.get(model)
        if digest is None:
            raise unknown_model(model, table.models)
        return table.choose(digest, tried=tried)

    async def _admit(self, model: str, tried: Mapping[str, Outcome]) -> Replica:
        replica = self._choose(model, tried)
        if replica is not None:
            return replica
        if self.held >= self._limits.max_held:
            raise Refusal(429, f"{self.held} requests wait for a replica already.", retry_after_seconds=1)
        self.held += 1
        try:
            async with asyncio.timeout(self._limits.hold_timeout_seconds):
                while replica is None:
                    await self._table_change()
                    replica = self._choose(model, tried)
                return replica
        except TimeoutError:
            message = f"No replica was ready for {self._limits.hold_timeout_seconds:g} s."
            raise Refusal(503, message, retry_after_seconds=5) from None
        finally:
            self.held -= 1

    async def _table_change(self) -> None:
        change = self._loop.create_future()
        self._waiting[change] = None
        try:
            await change
        finally:
            self._waiting.pop(change, None)

    def _wake_held(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)

    async def _attempt(self, replica: Replica, request: web.BaseRequest, asked: Asked) -> _Attempt:
        relay = EventRelay(request)
        outcome: Outcome | None = None
        self._table.begin(replica)
        try:
            attempt = await self._exchange(replica, asked, relay=relay)
            outcome = attempt.outcome
            return attempt
        except (aiohttp.ClientError, OSError) as error:
            ours = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError)
            outcome = Outcome.TIMED_OUT if ours and replica.state != "dead" else Outcome.LOST
            if relay.response is None:
                return _Attempt(outcome)
            await relay.break_off("The engine broke off in the middle of its answer.")
            return _Attempt(outcome, response=relay.response, status=502, begun=True)
        finally:
            self._table.end(replica, outcome)
            if replica.suspect:
                self._probes.watch(replica)

    async def _exchange(self, replica: Replica, asked: Asked, *, relay: EventRelay) -> _Attempt:
        body = asked.body if len(asked.body) <= _SENT_IN_PIECES_BYTES else io.BytesIO(asked.body)
        async with asyncio.timeout(self._limits.engine_timeout_seconds) as scope:
            self._running[scope] = replica
            try:
                async with self._session.post(
                    replica.url + asked.target, data=body, headers=asked.headers, allow_redirects=False
                ) as upstream:
                    if asked.stream and upstream.status == 200 and upstream.content_type == EVENT_STREAM:
                        await self._pass_on_stream(replica, upstream, relay=relay, scope=scope)
                        return _Attempt(Outcome.ANSWERED, response=relay.response, status=200, begun=True)
                    answer = web.Response(
                        status=upstream.status,
                        body=await upstream.read(),
                        headers=passed_on(upstream.headers, dropped=HOP_BY_HOP),
                    )
                    return _Attempt(outcome_of(answer.status), response=answer, status=answer.status)
            finally:
                del self._running[scope]

    async def _pass_on_stream(
        self,
        replica: Replica,
        upstream: aiohttp.ClientResponse,
        *,
        relay: EventRelay,
        scope: asyncio.Timeout,
    ) -> None:
        chunk = await upstream.content.readany()  # until something came, another replica may still answer
        await relay.begin(upstream)
        while chunk:
            await relay.send(chunk)
            patience = 0 if replica.state == "dead" else self._limits.engine_timeout_seconds
            scope.reschedule(self._loop.time() + patience)
            chunk = await upstream.content.readany()
        await relay.finish()
