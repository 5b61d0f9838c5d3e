"""The commands about policies: `assay plan`, `gaps`, `status`, `retry`, `cancel` and `reconcile`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import ERR, OUT, Json, print_json

if TYPE_CHECKING:
    from tasks.policies import Policy
    from tasks.reconciliation import Reconciliation, RunListing

_Policy = Annotated[str, typer.Argument(help="YAML file with a policy.", metavar="POLICY")]
_Cells = Annotated[
    list[str] | None, typer.Option("--cell", help="CHECKPOINT or CHECKPOINT:SUITE, names or patterns; repeatable.")
]
_Afresh = Annotated[bool, typer.Option("--afresh", help="Look at every record, whatever the index says.")]


def plan(policy: _Policy, afresh: _Afresh = False, as_json: Json = False) -> None:
    """Show what a policy would run now: which cells, in which order, where, and what they are expected to take."""
    from tasks.policy_looking import Estimates
    from tasks.policy_views import plan_json, plan_table

    wanted, listings, found = _looked(policy, afresh=afresh)
    estimates = Estimates(listings)
    if as_json:
        print_json(plan_json(wanted, found, estimates))
        return
    if found.work:
        OUT.print(plan_table(wanted, found, estimates))
    OUT.print(_summary(found), highlight=False)


def gaps(policy: _Policy, afresh: _Afresh = False, as_json: Json = False) -> None:
    """Show what a policy wants and has no result, and why: incomplete, failed, being evaluated, and until when."""
    from tasks.policy_views import gaps_json, gaps_table

    wanted, _, found = _looked(policy, afresh=afresh)
    if as_json:
        print_json(gaps_json(wanted, found))
        return
    if found.work or found.others:
        OUT.print(gaps_table(found))
    OUT.print(_summary(found), highlight=False)


def status(
    policy: _Policy,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again as it changes, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.2)] = 5.0,
    afresh: _Afresh = False,
    as_json: Json = False,
) -> None:
    """Show the grid of a policy: its checkpoints, and how far each suite is with them."""
    from rich.console import Group
    from rich.live import Live

    from tasks.policy_views import status_json, status_tables

    def look_now() -> Group:
        wanted, listings, found = _looked(policy, afresh=afresh)
        return Group(*status_tables(status_json(wanted, listings, found)), _summary(found))

    if as_json:
        wanted, listings, found = _looked(policy, afresh=afresh)
        print_json(status_json(wanted, listings, found))
    elif watch:
        with Live(look_now(), console=OUT, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(look_now(), refresh=True)
    else:
        OUT.print(look_now(), highlight=False)


def retry(
    policy: _Policy,
    cell: _Cells = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only what failed, not what was cancelled.")] = False,
    as_json: Json = False,
) -> None:
    """Have cells tried again that failed, failed too often or were cancelled; no record is removed."""
    from tasks.policy_acts import chosen
    from tasks.policy_acts import retry as clear

    wanted, _, found = _looked(policy, afresh=True)
    meant = clear(wanted, found, cells=chosen(found, cell) if cell else None, failed=failed)
    if as_json:
        print_json({"policy": wanted.name, "cells": [one.title for one in meant]})
        return
    for one in meant:
        OUT.print(f"{one.title}: {one.reason or one.state}", highlight=False, markup=False, soft_wrap=True)
    OUT.print(f"{len(meant):,} cells may be tried again.", highlight=False)


def cancel(policy: _Policy, cell: _Cells = None, as_json: Json = False) -> None:
    """End what runs of a policy, or of some of its cells, and let nothing more of it begin until assay retry."""
    from tasks.policy_acts import cancel as stop
    from tasks.policy_acts import chosen

    wanted, listings, found = _looked(policy, afresh=True)
    claims, flow_runs = stop(wanted, listings, cells=chosen(found, cell) if cell else None)
    if as_json:
        print_json({"policy": wanted.name, "claims_ended": claims, "flow_runs_cancelled": flow_runs})
        return
    OUT.print(f"Stopped. {claims:,} cells were being evaluated; these end, and publish nothing.", highlight=False)
    OUT.print("assay retry lets them begin again.", highlight=False)


def reconcile(policy: _Policy, as_json: Json = False) -> None:
    """Evaluate what a policy wants and nothing has settled yet; cells that another run has are left to it."""
    from flows.live import live_view
    from flows.reconcile import load_policy, reconcile_policy
    from resources.errors import AssayError
    from tasks.progress import listening

    wanted = load_policy(policy)
    try:
        with live_view(ERR) as show, listening(show):
            outcome = reconcile_policy(wanted)
    except AssayError as error:
        if as_json:
            print_json({"policy": wanted.name, "error": str(error)})
        raise
    if as_json:
        print_json({"policy": wanted.name, **outcome})
        return
    evaluated, left = outcome["succeeded"], outcome["left_to_others"]
    others = f", {left} left to other runs" if left else ""
    OUT.print(f"Evaluated {evaluated}{others}; {outcome['done_before']:,} were done before.", highlight=False)


def _looked(uri: str, *, afresh: bool) -> tuple[Policy, list[RunListing], Reconciliation]:
    from flows.reconcile import load_policy
    from tasks.policy_looking import look
    from tasks.reconciliation import reconcile as decide

    wanted = load_policy(uri)
    listings = look(wanted, afresh=afresh)
    return wanted, listings, decide(listings, wanted, now=time.time())


def _summary(found: Reconciliation) -> str:
    words = f"{found.done_count:,} cells done, {len(found.work):,} to do, {len(found.others):,} wait for something."
    return words + (f" {found.left_out:,} checkpoints are not wanted." if found.left_out else "")
