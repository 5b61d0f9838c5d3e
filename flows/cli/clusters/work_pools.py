"""`assay work-pools`: a Prefect work pool per region, and the choice among them for a request."""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from flows.cli.options.groups import EvaluationOptions, MachineOptions, flattened
from flows.console.console import OUT, Json, print_json

work_pool_app = typer.Typer(help="The Prefect work pools of the regions.", no_args_is_help=True)

RegionsFile = Annotated[
    Path | None, typer.Option("--regions", help="Regions file; ASSAY_REGIONS or Assay's own when left out.")
]


@work_pool_app.command("apply")
def apply(
    regions: RegionsFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="Also deploy every flow to each of them.")] = False,
    accelerators: Annotated[
        int | None, typer.Option(help="Accelerators that all runs of the server may use at a time.", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Create the work pools of the regions file, and deploy the flows that are sent to them; idempotent."""
    from flows.deploy.flows import deploy_to
    from flows.deploy.policies import watch_over_flow_runs
    from flows.deploy.regions import deploy_sent_flows
    from resources.regions.regions import known_regions, load_regions
    from tasks.prefect_server.accelerators import limit_accelerators
    from tasks.prefect_server.client import require_server
    from tasks.prefect_server.work_pools import apply_work_pools, wanted_work_pools

    require_server()
    table = load_regions(regions) if regions else known_regions()
    changes = apply_work_pools(wanted_work_pools(table), dry_run=dry_run)
    deployed = deploy_sent_flows(table, dry_run=dry_run)
    automations = [] if dry_run else watch_over_flow_runs()
    if accelerators is not None and not dry_run:
        limit_accelerators(accelerators)
    if deploy and not dry_run:
        for region in table.regions:
            if region.work_pool:
                deploy_to(region.work_pool, name=region.name)
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
    words = {"create": "created", "update": "updated", "unchanged": "unchanged"}
    for change in changes:
        action = change.action if dry_run else words[change.action]
        flows = "\n".join(name.partition("/")[0] for name in deployed.get(change.spec.name, []))
        shown.add_row(change.spec.name, change.spec.type, action, "\n".join(change.differs[:5]), flows)
    OUT.print(shown)
    for made in automations:
        OUT.print(f"Made the automation '{made.name}'.", highlight=False, soft_wrap=True)


@work_pool_app.command("list")
def list_(regions: RegionsFile = None, as_json: Json = False) -> None:
    """Show each region's work pool, and if a flow run would start there now."""
    from resources.regions.regions import known_regions, load_regions
    from tasks.prefect_server.client import require_server
    from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, work_pool_states

    require_server()
    table = load_regions(regions) if regions else known_regions()
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
    shown = Table("Work pool", "Region", "A flow run would start")
    for row in rows:
        shown.add_row(row["work_pool"], row["region"], "yes" if row["ready"] else f"no, it {row['why_not']}")
    OUT.print(shown)


@work_pool_app.command("choose")
@flattened
def choose(
    *,
    cpu: Annotated[int | None, typer.Option(help="CPU cores per replica; as its device needs when left out.")] = None,
    machine: MachineOptions,
    source: Annotated[str | None, typer.Option(help="Region where the checkpoints lie.")] = None,
    gigabytes: Annotated[float, typer.Option(help="Size of all checkpoints in GB.")] = 0.0,
    max_egress_usd: Annotated[float, typer.Option(help="Most that reading from another region may cost.")] = 0.0,
    regions: RegionsFile = None,
    as_json: Json = False,
) -> None:
    """Show the work pool that a request would get, with its job variables and cost."""
    from flows.cli.options.evaluations import resources_asked
    from resources.config import ResourceConfig
    from resources.regions.regions import known_regions, load_regions
    from resources.regions.work_pools import Source, choose_work_pool
    from tasks.prefect_server.client import require_server
    from tasks.prefect_server.work_pools import work_pool_states
    from tasks.spec.loading import build_config

    require_server()
    table = load_regions(regions) if regions else known_regions()
    asked = resources_asked(EvaluationOptions(cpu=cpu, **asdict(machine)), regions=table)
    resources = build_config(asked, ResourceConfig, source="the options")
    states = work_pool_states(entry.work_pool for entry in table.regions if entry.work_pool)
    choice = choose_work_pool(
        resources,
        regions=table,
        states=states,
        source=Source(table.named(source).name, int(gigabytes * 10**9)) if source else None,
        max_egress_usd=Decimal(str(max_egress_usd)),
    )
    if as_json:
        print_json(choice.as_dict())
        return
    OUT.print(choice.described(), highlight=False, soft_wrap=True)
    for name, value in choice.job_variables.items():
        OUT.print(f"  {name}: {value}", highlight=False, soft_wrap=True)
