"""Handles on actors: `handle.method(...)` calls and waits, `handle.method.remote(...)` returns a future.

A handle can be pickled, and used in any process with access to the backend and the user's key, such as the user's jobs.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import Future
from typing import Any

import cloudpickle

from resources.actors.actor_line import ActorLine, death_of
from resources.actors.actor_wire import Frame, Kind
from resources.errors import ActorCallCancelled, ActorMethodFailed, BadInput, JobTimeout
from resources.jobs.jobs import Client, JobHandle
from resources.jobs.results import Raised
from resources.jobs.waiting import growing_pauses


class ActorFuture:
    """The pending answer of an actor."""

    def __init__(self, answer: Future[Frame], *, line: ActorLine, full_name: str) -> None:
        self._answer = answer
        self._line = line
        self._full_name = full_name

    def done(self) -> bool:
        return self._answer.done()

    is_done = done

    def cancel(self) -> bool:
        """Cancels the call before it begins, and returns True; False if it runs, has finished, or is lost."""
        return not self.done() and self._line.cancel(self._answer)

    def result(self, timeout: float | None = None) -> Any:
        """Returns the method's result; blocks for at most `timeout` seconds."""
        try:
            frame = self._answer.result(timeout)
        except TimeoutError:
            if self._answer.done():
                raise
            raise JobTimeout(
                expected=f"an answer of {self._full_name} after {timeout:g} s",
                found="none yet",
                remedy="Wait longer, or ask what the actor's job is doing.",
            ) from None
        if frame.kind is Kind.RESULT:
            return self._read(frame)
        if frame.kind is Kind.CANCELLED:
            raise ActorCallCancelled(
                expected=f"an answer of {self._full_name}",
                found="the call was cancelled before it began",
                remedy="Make it again.",
            )
        if frame.kind is Kind.RAISED:
            Raised(*pickle.loads(frame.body)).raise_here(self._failed)
        raise self._unreadable(frame.body.decode())

    def _read(self, frame: Frame) -> Any:
        try:
            return pickle.loads(frame.body)
        except Exception as error:  # the objects' own pickling code can raise anything
            raise self._unreadable(f"its result: {type(error).__name__}: {error}") from error

    def _failed(self, problem: str) -> ActorMethodFailed:
        return ActorMethodFailed(
            expected=f"{self._full_name} to return, or to raise what can be sent to another process",
            found=problem,
            remedy="Read its traceback above.",
        )

    def _unreadable(self, problem: str) -> BadInput:
        return BadInput(
            expected=f"arguments and result of {self._full_name} that can be sent between processes",
            found=problem,
            remedy="Pass values, no open files, locks or connections; install their modules on both sides.",
        )


class ActorMethod:
    """A method of an actor, called through a handle."""

    def __init__(self, line: ActorLine, *, actor: str, method: str) -> None:
        self._line = line
        self._full_name = f"{actor}.{method}"
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> ActorFuture:
        """Calls the method and returns at once, even before the actor has started."""
        try:
            body = cloudpickle.dumps((args, kwargs))
        except Exception as error:  # the objects' own pickling code can raise anything
            raise BadInput(
                expected=f"arguments of {self._full_name} that can be pickled, since they are sent to another process",
                found=f"{type(error).__name__}: {error}",
                remedy="Pass values; open files, locks and connections inside the method.",
            ) from error
        return ActorFuture(self._line.call(self._method, body), line=self._line, full_name=self._full_name)


class ActorHandle:
    """A handle on an actor, with every public method of its object, and its own `name`, `job` and `wait_ready`."""

    def __init__(self, client: Client, job: JobHandle, *, name: str) -> None:
        self._client = client
        self._job = job
        self._name = name
        self._line: ActorLine | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def job(self) -> JobHandle:
        return self._job

    def wait_ready(self, timeout: float | None = None) -> None:
        """Blocks until the object is constructed and accepts calls, for at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pauses = growing_pauses()
        while True:
            if self._job.status().finished:
                raise death_of(self._job, self._job.details(), name=self._name)
            if self._job.announced():
                return
            if deadline is not None and time.monotonic() >= deadline:
                details = self._job.details()
                raise JobTimeout(
                    expected=f"actor {self._name} to be ready after {timeout:g} s",
                    found=f"its job is {details.status}" + (f": {details.reason}" if details.reason else ""),
                    remedy="Wait longer, or read the logs of its job.",
                )
            time.sleep(next(pauses))

    def __getattr__(self, method: str) -> ActorMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        if self._line is None:
            self._line = _line_to(self._client.url, self._job, name=self._name)
        return ActorMethod(self._line, actor=self._name, method=method)

    def __repr__(self) -> str:
        return f"ActorHandle({self._name!r}, job {self._job.job_id})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._client.url, self._job.job_id, self._name)


def _attached(url: str, job_id: str, name: str) -> ActorHandle:
    from resources.backends.choice import client_from_url  # importing it here keeps this module free of backends

    client = client_from_url(url)
    return ActorHandle(client, client.attach(job_id), name=name)


_lines: dict[tuple[int, str, str], ActorLine] = {}
_lines_lock = threading.Lock()


def _line_to(url: str, job: JobHandle, *, name: str) -> ActorLine:
    with _lines_lock:
        for key in [key for key, line in _lines.items() if line.is_dead]:
            del _lines[key]
        return _lines.setdefault((os.getpid(), url, job.job_id), ActorLine(job, name=name))
