"""A reconciliation as tables and as JSON: the plan, the gaps with their reasons, and the grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.batches import Batch
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import ON_ITS_WAY, OpenCell, Reconciliation, RunListing, State, moment
from tasks.policies.snapshot import Estimates, policy_spent
from tasks.records.cost import Spent, sum_of
from tasks.spec.names import how_many

_MOST_ROWS = 40
_SHORT_NAME = 24
_RETRY = "see its record, then assay retry"
# Words and style of each state, and the user's remedy if any.
_SHOWN: dict[State, tuple[str, str, str]] = {
    "work": ("to do", "cyan", ""),
    "waiting": ("incomplete", "dim", ""),
    "failed": ("failed", "red", _RETRY),
    "backing_off": ("infra failed", "yellow", ""),
    "retries_exhausted": ("infra failed too often", "red", _RETRY),
    "claimed": ("being evaluated", "blue", ""),
    "scheduled": ("scheduled", "blue", ""),
    "stopped": ("cancelled", "magenta", "assay retry"),
    "not_served": ("cannot be served", "dim", ""),
    "held": ("waits for a baseline", "dim", ""),
    "decided_early": ("decided early: not worse", "green", ""),
    "gone": ("gone", "dim", ""),
}
_TO_COME = ON_ITS_WAY | {"waiting"}
_VERDICTS = {"GO": Text("GO", "green"), "NO-GO": Text("NO-GO", "red"), None: Text("·", "dim")}


def plan_json(
    policy: Policy, reconciliation: Reconciliation, estimates: Estimates, batches: Sequence[Batch] = ()
) -> dict[str, Any]:
    """Returns the cells that would run, in order, with expected costs and with batches for work pools."""
    cells = [{**_identity(cell), "note": cell.reason, **estimates.of(cell)} for cell in reconciliation.work]
    expected = estimates.together(reconciliation.work).as_dict()
    chips = expected["chip_seconds"]
    total = {
        "cells": len(cells),
        "with_estimate": len(cells) - expected["never_measured"],
        "seconds": expected["seconds"],
        "chip_hours": None if chips is None else round(chips / 3600, 3),
        "money": expected["usd"],
        "expected": expected,
    }
    content = {"policy": policy.name, "done": reconciliation.done_count, "total": total, "cells": cells}
    return {**content, "batches": [_batch(batch) for batch in batches]} if policy.dispatch == "work_pools" else content


def _batch(batch: Batch) -> dict[str, Any]:
    names = ("work_pool", "region", "job_variables", "egress_usd", "usd_per_hour")
    nowhere = {**dict.fromkeys(names), "passed_over": {}}
    choice = batch.choice.as_dict() if batch.choice else nowhere
    why_not = batch.error.found if batch.error else None
    return {"title": batch.title, "cells": len(batch.cells), **choice, "why_not": why_not}


def plan_table(policy: Policy, reconciliation: Reconciliation, estimates: Estimates) -> Table:
    """Returns the plan as a table of at most _MOST_ROWS cells."""
    content = plan_json(policy, reconciliation, estimates)
    total, cells = content["total"], content["cells"]
    ranked = any(cell["priority"] for cell in cells)
    columns = [*_named("Evaluation", of=reconciliation.work), *(["Priority"] if ranked else [])]
    columns += ["Where", "Seconds", "Chip-hours", "USD", "How"]
    table = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)

    def add(number: str, checkpoint: str, evaluation: str, rank: str, where: str, costs: dict[str, Any]) -> None:
        numbers = (_number(costs["seconds"]), _number(costs["chip_hours"], 3), _number(costs["money"], 2))
        how = costs.get("how") or ""
        table.add_row(number, checkpoint, evaluation, *([rank] if ranked else []), where, *numbers, how)

    for number, cell in enumerate(cells[:_MOST_ROWS], start=1):
        add(str(number), cell["checkpoint"], cell["evaluation"], str(cell["priority"]), cell["where"], cell)
    if len(cells) > _MOST_ROWS:
        table.add_row("…", f"and {len(cells) - _MOST_ROWS:,} more")
    unknown = total["cells"] - total["with_estimate"]
    table.add_section()
    # A sum with unknown parts is a lower bound; the line below the table has it.
    shown = {**total, "money": None if total["expected"]["usd_unknown_cells"] else total["money"]}
    add("", how_many(total["cells"], "cell"), f"{unknown:,} never measured" if unknown else "", "", "", shown)
    return table


def cost_json(policy: Policy, listings: Sequence[RunListing], reconciliation: Reconciliation) -> dict[str, Any]:
    """Returns the cost of a policy so far, in total and by month, and the expected cost of the remaining cells."""
    months = policy_spent(policy, listings)
    left = [*reconciliation.work, *(cell for cell in reconciliation.others if cell.state in _TO_COME)]
    estimates = Estimates(listings, () if policy.dispatch == "work_pools" else None)
    return {
        "spent": _spent(sum_of(months.values())),
        "months": {month: _spent(spent) for month, spent in months.items()},
        "expected": estimates.together(left).as_dict(),
    }


def cost_lines(content: dict[str, Any]) -> list[str]:
    """Formats the result of `cost_json`."""
    spent, expected = content["spent"], content["expected"]
    lines = [f"Spent so far: {_spent_text(spent)}."] if spent["attempts"] else []
    if len(content["months"]) > 1:
        lines += [f"  {month}: {_spent_text(of_month)}" for month, of_month in content["months"].items()]
    if expected["cells"]:
        guessed = f", {expected['guessed']:,} of them guessed" if expected["guessed"] else ""
        never = f", {expected['never_measured']:,} never measured" if expected["never_measured"] else ""
        chips = expected["chip_seconds"]
        hours = "unknown" if chips is None else f"{chips / 3600:,.3f}"
        of = f"{how_many(expected['cells'], 'cell')}{guessed}{never}"
        lines.append(f"Expected for what is left: {hours} chip-hours, {expected['price']} ({of}).")
    return lines


def _spent(spent: Spent) -> dict[str, Any]:
    return {
        **spent.model_dump(),
        "usd": spent.usd if spent.unpriced < spent.attempts or spent.usd else None,
        "chip_hours": spent.chip_hours,
        "price": spent.price,
    }


def _spent_text(spent: dict[str, Any]) -> str:
    return f"{how_many(spent['attempts'], 'attempt')}, {spent['chip_hours']} chip-hours, {spent['price']}"


def _named(*others: str, of: Iterable[OpenCell]) -> list[Column]:
    short = all(len(cell.checkpoint.name) <= _SHORT_NAME for cell in of)
    first = Column("Checkpoint", no_wrap=short, overflow="fold")
    return [first, *(Column(heading, overflow="fold") for heading in others)]


def gaps_json(policy: Policy, reconciliation: Reconciliation) -> dict[str, Any]:
    """Returns the open cells, and those of removed checkpoints, with their states."""
    cells = [
        {**_identity(cell), "state": cell.state, "reason": cell.reason, "until": _until(cell)}
        for cell in (*reconciliation.every, *reconciliation.gone)
    ]
    counts = Counter(cell["state"] for cell in cells)
    return {
        "policy": policy.name,
        "done": reconciliation.done_count,
        "missing": dict(counts),
        "not_eligible_checkpoints": reconciliation.left_out,
        "cells": cells,
    }


def gaps_table(reconciliation: Reconciliation) -> Table:
    """Returns the gaps as a table with a row for each checkpoint and reason."""
    every = [*reconciliation.every, *reconciliation.gone]
    columns = ("State", *_named("Evaluation", "Why", of=every), "Until, or what to do")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for state, cells in [*reconciliation.by_state().items(), ("gone", reconciliation.gone)]:
        word, style, remedy = _SHOWN[state]
        for number, (cell, evaluations) in enumerate(_together(cells)):
            if number == _MOST_ROWS:
                table.add_row(Text(word, style), f"and {len(cells) - number:,} more", "", "", "")
                break
            until = _until(cell) or remedy
            table.add_row(Text(word, style), cell.checkpoint.name, Text(evaluations), Text(cell.reason or ""), until)
    return table


def _until(cell: OpenCell) -> str | None:
    return moment(cell.until) if cell.until else None


def _together(cells: Sequence[OpenCell]) -> list[tuple[OpenCell, str]]:
    groups: dict[tuple[str, str | None, float | None], list[OpenCell]] = {}
    for cell in cells:
        groups.setdefault((cell.checkpoint.name, cell.reason, cell.until), []).append(cell)
    titles = (same[0].evaluation.title if len(same) == 1 else f"{len(same)} evaluations" for same in groups.values())
    return [(same[0], title) for same, title in zip(groups.values(), titles, strict=True)]


def status_json(
    policy: Policy,
    listings: Sequence[RunListing],
    reconciliation: Reconciliation,
    verdicts: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Returns the grid: the states of each suite's evaluations and the gate's verdict by run and checkpoint."""
    cells = [*reconciliation.every, *reconciliation.gone]
    states = {(cell.run, cell.checkpoint.name, cell.evaluation.hash): cell.state for cell in cells}
    runs = []
    for listing in listings:
        rows = []
        gone = {cell.checkpoint.name: cell.checkpoint for cell in reconciliation.gone if cell.run == listing.name}
        for checkpoint in sorted([*listing.checkpoints, *gone.values()], key=lambda checkpoint: checkpoint.order):
            suites: dict[str, Counter[str]] = {}
            known = listing.records.done.get(checkpoint.name, ())
            own = [s.hashes for s in known if s.listing == checkpoint.listing or s.digest == checkpoint.digest]
            recorded = frozenset().union(*own)
            for evaluation in listing.evaluations:
                done = bool({evaluation.hash, evaluation.native_hash} & recorded)
                state = states.get((listing.name, checkpoint.name, evaluation.hash)) or ("done" if done else None)
                if state is not None:
                    suites.setdefault(evaluation.suites[0], Counter())[state] += 1
            counted = {suite: dict(counts) for suite, counts in suites.items()}
            row = {"checkpoint": checkpoint.name, **_place(checkpoint), "suites": counted}
            judged = {} if verdicts is None else {"gate": verdicts.get(listing.name, {}).get(checkpoint.name)}
            rows.append(row | judged)
        names = list(dict.fromkeys(evaluation.suites[0] for evaluation in listing.evaluations))
        runs.append({"run": listing.name, "uri": listing.run, "suites": names, "checkpoints": rows})
    counts = {"done": reconciliation.done_count, "open": len(reconciliation.every)}
    return {"policy": policy.name, **counts, "cost": cost_json(policy, listings, reconciliation), "runs": runs}


def status_tables(content: dict[str, Any]) -> list[Table]:
    """Returns the grid as tables with the newest checkpoints of each run."""
    tables = []
    for run in content["runs"]:
        rows = run["checkpoints"]
        judged = ["Gate"] if any("gate" in row for row in rows) else []
        table = Table("Checkpoint", *run["suites"], *judged, title=run["run"])
        if len(rows) > _MOST_ROWS:
            table.add_row(f"{len(rows) - _MOST_ROWS:,} earlier", *("" for _ in run["suites"]))
        for row in rows[-_MOST_ROWS:]:
            squares = [_square(row["suites"].get(suite)) for suite in run["suites"]]
            table.add_row(row["checkpoint"], *squares, *(_VERDICTS[row["gate"]] for _ in judged))
        if not rows:
            table.add_row("none yet", *("" for _ in run["suites"]))
        tables.append(table)
    return tables


def _square(states: dict[Any, int] | None) -> Text:
    if not states:
        return Text("·", "dim")
    if set(states) == {"done"}:
        return Text("✓", "green")
    parts = [Text(f"{states['done']} ").append("✓", "green")] if states.get("done") else []
    for state, number in states.items():
        if state != "done":
            number_shown = "" if len(states) == 1 and number == 1 else f"{number} "
            parts.append(Text(number_shown).append(*_SHOWN[state][:2]))
    return Text(", ").join(parts)


def _identity(cell: OpenCell) -> dict[str, Any]:
    return {
        "run": cell.run,
        "checkpoint": cell.checkpoint.name,
        **_place(cell.checkpoint),
        "uri": cell.checkpoint.uri,
        "suite": cell.evaluation.suites[0],
        "evaluation": cell.evaluation.title,
        "evaluation_hash": cell.evaluation.hash,
        "priority": cell.evaluation.priority,
        "decide": "early" if cell.early else "whole",
    }


def _place(checkpoint: SeenCheckpoint) -> dict[str, Any]:
    labelled = checkpoint.label is not None
    return {"step": None, "label": checkpoint.label} if labelled else {"step": checkpoint.step}


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
