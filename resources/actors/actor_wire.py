"""Messages between an actor's process and the holders of its handle, over TCP. Needs only the standard library.

Both sides first prove knowledge of the key without sending it, so that neither unpickles a stranger's data. Frames
follow: a head (call, kind, length of the method's name, length of the body), the name, the body.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("!QBHQ")
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_HANDSHAKE_SECONDS = 10.0
_COPIED_BYTES = 1 << 16  # up to this size, a single packet is worth the copy
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 5, 3, 3
_UNANSWERED_MILLISECONDS = 20_000  # a host that vanished sends nothing, not even a reset


class Kind(IntEnum):
    """Kind of content in the body of a frame."""

    CALL = 0
    RESULT = 1
    RAISED = 2
    """A pickle of the fields of `resources.jobs.results.Raised`."""
    UNREADABLE = 3
    """UTF-8: why the arguments could not be unpickled, or the result not pickled."""
    CANCEL = 4
    """The number of another call, in digits, to cancel before it begins."""
    CANCELLED = 5
    """Empty: the call was cancelled before it began; a `CANCEL` frame is answered with this kind, or with `RESULT`."""


class Frame(NamedTuple):
    """A message; `call` is a number that the caller chose."""

    call: int
    kind: Kind
    method: str
    body: bytes | bytearray


class WrongKey(ConnectionError):
    """The other side does not have the key of this actor, or is another program."""


def send(connection: socket.socket, frame: Frame) -> None:
    """Sends a frame; callers must prevent concurrent sends on the connection."""
    name = frame.method.encode()
    head = _HEAD.pack(frame.call, frame.kind, len(name), len(frame.body)) + name
    if len(frame.body) <= _COPIED_BYTES:
        connection.sendall(head + frame.body)
    else:
        connection.sendall(head)
        connection.sendall(frame.body)


def receive(connection: socket.socket) -> Frame | None:
    """Returns the next frame; None if the other side has closed the connection, even within a frame."""
    if (head := _exactly(connection, _HEAD.size)) is None:
        return None
    call, kind, name_length, body_length = _HEAD.unpack(head)
    name = _exactly(connection, name_length)
    body = _exactly(connection, body_length)
    if name is None or body is None:
        return None
    return Frame(call, Kind(kind), name.decode(), body)


def greet_caller(
    connection: socket.socket, key: bytes, *, actor: str, timeout_seconds: float = _HANDSHAKE_SECONDS
) -> None:
    """Runs the actor's side of the handshake on a freshly accepted connection, within `timeout_seconds` in total.

    The job id `actor` detects a port that another actor took over. Raises OSError for a caller that is gone, is too
    slow, or does not have the key.
    """
    _tune(connection)
    deadline = time.monotonic() + timeout_seconds
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours)
    answer = _exactly(connection, _NONCE_BYTES + _PROOF_BYTES, deadline=deadline)
    if answer is None:
        raise WrongKey("the caller went away")
    nonces = ours + bytes(answer[:_NONCE_BYTES])
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(key, b"caller", nonces, actor)):
        raise WrongKey("the caller does not know the key")
    connection.sendall(_proof(key, b"actor", nonces, actor))
    connection.settimeout(None)


def greet_actor(connection: socket.socket, key: bytes, *, actor: str) -> None:
    """Runs the caller's side of the handshake; see `greet_caller`."""
    _tune(connection)
    theirs = _exactly(connection, _NONCE_BYTES)
    if theirs is None:
        raise WrongKey("nothing was said")
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = bytes(theirs) + ours
    connection.sendall(ours + _proof(key, b"caller", nonces, actor))
    answer = _exactly(connection, _PROOF_BYTES)
    if answer is None or not hmac.compare_digest(answer, _proof(key, b"actor", nonces, actor)):
        raise WrongKey("it does not know this actor's key")
    connection.settimeout(None)


def _proof(key: bytes, role: bytes, nonces: bytes, actor: str) -> bytes:
    return hmac.digest(key, b"\0".join([role, nonces, actor.encode()]), "sha256")


def _exactly(connection: socket.socket, count: int, *, deadline: float | None = None) -> bytearray | None:
    content = bytearray(count)
    view, position = memoryview(content), 0
    while position < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side takes too long")
            connection.settimeout(left)
        received = connection.recv_into(view[position:])
        if received == 0:
            return None
        position += received
    return content


def _tune(connection: socket.socket) -> None:
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (  # some systems lack some of these options
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNANSWERED_MILLISECONDS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
