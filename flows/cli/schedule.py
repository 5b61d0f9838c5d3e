"""Automatic policies: `assay policy deploy`, `assay watch` and `assay notify`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

import typer
from rich.table import Table

from flows.console.console import ERR, OUT, Json, print_json
from resources.errors import BadInput

policy_app = typer.Typer(help="Policies that carry themselves out.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_Policy = Annotated[str, typer.Argument(help="YAML file with a policy.", metavar="POLICY")]


@policy_app.command("deploy")
def deploy(
    policy: _Policy,
    every: Annotated[str | None, typer.Option(help="Time between two runs, such as 10m; 10m when left out.")] = None,
    cron: Annotated[str | None, typer.Option(help="Times to run, in cron's five fields, in place of --every.")] = None,
    work_pool: Annotated[str, typer.Option(help="The Prefect work pool that runs it.")] = "assay-local",
    on_event: Annotated[bool, typer.Option("--on-event", help="Also run when a checkpoint is complete.")] = False,
    silent_after: Annotated[
        str, typer.Option(help="Mark flow runs as crashed that show no sign of life for so long.")
    ] = "10m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Have Prefect run a policy automatically; idempotent."""
    from flows.deploy.policies import PolicyDeployment, deploy_policy
    from flows.reconcile import load_policy
    from tasks.prefect_server.client import require_server

    if every is not None and cron is not None:
        raise BadInput(expected="--every or --cron", found="both", remedy="leave one of them out")
    require_server()
    policy_deployment = PolicyDeployment(
        load_policy(policy),
        policy,
        work_pool,
        every=None if cron is not None else duration(every or "10m"),
        cron=cron,
        on_event=on_event,
    )
    changes = deploy_policy(policy_deployment, silent_after=duration(silent_after), dry_run=dry_run)
    if as_json:
        print_json(
            [
                {"kind": change.kind, "name": change.name, "action": change.action, "differs": change.differs}
                for change in changes
            ]
        )
        return
    shown = Table("Kind", "Name", "Would" if dry_run else "Was", "Differs in")
    words = {"create": "created", "update": "updated", "unchanged": "unchanged", "remove": "removed"}
    for change in changes:
        shown.add_row(
            change.kind, change.name, change.action if dry_run else words[change.action], ", ".join(change.differs)
        )
    OUT.print(shown)


def watch(
    policy: _Policy,
    every: Annotated[str, typer.Option(help="Time between two looks.")] = "5s",
) -> None:
    """Notify Prefect when a checkpoint of a policy's runs is complete, until Ctrl-C."""
    from flows.deploy.watching import watch as look_again
    from flows.reconcile import load_policy
    from tasks.prefect_server.client import require_server

    require_server()
    look_again(
        load_policy(policy),
        every_seconds=duration(every).total_seconds(),
        on_event=lambda line: ERR.print(line, markup=False, highlight=False, soft_wrap=True),
    )


def notify(
    uri: Annotated[str, typer.Argument(help="A checkpoint, or any file of it.", metavar="CHECKPOINT")],
    as_json: Json = False,
) -> None:
    """Notify Prefect that a checkpoint is complete, if it is: for bucket notifications and hooks of a training."""
    from tasks.policies.events import CompleteCheckpoint, checkpoint_of, listeners, send
    from tasks.prefect_server.client import require_server

    require_server()
    checkpoint = checkpoint_of(uri)
    automations: list[str] = []
    if checkpoint is not None and checkpoint.complete:
        event = CompleteCheckpoint(checkpoint.uri, checkpoint.run, checkpoint.name, checkpoint.step)
        automations = listeners(event)
        send([event])
        outcome, problems = f"{checkpoint.name} is complete: said so", []
        if not automations:  # not a failure: a schedule may find it
            outcome += f", but nothing listens: no policy deployed with --on-event has {checkpoint.uri} among its runs"
    else:  # not a failure: a bucket notifies for each file, the last of which completes it
        problems = list(checkpoint.problems) if checkpoint is not None else ["no checkpoint is there yet"]
        outcome = f"not said: {'; '.join(problems)}"
    if as_json:
        sent = not problems
        place = checkpoint.uri if checkpoint is not None else uri
        print_json({"checkpoint": place, "sent": sent, "automations": automations, "problems": problems})
    else:
        OUT.print(outcome, highlight=False, markup=False, soft_wrap=True)


def duration(text: str) -> timedelta:
    """Parses a time such as 30s, 10m, 2h or 1d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None or float(match[1]) == 0:
        raise BadInput(expected="a time such as 30s, 10m, 2h or 1d", found=repr(text), remedy="write one of these")
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])
