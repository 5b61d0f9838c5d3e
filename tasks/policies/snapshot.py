"""Looking at everything a policy is about: runs, records, claims, overrides. Reads only, and builds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import NamedTuple

from resources.config import ResourceConfig
from resources.errors import BadInput
from resources.regions.regions import price_per_hour, regions_for
from resources.storage import storage
from tasks.checkpoints.run_snapshot import expand_runs, snapshot_run, with_digests
from tasks.claims.files import claims_folder, read_claims
from tasks.policies.batches import Batch
from tasks.policies.overrides import read_overrides
from tasks.policies.policy import Policy, WantedEvaluation, wanted_evaluations
from tasks.policies.reconciliation import OpenCell, RunListing, undecided
from tasks.records.index import indexed_records
from tasks.spec.names import name_of


def take_snapshot(
    policy: Policy,
    *,
    use_index: bool = True,
    evaluations_of: Callable[[Policy, str], Sequence[WantedEvaluation]] = wanted_evaluations,
) -> list[RunListing]:
    """One listing for each run of a policy.

    Args:
        policy: the policy.
        use_index: believe indices that were compared with their records lately.
        evaluations_of: what a policy wants of a run.

    Raises:
        BadInput: a run or suite is not there, or the policy does not fit what answers.
        StorageError: something could not be read.
    """
    listings = []
    for run in expand_runs(policy.runs):
        name = name_of(run)[0]
        folder = run_folder(policy, name)
        claims = read_claims(claims_folder(policy.evaluation_path, name))  # first: what ends meanwhile has a record
        records = indexed_records(folder, use_index=use_index)
        listing = RunListing(
            run=run,
            name=name,
            wanted=evaluations_of(policy, run),
            checkpoints=snapshot_run(run, reference=policy.native_reference, evaluated=records.has),
            records=records,
            claims=claims,
            overrides=read_overrides(folder),
        )
        if unclear := undecided(listing):
            known = {
                checkpoint.uri: checkpoint
                for checkpoint in with_digests(run, unclear, reference=policy.native_reference)
            }
            listing = replace(
                listing, checkpoints=[known.get(checkpoint.uri, checkpoint) for checkpoint in listing.checkpoints]
            )
        listings.append(listing)
    return listings


def run_folder(policy: Policy, run_name: str) -> str:
    """Returns where records, claims and overrides of a run lie."""
    return storage.join(policy.evaluation_path, run_name)


class Estimate(NamedTuple):
    """The cost expected of a cell, by what the same evaluation took of other checkpoints.

    `where` is the region of a work pool; else here, with the device, the endpoint or the pool that serves; `money` is
    in USD, at the prices of the region, or of the first one that offers the device.
    """

    seconds: float | None
    chip_hours: float | None
    where: str
    money: float | None


class Estimates:
    """Estimates for cells, from what records say and from the table of prices.

    Args:
        listings: what the cells are of.
        batches: what would be sent to work pools now; None where cells are evaluated here.
    """

    def __init__(self, listings: Sequence[RunListing], batches: Sequence[Batch] | None = None) -> None:
        self._typical: dict[str, tuple[float, float]] = {}
        self._sends = batches is not None
        self._batches = {id(cell): batch for batch in batches or () for cell in batch.cells}
        for listing in listings:
            self._typical |= listing.records.typical
        self._places: dict[str, tuple[str, Decimal | None]] = {}

    def of(self, cell: OpenCell) -> Estimate:
        """The estimate for one cell."""
        wanted = cell.evaluation
        resources = _resources(wanted)
        if self._sends:
            where, hourly = _place_of(self._batches.get(id(cell)))
        else:
            where, hourly = self._place(wanted, resources)
        known = self._typical.get(wanted.hash) or (
            self._typical.get(wanted.native_hash) if wanted.native_hash else None
        )
        if known is None:
            return Estimate(None, None, where, None)
        seconds, chip_seconds = known
        chips = resources.chip_count() / resources.replicas if resources else 0
        # A cell has a replica to itself for its chip-seconds, on a CPU for as long as it takes.
        hours = (chip_seconds / chips if chips else seconds) / 3600
        money = round(float(hourly) * hours, 4) if hourly is not None else None
        return Estimate(seconds, round(chip_seconds / 3600, 4), where, money)

    def _place(self, wanted: WantedEvaluation, resources: ResourceConfig | None) -> tuple[str, Decimal | None]:
        config = wanted.config
        if resources is None:
            return config.base_url or f"pool {config.pool_name}", None
        key = resources.model_dump_json()
        if key not in self._places:
            replica = resources.model_copy(update={"replicas": 1})
            if resources.device.kind == "cpu" and not resources.regions:
                self._places[key] = ("cpu here", None)
                return self._places[key]
            name = getattr(resources.device, "variant", "cpu")
            try:
                region = regions_for(replica)[0]
            except BadInput:
                self._places[key] = (f"{name} here", None)
            else:
                name = getattr((region.offered(replica) or replica).device, "variant", name)
                self._places[key] = (f"{name} here", price_per_hour(region, replica))
        return self._places[key]


def _place_of(batch: Batch | None) -> tuple[str, Decimal | None]:
    """The region of a batch's work pool, and an hour of one replica there."""
    if batch is None:
        return "in a later pass", None
    if batch.choice is None:
        return "when there is room" if batch.waits else "nowhere", None
    region = batch.choice.region
    hourly = price_per_hour(region, batch.resources.model_copy(update={"replicas": 1}))
    return region.name, hourly


def _resources(wanted: WantedEvaluation) -> ResourceConfig | None:
    """Returns what a cell runs on; None where somebody else serves it."""
    config = wanted.config
    if config.native:
        return config.resource_config or ResourceConfig()
    if config.pool_name is not None or config.pool_config is None:
        return None
    return config.pool_config.resource_config
