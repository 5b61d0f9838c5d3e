"""A process's connection to an actor: opened at the first call, reopened after a restart, closed when the actor dies.

A single thread per actor and process does the work. A call is sent at once over an open connection, and is queued while
the actor has not started. A broken connection fails the calls in flight; the job's status provides the reason.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

from resources.actors.actor_wire import Frame, Kind, WrongKey, greet_actor, receive, send
from resources.errors import ActorCallLost, ActorDied, ActorRestarted, AssayError, BackendUnavailable
from resources.jobs.jobs import JobDetails, JobHandle, JobStatus, growing_pauses, polls
from resources.jobs.user_key import USER_KEY_VARIABLE, user_key

_CONNECT_SECONDS = 5.0  # per attempt
_SHOWN_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Timeouts before a line gives an actor up."""

    unreachable_seconds: float = 30.0
    """Time for an announced address to answer; stale addresses change much sooner: a job's end is seen within 1 s."""
    unexplained_seconds: float = 10.0
    """Time for the job's status to explain a broken connection while its address is still announced."""
    silent_seconds: float = 5.0
    """Time between two polls of the job while calls are in flight."""


class ActorLine:
    """Carries calls to an actor and its answers back; `name` is for messages."""

    def __init__(self, job: JobHandle, *, name: str, patience: Patience = Patience()) -> None:
        self._job = job
        self._name = name
        self._patience = patience
        self._lock = threading.Lock()  # of all fields below; also held while sending, to keep frames whole
        self._numbers = itertools.count()
        self._on_their_way: dict[int, Future[Frame]] = {}
        self._waiting: deque[tuple[Frame, Future[Frame]]] = deque()
        self._connection: socket.socket | None = None
        self._works = False
        self._address: str | None = None
        self._attempts = 0
        self._death: ActorDied | None = None

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def call(self, method: str, body: bytes) -> Future[Frame]:
        """Sends a call; the future receives the answer's frame or an exception."""
        future: Future[Frame] = Future()
        with self._lock:
            if self._death is not None:
                future.set_exception(_again(self._death))
                return future
            frame = Frame(next(self._numbers), Kind.CALL, method, body)
            if self._connection is not None:
                self._send(frame, future)
            else:
                self._waiting.append((frame, future))
                if not self._works:
                    self._works = True
                    threading.Thread(target=self._work, name=f"actor {self._name}", daemon=True).start()
        return future

    def cancel(self, answer: Future[Frame]) -> bool:
        """Cancels a call before it begins; returns False if it has begun, or if that is unknown."""
        with self._lock:
            for waiting in [waiting for waiting in self._waiting if waiting[1] is answer]:
                self._waiting.remove(waiting)
                answer.set_result(Frame(waiting[0].call, Kind.CANCELLED, "", b""))
                return True
            number = next((number for number, sent in self._on_their_way.items() if sent is answer), None)
            if number is None or self._connection is None:
                return False
            heard: Future[Frame] = Future()
            self._send(Frame(next(self._numbers), Kind.CANCEL, "", b"%d" % number), heard)
        try:
            return heard.result().kind is Kind.CANCELLED
        except AssayError:  # the actor died, which ends the call too
            return False

    def _send(self, frame: Frame, future: Future[Frame]) -> None:
        assert self._connection is not None
        self._on_their_way[frame.call] = future
        with suppress(OSError):  # the reading thread sees the error too, and fails the calls in flight
            send(self._connection, frame)

    def _work(self) -> None:
        while True:
            try:
                self._connect()
                self._read()
                if self._on_their_way:  # nothing is sent without a connection
                    self._fail(self._judge(), only_sent=True)
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: waiting callers get the error
                if isinstance(error, ActorDied):
                    self._death = error
                self._fail(error)
            with self._lock:
                if not self._waiting:
                    self._works = False
                    return

    def _connect(self) -> None:
        refused_address, refused_since = None, 0.0
        for _ in polls():
            if self._job.status().finished:
                raise death_of(self._job, self._job.details(), name=self._name)
            if address := self._job.announced():
                attempts = self._job.details().attempts
                if address != refused_address:
                    refused_address, refused_since = address, time.monotonic()
                try:
                    connection = self._connected(address)
                except OSError as error:
                    if time.monotonic() - refused_since > self._patience.unreachable_seconds:
                        raise self._unreachable(address, error) from error
                else:
                    self._begin(connection, address, attempts)
                    return

    def _connected(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS)
        try:
            greet_actor(connection, user_key(), actor=self._job.job_id)
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, connection: socket.socket, address: str, attempts: int) -> None:
        with self._lock:
            self._connection, self._address, self._attempts = connection, address, attempts
            while self._waiting:
                self._send(*self._waiting.popleft())

    def _read(self) -> None:
        connection = self._connection
        assert connection is not None
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        try:
            while True:
                if not poll.poll(self._patience.silent_seconds * 1000):
                    if self._on_their_way and self._has_ended():
                        return
                    continue
                if (frame := receive(connection)) is None:
                    return
                with self._lock:
                    future = self._on_their_way.pop(frame.call, None)
                if future is not None:
                    future.set_result(frame)
        except OSError:
            return
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _has_ended(self) -> bool:
        with suppress(AssayError):  # an unreachable backend is no evidence about the actor
            return self._job.status().finished
        return False

    def _judge(self) -> AssayError:
        deadline = time.monotonic() + self._patience.unexplained_seconds
        pauses = growing_pauses()
        while True:
            details = self._job.details()
            if details.status.finished:
                raise death_of(self._job, details, name=self._name)
            address = self._job.announced()
            moved = address is not None and address != self._address
            over = details.failures + details.preemptions >= self._attempts  # False: its start is not recorded yet
            if moved or details.attempts > self._attempts or (details.status is JobStatus.PENDING and over):
                return ActorRestarted(
                    expected=f"actor {self._name} to answer",
                    found=f"it was ended from outside, and has started or will start again (job {details.job_id})",
                    remedy="Repeat the call if it may run twice; the actor's state is lost.",
                )
            # A missing address only means that the process ended: the job is about to end, or to try again.
            if address is not None and time.monotonic() > deadline:
                return ActorCallLost(
                    expected=f"actor {self._name} to answer",
                    found=f"the connection to {self._address} broke, and its job is still running",
                    remedy="Make the call again if it does no harm twice.",
                )
            time.sleep(next(pauses))

    def _unreachable(self, address: str, error: OSError) -> BackendUnavailable:
        return BackendUnavailable(
            expected=f"actor {self._name} to answer at {address}",
            found=str(error) or type(error).__name__,
            remedy=f"Give both sides the same {USER_KEY_VARIABLE}, or hand the handle to a job."
            if isinstance(error, WrongKey)
            else "Call it from a host that can reach that address, such as from a job of the same backend.",
        )

    def _fail(self, error: Exception, *, only_sent: bool = False) -> None:
        with self._lock:
            futures = list(self._on_their_way.values())
            self._on_their_way.clear()
            if not only_sent:
                futures += [future for _, future in self._waiting]
                self._waiting.clear()
        for future in futures:
            future.set_exception(_again(error))


def death_of(job: JobHandle, details: JobDetails, *, name: str) -> ActorDied:
    """Returns the error for an actor after the end of its `job`, with its reason and its last log lines."""
    ended = "was stopped" if details.status is JobStatus.STOPPED else f"has ended: {details.status}"
    reason = f", {details.reason}" if details.reason else ""
    return ActorDied(
        expected=f"actor {name} (job {details.job_id}) to be alive",
        found=f"it {ended}{reason}\n{job.logs(_SHOWN_LINES)}".rstrip(),
        remedy="Fix the error in its last lines, or create the actor again; max_restarts covers ends from outside.",
    )


def _again(error: Exception) -> Exception:
    return copy(error) if isinstance(error, AssayError) else error
