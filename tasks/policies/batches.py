"""Batches of a policy's work, and the work pool that each goes to. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from resources.config import ResourceConfig
from resources.errors import AssayError, NoUsableWorkPool
from resources.regions.region_table import Regions
from resources.regions.work_pools import Source, WorkPoolChoice, WorkPoolState, choose_work_pool
from tasks.policies.reconciliation import OpenCell
from tasks.spec.evaluation import EvaluationConfig

MOST_CELLS_IN_A_RUN = 500
"""Their names are a parameter of the flow run, which Prefect bounds at 512 kB."""


@dataclass(frozen=True)
class Batch:
    """Cells that one flow run can evaluate, and the work pool that would begin it now; else why none would.

    `waits` says that one would if it were not full.
    """

    cells: Sequence[OpenCell]
    resources: ResourceConfig
    choice: WorkPoolChoice | None = None
    error: AssayError | None = None
    waits: bool = False

    @property
    def title(self) -> str:
        """The first cell, and how many more there are."""
        more = len(self.cells) - 1
        return self.cells[0].title + (f" and {more} more" if more else "")

    def described(self) -> str:
        """One line: which cells, and where they go or why they do not."""
        if self.choice is not None:
            return f"{self.title}: {self.choice.described()}"
        assert self.error is not None
        return f"{self.title}: {'waits' if self.waits else 'nowhere'}, {self.error.found}"


def served_together(work: Iterable[OpenCell]) -> list[list[OpenCell]]:
    """Cells that one pool or endpoint can serve: of one run, served alike; by priority, which runs through a group."""
    groups: dict[tuple[Any, ...], list[OpenCell]] = {}
    for cell in work:
        config = cell.evaluation.config
        served = config.pool_config.model_dump_json() if config.pool_config else None
        kind = cell.checkpoint.kind  # an engine serves only one of them
        ways = (None,) if config.native else (served, config.pool_name, config.base_url)
        groups.setdefault((cell.run, kind, cell.evaluation.priority, ways), []).append(cell)
    return list(groups.values())


def resources_of(config: EvaluationConfig) -> ResourceConfig:
    """Returns what the flow run of an evaluation needs of the machine that it is on."""
    if not config.native and config.pool_config is not None:
        return config.pool_config.resource_config
    return config.resource_config or ResourceConfig()


def batches_of(work: Iterable[OpenCell]) -> list[Batch]:
    """Work in parts: what is served together on the same resources, bounded by what one flow run is told."""
    found: list[Batch] = []
    for group in served_together(work):
        alike: dict[str, list[OpenCell]] = {}
        for cell in group:
            alike.setdefault(resources_of(cell.evaluation.config).model_dump_json(), []).append(cell)
        for cells in alike.values():
            needed = resources_of(cells[0].evaluation.config)
            for start in range(0, len(cells), MOST_CELLS_IN_A_RUN):
                found.append(Batch(cells[start : start + MOST_CELLS_IN_A_RUN], needed))
    return found


def placed(
    batches: Iterable[Batch],
    *,
    regions: Regions,
    states: Mapping[str, WorkPoolState],
    source_of: Callable[[Sequence[OpenCell]], Source | None],
    max_egress_usd: Decimal,
) -> list[Batch]:
    """Each batch with its work pool; each takes a place of its work pool's limit from those after it.

    Args:
        batches: in the order in which they choose.
        regions: where to look.
        states: of all their work pools.
        source_of: where the checkpoints of some cells lie, and their size.
        max_egress_usd: what reading the checkpoints of one batch from another region may cost.
    """
    now = dict(states)
    found = []
    for batch in batches:
        source = source_of(batch.cells)

        def choose(
            known: Mapping[str, WorkPoolState],
            resources: ResourceConfig = batch.resources,
            source: Source | None = source,
        ) -> WorkPoolChoice:
            return choose_work_pool(
                resources, regions=regions, states=known, source=source, max_egress_usd=max_egress_usd
            )

        try:
            choice = choose(now)
        except NoUsableWorkPool as error:
            found.append(replace(batch, error=error, waits=_would(choose, without_limits(now))))
        except AssayError as error:  # it cannot be had anywhere; the other batches can
            found.append(replace(batch, error=error))
        else:
            state = now[choice.work_pool]
            now[choice.work_pool] = replace(state, active=state.active + 1)
            found.append(replace(batch, choice=choice))
    return found


def without_limits(states: Mapping[str, WorkPoolState]) -> dict[str, WorkPoolState]:
    """Returns the work pools with room in each."""
    return {name: replace(state, limit=None) for name, state in states.items()}


def _would(
    choose: Callable[[Mapping[str, WorkPoolState]], WorkPoolChoice], states: Mapping[str, WorkPoolState]
) -> bool:
    try:
        choose(states)
    except NoUsableWorkPool:
        return False
    return True
