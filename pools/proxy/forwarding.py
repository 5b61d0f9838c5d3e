"""Forwards clients' requests to replicas: holds them, retries them, and returns the engines' answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from pools.journal.cells import CellScope
from pools.journal.keys import Subject, question
from pools.journal.store import Journal
from pools.protocol import ProxyLimits, RequestCounters, ServedModel
from pools.proxy.connections.messages import ClientGone, Refusal, Reply, Request, Responder, no_room, unknown_model
from pools.proxy.connections.upstream import Call, Upstream
from pools.proxy.counters import CLIENT_LEFT, Tally, count
from pools.proxy.probes import Probes, engine_metrics
from pools.proxy.replicas import MAX_ATTEMPTS, SUSPECT_DEATHS, RequestOutcome, RoutedReplica, deaths_of
from pools.proxy.request import Asked, Attempt, asked_in, attempt
from pools.proxy.routing import RoutingTable

RETRY_PAUSE_SECONDS = 0.1
_SETTLED_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
_UNCOUNTED = (RequestOutcome.UNREACHED, RequestOutcome.TAKEN_AWAY)
"""Outcomes without effect on the engine; they count as failed only if the engine does not come back."""

_log = logging.getLogger("assay.proxy")

Found = TypeVar("Found")


class _InvalidAnswers(Refusal):
    """Engines returned invalid answers."""


class Forwarder:
    """Answers requests for engines from the replicas of a table, and from the journal if given."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        table: RoutingTable,
        tally: Tally,
        limits: ProxyLimits,
        journal: Journal | None = None,
    ) -> None:
        self._upstream = upstream
        self._table = table
        self._tally = tally
        self._limits = limits
        self._journal = journal
        self._probes = Probes(upstream, limits=limits, on_recovery=self._recovered)
        self._loop = asyncio.get_running_loop()
        self._running: dict[Call, RoutedReplica] = {}
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._request_numbers = itertools.count(1)

    def table_changed(self, lost: list[RoutedReplica]) -> None:
        """Checks held requests again, and aborts the requests that the `lost` replicas were working on."""
        if lost:
            for call, replica in list(self._running.items()):
                if replica in lost:
                    call.lose()
        self._probes.drop_settled()
        self._wake_held()

    async def close(self) -> None:
        await self._probes.close()

    async def engine_metrics(self) -> bytes:
        return await engine_metrics(self._upstream, self._table.replicas.values())

    async def answer(
        self,
        request: Request,
        responder: Responder,
        *,
        target: bytes,
        scope: CellScope | None,
        trace: bytes | None = None,
    ) -> None:
        """Answers a request for an engine, at the path `target`; errors of the proxy itself are answered too.

        `scope` is the attempt at a cell that the request belongs to; `trace` becomes the `traceparent` of a request
        without it.
        """
        started = self._loop.time()
        number = next(self._request_numbers)
        asked: Asked | None = None
        status, turned_away = CLIENT_LEFT, False
        try:
            asked = asked_in(request, target=target, trace=trace)
            asked.tries_after = self._table.failures if scope is None else None
            status = await self._answer(asked, responder, scope)
        except Refusal as refusal:
            status, turned_away = refusal.status, True
            responder.send(refusal.reply())
        except ClientGone:
            pass
        except Exception:
            status, turned_away = 500, True
            raise
        finally:
            seconds = self._loop.time() - started
            self._tally.finished(status, seconds=seconds)
            for tally in self._tallies(asked, scope):
                count(tally, status, turned_away=turned_away)
            if status >= 400:
                model = asked.model if asked is not None and asked.model in (self._table.models or {}) else "-"
                _log.warning("request=%d model=%s status=%d seconds=%.3f", number, model, status, seconds)

    def _tallies(self, asked: Asked | None, scope: CellScope | None) -> list[RequestCounters]:
        tallies = []
        if asked is not None and asked.model in (self._table.models or {}):
            tallies.append(self._tally.models[asked.model])
        if scope is not None:
            tallies.append(self._tally.cell(scope.cell, scope.attempt))
        return tallies

    async def _answer(self, asked: Asked, responder: Responder, scope: CellScope | None) -> int:
        journal = self._journal
        if journal is None or not asked.is_completion:
            last, _ = await self._forward(asked, responder, scope)
            return await _give(last, responder)
        if self._table.models is None:
            await self._hold(asked, scope, lambda: self._table.models)
        served = self._served(asked)
        engine = f"{self._table.engine}/{served.config}"  # generation defaults etc. are engine arguments too
        subject = Subject(served.weights or served.digest, served.tokenizer, engine)
        target = asked.target.decode("latin-1")
        claim = journal.claim(question(subject, target, body=asked.body, fields=asked.fields), cell=scope)
        try:
            if (stored := await claim.replay()) is not None:
                if not asked.share.hold(len(stored.body)):
                    raise no_room()
                asked.share.complete()
                content_type = stored.content_type.encode("latin-1")
                responder.send(Reply(200, stored.body, ((b"Content-Type", content_type),)))
                for tally in self._tallies(asked, scope):
                    tally.journal_hits += 1
                return 200
            last, digest = await self._forward(asked, responder, scope)
            if digest == served.digest and last.facts is not None and (body := last.body) is not None:
                await journal.keep(claim, last.content_type, body, facts=last.facts)
            else:
                claim.release()
            return await _give(last, responder)
        except _InvalidAnswers:
            claim.refuse()
            raise
        except BaseException:
            claim.release()
            raise

    async def _forward(self, asked: Asked, responder: Responder, scope: CellScope | None) -> tuple[Attempt, str | None]:
        asked.fields = {}  # not needed any more, and they take as much memory as the body
        try:
            return await self._try_until_answered(asked, responder, scope)
        finally:
            self._table.suspects.close(asked)
            self._release(asked)

    async def _try_until_answered(
        self, asked: Asked, responder: Responder, scope: CellScope | None
    ) -> tuple[Attempt, str | None]:
        suspects = self._table.suspects
        tried: dict[str, RequestOutcome] = {}
        failed = 0
        taken_from: set[tuple[RoutedReplica, tuple[str | None, int]]] = set()
        patient_until = self._loop.time() + self._limits.hold_timeout_seconds
        tallies = self._tallies(asked, scope)
        while True:
            replica = self._choose(asked, tried)
            if replica is None:
                replica = await self._hold(asked, scope, lambda: self._choose(asked, tried))
                tallies = self._tallies(asked, scope)
            digest, engine, deaths = replica.announcement.digest, replica.engine, deaths_of(replica)
            if (message := suspects.verdict(digest, asked.target, asked.body)) is not None:
                raise Refusal(422, message)
            for tally in tallies:
                tally.upstream += 1
            last = await self._attempt(replica, asked, responder)
            if last.outcome is RequestOutcome.ANSWERED or last.stream is not None:
                if (facts := last.facts) is not None:
                    for tally in tallies:
                        tally.prompt_tokens += facts.prompt_tokens
                        tally.completion_tokens += facts.completion_tokens
                return last, digest
            tried[replica.name] = last.outcome
            if last.outcome in (RequestOutcome.LOST, RequestOutcome.TAKEN_AWAY):
                if suspects.lost(asked, asked.model, replica, deaths_before=deaths) >= SUSPECT_DEATHS:
                    await self._settle(asked)
                if replica.reserved is asked and suspects.deaths(asked) > SUSPECT_DEATHS:
                    error = (replica.announcement.last_death or "")[:_SHOWN_CHARACTERS]
                    message = suspects.condemn(digest, asked.target, asked.body, model=asked.model, error=error)
                    raise Refusal(422, message)
            if last.outcome not in _UNCOUNTED or self._loop.time() > patient_until:
                failed += 1
            elif last.outcome is RequestOutcome.TAKEN_AWAY:
                taken_from.add((replica, engine))
            attempts = failed + sum(other.gone or other.engine != then for other, then in taken_from)
            if attempts >= MAX_ATTEMPTS:
                break
            if last.outcome is RequestOutcome.TIMED_OUT and self._choose(asked, tried) is None:
                break
            if last.outcome in (RequestOutcome.SERVER_ERROR, RequestOutcome.UNREACHED):
                await asyncio.sleep(RETRY_PAUSE_SECONDS)
            for tally in tallies:
                tally.retried += 1
        if last.reply is not None:
            return last, digest
        if last.outcome is RequestOutcome.TIMED_OUT:
            raise Refusal(504, f"No engine answered in {self._limits.engine_timeout_seconds:g} s.")
        if last.outcome is RequestOutcome.SERVER_ERROR:
            raise _InvalidAnswers(502, f"Engines gave answers that are not whole or not valid, {attempts} times.")
        raise Refusal(502, f"Engines broke the connection, or took none, before they had answered, {attempts} times.")

    async def _attempt(self, replica: RoutedReplica, asked: Asked, responder: Responder) -> Attempt:
        outcome: RequestOutcome | None = None
        call = self._upstream.call(
            replica.url, patience_seconds=self._limits.engine_timeout_seconds, keys=replica.keys, share=asked.share
        )
        self._running[call] = replica
        self._table.begin(replica, asked.model)
        try:
            made = await attempt(call, replica, asked, responder=responder)
            outcome = made.outcome
            return made
        finally:
            call.close()
            if outcome is not RequestOutcome.ANSWERED:
                asked.share.drop()
            del self._running[call]
            self._table.end(replica, asked.model, outcome)
            if replica.reserved is not None and replica.in_flight == 0:
                self._wake_held()
            if replica.suspect:
                self._probes.watch(replica)

    # --- Choosing and holding ----------------------------------------------------------------------------------------

    def _served(self, asked: Asked) -> ServedModel:
        table, model = self._table, asked.model
        is_try = table.failed is not None and table.tries_again and asked.tries_after == table.failures
        if table.failed is not None and not is_try:
            raise Refusal(503, table.failed)
        served = (table.models or {}).get(model)
        if served is None:
            raise unknown_model(model, table.models or {})
        if (failure := table.unusable.get(model)) is not None and not is_try:
            raise Refusal(503, f"{model} cannot be served: {failure.found.splitlines()[0]}", param="model")
        return served

    def _choose(self, asked: Asked, tried: Mapping[str, RequestOutcome]) -> RoutedReplica | None:
        if self._table.models is None and self._table.failed is None:
            return None
        digest = self._served(asked).digest
        if self._table.suspects.deaths(asked) < SUSPECT_DEATHS:
            return self._table.choose(digest, tried=tried)
        replica = self._reserved(asked)
        if replica is not None and not (replica.takes_requests and replica.announcement.digest == digest):
            replica.reserved, replica = None, None
        if replica is None and (replica := self._table.choose(digest, tried={})) is not None:
            replica.reserved = asked
        return replica if replica is not None and replica.in_flight == 0 else None

    def _reserved(self, asked: Asked) -> RoutedReplica | None:
        return next((replica for replica in self._table.replicas.values() if replica.reserved is asked), None)

    def _release(self, asked: Asked) -> None:
        if (replica := self._reserved(asked)) is not None:
            replica.reserved = None
            self._wake_held()

    async def _settle(self, asked: Asked) -> None:
        with suppress(TimeoutError), self._held(asked):
            async with asyncio.timeout(_SETTLED_SECONDS):
                while not self._table.suspects.is_settled(asked):
                    await self._table_change()

    @contextmanager
    def _held(self, asked: Asked) -> Iterator[None]:
        self._table.hold(asked.model)
        try:
            yield
        finally:
            self._table.let_go(asked.model)

    async def _hold(self, asked: Asked, scope: CellScope | None, look: Callable[[], Found | None]) -> Found:
        table, limits = self._table, self._limits
        if table.held >= limits.max_held:
            raise Refusal(429, f"{table.held} requests wait for a replica already.", retry_after_seconds=1)
        try:
            with self._held(asked):
                async with asyncio.timeout(limits.hold_timeout_seconds):
                    while (target := look()) is None:
                        await self._table_change()
                    return target
        except TimeoutError:
            message = f"No replica was ready for {limits.hold_timeout_seconds:g} s."
            raise Refusal(503, message, retry_after_seconds=5) from None
        finally:
            for tally in self._tallies(asked, scope):
                tally.held += 1

    async def _table_change(self) -> None:
        change = self._loop.create_future()
        self._waiting[change] = None
        try:
            await change
        finally:
            self._waiting.pop(change, None)

    def _recovered(self) -> None:
        self._table.bump()
        self._wake_held()

    def _wake_held(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)


async def _give(last: Attempt, responder: Responder) -> int:
    if last.stream is not None:
        if last.outcome is RequestOutcome.ANSWERED:
            await last.stream.finish()
            return 200
        await last.stream.break_off("The engine broke off in the middle of its answer.")
        return 502
    assert last.reply is not None
    responder.send(last.reply)
    return last.reply.status
