"""Deployments of policies: reconciliations on a schedule, one at a time, and on each complete checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.events import EventTrigger, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.settings import get_current_settings
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from flows.reconcile import reconcile_policy
from resources.errors import BadInput
from resources.storage import storage
from tasks.policies.dispatch import TAG
from tasks.policies.events import CHECKPOINT_COMPLETE, resources_of
from tasks.policies.policy import Policy, check_policy_paths
from tasks.prefect_server.client import prefect_client, read_or_none

ENTRYPOINT = "flows.reconcile.reconcile_policy"
SILENCE_AUTOMATION = "assay: flow runs without a sign of life"
"""Name of the automation that marks flow runs without heartbeats as crashed."""
PENDING_AUTOMATION = "assay: flow runs that their worker did not begin"
"""Name of the automation that marks flow runs as crashed if their worker vanished before it started their process."""
CANCELLING_AUTOMATION = "assay: cancellations that nobody carries out"
"""Name of the automation that completes cancellations if the worker has vanished."""
_PATIENT = timedelta(minutes=30)
"""Default for `silent_after`."""
_BURST = timedelta(seconds=2)
"""Events within this time of another start no run of their own: the run that the first starts begins after them."""
_ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed")
_EVENT = "prefect.flow-run."

Action = Literal["create", "update", "unchanged", "remove"]


@dataclass(frozen=True)
class PolicyDeployment:
    """A policy as it is to be deployed.

    For a policy in an object store, each run reads its address again; a policy in a local file is embedded in the
    parameters, since a remote worker does not have the file. Without a schedule only events and people start it.
    """

    policy: Policy
    uri: str
    work_pool: str
    every: timedelta | None = None
    cron: str | None = None
    on_event: bool = False

    @property
    def name(self) -> str:
        return f"{reconcile_policy.name}/{self.policy.name}"

    @property
    def work_queue(self) -> str:
        """The queue of its work pool for its flow runs, with a concurrency limit of 1.

        The queue counts flow runs in the server's database. A limit of the deployment would give each flow run a lease,
        which a restarted server has lost, and Prefect ends a flow run without a lease.
        """
        return f"policy-{self.policy.name}"

    @property
    def event_automation(self) -> str:
        return f"{self.name} on {CHECKPOINT_COMPLETE}"

    def parameters(self) -> dict[str, Any]:
        whole = storage.is_local(self.uri)
        return {"policy": self.policy.model_dump(mode="json") if whole else self.uri}

    def schedules(self) -> list[DeploymentScheduleCreate]:
        if self.cron is not None:
            try:
                return [DeploymentScheduleCreate(schedule=CronSchedule(cron=self.cron))]
            except ValidationError as error:
                raise BadInput(
                    expected="a line of five fields as cron reads it, such as '0 * * * *'",
                    found=repr(self.cron),
                    remedy="correct --cron",
                ) from error
        return [DeploymentScheduleCreate(schedule=IntervalSchedule(interval=self.every))] if self.every else []


@dataclass(frozen=True)
class Change:
    """A change of an object on the server, made or planned."""

    kind: Literal["deployment", "automation"]
    name: str
    action: Action
    differs: tuple[str, ...] = ()
    """The parts that differ from the wanted state."""


def deploy_policy(planned: PolicyDeployment, *, silent_after: timedelta, dry_run: bool = False) -> list[Change]:
    """Creates or updates the deployment and its automations; idempotent.

    Runs do not overlap: an event during a run is handled by a later run, which collapses all waiting runs
    (`collapse_waiting`). A flow run without a heartbeat for `silent_after` is marked as crashed.
    """
    check_policy_paths(planned.policy)
    _require_longer_than_heartbeats(silent_after)
    with prefect_client() as client:
        if read_or_none(client.read_work_pool, planned.work_pool) is None:
            raise BadInput(
                expected=f"a work pool {planned.work_pool} on the server",
                found="none of that name",
                remedy=f"make it (prefect work-pool create {planned.work_pool} --type process; those of the regions "
                f"file: assay work-pools apply) and start a worker for it (prefect worker start --pool "
                f"{planned.work_pool}), or name another work pool with --work-pool",
            )
        existing = read_or_none(client.read_deployment_by_name, planned.name)
        deployment = _deployment(client, planned, existing)
        changes = [deployment]
        identifier = existing.id if existing else None
        if not dry_run and deployment.action != "unchanged":
            identifier = _deploy(client, planned)
        automations = {
            planned.event_automation: _on_event(planned, identifier) if planned.on_event else None,
            **{watcher.name: watcher for watcher in _watchers(silent_after)},
        }
        for name, automation in automations.items():
            changes += _automation(client, name, automation, dry_run=dry_run)
    return changes


def watch_over_flow_runs(silent_after: timedelta = _PATIENT) -> list[Change]:
    """Creates missing automations that end flow runs with lost workers.

    Flow runs at work pools need them without a deployed policy too: their cells are not sent again while they are shown
    as running. Existing automations keep the time that `deploy_policy` set. `silent_after` is raised to 1.5 times the
    interval of heartbeats.
    """
    heartbeat = get_current_settings().flows.heartbeat_frequency or 0
    silent_after = max(silent_after, timedelta(seconds=1.5 * heartbeat))
    changes: list[Change] = []
    with prefect_client() as client:
        for automation in _watchers(silent_after):
            if not client.read_automations_by_name(automation.name):
                changes += _automation(client, automation.name, automation, dry_run=False)
    return changes


def _require_longer_than_heartbeats(silent_after: timedelta) -> None:
    heartbeat = get_current_settings().flows.heartbeat_frequency
    if heartbeat is None or silent_after.total_seconds() < 1.5 * heartbeat:
        raise BadInput(
            expected="flow runs that show signs of life more often than --silent-after asks for, with time to spare",
            found="none, as Prefect is set" if heartbeat is None else f"a sign every {heartbeat} s",
            remedy="raise --silent-after, or lower PREFECT_FLOWS_HEARTBEAT_FREQUENCY here and at the workers",
        )


def _deployment(client: SyncPrefectClient, planned: PolicyDeployment, existing: DeploymentResponse | None) -> Change:
    if existing is None:
        return Change("deployment", planned.name, "create")
    queue = read_or_none(client.read_work_queue_by_name, str(existing.work_queue_name), existing.work_pool_name)
    differs = [
        name.removesuffix("_name").replace("_", " ")
        for name, value in _attributes(planned).items()
        if getattr(existing, name) != value
    ]
    now = [_as_configured(schedule.schedule) for schedule in existing.schedules if schedule.active]
    if now != [_as_configured(schedule.schedule) for schedule in planned.schedules()]:
        differs.append("schedule")
    if queue is None or queue.concurrency_limit != 1:
        differs.append("runs at once")
    return Change("deployment", planned.name, "update" if differs else "unchanged", tuple(differs))


def _as_configured(schedule: Any) -> Any:
    return getattr(schedule, "cron", None) or getattr(schedule, "interval", None)


def _attributes(planned: PolicyDeployment) -> dict[str, Any]:
    return {
        "parameters": planned.parameters(),
        "work_pool_name": planned.work_pool,
        "work_queue_name": planned.work_queue,  # the server creates it
        "entrypoint": ENTRYPOINT,
        "tags": [TAG, f"policy={planned.policy.name}"],
    }


def _deploy(client: SyncPrefectClient, planned: PolicyDeployment) -> Any:
    deployment = client.create_deployment(
        flow_id=client.create_flow_from_name(reconcile_policy.name),
        name=planned.policy.name,
        description=f"Evaluate what the policy {planned.policy.name} wants and no record settles yet.",
        pull_steps=[],
        parameter_openapi_schema=parameter_schema(reconcile_policy).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        schedules=planned.schedules(),
        paused=False,
        **_attributes(planned),
    )
    queue = client.read_work_queue_by_name(planned.work_queue, planned.work_pool)
    client.update_work_queue(queue.id, concurrency_limit=1)
    return deployment


def _on_event(planned: PolicyDeployment, deployment: Any) -> AutomationCore:
    resources = resources_of(planned.policy.runs)
    return AutomationCore(
        name=planned.event_automation,
        description="Made by `assay policy deploy`: a complete checkpoint of its runs starts a reconciliation.",
        trigger=EventTrigger(expect={CHECKPOINT_COMPLETE}, match={"prefect.resource.id": resources}, within=_BURST),
        actions=[
            RunDeployment(
                source="selected", deployment_id=deployment, parameters=None, job_variables=None, schedule_after=_BURST
            )
        ]
        if deployment
        else [],
        owner_resource=f"prefect.deployment.{deployment}",
    )


def _watchers(silent_after: timedelta) -> list[AutomationCore]:
    alive = {"Running", "heartbeat", *_ENDINGS}
    return [
        _ending(
            SILENCE_AUTOMATION,
            "flow runs of lost workers are marked as crashed.",
            _missing(after={"Running", "heartbeat"}, expected=alive, within=silent_after),
            StateType.CRASHED,
            f"no sign of life for {silent_after}: the worker is gone with it",
        ),
        _ending(
            PENDING_AUTOMATION,
            "flow runs that a worker of processes took and did not begin are marked as crashed.",
            _missing(after={"Pending"}, expected=alive, within=silent_after, work_pool_type="process"),
            StateType.CRASHED,
            f"not begun for {silent_after}: the worker that took it is gone",
        ),
        _ending(
            CANCELLING_AUTOMATION,
            "cancelled flow runs that no worker ends are completed as cancelled.",
            _missing(after={"Cancelling"}, expected=_ENDINGS, within=silent_after),
            StateType.CANCELLED,
            f"not carried out for {silent_after}: the worker is gone",
        ),
    ]


def _ending(name: str, does: str, trigger: EventTrigger, state: StateType, message: str) -> AutomationCore:
    change = ChangeFlowRunState(state=state, name=state.value.capitalize(), message=message, force=False)
    return AutomationCore(
        name=name, description=f"Made by `assay policy deploy`: {does}", trigger=trigger, actions=[change]
    )


def _missing(
    *, after: Collection[str], expected: Collection[str], within: timedelta, work_pool_type: str | None = None
) -> EventTrigger:
    related = [{"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}]
    if work_pool_type is not None:
        related.append({"prefect.resource.role": "work-pool", "prefect.work-pool.type": work_pool_type})
    return EventTrigger(
        after={_EVENT + name for name in after},
        expect={_EVENT + name for name in expected},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=[ResourceSpecification.model_validate(resource) for resource in related],
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )


def _automation(
    client: SyncPrefectClient, name: str, planned: AutomationCore | None, *, dry_run: bool
) -> Iterator[Change]:
    existing = next(iter(client.read_automations_by_name(name)), None)
    if existing is None and planned is None:
        return
    action: Action = "remove" if planned is None else "create"
    differs: tuple[str, ...] = ()
    if existing is not None and planned is not None:
        now, then = (_comparable(automation) for automation in (existing, planned))
        differs = tuple(key for key in then if now.get(key) != then[key])
        action = "update" if differs else "unchanged"
    if action != "unchanged" and not dry_run:
        if existing is not None:
            client.delete_automation(existing.id)  # the server refuses to update an automation with an owner
        if planned is not None:
            client.create_automation(planned)
    yield Change("automation", name, action, differs)


def _comparable(automation: AutomationCore) -> dict[str, Any]:
    dumped = automation.model_dump(mode="json", include={"enabled", "trigger", "actions"})
    for key in ("after", "expect", "for_each"):
        dumped["trigger"][key] = sorted(dumped["trigger"][key])
    return dumped
