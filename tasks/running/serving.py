"""Serving of checkpoints to evaluators: by a pool started for the run, a kept pool, or an external endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from pools.endpoint import RunningModel
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Servable
from pools.pool.session import OpenCell, PoolSession
from resources.errors import EndpointUnusable, ModelUnusable
from resources.settings import settings
from resources.tracing import past_span

CLIENT_CONCURRENCY = 16
CLIENT_TIMEOUT_SECONDS = 1800.0
"""Concurrent requests, and timeout of a request, for an external endpoint."""
_MOST_APART = 0.05
"""Largest mean difference in nats per token between log-likelihoods of fixed texts by the same model, due to rounding
and request order."""
_TRIES = 3
_NOT_RECORDED = {"number", "model", "digest", "failure", "ended"}


class SharedSeconds:
    """Replica seconds, divided at each moment equally among the cells that use a checkpoint.

    `total` returns the seconds that a checkpoint has used so far. Threads read it in turn, since a smaller number than
    before means that the proxy was restarted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._parts: dict[str, dict[str, float]] = {}

    def join(self, model: str, attempt: str, total: Callable[[], float]) -> None:
        """Starts counting an attempt's share of a checkpoint."""
        with self._lock:
            self._divide(model, total())
            self._parts.setdefault(model, {})[attempt] = 0.0

    def leave(self, model: str, attempt: str, total: Callable[[], float] | None = None) -> float:
        """Stops counting; returns the attempt's seconds, 0 if it had none. Without `total`, the share does not grow."""
        with self._lock:
            if total is not None:
                self._divide(model, total())
            return round(self._parts.get(model, {}).pop(attempt, 0.0), 3)

    def _divide(self, model: str, total: float) -> None:
        parts = self._parts.get(model, {})
        seen = self._seen.get(model, 0.0)
        spent = total - seen if total >= seen else total  # a restarted proxy counts from 0
        self._seen[model] = total
        for attempt in parts:
            parts[attempt] += spent / len(parts)


@dataclass(frozen=True, eq=False)
class PoolServing:
    """A pool, used through a PoolSession; it works on `checkpoints_at_once`."""

    session: PoolSession
    shares: SharedSeconds = field(default_factory=SharedSeconds)

    @property
    def checkpoints_at_once(self) -> int:
        """Number of checkpoints it works on at once."""
        return self.session.access.config.resource_config.replicas

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        """Registers more checkpoints before they are requested."""
        self.session.bring(checkpoints)

    def has_prompt_logprobs(self, name: str) -> bool:
        """Returns True if a checkpoint returns prompt log-probabilities; sends a request if that is unknown."""
        return self.session.has_prompt_logprobs(name)

    def open(self, name: str, *, cell: str, attempt: str, mirror: str, in_chat: bool) -> PoolCell:
        """Requests a checkpoint for a cell, as `PoolSession.open`; `in_chat` sends prompts through its template."""
        deaths, now = _deaths(self.session), time.time()
        self.shares.join(name, attempt, partial(self.session.replica_seconds, name))
        try:
            opened = self.session.open(name, cell=cell, attempt=attempt, mirror=mirror)
        except BaseException:
            self.shares.leave(name, attempt)
            raise
        known = {**vars(opened), "running": replace(opened.running, apply_chat_template=in_chat)}
        return PoolCell(**known, session=self.session, shares=self.shares, deaths_before=deaths, opened_at=now)


@dataclass(frozen=True, eq=False)
class PoolCell(OpenCell):
    """A checkpoint of a pool that serves an attempt at a cell, now or once it is loaded."""

    session: PoolSession
    shares: SharedSeconds
    deaths_before: frozenset[tuple[str, int, str | None]]
    opened_at: float
    weighed: tuple[float, ...] = ()

    def check(self) -> None:
        """Raises if the pool cannot serve the checkpoint any more."""
        self.session.check(self.running.model)

    def prove_unchanged(self) -> None:
        pass  # each answer comes from a replica that has verified its weights

    def counts(self) -> dict[str, int]:
        """Returns the requests of this attempt so far, by outcome."""
        return asdict(self.session.cell_counts(self))

    def asked_all(self) -> dict[str, Any]:
        """Releases the checkpoint after the last request; returns how it was served, for the record."""
        name = self.running.model
        report = self.session.report_of(name, self)
        seconds = self.shares.leave(name, self.attempt, partial(self.session.replica_seconds, name))
        self.session.unwant(name)
        # If all answers come from the journal, no engine is needed.
        loaded = report.model_dump(exclude=_NOT_RECORDED) if report else {"how": "not needed"}
        if report is not None and report.ended > self.opened_at:
            began = report.ended - report.seconds
            past_span("load", began=began, ended=report.ended, phases=report.phases, **{"assay.how": report.how})
        engine = self.session.engine_identity()
        served = {"by": "pool", **loaded, "replica_seconds": seconds, "engine": engine}
        errors = sorted({str(error) for _, _, error in _deaths(self.session) - self.deaths_before})
        return {**served, "engine_errors": errors} if errors else served

    def close(self, *, finished: bool) -> None:
        """Ends the attempt; `finished` is True if the cell has its record, so that its answers are not needed again."""
        self.shares.leave(self.running.model, self.attempt)  # if the pool was gone before asked_all
        self.session.close_cell(self, finished=finished)


def _deaths(session: PoolSession) -> frozenset[tuple[str, int, str | None]]:
    announced = [replica.announcement for replica in session.status().replicas]
    return frozenset(
        (replica.instance, replica.restarts, replica.last_death) for replica in announced if replica.last_death
    )


def same_model(first: Sequence[float], second: Sequence[float]) -> bool:
    """Returns True if log-likelihoods of fixed texts come from the same model, up to rounding."""
    if len(first) != len(second):
        return False
    return fmean(abs(value - before) for value, before in zip(second, first, strict=True)) <= _MOST_APART


class EndpointServing:
    """An external endpoint of which only the address is known; it loads no checkpoints on request."""

    checkpoints_at_once = 0  # it always serves the same model

    def __init__(self, base_url: str, checkpoints: Mapping[str, Servable], *, served_name: str | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._checkpoints = checkpoints
        self._served_name = served_name
        key = settings().endpoint_api_key
        self._key = key.get_secret_value() if key else "none"
        self._engine = EngineClient(self._base_url.removesuffix("/v1"), self._key)

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        self._checkpoints = {**self._checkpoints, **{checkpoint.name: checkpoint for checkpoint in checkpoints}}

    def has_prompt_logprobs(self, name: str) -> bool:
        return self._engine.has_prompt_logprobs(self._model(name))

    def open(self, name: str, *, cell: str, attempt: str, mirror: str, in_chat: bool) -> EndpointCell:
        """Finds the checkpoint among the model names that the endpoint offers."""
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
        return EndpointCell(running, self._engine, weighed)

    def _model(self, name: str) -> str:
        offered = self._engine.model_names()
        # A server started without a model name uses its model path as the name.
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
class EndpointCell:
    """An external endpoint that serves an attempt at a cell, as `PoolCell`, with the log-likelihoods of fixed texts
    before the first request."""

    running: RunningModel
    engine: EngineClient
    weighed: tuple[float, ...]
    """Log-likelihoods of fixed texts before the first request; empty where only chats are answered."""

    def check(self) -> None:
        self.engine.check_reachable()

    def prove_unchanged(self) -> None:
        """Raises EndpointUnusable if the endpoint now serves another model than before the first request."""
        running = self.running
        for _ in range(_TRIES):
            try:
                now = self.engine.canary(running.model, prompt_logprobs=running.prompt_logprobs)
            except EndpointUnusable:
                return  # cannot be verified
            except ModelUnusable:
                continue
            if same_model(now, self.weighed):
                return
        raise EndpointUnusable(
            expected=f"{running.model} at {running.base_url} to be the same model from the first question to the last",
            found="fixed texts are weighed otherwise at the end than before the first question",
            remedy="change nothing of what the endpoint serves meanwhile, and evaluate again",
        )

    def counts(self) -> dict[str, int]:
        return {}

    def asked_all(self) -> dict[str, Any]:
        running = self.running
        return {"by": "endpoint", "base_url": running.base_url, "model": running.model, "weights": "as its owner says"}

    def close(self, *, finished: bool) -> None: ...


ServedCell = PoolCell | EndpointCell
"""A checkpoint that serves an attempt at a cell, now or once it is loaded."""
Serving = PoolServing | EndpointServing
"""A source of served checkpoints."""
