"""An object store in memory, shared by threads, in which a test decides which thread makes the next step or dies.

`cond://x` is a name in it. Like a real store it writes whole objects, lists existing objects, and lets only one of
several writers create an object, unless `exclusive` is false.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem


class Crashed(BaseException):
    """The process died at this step: nothing after it runs."""


class ConditionalStore(AbstractFileSystem):
    """The store of this module. `steps` schedules the threads."""

    protocol = "cond"
    cachable = False

    objects: ClassVar[dict[str, bytes]]
    exclusive: ClassVar[bool]
    steps: ClassVar[Steps | None]
    lock: ClassVar[threading.Lock]

    @classmethod
    def reset(cls, *, exclusive: bool = True) -> None:
        cls.objects, cls.exclusive, cls.lock = {}, exclusive, threading.Lock()
        cls.steps = None

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **_: Any) -> Any:
        self._step()
        prefix = f"{self._name(path).rstrip('/')}/"
        with self.lock:
            entries = {name: self._entry(name) for name in sorted(self.objects) if name.startswith(prefix)}
        return entries if detail else list(entries)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._step()
        with self.lock:
            try:
                return self.objects[self._name(path)][start:end]
            except KeyError:
                raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._step()
        name = self._name(path)
        with self.lock:
            if mode == "create" and self.exclusive and name in self.objects:
                raise FileExistsError(path)
            self.objects[name] = bytes(value)

    def rm_file(self, path: str) -> None:
        self._step()
        with self.lock:
            if self.objects.pop(self._name(path), None) is None:
                raise FileNotFoundError(path)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._name(path)
        with self.lock:
            if name in self.objects:
                return self._entry(name)
            if any(other.startswith(f"{name}/") for other in self.objects):
                return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def _step(self) -> None:
        if self.steps is not None:
            self.steps.step()

    @classmethod
    def _name(cls, path: str) -> str:
        return str(cls._strip_protocol(path))

    def _entry(self, name: str) -> dict[str, Any]:
        return {"name": name, "size": len(self.objects[name]), "type": "file", "mtime": 1.0}


@contextmanager
def conditional_store(*, exclusive: bool = True) -> Iterator[type[ConditionalStore]]:
    ConditionalStore.reset(exclusive=exclusive)
    fsspec.register_implementation("cond", ConditionalStore, clobber=True)
    try:
        yield ConditionalStore
    finally:
        _registry.pop("cond", None)


class Steps:
    """Lets threads make 1 step at a time at the store, in an order that a test draws; some of them die at a step."""

    def __init__(self, order: Iterator[int], *, dies_at: dict[int, int]) -> None:
        self._order, self._dies_at = order, dies_at
        self._made: dict[int, int] = {}
        self._alive: list[int] = []
        self._turn: int | None = None
        self._changed = threading.Condition()
        self._names = threading.local()

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Runs each body in a thread until all of them have ended or died."""
        self._alive = list(range(len(bodies)))
        threads = [threading.Thread(target=self._run_thread, args=(number, body)) for number, body in enumerate(bodies)]
        with self._changed:
            self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"

    def step(self) -> None:
        """Waits for this thread's turn; the store calls it before each step."""
        number = getattr(self._names, "number", None)
        if number is None:  # the test itself
            return
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number, timeout=30.0)
            made = self._made[number] = self._made.get(number, 0) + 1
            dies = made >= self._dies_at.get(number, 10**9)
            if not dies:
                self._next()
        if dies:
            raise Crashed

    def _run_thread(self, number: int, body: Callable[[], None]) -> None:
        self._names.number = number
        try:
            body()
        except Crashed:
            pass
        finally:
            with self._changed:
                self._alive.remove(number)
                self._next()

    def _next(self) -> None:
        if self._alive:
            self._turn = self._alive[next(self._order) % len(self._alive)]
        self._changed.notify_all()
