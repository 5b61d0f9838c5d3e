"""Choice of the Prefect work pool for a `ResourceConfig`; a pure function of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from resources.config import ResourceConfig, TpuConfig
from resources.errors import NoUsableWorkPool, UnsatisfiableResources
from resources.regions.region_table import Region, Regions
from resources.regions.regions import known_regions, price_per_hour, regions_for
from resources.regions.work_pool_variables import job_variables
from resources.settings import MAX_EGRESS_VARIABLE, REGION_VARIABLE

_GB = 10**9


@dataclass(frozen=True)
class WorkPoolState:
    """State of a work pool, as the Prefect server reports it."""

    exists: bool = True
    paused: bool = False
    live_workers: int = 1
    limit: int | None = None
    """Maximum number of concurrent flow runs, which `active` counts; no limit when None."""
    active: int = 0

    @property
    def obstacle(self) -> str | None:
        """Returns the reason why a flow run would not start now; None if it would."""
        if not self.exists:
            return "does not exist"
        if self.paused:
            return "is paused"
        if self.live_workers == 0:
            return "has no live worker"
        if self.limit is not None and self.active >= self.limit:
            return f"is full ({self.active} of {self.limit} flow runs)"
        return None


@dataclass(frozen=True)
class Source:
    """Location of the checkpoints of a run."""

    region: str
    size_bytes: int
    """Bytes to read, over all checkpoints of the flow run."""


@dataclass(frozen=True)
class WorkPoolChoice:
    """The work pool for a flow run, with its job variables."""

    work_pool: str
    region: Region
    job_variables: dict[str, Any]
    egress_usd: Decimal = Decimal(0)
    price_per_hour: Decimal | None = None
    """USD per hour for the requested resources; None without a price."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Reasons why better regions were not chosen, by region name."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "work_pool": self.work_pool,
            "region": self.region.name,
            "job_variables": self.job_variables,
            "egress_usd": float(self.egress_usd),
            "usd_per_hour": None if self.price_per_hour is None else float(self.price_per_hour),
            "passed_over": dict(self.passed_over),
        }

    def described(self) -> str:
        """Returns a line with the work pool, its costs, and why better regions were not chosen."""
        price = f", {self.price_per_hour:.2f} USD an hour" if self.price_per_hour is not None else ""
        egress = f", {self.egress_usd:.2f} USD for reading from another region" if self.egress_usd else ""
        why = "; ".join(f"{region} {reason}" for region, reason in self.passed_over.items())
        return f"work pool {self.work_pool} in {self.region.name}{price}{egress}" + (f" ({why})" if why else "")


def choose_work_pool(
    resources: ResourceConfig,
    *,
    regions: Regions | None = None,
    states: Mapping[str, WorkPoolState] | None = None,
    source: Source | None = None,
    max_egress_usd: Decimal = Decimal(0),
) -> WorkPoolChoice:
    """Returns the work pool of the best region that offers the device, can express the request, and would start it now.

    Regions are tried in the order of `resources.regions`, else the source's region first, then in the order of the
    file.

    Args:
        states: states of work pools by name; a pool without a state counts as ready.
        source: location of the checkpoints; reading from another region costs egress.
        max_egress_usd: highest accepted cost of reading the checkpoints.
    """
    known = regions or known_regions()
    offering = regions_for(resources, known)
    if source is not None and not resources.regions:
        offering.sort(key=lambda region: region.name != source.region)
    passed_over: dict[str, str] = {}
    impossible: UnsatisfiableResources | None = None
    nearest: str | None = None
    for region in offering:
        if region.work_pool is None:
            passed_over[region.name] = "has no work pool"
            continue
        try:
            variables = job_variables(resources, region)
        except UnsatisfiableResources as error:
            impossible = impossible or error
            passed_over[region.name] = f"cannot: {error.found}; {error.remedy}"
            continue
        if obstacle := (states or {}).get(region.work_pool, WorkPoolState()).obstacle:
            passed_over[region.name] = f"has a work pool, {region.work_pool}, that {obstacle}"
            nearest = nearest or f"{region.work_pool}, which {obstacle}"
            continue
        egress = _egress_usd(known, region, source)
        if egress > max_egress_usd:
            nearest = nearest or f"{region.work_pool}, for {egress:.2f} USD of egress"
            passed_over[region.name] = f"would cost {egress:.2f} USD for reading the checkpoints from another region"
            continue
        environment = {REGION_VARIABLE: region.name, **variables.get("env", {})}
        if egress:  # the job checks the limit again
            environment[MAX_EGRESS_VARIABLE] = str(max_egress_usd)
        variables |= {"env": environment}
        price = price_per_hour(region, resources)
        return WorkPoolChoice(region.work_pool, region, variables, egress, price, passed_over)
    if impossible is not None and all(reason.startswith("cannot: ") for reason in passed_over.values()):
        raise impossible
    raise NoUsableWorkPool(
        expected=f"a work pool that starts a flow run now, for {_device_text(resources)}",
        found="; ".join(f"{name} {reason}" for name, reason in passed_over.items()),
        remedy=(f"nearest: {nearest}; " if nearest else "")
        + "resume a work pool, start a worker for it, wait, allow more regions, or raise the limit for egress "
        f"(now {max_egress_usd:.2f} USD)",
    )


def _egress_usd(known: Regions, region: Region, source: Source | None) -> Decimal:
    if source is None:
        return Decimal(0)
    return known.egress_price(source.region, region.name) * Decimal(source.size_bytes) / _GB


def _device_text(resources: ResourceConfig) -> str:
    described = resources.device.model_dump(exclude_none=True, exclude={"alternatives"})
    described |= {"variant": " or ".join(resources.device.types)} if isinstance(resources.device, TpuConfig) else {}
    return " ".join(str(value) for value in described.values())
