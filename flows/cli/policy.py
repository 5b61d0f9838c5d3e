"""The commands about policies: `assay plan`, `gaps`, `status`, `retry`, `cancel`, `reconcile` and `alerts`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.gate import GateOptions, gate_of, show_verdict, write_summaries
from flows.cli.options.groups import flattened
from flows.console.console import ERR, OUT, Json, print_json

if TYPE_CHECKING:
    from tasks.policies.batches import Batch
    from tasks.policies.policy import Policy
    from tasks.policies.reconciliation import Reconciliation, RunListing

_Policy = Annotated[str, typer.Argument(help="YAML file with a policy.", metavar="POLICY")]
_Cells = Annotated[
    list[str] | None, typer.Option("--cell", help="CHECKPOINT or CHECKPOINT:SUITE, names or patterns; repeatable.")
]
_NoIndex = Annotated[bool, typer.Option("--no-index", help="Read every record, without the index.")]


def plan(policy: _Policy, no_index: _NoIndex = False, as_json: Json = False) -> None:
    """Show the cells that a policy would run now, in order, with their location and expected time and cost."""
    from tasks.policies.snapshot import Estimates
    from tasks.policies.views import plan_json, plan_table

    loaded_policy, listings, state = _snapshot(policy, use_index=not no_index)
    batches = _batches(loaded_policy, listings, state)
    estimates = Estimates(listings, batches if loaded_policy.dispatch == "work_pools" else None)
    if as_json:
        print_json(plan_json(loaded_policy, state, estimates, batches))
        return
    if state.work:
        OUT.print(plan_table(loaded_policy, state, estimates))
        for line in estimates.together(state.work).lines():
            OUT.print(f"{line[:1].upper()}{line[1:]}", highlight=False, markup=False, soft_wrap=True)
    for batch in batches:
        OUT.print(batch.described(), highlight=False, markup=False, soft_wrap=True)
    OUT.print(_summary(state), highlight=False)


def gaps(policy: _Policy, no_index: _NoIndex = False, as_json: Json = False) -> None:
    """Show the cells of a policy without a result, and why."""
    from tasks.policies.views import gaps_json, gaps_table

    loaded_policy, _, state = _snapshot(policy, use_index=not no_index)
    if as_json:
        print_json(gaps_json(loaded_policy, state))
        return
    if state.work or state.others:
        OUT.print(gaps_table(state))
    OUT.print(_summary(state), highlight=False)


def status(
    policy: _Policy,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again as it changes, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.2)] = 5.0,
    no_index: _NoIndex = False,
    as_json: Json = False,
) -> None:
    """Show the progress of each suite of a policy by checkpoint, the verdicts of its own gate, and the cost."""
    from rich.console import Group
    from rich.live import Live

    from tasks.policies.gate import verdict_words
    from tasks.policies.policy import own_gate
    from tasks.policies.views import cost_lines, status_json, status_tables

    def look() -> tuple[dict[str, Any], Reconciliation]:
        loaded_policy, listings, state = _snapshot(policy, use_index=not no_index)
        judged_by = own_gate(loaded_policy)
        verdicts = judged_by and {each.name: verdict_words(judged_by, loaded_policy, each) for each in listings}
        return status_json(loaded_policy, listings, state, verdicts), state

    def look_now() -> Group:
        content, state = look()
        return Group(*status_tables(content), *cost_lines(content["cost"]), _summary(state))

    if as_json:
        print_json(look()[0])
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
    """Retry cells that failed or were cancelled; no record is removed."""
    from tasks.policies.actions import chosen
    from tasks.policies.actions import retry as clear
    from tasks.spec.names import how_many

    loaded_policy, _, state = _snapshot(policy, use_index=False)
    meant = clear(loaded_policy, state, cells=chosen(state, cell) if cell else None, failed=failed)
    if as_json:
        print_json({"policy": loaded_policy.name, "cells": [retried.title for retried in meant]})
        return
    for retried in meant:
        OUT.print(f"{retried.title}: {retried.reason or retried.state}", highlight=False, markup=False, soft_wrap=True)
    OUT.print(f"{how_many(len(meant), 'cell')} may be tried again.", highlight=False)


def cancel(policy: _Policy, cell: _Cells = None, as_json: Json = False) -> None:
    """Cancel the running cells of a policy, or some of them; they do not start again until assay retry."""
    from tasks.policies.actions import cancel as stop
    from tasks.policies.actions import chosen
    from tasks.spec.names import how_many

    loaded_policy, listings, state = _snapshot(policy, use_index=False)
    claims, flow_runs = stop(loaded_policy, listings, cells=chosen(state, cell) if cell else None)
    if as_json:
        print_json({"policy": loaded_policy.name, "claims_ended": claims, "flow_runs_cancelled": flow_runs})
        return
    running = f"{how_many(claims, 'cell')} {'was' if claims == 1 else 'were'} being evaluated"
    OUT.print(f"Stopped. {running}, to end now and publish nothing.", highlight=False)
    OUT.print("assay retry lets them begin again.", highlight=False)


def alerts(
    where: Annotated[
        str, typer.Argument(help="YAML file with a policy, or folder given as --output to evaluate.", metavar="WHERE")
    ] = "evaluations",
    acknowledge: Annotated[
        list[str] | None,
        typer.Option("--acknowledge", help="Id of an alert, or its beginning, that is not to be open; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Acknowledge all that are open.")] = False,
    note: Annotated[str | None, typer.Option(help="A few words about what is acknowledged.")] = None,
    as_json: Json = False,
) -> None:
    """List scores that left the curves of their runs, open alerts first, or acknowledge them.

    The exit code is 0, with or without open alerts.
    """
    from resources.errors import BadInput
    from tasks.verdicts.alert_files import acknowledge as write
    from tasks.verdicts.alert_files import alerts_table, chosen, list_alerts

    if note is not None and not (acknowledge or every):
        raise BadInput(expected="--acknowledge ID or --all with --note", found="neither", remedy="name the alerts")
    folders = _record_folders(where)
    listed = list_alerts(folders)
    meant = [*chosen(listed, acknowledge or ()), *(each for each in listed if every and each.state == "open")]
    for each in meant:
        write(each.run_folder, each.alert, note=note)
    if meant:
        _rewrite_reports({each.run_folder for each in meant})
        listed = list_alerts(folders)
    if as_json:
        print_json([each.as_dict() for each in listed])
    elif listed:
        OUT.print(alerts_table(listed))
    else:
        OUT.print("No alerts.")


@flattened
def reconcile(policy: _Policy, gating: GateOptions, as_json: Json = False) -> None:
    """Evaluate the pending cells of a policy; cells that another run has claimed are left to it.

    With --gate each run is judged at the end, including results of other evaluations; without, the policy's own gate
    judges the checkpoints it has not judged yet. Exit code 0 is GO, 1 is NO-GO.
    """
    from flows.console.live import live_view
    from flows.reconcile import load_policy, reconcile_policy
    from resources.errors import AssayError
    from tasks.prefect_server.client import readable_prefect_errors, require_server
    from tasks.prefect_server.progress import Event, Judged, Notice, Raised, Update, listening
    from tasks.records.verdicts import Verdict
    from tasks.spec.names import how_many

    loaded_policy, judged_by = load_policy(policy), gate_of(gating)
    if loaded_policy.dispatch == "work_pools":
        require_server()
    verdicts: list[Verdict] = []
    alert_lines: list[str] = []
    outcome: dict[str, Any] = {}
    error: AssayError | None = None
    with live_view(ERR) as show:

        def take(update: Update) -> None:
            if isinstance(update, Judged):
                verdicts.append(update.verdict)
            elif isinstance(update, Raised):
                alert_lines.append(update.text)
            if isinstance(update, Notice):
                show(update)
            elif isinstance(update, Event) and loaded_policy.dispatch == "work_pools":  # with prices: none is skipped
                ERR.print(update.text, markup=False, highlight=False, soft_wrap=True)
            else:
                show(update)

        with listening(take):
            try:
                with readable_prefect_errors():
                    outcome = reconcile_policy(loaded_policy, judged_by)
            except AssayError as raised:
                error = raised
    write_summaries(verdicts, gating.summary)
    gated = judged_by is not None or loaded_policy.gate is not None
    judged = {"gate": [verdict.as_dict() for verdict in verdicts]} if gated else {}
    if as_json:
        print_json({"policy": loaded_policy.name, **outcome, **({"error": str(error)} if error else {}), **judged})
    else:
        for alert in alert_lines:
            OUT.print(alert, soft_wrap=True, highlight=False, markup=False)
        for verdict in verdicts:
            show_verdict(verdict)
    if error is not None:
        raise error
    if as_json:
        return
    if loaded_policy.dispatch == "work_pools":
        sent = f"Sent {how_many(outcome['scheduled'], 'cell')} to work pools, {outcome['done_before']:,} done before."
        OUT.print(f"{sent} `assay status` shows them.", highlight=False)
        return
    evaluated, left = outcome["succeeded"], outcome["left_to_others"]
    others = f", {left} left to other runs" if left else ""
    decided = f", decided {early} early" if (early := outcome["decided_early"]) else ""
    OUT.print(f"Evaluated {evaluated}{decided}{others}; {outcome['done_before']:,} were done before.", highlight=False)


def _record_folders(where: str) -> list[str]:
    from resources.errors import BadInput
    from tasks.checkpoints.run_snapshot import expand_runs
    from tasks.policies.policy import Policy
    from tasks.policies.snapshot import run_folder
    from tasks.records.record import find_records
    from tasks.spec.loading import load_config
    from tasks.spec.names import name_of

    if where.endswith((".yaml", ".yml", ".json")):
        policy = load_config(where, Policy)
        return [run_folder(policy, name_of(run)[0]) for run in expand_runs(policy.runs)]
    if not find_records(where):
        raise BadInput(
            expected=f"a policy's YAML file, or a folder with records: {where}",
            found="no record there",
            remedy="evaluate something, or name another folder",
        )
    return [where]


def _rewrite_reports(run_folders: Iterable[str]) -> None:
    from resources.storage import storage
    from tasks.records.record import read_records
    from tasks.reports.artifacts import REPORT_NAME
    from tasks.reports.page import write_report

    for folder in run_folders:
        page = storage.join(folder, REPORT_NAME)
        if storage.exists(page):
            records_at, run = storage.parent(folder), storage.basename(folder)
            write_report(read_records(folder), page, title=run, records_at=records_at, run=run)


def _snapshot(uri: str, *, use_index: bool) -> tuple[Policy, list[RunListing], Reconciliation]:
    from flows.reconcile import load_policy
    from tasks.policies.reconciliation import reconcile as decide
    from tasks.policies.snapshot import take_snapshot

    policy = load_policy(uri)
    listings = take_snapshot(policy, use_index=use_index)
    state = decide(listings, policy, now=time.time())
    if policy.dispatch == "work_pools":
        state = _without_scheduled(policy, listings, state)
    return policy, listings, state


def _without_scheduled(policy: Policy, listings: list[RunListing], state: Reconciliation) -> Reconciliation:
    from resources.errors import BadInput
    from tasks.errors import PrefectUnavailable
    from tasks.policies.dispatched import read_dispatches, with_dispatches
    from tasks.prefect_server.client import require_server

    try:
        require_server()
        sent = read_dispatches(policy)
    except (BadInput, PrefectUnavailable) as error:
        ERR.print(f"The cells scheduled at work pools are not known: {error.found}.", markup=False, soft_wrap=True)
        return state
    return with_dispatches(state, listings, sent, policy, now=time.time())


def _batches(policy: Policy, listings: list[RunListing], state: Reconciliation) -> list[Batch]:
    if policy.dispatch == "here" or not state.work:
        return []
    from tasks.policies.dispatch import Dispatcher
    from tasks.policies.dispatched import Dispatches
    from tasks.prefect_server.client import require_server

    require_server()
    return Dispatcher(policy, listings, Dispatches()).batches(state.work[: policy.most_cells_at_once])


def _summary(state: Reconciliation) -> str:
    from tasks.spec.names import how_many

    done, left_out = how_many(state.done_count, "cell"), state.left_out
    early = sum(cell.state == "decided_early" for cell in state.others)
    done += f" done, {early:,} decided early" if early else " done"
    words = f"{done}, {len(state.work):,} to do, {len(state.others) - early:,} waiting for something."
    not_wanted = f" {how_many(left_out, 'checkpoint')} {'is' if left_out == 1 else 'are'} not wanted."
    return words + (not_wanted if left_out else "")
