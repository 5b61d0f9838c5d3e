"""Work that Prefect starts later: `assay policy deploy`, `assay notify`, and `assay work-pools` per region."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Column, Table

from flows.cli.options.pools import EngineOptions, Positive, resources_asked
from flows.cli.policy import PolicyFile
from flows.console.console import ERR, OUT, Json, print_json, say, table_of
from flows.deploy.policies import PolicyDeployment, deploy_policy, watch_over_flow_runs
from flows.deploy.work_pools import deploy_flows
from resources.config import ResourceConfig
from resources.errors import AssayError, BadInput, exclusive
from resources.regions.region_table import Regions
from resources.regions.regions import known_regions, load_regions
from resources.regions.work_pools import Source, choose_work_pool
from tasks.policies.events import CompleteCheckpoint, WatchedRuns, checkpoint_of, complete_checkpoint, listeners, send
from tasks.policies.policy import Policy
from tasks.prefect_server.client import limit_accelerators, require_server
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, apply_work_pools, wanted_work_pools, work_pool_states
from tasks.spec.loading import build_config, load_config

_DONE = {"create": "created", "update": "updated", "unchanged": "unchanged", "remove": "removed"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
RegionsFile = Annotated[
    Path | None, Parameter("--regions", help="Regions file; ASSAY_REGIONS or Assay's own when left out.")
]


def deploy(
    policy: PolicyFile,
    /,
    *,
    every: str | None = None,
    cron: str | None = None,
    work_pool: str = "assay-local",
    on_event: bool = False,
    silent_after: str = "10m",
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Have Prefect run a policy automatically; idempotent.

    Args:
        every: Time between two runs, such as 10m; 10m when left out.
        cron: Times to run, in cron's five fields, in place of --every.
        work_pool: The Prefect work pool that runs it.
        on_event: Also run when a checkpoint is complete.
        silent_after: Mark flow runs as crashed that show no sign of life for so long.
        dry_run: Show what would change, and change nothing.
    """
    if every is not None and cron is not None:
        raise exclusive("--every", "--cron")
    require_server()
    interval = None if cron is not None else duration(every or "10m")
    planned = PolicyDeployment(load_config(policy, Policy), policy, work_pool, interval, cron, on_event)
    changes = deploy_policy(planned, silent_after=duration(silent_after), dry_run=dry_run)
    if as_json:
        print_json([asdict(change) for change in changes])
        return
    words = {} if dry_run else _DONE
    rows = [(each.kind, each.name, words.get(each.action, each.action), ", ".join(each.differs)) for each in changes]
    OUT.print(table_of("Kind", "Name", "Would" if dry_run else "Was", "Differs in", rows=rows))


def notify(
    of: Annotated[str, Parameter(help="A checkpoint, or any file of it; a policy's YAML file with --every.")],
    /,
    *,
    every: str | None = None,
    as_json: Json = False,
) -> None:
    """Notify Prefect that a checkpoint is complete, if it is: for bucket notifications and hooks of a training.

    With --every the runs of a policy are watched, until Ctrl-C, and Prefect is notified of each complete checkpoint.

    Args:
        every: Time between two looks at the runs of a policy, such as 5s.
    """
    require_server()
    if every is not None:
        seconds = duration(every).total_seconds()
        watch(load_config(of, Policy), every_seconds=seconds, on_event=lambda line: say(line, to=ERR))
        return
    checkpoint = checkpoint_of(of)
    automations: list[str] = []
    if checkpoint is not None and checkpoint.complete:
        event = complete_checkpoint(checkpoint)
        automations = listeners(event)
        send([event])
        outcome, problems = f"{checkpoint.name} is complete: said so", []
        if not automations:  # not a failure: a schedule may find it
            outcome += f", but nothing listens: no policy deployed with --on-event has {checkpoint.uri} among its runs"
    else:  # not a failure: a bucket notifies for each file, the last of which completes it
        problems = list(checkpoint.problems) if checkpoint is not None else ["no checkpoint is there yet"]
        outcome = f"not said: {'; '.join(problems)}"
    if as_json:
        place = checkpoint.uri if checkpoint is not None else of
        print_json({"checkpoint": place, "sent": not problems, "automations": automations, "problems": problems})
    else:
        say(outcome)


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


def duration(text: str) -> timedelta:
    """Parses a time such as 30s, 10m, 2h or 1d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None or float(match[1]) == 0:
        raise BadInput(expected="a time such as 30s, 10m, 2h or 1d", found=repr(text), remedy="write one of these")
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])


def apply(
    *,
    regions: RegionsFile = None,
    dry_run: bool = False,
    deploy: bool = False,
    accelerators: Annotated[int | None, Positive] = None,
    as_json: Json = False,
) -> None:
    """Create the work pools of the regions file, and deploy the flows that are sent to them; idempotent.

    Args:
        dry_run: Show what would change, and change nothing.
        deploy: Also deploy every flow to each of them.
        accelerators: Accelerators that all runs of the server may use at a time.
    """
    table = _regions(regions)
    changes = apply_work_pools(wanted_work_pools(table), dry_run=dry_run)
    deployed = deploy_flows(table, every=deploy, dry_run=dry_run)
    automations = [] if dry_run else watch_over_flow_runs()
    if accelerators is not None and not dry_run:
        limit_accelerators(accelerators)
    if as_json:
        print_json(
            [
                {
                    "work_pool": change.spec.name,
                    "type": change.spec.type,
                    "action": change.action,
                    "differs": change.differs,
                    "deployments": deployed.get(change.spec.name, []),
                }
                for change in changes
            ]
        )
        return
    whole = Column("Work pool", no_wrap=True, overflow="fold")
    differs = Column("Differs in", overflow="fold")
    shown = Table(whole, "Type", "Would" if dry_run else "Was", differs, "Deployments")
    for change in changes:
        action = change.action if dry_run else _DONE[change.action]
        flows = "\n".join(name.partition("/")[0] for name in deployed.get(change.spec.name, []))
        shown.add_row(change.spec.name, change.spec.type, action, "\n".join(change.differs[:5]), flows)
    OUT.print(shown)
    say(*(f"Made the automation '{made.name}'." for made in automations))


def list_(
    *,
    machine: EngineOptions = EngineOptions(),
    source: str | None = None,
    gigabytes: float = 0.0,
    max_egress_usd: float = 0.0,
    regions: RegionsFile = None,
    as_json: Json = False,
) -> None:
    """Show each region's work pool, and if a flow run would start there now.

    With options of a machine or --source, the work pool that the request would get, its job variables and cost.

    Args:
        source: Region where the checkpoints lie.
        gigabytes: Size of all checkpoints in GB.
        max_egress_usd: Most that reading from another region may cost.
    """
    table = _regions(regions)
    if machine.given() or source is not None:
        at = Source(table.named(source).name, int(gigabytes * 10**9)) if source else None
        _show_choice(machine, table, at, max_egress_usd, as_json=as_json)
        return
    places = {LOCAL_WORK_POOL: "this machine"} | {
        region.work_pool: region.name for region in table.regions if region.work_pool
    }
    states = work_pool_states(places)
    rows: list[dict[str, Any]] = [
        {"work_pool": name, "region": place, "ready": states[name].obstacle is None, "why_not": states[name].obstacle}
        for name, place in places.items()
    ]
    if as_json:
        print_json(rows)
        return
    shown = [(row["work_pool"], row["region"], f"no, it {row['why_not']}" if row["why_not"] else "yes") for row in rows]
    OUT.print(table_of("Work pool", "Region", "A flow run would start", rows=shown))


def _show_choice(
    machine: EngineOptions, table: Regions, source: Source | None, max_egress_usd: float, *, as_json: bool
) -> None:
    choice = choose_work_pool(
        build_config(resources_asked(machine, regions=table), ResourceConfig, source="the options"),
        regions=table,
        states=work_pool_states(entry.work_pool for entry in table.regions if entry.work_pool),
        source=source,
        max_egress_usd=Decimal(str(max_egress_usd)),
    )
    if as_json:
        print_json(choice.as_dict())
    else:
        say(choice.described(), *(f"  {name}: {value}" for name, value in choice.job_variables.items()))


def _regions(file: Path | None) -> Regions:
    require_server()
    return load_regions(file) if file else known_regions()
