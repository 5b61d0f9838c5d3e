"""`assay faults`: a pool of real engines on this machine, and every fault of the suite that can be tried on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from flows.cli.options import EvaluationOptions, pool_content
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.faults.outcome import Outcome, Scale
from pools.faults.scenarios import chosen, try_all
from pools.faults.target import Recipe, Target
from pools.pool.inference import InferencePool
from pools.weights.model_files import digest_model_folder
from resources.errors import NoCheckpoints
from tasks.checkpoints.discovery import find_checkpoints
from tasks.spec.loading import build_config

_SHORT = {
    "engine_timeout_seconds": 120,
    "proxy_timeout_seconds": 600,
    "lease_seconds": 6,
    "max_replica_restarts": 100,  # each scenario ends an engine or two
}
"""What a pool for faults has otherwise: short leases, since a fault is seen once one has run out."""


def try_faults(
    options: EvaluationOptions,
    *,
    only: Sequence[str] = (),
    scale: Scale,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    on_event: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Starts a pool for the latest complete checkpoint at `options.model`, and tries the scenarios one by one.

    Args:
        options: the checkpoint, replicas, cores and engine arguments.
        only: names of scenarios; all of them where none is named.
        scale: how much is asked, and how long faults last.
        on_outcome: told of each outcome as it comes.
        on_event: told in a line what the pool does.

    Raises:
        BadInput: an option is wrong.
        NoCheckpoints: there is no complete checkpoint.
        EngineStartFailed, ProxyFailed: the pool did not come up.
    """
    scenarios = chosen(only)
    assert options.model is not None
    config = build_config({**pool_content(options), **_SHORT}, InferencePoolConfig, source="the options")
    checkpoint = _latest(options.model)
    outcomes: list[Outcome] = []

    async def try_them(target: Target) -> None:
        async for outcome in try_all(target, scenarios, scale):
            outcomes.append(outcome)
            on_outcome(outcome)

    with InferencePool(config, [checkpoint], on_event=on_event) as pool:
        pool.load(checkpoint.name)
        recipe = Recipe(config, (checkpoint,), launcher=None)
        asyncio.run(try_them(Target(pool, checkpoint.name, owner_pid=os.getpid(), recipe=recipe)))
    return outcomes


def _latest(path: str) -> Servable:
    complete = [one for one in find_checkpoints(path) if one.complete and one.folder is not None]
    if not complete or complete[-1].folder is None:
        raise NoCheckpoints(
            expected=f"at least one complete checkpoint in Hugging Face layout at {path}",
            found="none",
            remedy="see which are there and why not: assay checkpoints PATH",
        )
    found = complete[-1]
    assert found.folder is not None
    return Servable.from_folder(found.name, found.folder, digest_model_folder(found.folder))


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each scenario, with what did not hold below its name."""
    table = Table("Scenario", "Requests", "Client errors", "Wrong", "Duplicates", "Seconds", "Verdict")
    colours = {"holds": "green", "violated": "red", "skipped": "yellow"}
    for one in outcomes:
        counts = (one.requests, one.client_errors, one.wrong_answers, one.duplicates, f"{one.seconds:g}")
        shown = [""] * len(counts) if one.skipped else [str(count) for count in counts]
        name = "\n  ".join((one.scenario, *one.violations, *([one.skipped] if one.skipped else [])))
        table.add_row(name, *shown, f"[{colours[one.verdict]}]{one.verdict}[/]")
    return table


def outcomes_as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The same for scripts."""
    return [one.as_dict() for one in outcomes]
