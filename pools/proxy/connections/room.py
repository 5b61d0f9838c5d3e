"""Memory that the bodies of all requests and answers share, and which answers are read while there is none left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PART_BYTES = 2**20
"""Of each answer, these take no room: small answers wait for nothing."""


@dataclass(slots=True)
class BodyRoom:
    """Bytes that the bodies of all connections together may still take.

    Those of a request count from their arrival to the end of its answer, and of an answer those beyond its first MiB
    until its client has taken it. Answers take half of the room; then no more is read of them, except for the oldest
    that still comes. That waits too while a quarter of the room holds whole answers, as a client that takes nothing of
    its answer loses the connection in time.
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
        """Bytes that requests may still take: answers beyond their half make no request fail."""
        return self.free + max(0, self._answers - self._size // 2)

    def give_back(self, size: int) -> None:
        """Returns bytes of a request, and lets answers go on that waited for them."""
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
    """Bytes of the room that the answer to one request takes."""

    __slots__ = ("_ended", "_room", "_taken", "_whole", "blocked", "resume")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._taken = 0
        self._whole = self._ended = self.blocked = False
        self.resume: Callable[[], None] | None = None

    def hold(self, size: int, resume: Callable[[], None] | None = None, *, blocked: bool = False) -> bool:
        """Counts the bytes that are held of an answer that still comes; whether to read more of it now.

        Args:
            size: of them all.
            resume: called when more may be read.
            blocked: its client has to take some of it first, so that another is the oldest meanwhile.
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
        """The answer is whole: it waits for its judgement, and for its client."""
        if self._taken and not self._whole:
            self._whole = True
            self._room._whole += self._taken
            self._leave()

    def drop(self) -> None:
        """The answer is held no more."""
        if self._taken:
            self._room._whole -= self._taken * self._whole
            self._whole = False
            self._take(0)
            self._leave()

    def end(self) -> None:
        """The request is over: nothing counts from now on."""
        self._ended = True
        self.drop()

    def _leave(self) -> None:
        self._room._coming.pop(self, None)
        self.resume = None  # a call and its share that know each other keep the answer until a collection
        self._room._wake()

    def _take(self, size: int) -> None:
        self._room._answers += size - self._taken
        self._room.free -= size - self._taken
        self._taken = size
