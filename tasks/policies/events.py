"""Events about checkpoints: complete checkpoints, and verdicts of a policy's own gate.

`checkpoint.complete` reports to Prefect's server that a checkpoint can be evaluated. It is sent by a watcher, the
training flow, or a bucket notification. An event starts a full reconciliation, so duplicates change nothing, and the
next schedule makes up for a lost event. `gate.go` and `gate.no-go` are for user-defined automations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefect.events import Event, EventTrigger, Resource, ResourceSpecification, emit_event

from pools.weights.merges import with_each_location
from resources.errors import BadInput
from resources.storage import storage
from tasks.checkpoints.checkpoint import Checkpoint
from tasks.checkpoints.discovery import checkpoint_at
from tasks.checkpoints.run_snapshot import SeenCheckpoint, expand_runs, snapshot_run
from tasks.policies.policy import Policy
from tasks.prefect_server.client import every_page, prefect_client, send_events
from tasks.prefect_server.lazy import in_flow_run
from tasks.records.verdicts import Verdict

CHECKPOINT_COMPLETE = "checkpoint.complete"
GATE_EVENTS = {"GO": "gate.go", "NO-GO": "gate.no-go"}
_RESOURCE = "assay.checkpoint."
_SHOWN_REFUSALS = 20  # gates may have several hundred rules, and servers refuse events of more than 1.5 MB
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class CompleteCheckpoint:
    """The content of the event."""

    uri: str
    run: str
    name: str
    step: int
    policy: str | None = None
    """Policy of the watcher that found it; unset for events from elsewhere."""
    label: str | None = None

    def labels(self) -> dict[str, str]:
        """Returns the event's resource, `assay.checkpoint.<uri>`, with labels for searches."""
        labels = {
            "prefect.resource.id": f"{_RESOURCE}{with_each_location(self.uri, storage.absolute)}",
            "prefect.resource.name": self.name,
            "assay.run": self.run,
            **({"assay.step": str(self.step)} if self.label is None else {"assay.label": self.label}),
        }
        return labels | ({"assay.policy": self.policy} if self.policy is not None else {})


def complete_checkpoint(checkpoint: Checkpoint) -> CompleteCheckpoint:
    """Returns the content of the event of a discovered checkpoint."""
    return CompleteCheckpoint(checkpoint.uri, checkpoint.run, checkpoint.name, checkpoint.step, label=checkpoint.label)


def resources_of(runs: Iterable[str]) -> list[str]:
    """Returns the resource patterns of an automation for runs, or for patterns of runs. Prefect supports only a
    trailing star. A match too many starts a reconciliation that finds no work."""
    patterns: dict[str, None] = {}
    for run in runs:
        location = storage.absolute(run.rstrip("/"))
        glob = _GLOB.search(location)
        for pattern in [f"{location[: glob.start()]}*"] if glob else [location, f"{location}/*"]:
            patterns[f"{_RESOURCE}{pattern}"] = None
    return list(patterns)


def send(checkpoints: Sequence[CompleteCheckpoint]) -> None:
    """Sends an event for each checkpoint, and returns when the server has them."""
    send_events(
        [Event(event=CHECKPOINT_COMPLETE, resource=Resource(checkpoint.labels())) for checkpoint in checkpoints]
    )


def listeners(checkpoint: CompleteCheckpoint) -> list[str]:
    """Returns the names of the server's automations that a checkpoint's event triggers."""
    resource = Resource(checkpoint.labels())
    with prefect_client() as client:
        automations = every_page(client.read_automations)
    return sorted(
        automation.name
        for automation in automations
        if automation.enabled
        and isinstance(automation.trigger, EventTrigger)
        and CHECKPOINT_COMPLETE in automation.trigger.expect
        and ResourceSpecification.model_validate(automation.trigger.match).matches(resource)
    )


def emit(checkpoints: Iterable[Checkpoint]) -> None:
    """Sends `checkpoint.complete` events in the background of a flow; failures do not affect the flow."""
    for checkpoint in checkpoints:
        complete = complete_checkpoint(checkpoint)
        emit_event(event=CHECKPOINT_COMPLETE, resource=complete.labels())


def emit_verdict(verdict: Verdict, checkpoint: SeenCheckpoint, *, run: str, policy: str) -> None:
    """Sends a gate's verdict on a checkpoint as an event if there is a flow run; failures do not affect the flow."""
    if not in_flow_run():
        return
    complete = CompleteCheckpoint(checkpoint.uri, run, checkpoint.name, checkpoint.step, policy, checkpoint.label)
    refused = [{"rule": refusal.rule, "found": refusal.found} for refusal in verdict.refusals]
    emit_event(
        event=GATE_EVENTS[verdict.word],
        resource={**complete.labels(), "assay.gate": verdict.gate},
        payload={"verdict": verdict.word, "refused": refused[:_SHOWN_REFUSALS], "refusals": len(refused)},
    )


class WatchedRuns:
    """The runs of a policy; reports each checkpoint once it is complete, and again after each rewrite. In memory only.
    The first poll of a run reports only its newest checkpoint, since it starts a full reconciliation."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._reported: dict[str, dict[str, str]] = {}

    def find_new(self) -> list[CompleteCheckpoint]:
        """Returns newly complete checkpoints; lists each run once. Raises StorageError if they cannot be listed or
        read."""
        try:
            runs = expand_runs(self._policy.runs)
        except BadInput:  # no run matches the patterns yet
            return []
        checkpoints: list[CompleteCheckpoint] = []
        for run in runs:
            seen = snapshot_run(run, reference=self._policy.native_reference, steps_from=self._policy.steps_from)
            complete = [checkpoint for checkpoint in seen if checkpoint.complete]
            before = self._reported.get(run)
            fresh = [checkpoint for checkpoint in complete if (before or {}).get(checkpoint.uri) != checkpoint.listing]
            self._reported[run] = {checkpoint.uri: checkpoint.listing for checkpoint in complete}
            checkpoints += [
                CompleteCheckpoint(seen.uri, seen.run, seen.name, seen.step, self._policy.name, seen.label)
                for seen in (fresh[-1:] if before is None else fresh)
            ]
        return checkpoints

    def forget(self, checkpoints: Iterable[CompleteCheckpoint]) -> None:
        """Makes `find_new` return checkpoints again, after their events could not be sent."""
        for checkpoint in checkpoints:
            for listings in self._reported.values():
                listings.pop(checkpoint.uri, None)


def checkpoint_of(uri: str) -> Checkpoint | None:
    """Returns the checkpoint at a location or containing a file; None if there is none or it is incomplete."""
    for folder in (uri.rstrip("/"), storage.parent(uri)):
        if checkpoint := checkpoint_at(folder, kinds=("huggingface", "levanter")):
            return checkpoint
    return None
