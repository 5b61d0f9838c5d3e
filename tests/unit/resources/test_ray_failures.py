"""Classification of ends of Ray's tasks as preemptions or failures: the table, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ray import exceptions
from ray._raylet import ActorID

from resources.backends.ray.orders import classify_ray

OBJECT = ("00" * 28, None, "call site")
FROM_OUTSIDE: dict[str, Callable[[], BaseException]] = {
    "its node has died": lambda: exceptions.NodeDiedError("node 127.0.0.3"),
    "its raylet has died": lambda: exceptions.LocalRayletDiedError(),
    "its worker has died": lambda: exceptions.WorkerCrashedError(),
    "its actor has died": lambda: exceptions.ActorDiedError(),
    "its actor cannot be reached": lambda: exceptions.ActorUnavailableError("no route", b"0" * ActorID.size()),
    "its data was lost": lambda: exceptions.ObjectLostError(*OBJECT),
    "the owner of its data has died": lambda: exceptions.OwnerDiedError(*OBJECT),
    "its data could not be rebuilt": lambda: exceptions.ObjectReconstructionFailedError(*OBJECT),
    "its data could not be fetched": lambda: exceptions.ObjectFetchTimedOutError(*OBJECT),
    "the cluster did not answer": lambda: exceptions.GetTimeoutError("10 s"),
    "disk ran out": lambda: exceptions.OutOfDiskError("full"),
    "the placement group was removed": lambda: exceptions.TaskPlacementGroupRemoved(),
    "an actor's placement group was removed": lambda: exceptions.ActorPlacementGroupRemoved(),
    "the node it was pinned to is gone": lambda: exceptions.TaskUnschedulableError("node is dead"),
}
OWN_DOING: dict[str, Callable[[], BaseException]] = {
    "the runtime environment cannot be set up": lambda: exceptions.RuntimeEnvSetupError("no such package"),
    "memory ran out": lambda: exceptions.OutOfMemoryError("killed the last worker"),
    "our code on the node raised": lambda: exceptions.RayTaskError("f", "Traceback\nNameError: x", NameError("x")),
    "it was cancelled": lambda: exceptions.TaskCancelledError(),
    "anything else": lambda: KeyError("x"),
}


@pytest.mark.parametrize("make", FROM_OUTSIDE.values(), ids=FROM_OUTSIDE.keys())
def test_classify_ray_what_was_taken_from_outside_is_a_preemption(make: Callable[[], BaseException]) -> None:
    verdict, words = classify_ray(make())
    assert verdict == "preempted"
    assert words


@pytest.mark.parametrize("make", OWN_DOING.values(), ids=OWN_DOING.keys())
def test_classify_ray_what_would_come_again_is_a_failure(make: Callable[[], BaseException]) -> None:
    verdict, words = classify_ray(make())
    assert verdict == "failed"
    assert len(words.splitlines()) == 1


def test_classify_ray_want_of_memory_says_what_to_do() -> None:
    assert "resources.ram" in classify_ray(exceptions.OutOfMemoryError("killed the last worker"))[1]


def test_classify_ray_error_of_our_code_with_the_class_of_its_cause_says_what_was_raised() -> None:
    error = exceptions.RayTaskError("f", "Traceback\n  File x\nValueError: damaged", ValueError("damaged"))
    assert classify_ray(error.as_instanceof_cause()) == ("failed", "RayTaskError(ValueError): ValueError: damaged")
