"""Serving of checkpoints to evaluators: by a pool that we start, one that is kept up, or an endpoint that runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from pools.endpoint import RunningModel
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Servable
from pools.pool.session import OpenCell, PoolSession
from resources.errors import EndpointUnusable, ModelUnusable
from resources.settings import settings
from resources.tracing import past_span

CLIENT_CONCURRENCY = 16
CLIENT_TIMEOUT_SECONDS = 1800.0
"""Requests at once, and time for an answer, that an endpoint started by others is trusted with."""
_MOST_APART = 0.05
"""Nats a token by which one model's rounding, in any order of its requests, moves the weights of texts at most."""
_TRIES = 3
_NOT_RECORDED = {"number", "model", "digest", "failure", "ended"}


class ServedCell(Protocol):
    """A checkpoint that answers, or will, for one attempt at one cell."""

    @property
    def running(self) -> RunningModel:
        """The endpoint to ask, and how."""
        ...

    @property
    def weighed(self) -> tuple[float, ...]:
        """Weights of fixed texts before the first question, for an endpoint of others; a pool proves its replicas."""
        ...

    def check(self) -> None:
        """Raises if nobody will answer any more."""
        ...

    def prove_unchanged(self) -> None:
        """Raises if it is another model by now than the one that answered first."""
        ...

    def counts(self) -> dict[str, int]:
        """Requests of this attempt counted so far, by outcome; empty where nobody counts."""
        ...

    def asked_all(self) -> dict[str, Any]:
        """Lets the checkpoint go, since nothing more will be asked; returns how it was served, for the record."""
        ...

    def close(self, *, finished: bool) -> None:
        """Ends the attempt; `finished` says that the cell has its record, and nobody needs its answers again."""
        ...


class Serving(Protocol):
    """A source of checkpoints that answer."""

    @property
    def checkpoints_at_once(self) -> int:
        """Number of checkpoints it works on at once; 0 for an endpoint that serves one whatever is asked."""
        ...

    def has_prompt_logprobs(self, name: str) -> bool:
        """Tells if a checkpoint answers with log-probabilities of its prompts; asks for it where that is unknown."""
        ...

    def open(self, name: str, *, cell: str, attempt: str, mirror: str, in_chat: bool) -> ServedCell:
        """Asks for a checkpoint on behalf of a cell.

        Args:
            name: of the checkpoint.
            cell: the same in every attempt that may use answers of an earlier one.
            attempt: name of this attempt.
            mirror: folder for a copy of the answers.
            in_chat: whether questions go through the chat template.
        """
        ...

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        """Makes more checkpoints known, before they are asked for."""
        ...


class SharedSeconds:
    """Seconds of replicas, divided among the cells that have a checkpoint at the time, each moment in equal parts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._parts: dict[str, dict[str, float]] = {}

    def join(self, model: str, attempt: str, total: float) -> None:
        """Lets an attempt have its part of a checkpoint from now on, when so many seconds were spent on it in all."""
        with self._lock:
            self._divide(model, total)
            self._parts.setdefault(model, {})[attempt] = 0.0

    def leave(self, model: str, attempt: str, total: float | None = None) -> float:
        """Ends that; returns the attempt's part, 0 where it had none. Without a total nothing more is divided."""
        with self._lock:
            if total is not None:
                self._divide(model, total)
            return round(self._parts.get(model, {}).pop(attempt, 0.0), 3)

    def _divide(self, model: str, total: float) -> None:
        parts = self._parts.get(model, {})
        seen = self._seen.get(model, 0.0)
        spent = total - seen if total >= seen else total  # a proxy that was started again counts anew
        self._seen[model] = total
        for attempt in parts:
            parts[attempt] += spent / len(parts)


@dataclass(frozen=True, eq=False)
class PoolServing:
    """A pool, through a session of ours."""

    session: PoolSession
    shares: SharedSeconds = field(default_factory=SharedSeconds)

    @property
    def checkpoints_at_once(self) -> int:
        """As many as there are replicas."""
        return self.session.access.config.resource_config.replicas

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        """See `Serving.bring`."""
        self.session.bring(checkpoints)

    def has_prompt_logprobs(self, name: str) -> bool:
        """See `Serving.has_prompt_logprobs`."""
        return self.session.has_prompt_logprobs(name)

    def open(self, name: str, *, cell: str, attempt: str, mirror: str, in_chat: bool) -> ServedCell:
        """See `Serving.open`."""
        deaths, now = _deaths(self.session), time.time()
        self.shares.join(name, attempt, self.session.replica_seconds(name))
        try:
            opened = self.session.open(name, cell=cell, attempt=attempt, mirror=mirror)
        except BaseException:
            self.shares.leave(name, attempt)
            raise
        running = replace(opened.running, apply_chat_template=in_chat)
        return _PoolCell(self.session, opened, running, deaths, self.shares, now)


@dataclass(frozen=True, eq=False)
class _PoolCell:
    session: PoolSession
    opened: OpenCell
    running: RunningModel
    deaths_before: frozenset[tuple[str, int, str | None]]
    shares: SharedSeconds
    opened_at: float
    weighed: tuple[float, ...] = ()

    def check(self) -> None:
        self.session.check(self.running.model)

    def prove_unchanged(self) -> None:
        """Does nothing: each answer of a pool is one of a replica that has proved its weights."""

    def counts(self) -> dict[str, int]:
        return self.session.cell_counts(self.opened).model_dump()

    def asked_all(self) -> dict[str, Any]:
        name = self.running.model
        report = self.session.report_of(name, self.opened)
        seconds = self.shares.leave(name, self.opened.attempt, self.session.replica_seconds(name))
        self.session.unwant(name)
        # Answered from the journal alone, a checkpoint needs no engine.
        loaded = report.model_dump(exclude=_NOT_RECORDED) if report else {"how": "not needed"}
        if report is not None and report.ended > self.opened_at:
            began = report.ended - report.seconds
            past_span("load", began=began, ended=report.ended, phases=report.phases, **{"assay.how": report.how})
        engine = self.session.engine_identity()
        served = {"by": "pool", **loaded, "replica_seconds": seconds, "engine": engine}
        errors = sorted({str(error) for _, _, error in _deaths(self.session) - self.deaths_before})
        return {**served, "engine_errors": errors} if errors else served

    def close(self, *, finished: bool) -> None:
        self.shares.leave(self.running.model, self.opened.attempt)  # where the pool was gone before it had asked all
        self.session.close_cell(self.opened, finished=finished)


def _deaths(session: PoolSession) -> frozenset[tuple[str, int, str | None]]:
    announced = [replica.announcement for replica in session.status().replicas]
    return frozenset(
        (replica.instance, replica.restarts, replica.last_death) for replica in announced if replica.last_death
    )


def same_model(first: Sequence[float], second: Sequence[float]) -> bool:
    """True if weights of fixed texts are those of one model, but for rounding."""
    if len(first) != len(second):
        return False
    return fmean(abs(value - before) for value, before in zip(second, first, strict=True)) <= _MOST_APART


class EndpointServing:
    """An endpoint of others, of which nothing is known but its address; it serves what it serves."""

    checkpoints_at_once = 0

    def __init__(self, base_url: str, checkpoints: Mapping[str, Servable], *, served_name: str | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._checkpoints = checkpoints
        self._served_name = served_name
        key = settings().endpoint_api_key
        self._key = key.get_secret_value() if key else "none"
        self._engine = EngineClient(self._base_url.removesuffix("/v1"), self._key)

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        """See `Serving.bring`; the endpoint itself is told nothing."""
        self._checkpoints = {**self._checkpoints, **{checkpoint.name: checkpoint for checkpoint in checkpoints}}

    def has_prompt_logprobs(self, name: str) -> bool:
        """Asks the endpoint once."""
        return self._engine.has_prompt_logprobs(self._model(name))

    def open(self, name: str, *, cell: str, attempt: str, mirror: str, in_chat: bool) -> ServedCell:
        """Finds the checkpoint among the names the endpoint offers; it is not asked to load anything."""
        model = self._model(name)
        only_chat = False
        try:
            self._engine.prove_it_answers(model)
        except EndpointUnusable:
            only_chat = self._engine.answers_in_chat(model)
            if not only_chat:
                raise
        prompt_logprobs = not only_chat and self._engine.has_prompt_logprobs(model)
        running = RunningModel(
            base_url=self._base_url,
            model=model,
            tokenizer=str(self._checkpoints[name].tokenizer),
            capacity=CLIENT_CONCURRENCY,
            prompt_logprobs=prompt_logprobs,
            request_timeout_seconds=CLIENT_TIMEOUT_SECONDS,
            apply_chat_template=in_chat,
            max_model_len=self._engine.max_model_len(model),
            api_key=self._key,
        )
        weighed = () if only_chat else self._engine.canary(model, prompt_logprobs=prompt_logprobs)
        return _EndpointCell(running, self._engine, weighed)

    def _model(self, name: str) -> str:
        offered = self._engine.model_names()
        # A server that was given no name uses the path it was given.
        known = [self._served_name] if self._served_name else [name, self._checkpoints[name].uri]
        model = next((known_name for known_name in known if known_name in offered), None)
        if model is None:
            raise EndpointUnusable(
                expected=f"{self._base_url} to serve {' or '.join(known)}",
                found=f"it offers {', '.join(offered) or 'no model'}",
                remedy="serve the checkpoint under that name, or give the name it has there as served_model_name",
            )
        return model


@dataclass(frozen=True, eq=False)
class _EndpointCell:
    running: RunningModel
    engine: EngineClient
    weighed: tuple[float, ...]

    def check(self) -> None:
        self.engine.check_reachable()

    def prove_unchanged(self) -> None:
        running = self.running
        for _ in range(_TRIES):
            try:
                now = self.engine.canary(running.model, prompt_logprobs=running.prompt_logprobs)
            except EndpointUnusable:
                return  # nobody can know
            except ModelUnusable:
                continue
            if same_model(now, self.weighed):
                return
        raise EndpointUnusable(
            expected=f"{running.model} at {running.base_url} to be one model from the first question to the last",
            found="fixed texts are weighed otherwise at the end than before the first question",
            remedy="change nothing of what the endpoint serves meanwhile, and evaluate again",
        )

    def counts(self) -> dict[str, int]:
        return {}

    def asked_all(self) -> dict[str, Any]:
        running = self.running
        return {"by": "endpoint", "base_url": running.base_url, "model": running.model, "weights": "as its owner says"}

    def close(self, *, finished: bool) -> None:
        """Does nothing: there is nothing to close."""
