"""Who answers an evaluator's requests: a pool that we start, one that is kept up, or an endpoint that runs already."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pools.endpoint import RunningModel
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Servable
from pools.pool.session import OpenCell, PoolSession
from resources.errors import EndpointUnusable, EvaluationInterrupted
from resources.settings import settings

CLIENT_CONCURRENCY = 16
CLIENT_TIMEOUT_SECONDS = 1800.0
"""What an endpoint that nobody here started is trusted with."""


class ServedCell(Protocol):
    """A checkpoint that answers, or will, for one attempt at one cell."""

    @property
    def running(self) -> RunningModel:
        """Where to ask."""
        ...

    def check(self) -> None:
        """Raises if nobody will answer any more."""
        ...

    def counts(self) -> dict[str, int]:
        """Requests of this attempt counted so far, by outcome; empty where nobody counts."""
        ...

    def asked_all(self) -> dict[str, Any]:
        """Lets the checkpoint go, since nothing more will be asked; tells how it was served, for the record."""
        ...

    def close(self, *, finished: bool) -> None:
        """Ends the attempt; `finished` says that the cell has its record, and nobody needs its answers again."""
        ...


class Serving(Protocol):
    """Somebody who can be asked for checkpoints."""

    @property
    def checkpoints_at_once(self) -> int:
        """How many checkpoints it works on at once; 0 for an endpoint that serves one whatever is asked."""
        ...

    def has_prompt_logprobs(self, name: str) -> bool:
        """Whether a checkpoint will answer with log-probabilities of its prompts; asks for it where that is unknown."""
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

    def interrupt(self) -> None:
        """Makes every open cell fail at its next check, since the run is being ended."""
        ...


class Interruption:
    """Whether a run has been told to end."""

    def __init__(self) -> None:
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """Tells it to end."""
        self._interrupted.set()

    def raise_if_interrupted(self) -> None:
        """Raises EvaluationInterrupted once it has been."""
        if self._interrupted.is_set():
            raise EvaluationInterrupted(
                expected="the run to go on until the cell has its record",
                found="it was told to end",
                remedy="run it again: what was answered is in the journal",
            )


class PoolServing(Interruption):
    """A pool, through a session of ours."""

    def __init__(self, session: PoolSession) -> None:
        super().__init__()
        self._session = session

    @property
    def checkpoints_at_once(self) -> int:
        """As many as there are replicas."""
        return self._session.access.config.resource_config.replicas

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        """See `Serving.bring`."""
        self._session.bring(checkpoints)

    def has_prompt_logprobs(self, name: str) -> bool:
        """See `Serving.has_prompt_logprobs`."""
        self.raise_if_interrupted()
        return self._session.has_prompt_logprobs(name)

    def open(self, name: str, *, cell: str, attempt: str, mirror: str, in_chat: bool) -> ServedCell:
        """See `Serving.open`."""
        self.raise_if_interrupted()
        opened = self._session.open(name, cell=cell, attempt=attempt, mirror=mirror)
        opened = replace(opened, running=replace(opened.running, apply_chat_template=in_chat))
        return _PoolCell(self, self._session, name, opened)


class _PoolCell:
    def __init__(self, serving: PoolServing, session: PoolSession, name: str, opened: OpenCell) -> None:
        self._serving = serving
        self._session = session
        self._name = name
        self._opened = opened

    @property
    def running(self) -> RunningModel:
        return self._opened.running

    def check(self) -> None:
        self._serving.raise_if_interrupted()
        self._session.check(self._name)

    def counts(self) -> dict[str, int]:
        return self._session.cell_counts(self._opened).model_dump()

    def asked_all(self) -> dict[str, Any]:
        report = self._session.report_of(self._name, self._opened)
        seconds = self._session.replica_seconds(self._name) - self._opened.replica_seconds
        self._session.unwant(self._name)
        # Answered from the journal alone, a checkpoint needs no engine.
        loaded = (
            report.model_dump(exclude={"number", "model", "digest", "failure"}) if report else {"how": "not needed"}
        )
        engine = self._session.engine_identity()
        return {"by": "pool", **loaded, "replica_seconds": round(max(0.0, seconds), 3), "engine": engine}

    def close(self, *, finished: bool) -> None:
        self._session.close_cell(self._opened, finished=finished)


class EndpointServing(Interruption):
    """Somebody else's endpoint, of which nothing is known but its address; it serves what it serves."""

    checkpoints_at_once = 0

    def __init__(self, base_url: str, checkpoints: Mapping[str, Servable], *, served_name: str | None = None) -> None:
        super().__init__()
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
        self._engine.prove_it_answers(model)
        running = RunningModel(
            base_url=self._base_url,
            model=model,
            tokenizer=str(self._checkpoints[name].tokenizer),
            capacity=CLIENT_CONCURRENCY,
            prompt_logprobs=self._engine.has_prompt_logprobs(model),
            request_timeout_seconds=CLIENT_TIMEOUT_SECONDS,
            apply_chat_template=in_chat,
            max_model_len=self._engine.max_model_len(model),
            api_key=self._key,
        )
        return _EndpointCell(self, running, self._engine)

    def _model(self, name: str) -> str:
        """The name under which the endpoint offers a checkpoint.

        Raises:
            EndpointUnusable: it does not, or does not answer.
        """
        offered = self._engine.model_names()
        # A server that was given no name uses the path it was given.
        known = [self._served_name] if self._served_name else [name, self._checkpoints[name].uri]
        model = next((one for one in known if one in offered), None)
        if model is None:
            raise EndpointUnusable(
                expected=f"{self._base_url} to serve {' or '.join(known)}",
                found=f"it offers {', '.join(offered) or 'no model'}",
                remedy="serve the checkpoint under that name, or give the name it has there as served_model_name",
            )
        return model


class _EndpointCell:
    def __init__(self, serving: EndpointServing, running: RunningModel, engine: EngineClient) -> None:
        self._serving = serving
        self.running = running
        self._engine = engine

    def check(self) -> None:
        """Raises if the endpoint is gone, which the harness would put down to itself."""
        self._serving.raise_if_interrupted()
        self._engine.check_reachable()

    def counts(self) -> dict[str, int]:
        return {}

    def asked_all(self) -> dict[str, Any]:
        running = self.running
        return {"by": "endpoint", "base_url": running.base_url, "model": running.model, "weights": "as its owner says"}

    def close(self, *, finished: bool) -> None:
        """There is nothing to close."""
