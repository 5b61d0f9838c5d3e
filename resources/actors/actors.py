"""Actors: objects that live in memory in a process of a job, on any backend, called from other processes by handles.

An actor dies with its job, and its job with the process that created it, unless it outlives its parent. A handle calls
and waits by `handle.method(...)`; `handle.method.remote(...)` returns a future. A handle can be pickled, and used in
any process with access to the backend and the user's key, such as the user's jobs.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from resources.actors.actor_line import ActorLine, death_of
from resources.actors.actor_server import serve_actor
from resources.actors.actor_wire import Frame, Kind
from resources.config import ResourceConfig, TpuConfig
from resources.errors import ActorCallCancelled, ActorMethodFailed, BadInput, JobTimeout
from resources.jobs.jobs import Call, Client, EnvironmentConfig, JobHandle, JobRequest, create_environment, polls
from resources.jobs.results import Raised
from resources.jobs.user_key import USER_KEY_VARIABLE, user_key

_PREFIX = "actor-"  # of the names of actors' jobs
_ENDED_AT_ONCE = 16


class ActorFuture:
    """The pending answer of an actor."""

    def __init__(self, answer: Future[Frame], *, line: ActorLine, full_name: str) -> None:
        self._answer = answer
        self._line = line
        self._full_name = full_name

    def done(self) -> bool:
        return self._answer.done()

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
            try:
                return pickle.loads(frame.body)
            except Exception as error:  # the objects' own pickling code can raise anything
                raise self._unreadable(f"its result: {type(error).__name__}: {error}") from error
        if frame.kind is Kind.CANCELLED:
            raise ActorCallCancelled(
                expected=f"an answer of {self._full_name}",
                found="the call was cancelled before it began",
                remedy="Make it again.",
            )
        if frame.kind is Kind.RAISED:
            Raised(*pickle.loads(frame.body)).raise_here(self._failed)
        raise self._unreadable(frame.body.decode())

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
        self.job = job
        self.name = name
        self._line: ActorLine | None = None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Blocks until the object is constructed and accepts calls, for at most `timeout` seconds."""
        for _ in polls(timeout):
            if self.job.status().finished:
                raise death_of(self.job, self.job.details(), name=self.name)
            if self.job.announced():
                return
        details = self.job.details()
        raise JobTimeout(
            expected=f"actor {self.name} to be ready after {timeout:g} s",
            found=f"its job is {details.status}" + (f": {details.reason}" if details.reason else ""),
            remedy="Wait longer, or read the logs of its job.",
        )

    def __getattr__(self, method: str) -> ActorMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        if self._line is None:
            self._line = _line_to(self._client.url, self.job, name=self.name)
        return ActorMethod(self._line, actor=self.name, method=method)

    def __repr__(self) -> str:
        return f"ActorHandle({self.name!r}, job {self.job.job_id})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._client.url, self.job.job_id, self.name)


def _attached(url: str, job_id: str, name: str) -> ActorHandle:
    from resources.backends.current import client_from_url  # importing it here keeps this module free of backends

    client = client_from_url(url)
    return ActorHandle(client, client.attach(job_id), name=name)


_lines: dict[tuple[int, str, str], ActorLine] = {}
_lines_lock = threading.Lock()


def _line_to(url: str, job: JobHandle, *, name: str) -> ActorLine:
    with _lines_lock:
        for key in [key for key, line in _lines.items() if line.is_dead]:
            del _lines[key]
        return _lines.setdefault((os.getpid(), url, job.job_id), ActorLine(job, name=name))


def actor_variables() -> dict[str, str]:
    """Returns the variables that a job on another machine needs to call actors and read results of this user."""
    return {USER_KEY_VARIABLE: user_key().decode()}


class ActorGroup(list[ActorHandle]):
    """Handles on actors that were created together; `name` is for messages."""

    def __init__(self, *, name: str) -> None:
        super().__init__()
        self._name = name
        self._discovered: set[str] = set()

    def ready(self) -> list[ActorHandle]:
        return [actor for actor in self if actor.job.announced() and not actor.job.status().finished]

    def discover_new(self) -> list[ActorHandle]:
        """Returns the ready actors that no earlier call of this method returned."""
        actors = [actor for actor in self.ready() if actor.job.job_id not in self._discovered]
        self._discovered.update(actor.job.job_id for actor in actors)
        return actors

    def wait_ready(self, count: int | None = None, *, timeout: float | None = None) -> list[ActorHandle]:
        """Blocks for up to `timeout` seconds until `count` actors, all when None, accept calls; returns them."""
        required = len(self) if count is None else count
        if required > len(self):
            raise BadInput(
                expected=f"at most {len(self)} actors, the size of group {self._name}",
                found=f"count={count}",
                remedy="Wait for fewer, or create more.",
            )
        for _ in polls(timeout):
            if len(ready := self.ready()) >= required:
                return ready
            ended = [actor for actor in self if actor.job.status().finished]
            if len(self) - len(ended) < required:
                ended[0].wait_ready()  # raises
        raise JobTimeout(
            expected=f"{required} actors of group {self._name} to be ready after {timeout:g} s",
            found=f"{len(self.ready())} are; jobs: {', '.join(actor.job.status() for actor in self)}",
            remedy="Wait longer, or for fewer.",
        )

    def shutdown(self) -> None:
        """Ends all actors, and returns after their jobs have ended."""
        with ThreadPoolExecutor(_ENDED_AT_ONCE) as workers:
            for ending in [workers.submit(actor.job.terminate) for actor in self]:
                ending.result()


def create_actor(
    client: Client,
    actor_class: Callable[..., object],
    *args: Any,
    name: str,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    max_concurrency: int = 1,
    max_restarts: int = 0,
    outlives_parent: bool = False,
    **kwargs: Any,
) -> ActorHandle:
    """Starts an actor; returns before its object `actor_class(*args, **kwargs)` exists, and calls wait until it does.

    Args:
        name: for `get_actor`, while it lives.
        resources: 1 CPU when None.
        environment: `create_environment()` when None.
        max_concurrency: number of its methods that may run at once; the object must be safe for that.
        max_restarts: number of restarts, with a new object, after it was ended from outside, for example by preemption.
            An actor that crashes, or fails in its constructor, is dead at once.
        outlives_parent: keeps it running after the process that created it ends.
    """
    if max_concurrency < 1:
        raise BadInput(expected="max_concurrency of at least 1", found=str(max_concurrency), remedy="Correct it.")
    resources = resources or ResourceConfig()
    if isinstance(resources.device, TpuConfig) and resources.device.slice.vms > 1:
        raise BadInput(
            expected="a single machine for an actor, which is a single object",
            found=f"{resources.device.variant}, a slice of {resources.device.slice.vms} VMs",
            remedy="Take a slice of a single VM, or submit a job: it runs on every VM.",
        )
    environment = environment or create_environment()
    variables = {**environment.env_vars, **actor_variables()}
    host = "127.0.0.1" if client.is_local else None
    request = JobRequest(
        _PREFIX + name,
        Call(serve_actor, (actor_class, args, kwargs, max_concurrency, host)),
        resources=resources,
        environment=dataclasses.replace(environment, env_vars=variables),
        replicas=1,
        max_retries_preemption=max_restarts,
        outlives_parent=outlives_parent,
    )
    return ActorHandle(client, client.submit(request), name=name)


def create_actor_group(
    client: Client, actor_class: Callable[..., object], *args: Any, name: str, count: int, **options: Any
) -> ActorGroup:
    """Starts `count` equal, independent actors named `<name>-0`, `<name>-1` …; other arguments as in `create_actor`."""
    if count < 1:
        raise BadInput(expected="at least 1 actor", found=f"count={count}", remedy="Correct it.")
    group = ActorGroup(name=name)
    try:
        for index in range(count):
            group.append(create_actor(client, actor_class, *args, name=f"{name}-{index}", **options))
    except BaseException:
        group.shutdown()
        raise
    return group


def get_actor(client: Client, name: str) -> ActorHandle:
    """Returns the living actor of that name, from any process; the newest if several processes chose the same name."""
    living = [details for details in client.jobs() if not details.status.finished]
    names = [details.name.removeprefix(_PREFIX) for details in living if details.name.startswith(_PREFIX)]
    for details in living:
        if details.name == _PREFIX + name:
            return ActorHandle(client, client.attach(details.job_id), name=name)
    raise BadInput(
        expected=f"a living actor named {name}",
        found=f"only {', '.join(sorted(names))}" if names else "no actors at all",
        remedy="Correct the name, or create it first.",
    )
