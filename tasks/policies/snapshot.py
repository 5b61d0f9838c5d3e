"""Snapshot of a policy's runs, records, claims and overrides. Reads only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.regions.regions import Tariff, known_regions, tariff_in
from resources.regions.work_pools import choose_work_pool
from resources.storage import storage
from tasks.checkpoints.merged_listing import with_means
from tasks.checkpoints.run_snapshot import SeenCheckpoint, expand_runs, snapshot_run, with_digests
from tasks.policies.batches import Batch
from tasks.policies.early import early_decisions
from tasks.policies.policy import Policy, WantedEvaluation, read_overrides, wanted_evaluations
from tasks.policies.reconciliation import OpenCell, RunListing
from tasks.records.cost import Predicted, Spent
from tasks.records.index import RunRecords, indexed_records
from tasks.running.claims.files import SeenClaim, claims_folder, read_claims
from tasks.running.expected import Expectations, Expected, together
from tasks.running.pricing import resources_of_replica, tariff_of_cell
from tasks.spec.evaluation import EvaluationConfig


def take_snapshot(
    policy: Policy,
    *,
    use_index: bool = True,
    evaluations_of: Callable[[Policy, str], Sequence[WantedEvaluation]] = wanted_evaluations,
) -> list[RunListing]:
    """Returns a listing for each run of a policy; `use_index` trusts indices recently compared with their records."""
    listings = []
    for run, name in expand_runs(policy.runs).items():
        recorded = _recorded(policy, name, use_index=use_index)
        evaluations = evaluations_of(policy, run)
        seen = snapshot_run(
            run, reference=policy.native_reference, steps_from=policy.steps_from, evaluated=recorded[1].has
        )
        for series in sorted({each.series for each in seen}) or [""]:
            own = f"{name}-{series}" if series else name
            if series:
                recorded = _recorded(policy, own, use_index=use_index)
            named = [replace(each, config=each.config.model_copy(update={"model_name": own})) for each in evaluations]
            folder, (claims, records) = run_folder(policy, own), recorded
            listing = RunListing(
                run=run,
                name=own,
                evaluations=named,
                checkpoints=[each for each in seen if each.series == series],
                records=records,
                claims=claims,
                overrides=read_overrides(folder),
                early=early_decisions(policy, folder, named),
            )
            listing = _with_means(listing, policy)
            if unclear := _undecided(listing):
                known = {seen.uri: seen for seen in with_digests(run, unclear, reference=policy.native_reference)}
                listing = replace(listing, checkpoints=[known.get(seen.uri, seen) for seen in listing.checkpoints])
            listings.append(listing)
    return listings


def run_folders(policy: Policy) -> dict[str, str]:
    """Returns the folders of records of a policy's runs, and of the series of each, by name."""
    names: dict[str, None] = {}
    for run, name in expand_runs(policy.runs).items():
        seen = snapshot_run(run, reference=policy.native_reference, steps_from=policy.steps_from)
        names |= dict.fromkeys([name, *sorted({each.run for each in seen})])
    return {name: run_folder(policy, name) for name in names}


def _recorded(policy: Policy, run_name: str, *, use_index: bool) -> tuple[Sequence[SeenClaim], RunRecords]:
    claims = read_claims(claims_folder(policy.evaluation_path, run_name))  # first: those ending meanwhile have records
    return claims, indexed_records(run_folder(policy, run_name), use_index=use_index)


def _with_means(listing: RunListing, policy: Policy) -> RunListing:
    merging = {each.rules for each in listing.evaluations if any(rule.merged for rule in each.rules)}
    taken = [listing.taken_by(rules, final_step=policy.final_step) for rules in merging]
    return replace(listing, checkpoints=with_means(listing.checkpoints, set().union(*taken)))


def _undecided(listing: RunListing) -> list[SeenCheckpoint]:
    recorded: dict[str, set[str | None]] = defaultdict(set)
    for record in listing.records.others:
        recorded[record.checkpoint].add(record.listing)
    undecided = []
    for checkpoint in listing.checkpoints:
        others, states = recorded.get(checkpoint.name, ()), listing.records.done.get(checkpoint.name, ())
        listings = {*others, *(state.listing for state in states)}
        if listings and checkpoint.listing not in listings and not checkpoint.problems:
            undecided.append(checkpoint)
    return undecided


def run_folder(policy: Policy, run_name: str) -> str:
    """Returns the folder of a run's records, claims and overrides."""
    return storage.join(policy.evaluation_path, run_name)


class Estimates:
    """Estimates for cells from records and prices; `batches` go to work pools, None means local evaluation."""

    def __init__(self, listings: Sequence[RunListing], batches: Sequence[Batch] | None = None) -> None:
        self._records = {listing.name: listing.records for listing in listings}
        self._sends = batches is not None
        self._batches = {id(cell): batch for batch in batches or () for cell in batch.cells}
        self._expectations: Expectations | None = None
        self._tariffs: dict[tuple[str | None, str | None, str | None], Tariff] = {}
        self._found: dict[tuple[WantedEvaluation, str | None], tuple[Predicted | None, Tariff]] = {}

    def of(self, cell: OpenCell) -> dict[str, Any]:
        """Returns the expected cost of a cell as JSON. `where` is the region of a work pool, else the
        local device, the endpoint or the pool; `money` is in USD at local prices there; `how` is measured, guess, or
        None if the cost is unknown."""
        predicted, _ = self._expected(cell)
        known = predicted.model_dump() if predicted is not None else {}
        chips, usd = known.get("chip_seconds"), known.get("usd")
        return {
            "seconds": known.get("seconds"),
            "chip_hours": None if chips is None else round(chips / 3600, 4),
            "where": self._place(cell),
            "money": None if usd is None else round(usd, 4),
            "how": known.get("how"),
            "basis": known.get("basis"),
        }

    def together(self, cells: Sequence[OpenCell]) -> Expected:
        expected = [self._expected(cell) for cell in cells]
        whys = [tariff.why_unknown for _, tariff in expected if tariff.usd_per_hour is None]
        return together([predicted for predicted, _ in expected], why_unpriced=whys[0] if whys else None)

    def _expected(self, cell: OpenCell) -> tuple[Predicted | None, Tariff]:
        evaluation, batch = cell.evaluation, self._batches.get(id(cell))
        region = batch.choice.region.name if batch is not None and batch.choice is not None else None
        if (evaluation, region) not in self._found:
            if self._expectations is None:
                self._expectations = Expectations(evaluation.config.evaluation_path, self._records)
            tariff = self._tariff(evaluation.config, batch, region)
            predicted = self._expectations.of(evaluation.config, (evaluation.hash, evaluation.native_hash), tariff)
            self._found[evaluation, region] = predicted, tariff
        return self._found[evaluation, region]

    def _tariff(self, config: EvaluationConfig, batch: Batch | None, region: str | None) -> Tariff:
        resources = resources_of_replica(config)
        key = (resources.model_dump_json() if resources else None, config.pool_name or config.base_url, region)
        if key not in self._tariffs:
            self._tariffs[key] = self._priced(config, resources, batch)
        return self._tariffs[key]

    def _priced(self, config: EvaluationConfig, resources: ResourceConfig | None, batch: Batch | None) -> Tariff:
        if not self._sends or resources is None or config.pool_name is not None:
            return tariff_of_cell(config)
        try:
            choice = batch.choice if batch is not None and batch.choice is not None else choose_work_pool(resources)
            return tariff_in(choice.region, resources, known_regions())
        except AssayError as error:
            return Tariff(why_unknown=error.found.splitlines()[0])

    def _place(self, cell: OpenCell) -> str:
        if self._sends:
            batch = self._batches.get(id(cell))
            if batch is None:
                return "in a later pass"
            if batch.choice is None:
                return "when there is room" if batch.waits else "nowhere"
            return batch.choice.region.name
        config = cell.evaluation.config
        served_by_others = config.pool_name is not None and not config.native
        resources = None if served_by_others else resources_of_replica(config)
        if resources is None:
            return config.base_url or f"pool {config.pool_name}"
        return f"{getattr(resources.device, 'variant', 'cpu')} here"


def policy_spent(policy: Policy, listings: Sequence[RunListing]) -> dict[str, Spent]:
    """Returns the cost of a policy by month, in order: all records that carry its name, failed attempts included. The
    month is that of the record's creation in UTC. Attempts without a record are not counted."""
    months: dict[str, Spent] = {}
    for listing in listings:
        for month_spent in listing.records.spent:
            if policy.name in month_spent.policies:
                months[month_spent.month] = months.get(month_spent.month, Spent()) + month_spent.spent
    return dict(sorted(months.items()))
