"""Watches the runs of a policy and reports complete checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

from resources.errors import AssayError
from tasks.policies.events import CompleteCheckpoint, WatchedRuns, send
from tasks.policies.policy import Policy


def watch(
    policy: Policy,
    *,
    every_seconds: float,
    on_event: Callable[[str], None],
    tell: Callable[[list[CompleteCheckpoint]], None] = send,
    sleep: Callable[[float], None] = time.sleep,
    looks: int | None = None,
) -> None:
    """Polls the runs of a policy and sends `checkpoint.complete` for new checkpoints; endless without `looks`.

    Errors of stores and of the server are reported and retried; unsent events are sent later.
    """
    watched = WatchedRuns(policy)
    number = 0
    while looks is None or number < looks:
        if number:
            sleep(every_seconds)
        number += 1
        new_checkpoints: list[CompleteCheckpoint] = []
        try:
            new_checkpoints = watched.find_new()
            tell(new_checkpoints)
        except AssayError as error:
            watched.forget(new_checkpoints)
            on_event(f"looking again: {error.found}")
        else:
            for checkpoint in new_checkpoints:
                on_event(f"{checkpoint.name} is complete: {checkpoint.uri}")
