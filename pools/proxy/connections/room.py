"""Memory shared by the bodies of all requests and answers, and the choice of answers to read on when it is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PART_BYTES = 2**20
"""Bytes of each answer that are not counted: small answers never wait."""


@dataclass(slots=True)
class BodyRoom:
    """Bytes that the bodies of all connections together may still take.

    A request's bytes count from their arrival to the end of its answer; an answer's bytes beyond its first MiB count
    until its client has taken it. Answers take half of the room; beyond it, only the oldest incomplete answer is read
    further. That answer waits too while complete answers hold more than a quarter of the room, since a client that
    takes nothing of its answer loses its connection in time.
    """

    free: int = 2**29
    _size: int = field(init=False)
    _answers: int = 0
    _whole: int = 0
    _coming: dict[AnswerShare, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._size = self.free

    @property
    def free_for_requests(self) -> int:
        """Bytes that requests may still take; answers beyond their half make no request fail."""
        return self.free + max(0, self._answers - self._size // 2)

    def give_back(self, size: int) -> None:
        """Gives back bytes of a request, and resumes answers that waited for them."""
        self.free += size
        self._wake()

    def _may_go_on(self, answer: AnswerShare) -> bool:
        if self.free > 0 and self._answers < self._size // 2:
            return True
        oldest = next((other for other in self._coming if not other.blocked), answer)
        return self._whole <= self._size // 4 and answer is oldest

    def _wake(self) -> None:
        for answer in tuple(self._coming):
            if answer.blocked or answer.resume is None:
                continue
            if not self._may_go_on(answer):
                break
            answer.resume()


class AnswerShare:
    """Bytes of the room for the answer to a single request."""

    __slots__ = ("_ended", "_room", "_taken", "_whole", "blocked", "resume")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._taken = 0
        self._whole = self._ended = self.blocked = False
        self.resume: Callable[[], None] | None = None

    def hold(self, size: int, resume: Callable[[], None] | None = None, *, blocked: bool = False) -> bool:
        """Counts the bytes of an incomplete answer; returns True if more may be read now, else calls `resume` later.

        While `blocked`, its client must take some of it first, and another answer counts as the oldest.
        """
        if self._ended or size <= PART_BYTES:
            return True
        self.resume = resume
        self._take(size - PART_BYTES)
        self._room._coming[self] = None
        before, self.blocked = self.blocked, blocked
        if blocked and not before:
            self._room._wake()
        return self._room._may_go_on(self)

    def complete(self) -> None:
        """Marks the answer as complete: it waits for its check, and for its client."""
        if self._taken and not self._whole:
            self._whole = True
            self._room._whole += self._taken
            self._leave()

    def drop(self) -> None:
        if self._taken:
            self._room._whole -= self._taken * self._whole
            self._whole = False
            self._take(0)
            self._leave()

    def end(self) -> None:
        """Ends the request: nothing counts from now on."""
        self._ended = True
        self.drop()

    def _leave(self) -> None:
        self._room._coming.pop(self, None)
        self.resume = None  # a reference cycle of call and share would keep the answer until a collection
        self._room._wake()

    def _take(self, size: int) -> None:
        self._room._answers += size - self._taken
        self._room.free -= size - self._taken
        self._taken = size
