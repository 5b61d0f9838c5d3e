"""Hourly price of a replica where it runs: its location, whether it is preemptible, and the source of the price."""

from __future__ import annotations

from datetime import date

from resources.config import Config, ResourceConfig
from resources.errors import BadInput
from resources.regions.region_check import vm_metadata
from resources.regions.region_table import Region, Regions
from resources.regions.regions import known_regions, price_per_hour
from resources.settings import settings

STALE_DAYS = 180
"""Age of a price list from which on `assay doctor` requests a newer list; list prices change about once a year."""


class Tariff(Config):
    """Hourly price of a replica, as far as it is known."""

    usd_per_hour: float | None = None
    """USD per hour of a replica, for all of its hosts; empty if unknown."""
    region: str | None = None
    """Region that it runs in."""
    zone: str | None = None
    """Zone that it runs in, if known."""
    preemptible: bool | None = None
    """True if the machine can be preempted, which is cheaper."""
    as_of: date | None = None
    """Date of the price list."""
    source: str | None = None
    """Source of the price list."""
    why_unknown: str | None = None
    """Reason for a missing price."""


def tariff_in(region: Region, resources: ResourceConfig, regions: Regions, *, zone: str | None = None) -> Tariff:
    """Returns the tariff of a replica in a region, and in a zone if known."""
    hourly = price_per_hour(region, resources.model_copy(update={"replicas": 1}))
    place = {"region": region.name, "zone": zone or resources.zone, "preemptible": resources.preemptible}
    if hourly is None:
        kind = "preemptible" if resources.preemptible else "on demand"
        return Tariff(**place, why_unknown=f"the price list has no price for it in {region.name}, {kind}")
    prices = regions.prices
    source = prices.source or prices.note or None
    return Tariff(**place, usd_per_hour=round(float(hourly), 6), as_of=prices.as_of, source=source)


def tariff_of(resources: ResourceConfig, *, backend: str | None, regions: Regions | None = None) -> Tariff:
    """Returns the tariff of a replica of a job, as far as its region is known; `backend` is as in `Client.url`.

    Locally (None), the region comes from the settings, or from the zone in a Google VM's metadata; otherwise from the
    backend, or from `resources.regions` if it lists a single region.
    """
    try:
        known = regions or known_regions()
        if backend is None:
            return _tariff_here(resources, known)
        at = (region for region in known.regions if backend in (region.ray_address, region.iris_address))
        region = next(at, None)
        match resources.regions:
            case (only,) if region is None:
                region = known.named(only)
    except BadInput as error:
        return Tariff(why_unknown=f"{error.expected}: {error.found}".splitlines()[0])
    if region is None:
        return Tariff(why_unknown="neither the backend nor resources.regions says which region it runs in")
    return tariff_in(region, resources, known)


def _tariff_here(resources: ResourceConfig, known: Regions) -> Tariff:
    zone, preemptible = None, None
    if (name := settings().region) is None and (place := vm_metadata("zone")) is not None:
        zone = place.rpartition("/")[2]
        name = zone.rpartition("-")[0]
    if name is None:
        return Tariff(why_unknown="this machine is in no region that has prices")
    if zone is not None and (told := vm_metadata("scheduling/preemptible")) is not None:
        preemptible = told.upper() == "TRUE"
    region = known.find(name)
    if region is None:
        return Tariff(zone=zone, why_unknown=f"the price list has no region {name}")
    asked = resources if preemptible is None else resources.model_copy(update={"preemptible": preemptible})
    return tariff_in(region, asked, known, zone=zone)
