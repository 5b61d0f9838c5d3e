"""The process of an actor: constructs the object, listens, and calls its methods for callers with the key.

At most `max_concurrency` methods run at once, including `async` methods; further calls wait in the order of arrival.
Each connection has a reading and a writing thread, so a caller that does not read its answers blocks no other caller.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import cloudpickle

from resources.actors.actor_wire import Frame, Kind, greet_caller, receive, send
from resources.backends.programs.run_call import raised
from resources.jobs.addresses import own_address
from resources.jobs.announcements import announce
from resources.jobs.user_key import user_key
from resources.settings import job_id

_BACKLOG = 512
_MOST_STRANGERS = 64
_SHARE_OF_DESCRIPTORS = 4
_PAUSE_SECONDS = 0.05
_log = logging.getLogger("assay.actor")


def serve_actor(
    actor_class: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    max_concurrency: int,
    host: str | None,
) -> None:
    """Constructs the object and serves it until this process is ended; a failing constructor ends the process.

    When `host` is None, it listens on the address under which other hosts reach this machine.
    """
    actor = actor_class(*args, **kwargs)
    host = host or own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=_BACKLOG) as listener:
        port = listener.getsockname()[1]
        announce(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        ActorServer(actor, max_concurrency=max_concurrency).serve(listener)


class ActorServer:
    """Calls methods of an object, at most `max_concurrency` at the same time."""

    def __init__(self, actor: object, *, max_concurrency: int) -> None:
        self._actor = actor
        self._key = user_key()
        self._job_id = job_id()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._strangers = _Strangers(max(1, min(_MOST_STRANGERS, descriptors // _SHARE_OF_DESCRIPTORS)))
        self._workers = ThreadPoolExecutor(max_concurrency, thread_name_prefix="actor")
        self._loop = asyncio.new_event_loop()  # of all `async` methods, which may share locks and connections
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def serve(self, listener: socket.socket) -> None:
        """Accepts callers until the listener is closed; unauthenticated connections cannot end or block it."""
        was_refused = False
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
                self._strangers.add(connection)
                try:
                    threading.Thread(target=self._listen_to, args=(connection,), daemon=True).start()
                except RuntimeError:
                    self._strangers.remove(connection)
                    connection.close()
                    raise
                was_refused = False
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left for now: retried after a pause
                if not was_refused:
                    _log.warning("connections are not accepted now: %s", error)
                was_refused = True
                time.sleep(_PAUSE_SECONDS)

    def _listen_to(self, connection: socket.socket) -> None:
        outbox: SimpleQueue[Frame | None] = SimpleQueue()
        with connection, suppress(OSError):  # the caller is gone, or failed the handshake
            try:
                greet_caller(connection, self._key, actor=self._job_id)
            finally:
                self._strangers.remove(connection)
            threading.Thread(target=_write, args=(connection, outbox), daemon=True).start()
            calls: dict[int, Future[None]] = {}
            try:
                while (frame := receive(connection)) is not None:
                    if frame.kind is Kind.CANCEL:
                        _cancel(frame, calls, outbox)
                        continue
                    call = calls[frame.call] = self._workers.submit(self._call, frame, outbox)
                    call.add_done_callback(lambda _, number=frame.call: calls.pop(number, None))
            finally:
                outbox.put(None)

    def _call(self, frame: Frame, outbox: SimpleQueue[Frame | None]) -> None:
        kind, body = self._outcome(frame)
        outbox.put(Frame(frame.call, kind, "", body))

    def _outcome(self, frame: Frame) -> tuple[Kind, bytes]:
        try:
            args, kwargs = pickle.loads(frame.body)
        except Exception as error:  # noqa: BLE001 - the objects' own pickling code can raise anything
            return Kind.UNREADABLE, f"arguments of {frame.method}: {type(error).__name__}: {error}".encode()
        try:
            value = self._method(frame.method)(*args, **kwargs)
            if inspect.isawaitable(value):
                value = asyncio.run_coroutine_threadsafe(_awaited(value), self._loop).result()
        except BaseException as error:  # noqa: BLE001 - any exception of the method belongs to its caller
            return Kind.RAISED, pickle.dumps(raised(error))
        try:
            return Kind.RESULT, cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - as above
            problem = f"result of {frame.method}, a {type(value).__name__}: {type(error).__name__}: {error}"
            return Kind.UNREADABLE, problem.encode()

    def _method(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name} is not a public method")
        return getattr(self._actor, name)


# Connections in the handshake; beyond the limit, the oldest is ended.
class _Strangers:
    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._connections) >= self._most:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)


def _cancel(order: Frame, calls: Mapping[int, Future[None]], outbox: SimpleQueue[Frame | None]) -> None:
    number = int(order.body)
    call = calls.get(number)  # None if it has ended
    kind = Kind.CANCELLED if call is not None and call.cancel() else Kind.RESULT
    if kind is Kind.CANCELLED:
        outbox.put(Frame(number, kind, "", b""))
    outbox.put(Frame(order.call, kind, "", b""))


async def _awaited(value: Any) -> Any:
    return await value


def _write(connection: socket.socket, outbox: SimpleQueue[Frame | None]) -> None:
    with suppress(OSError):  # the caller is gone; the reading thread notices it too
        while (frame := outbox.get()) is not None:
            send(connection, frame)
