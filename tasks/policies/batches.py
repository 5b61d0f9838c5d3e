"""Batches of a policy's work, and the work pool of each. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any

from resources.config import ResourceConfig
from resources.errors import AssayError, NoUsableWorkPool
from resources.regions.region_table import Regions
from resources.regions.work_pools import Source, WorkPoolChoice, WorkPoolState, choose_work_pool
from tasks.policies.reconciliation import OpenCell

MOST_CELLS_IN_A_RUN = 500
"""Bound due to their names, a parameter of the flow run, which Prefect limits to 512 kB."""


@dataclass(frozen=True)
class Batch:
    """Cells for a single flow run, with the work pool that would start it now, or the error if there is none. `waits`
    is True if a work pool would start it but is full."""

    cells: Sequence[OpenCell]
    resources: ResourceConfig
    choice: WorkPoolChoice | None = None
    error: AssayError | None = None
    waits: bool = False

    @property
    def title(self) -> str:
        more = len(self.cells) - 1
        return self.cells[0].title + (f" and {more} more" if more else "")

    def described(self) -> str:
        """Returns a line with the cells and their work pool, or the reason that there is none."""
        if self.choice is not None:
            return f"{self.title}: {self.choice.described()}"
        assert self.error is not None
        return f"{self.title}: {'waits' if self.waits else 'nowhere'}, {self.error.found}"


def served_together(work: Iterable[OpenCell]) -> list[list[OpenCell]]:
    """Groups cells that a single pool or endpoint can serve: same run, checkpoint kind, priority and serving."""
    groups: dict[tuple[Any, ...], list[OpenCell]] = {}
    for cell in work:
        config = cell.evaluation.config
        served = config.pool_config.model_dump_json() if config.pool_config else None
        kind = cell.checkpoint.kind  # an engine serves a single kind
        ways = (None,) if config.native else (served, config.pool_name, config.base_url)
        groups.setdefault((cell.run, kind, cell.evaluation.priority, ways), []).append(cell)
    return list(groups.values())


def batches_of(work: Iterable[OpenCell]) -> list[Batch]:
    """Splits work into groups that are served together on the same resources, of MOST_CELLS_IN_A_RUN cells at most."""
    batches: list[Batch] = []
    for group in served_together(work):
        alike: dict[str, list[OpenCell]] = {}
        for cell in group:
            alike.setdefault(cell.evaluation.config.resources.model_dump_json(), []).append(cell)
        for cells in alike.values():
            needed = cells[0].evaluation.config.resources
            for start in range(0, len(cells), MOST_CELLS_IN_A_RUN):
                batches.append(Batch(cells[start : start + MOST_CELLS_IN_A_RUN], needed))
    return batches


def placed(
    batches: Iterable[Batch],
    *,
    regions: Regions,
    states: Mapping[str, WorkPoolState],
    source_of: Callable[[Sequence[OpenCell]], Source | None],
    max_egress_usd: Decimal,
) -> list[Batch]:
    """Chooses a work pool for each batch in order; each choice takes a slot of the work pool's limit. `source_of`:
    returns region and size of the cells' checkpoints. `max_egress_usd`: most that reading the checkpoints of a batch
    from another region may cost."""
    now = dict(states)
    placements = []
    for batch in batches:
        choose = partial(
            choose_work_pool,
            batch.resources,
            regions=regions,
            source=source_of(batch.cells),
            max_egress_usd=max_egress_usd,
        )
        try:
            choice = choose(states=now)
        except NoUsableWorkPool as error:
            placements.append(replace(batch, error=error, waits=_would_start(choose, without_limits(now))))
        except AssayError as error:  # not available anywhere; continue with the other batches
            placements.append(replace(batch, error=error))
        else:
            state = now[choice.work_pool]
            now[choice.work_pool] = replace(state, active=state.active + 1)
            placements.append(replace(batch, choice=choice))
    return placements


def without_limits(states: Mapping[str, WorkPoolState]) -> dict[str, WorkPoolState]:
    """Returns the states with all limits removed."""
    return {name: replace(state, limit=None) for name, state in states.items()}


def _would_start(choose: Callable[..., WorkPoolChoice], states: Mapping[str, WorkPoolState]) -> bool:
    try:
        choose(states=states)
    except NoUsableWorkPool:
        return False
    return True
