"""A group of equal actors: waiting until enough are ready, finding newly ready actors, ending all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from resources.actors.actor_handle import ActorHandle
from resources.errors import BadInput, JobTimeout
from resources.jobs.jobs import JobStatus
from resources.jobs.waiting import growing_pauses

_ENDED_AT_ONCE = 16


class ActorGroup:
    """Handles on actors that were created together; `name` is for messages."""

    def __init__(self, actors: Iterable[ActorHandle], *, name: str) -> None:
        self._actors = list(actors)
        self._name = name
        self._discovered: set[str] = set()

    def __iter__(self) -> Iterator[ActorHandle]:
        return iter(self._actors)

    def __len__(self) -> int:
        return len(self._actors)

    def __getitem__(self, index: int) -> ActorHandle:
        return self._actors[index]

    def add(self, actor: ActorHandle) -> None:
        self._actors.append(actor)

    @property
    def ready_count(self) -> int:
        return len(self.ready())

    def ready(self) -> list[ActorHandle]:
        return [actor for actor in self._actors if actor.job.announced() and not actor.job.status().finished]

    def discover_new(self) -> list[ActorHandle]:
        """Returns the ready actors that no earlier call of this method returned."""
        actors = [actor for actor in self.ready() if actor.job.job_id not in self._discovered]
        self._discovered.update(actor.job.job_id for actor in actors)
        return actors

    def statuses(self) -> list[JobStatus]:
        return [actor.job.status() for actor in self._actors]

    def wait_ready(self, count: int | None = None, *, timeout: float | None = None) -> list[ActorHandle]:
        """Blocks for up to `timeout` seconds until `count` actors, all when None, accept calls; returns them."""
        required = len(self._actors) if count is None else count
        if required > len(self._actors):
            raise BadInput(
                expected=f"at most {len(self._actors)} actors, the size of group {self._name}",
                found=f"count={count}",
                remedy="Wait for fewer, or create more.",
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        pauses = growing_pauses()
        while len(ready := self.ready()) < required:
            ended = [actor for actor in self._actors if actor.job.status().finished]
            if len(self._actors) - len(ended) < required:
                ended[0].wait_ready()  # raises
            if deadline is not None and time.monotonic() >= deadline:
                raise JobTimeout(
                    expected=f"{required} actors of group {self._name} to be ready after {timeout:g} s",
                    found=f"{len(ready)} are; jobs: {', '.join(self.statuses())}",
                    remedy="Wait longer, or for fewer.",
                )
            time.sleep(next(pauses))
        return ready

    def shutdown(self) -> None:
        """Ends all actors, and returns after their jobs have ended."""
        with ThreadPoolExecutor(_ENDED_AT_ONCE) as workers:
            for ending in [workers.submit(actor.job.terminate) for actor in self._actors]:
                ending.result()
