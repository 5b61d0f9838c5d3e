"""The commands about the cells of a policy: `assay status`, `retry`, `cancel`, `reconcile` and `alerts`."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.console import Group
from rich.live import Live

from flows.cli.gate import GateOptions, show_verdict, write_summaries
from flows.console.console import ERR, OUT, Json, print_json, say
from flows.console.live import live_view
from resources.errors import AssayError, BadInput
from resources.storage import storage
from tasks.errors import PrefectUnavailable
from tasks.policies.batches import Batch
from tasks.policies.policy import Policy, own_gate
from tasks.policies.reconciliation import Reconciliation, RunListing
from tasks.policies.reconciliation import reconcile as decide
from tasks.policies.snapshot import Estimates, run_folders, take_snapshot
from tasks.policies.views import cost_lines, gaps_json, gaps_table, plan_json, plan_table, status_json, status_tables
from tasks.prefect_server.progress import Event, Judged, Notice, RaisedAlert, Update, listening
from tasks.records.record import find_records, read_records
from tasks.records.verdicts import Verdict
from tasks.reports.artifacts import REPORT_NAME
from tasks.reports.page import write_report
from tasks.spec.loading import load_config
from tasks.spec.names import how_many
from tasks.verdicts.alert_files import acknowledge as write_acknowledgement
from tasks.verdicts.alert_files import alerts_table, list_alerts
from tasks.verdicts.alert_files import chosen as chosen_alerts

PolicyFile = Annotated[str, Parameter(help="YAML file with a policy.")]
_Cells = Annotated[tuple[str, ...], Parameter(help="CHECKPOINT or CHECKPOINT:SUITE, names or patterns; repeatable.")]


def status(
    policy: PolicyFile,
    /,
    *,
    plan: bool = False,
    gaps: bool = False,
    watch: bool = False,
    every: Annotated[float, Parameter(validator=validators.Number(gte=0.2))] = 5.0,
    no_index: bool = False,
    as_json: Json = False,
) -> None:
    """Show the progress of each suite of a policy by checkpoint, the verdicts of its own gate, and the cost.

    Args:
        plan: The cells that it would run now instead, in order, with their location and expected time and cost.
        gaps: The cells without a result instead, and why.
        watch: Show it again as it changes, until Ctrl-C.
        every: Seconds between two looks of --watch.
        no_index: Read every record, without the index.
    """
    if plan + gaps + watch > 1:
        raise BadInput(expected="one of --plan, --gaps and --watch", found="several", remedy="keep one of them")
    look = partial(_snapshot, policy, use_index=not no_index)
    seen = look()
    if plan:
        _show_plan(*seen, as_json=as_json)
    elif gaps:
        _show_gaps(*seen, as_json=as_json)
    elif as_json:
        print_json(_status_content(*seen))
    elif watch:
        with Live(_progress(*seen), console=OUT, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_progress(*look()), refresh=True)
    else:
        OUT.print(_progress(*seen), highlight=False)


def _show_plan(policy: Policy, listings: list[RunListing], state: Reconciliation, *, as_json: bool) -> None:
    batches = _batches(policy, listings, state)
    estimates = Estimates(listings, batches if policy.dispatch == "work_pools" else None)
    if as_json:
        print_json(plan_json(policy, state, estimates, batches))
        return
    if state.work:
        OUT.print(plan_table(policy, state, estimates))
        say(*(f"{line[:1].upper()}{line[1:]}" for line in estimates.together(state.work).lines()))
    say(*(batch.described() for batch in batches), _summary(state))


def _show_gaps(policy: Policy, _: list[RunListing], state: Reconciliation, *, as_json: bool) -> None:
    if as_json:
        print_json(gaps_json(policy, state))
        return
    if state.every or state.gone:
        OUT.print(gaps_table(state))
    say(_summary(state))


def _status_content(policy: Policy, listings: list[RunListing], state: Reconciliation) -> dict[str, Any]:
    verdicts = None
    if (gate := own_gate(policy)) is not None:
        from tasks.policies.gate import verdict_words  # with Prefect

        verdicts = {each.name: verdict_words(gate, policy, each) for each in listings}
    return status_json(policy, listings, state, verdicts)


def _progress(policy: Policy, listings: list[RunListing], state: Reconciliation) -> Group:
    content = _status_content(policy, listings, state)
    return Group(*status_tables(content), *cost_lines(content["cost"]), _summary(state))


def retry(policy: PolicyFile, /, *, cell: _Cells = (), failed: bool = False, as_json: Json = False) -> None:
    """Retry cells that failed or were cancelled; no record is removed.

    Args:
        failed: Only what failed, not what was cancelled.
    """
    from tasks.policies import actions  # with Prefect, which takes seconds

    loaded_policy, _, state = _snapshot(policy, use_index=False)
    cells = actions.chosen(state, cell) if cell else None
    meant = actions.retry(loaded_policy, state, cells=cells, failed=failed)
    if as_json:
        print_json({"policy": loaded_policy.name, "cells": [retried.title for retried in meant]})
        return
    say(*(f"{retried.title}: {retried.reason or retried.state}" for retried in meant))
    say(f"{how_many(len(meant), 'cell')} may be tried again.")


def cancel(policy: PolicyFile, /, *, cell: _Cells = (), as_json: Json = False) -> None:
    """Cancel the running cells of a policy, or some of them; they do not start again until assay retry."""
    from tasks.policies import actions

    loaded_policy, listings, state = _snapshot(policy, use_index=False)
    cells = actions.chosen(state, cell) if cell else None
    claims, flow_runs = actions.cancel(loaded_policy, listings, cells=cells)
    if as_json:
        print_json({"policy": loaded_policy.name, "claims_ended": claims, "flow_runs_cancelled": flow_runs})
        return
    running = f"{how_many(claims, 'cell')} {'was' if claims == 1 else 'were'} being evaluated"
    say(f"Stopped. {running}, to end now and publish nothing.", "assay retry lets them begin again.")


def alerts(
    where: Annotated[
        str, Parameter(help="YAML file with a policy, or folder given as --output to evaluate.")
    ] = "evaluations",
    /,
    *,
    acknowledge: tuple[str, ...] = (),
    every: Annotated[bool, Parameter("--all")] = False,
    note: str | None = None,
    as_json: Json = False,
) -> None:
    """List scores that left the curves of their runs, open alerts first, or acknowledge them.

    The exit code is 0, with or without open alerts.

    Args:
        acknowledge: Id of an alert, or its beginning, that is not to be open; repeatable.
        every: Acknowledge all that are open.
        note: A few words about what is acknowledged.
    """
    if note is not None and not (acknowledge or every):
        raise BadInput(expected="--acknowledge ID or --all with --note", found="neither", remedy="name the alerts")
    folders = _record_folders(where)
    listed = list_alerts(folders)
    meant = [*chosen_alerts(listed, acknowledge), *(each for each in listed if every and each.state == "open")]
    for each in meant:
        write_acknowledgement(each.run_folder, each.alert, note=note)
    if meant:
        for folder in {each.run_folder for each in meant}:
            page = storage.join(folder, REPORT_NAME)
            if storage.exists(page):
                records_at, run = storage.parent(folder), storage.basename(folder)
                write_report(read_records(folder), page, title=run, records_at=records_at, run=run)
        listed = list_alerts(folders)
    if as_json:
        print_json([each.as_dict() for each in listed])
    else:
        OUT.print(alerts_table(listed) if listed else "No alerts.")


def reconcile(policy: PolicyFile, /, *, gating: GateOptions = GateOptions(), as_json: Json = False) -> None:
    """Evaluate the pending cells of a policy; cells that another run has claimed are left to it.

    With --gate each run is judged at the end, including results of other evaluations; without, the policy's own gate
    judges the checkpoints it has not judged yet. Exit code 0 is GO, 1 is NO-GO.
    """
    from flows.reconcile import reconcile_policy
    from tasks.prefect_server.client import readable_prefect_errors, require_server

    loaded_policy, gate = load_config(policy, Policy), gating.loaded()
    elsewhere = loaded_policy.dispatch == "work_pools"
    if elsewhere:
        require_server()
    verdicts: list[Verdict] = []
    alert_lines: list[str] = []
    outcome: dict[str, Any] = {}
    error: AssayError | None = None
    with live_view(ERR) as show:

        def take(update: Update) -> None:
            if isinstance(update, Judged):
                verdicts.append(update.verdict)
            elif isinstance(update, RaisedAlert):
                alert_lines.append(update.text)
            if isinstance(update, Event) and not isinstance(update, Notice) and elsewhere:  # prices: none is skipped
                say(update.text, to=ERR)
            else:
                show(update)

        with listening(take):
            try:
                with readable_prefect_errors():
                    outcome = reconcile_policy(loaded_policy, gate)
            except AssayError as raised:
                error = raised
    write_summaries(verdicts, gating.summary)
    if as_json:
        gated = gate is not None or loaded_policy.gate is not None
        judged = {"gate": [verdict.as_dict() for verdict in verdicts]} if gated else {}
        print_json({"policy": loaded_policy.name, **outcome, **({"error": str(error)} if error else {}), **judged})
    else:
        say(*alert_lines)
        for verdict in verdicts:
            show_verdict(verdict)
    if error is not None:
        raise error
    if as_json:
        return
    done = f"{outcome['done_before']:,}"
    if elsewhere:
        sent = how_many(outcome["scheduled"], "cell")
        say(f"Sent {sent} to work pools, {done} done before. `assay status` shows them.")
        return
    others = f", {left} left to other runs" if (left := outcome["left_to_others"]) else ""
    decided = f", decided {early} early" if (early := outcome["decided_early"]) else ""
    say(f"Evaluated {outcome['succeeded']}{decided}{others}; {done} were done before.")


def _record_folders(where: str) -> list[str]:
    if where.endswith((".yaml", ".yml", ".json")):
        return [*run_folders(load_config(where, Policy)).values()]
    if not find_records(where):
        raise BadInput(
            expected=f"a policy's YAML file, or a folder with records: {where}",
            found="no record there",
            remedy="evaluate something, or name another folder",
        )
    return [where]


def _snapshot(uri: str, *, use_index: bool) -> tuple[Policy, list[RunListing], Reconciliation]:
    policy = load_config(uri, Policy)
    listings = take_snapshot(policy, use_index=use_index)
    state = decide(listings, policy, now=time.time())
    if policy.dispatch == "work_pools":
        state = _without_scheduled(policy, listings, state)
    return policy, listings, state


def _without_scheduled(policy: Policy, listings: list[RunListing], state: Reconciliation) -> Reconciliation:
    from tasks.policies.dispatch import read_dispatches, with_dispatches
    from tasks.prefect_server.client import require_server

    try:
        require_server()
        sent = read_dispatches(policy)
    except (BadInput, PrefectUnavailable) as error:
        say(f"The cells scheduled at work pools are not known: {error.found}.", to=ERR)
        return state
    return with_dispatches(state, listings, sent, policy, now=time.time())


def _batches(policy: Policy, listings: list[RunListing], state: Reconciliation) -> list[Batch]:
    if policy.dispatch == "here" or not state.work:
        return []
    from tasks.policies.dispatch import Dispatcher, Dispatches
    from tasks.prefect_server.client import require_server

    require_server()
    return Dispatcher(policy, listings, Dispatches()).batches(state.work[: policy.most_cells_at_once])


def _summary(state: Reconciliation) -> str:
    done, left_out = how_many(state.done_count, "cell"), state.left_out
    early = sum(cell.state == "decided_early" for cell in state.others)
    done += f" done, {early:,} decided early" if early else " done"
    words = f"{done}, {len(state.work):,} to do, {len(state.others) - early:,} waiting for something."
    not_wanted = f" {how_many(left_out, 'checkpoint')} {'is' if left_out == 1 else 'are'} not wanted."
    gone = f" {how_many(len(state.gone), 'cell')} of removed checkpoints." if state.gone else ""
    return words + (not_wanted if left_out else "") + gone
