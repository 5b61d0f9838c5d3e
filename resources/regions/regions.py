"""Choice of a region: the regions that offer a device, its hourly price in each, and the price where a replica runs.

Decisions are pure functions of `deployments/regions.yaml`, or of the file in `ASSAY_REGIONS`.
"""

from __future__ import annotations

import difflib
import urllib.request
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path

import yaml
from pydantic import ValidationError

from resources.config import Config, CpuConfig, GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import BadInput, NoMatchingRegion
from resources.regions.region_table import Price, Region, Regions, gpu_model
from resources.settings import deployment_data, settings
from resources.storage.yaml_text import load_yaml

_GB = 10**9
STALE_DAYS = 180
"""Age of a price list from which on `assay doctor` requests a newer list; list prices change about once a year."""
METADATA = "http://169.254.169.254"  # of a VM at Google; by IP, since resolving the name can hang on other networks
_METADATA_SECONDS = 1.0


def load_regions(path: Path) -> Regions:
    """Reads a regions file."""
    try:
        return Regions.model_validate(load_yaml(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise BadInput(
            expected=f"regions and prices in {path}",
            found=str(error),
            remedy="Correct the file; deployments/regions.yaml of Assay shows how it is written.",
        ) from error


def regions_file() -> Path:
    """Returns the path of the regions file: from the settings, else Assay's own."""
    return settings().regions or deployment_data("regions.yaml")


def where_to_write(region: str, line: str) -> str:
    """Returns advice on where to add a line about a region: updates replace Assay's own file, which is a template."""
    own = settings().regions
    file = str(own) if own else f"a copy of {regions_file()}, which ASSAY_REGIONS names,"
    return f"write into {file} at {region}: {line}"


def known_regions() -> Regions:
    """Returns the regions of this machine's settings, read once."""
    return _loaded(regions_file())


_loaded = cache(load_regions)


def regions_for(resources: ResourceConfig, regions: Regions | None = None) -> list[Region]:
    """Returns the regions that offer the requested device and zone, in the order of `resources.regions` or the file."""
    known = regions or known_regions()
    searched = [known.named(name) for name in resources.regions] if resources.regions else list(known.regions)
    unique = {region.name: region for region in searched}.values()
    if matching := [region for region in unique if region.offered(resources)]:
        return matching
    raise NoMatchingRegion(
        expected=f"a region that offers {described(resources)}",
        found=f"no region does. Regions searched: {', '.join(region.name for region in searched)}",
        remedy=f"{_nearest(resources, searched=searched, known=known)}Add a region to the regions file "
        "(deployments/regions.yaml, unless ASSAY_REGIONS names another), or change resources.device.",
    )


def price_per_hour(region: Region, resources: ResourceConfig) -> Decimal | None:
    """Returns USD per hour of all replicas in a region, for the first offered TPU type; None if a part has no price."""
    resources = region.offered(resources) or resources.choices[0]

    def rate(price: Price | None) -> Decimal | None:
        return None if price is None else price.preemptible if resources.preemptible else price.on_demand

    def host() -> Decimal | None:
        cores, memory = rate(region.vcpu_hour), rate(region.memory_gb_hour)
        if cores is None or memory is None:
            return None
        return cores * resources.cpu + memory * Decimal(size_in_bytes(resources.ram)) / _GB

    machines = resources.hosts * resources.replicas
    match resources.device:
        case TpuConfig(slice=slice_):
            chip = rate(region.chip_hour.get(slice_.generation))
            return None if chip is None else chip * resources.chip_count()
        case GpuConfig(variant=variant, count=count):
            chip, machine = rate(region.chip_hour.get(gpu_model(variant))), host()
            return None if chip is None or machine is None else (chip * count + machine) * machines
        case CpuConfig():
            machine = host()
            return None if machine is None else machine * machines


def described(resources: ResourceConfig) -> str:
    """Formats the requested device, and the zone if it matters."""
    match resources.device:
        case CpuConfig():
            device = "machines without accelerators"
        case GpuConfig(variant=variant):
            device = f"{variant} GPUs" if variant != "auto" else "GPUs"
        case TpuConfig(types=types):
            device = " or ".join(types)
    return device + (f" in zone {resources.zone}" if resources.zone else "")


def _nearest(resources: ResourceConfig, *, searched: Sequence[Region], known: Regions) -> str:
    anywhere = resources.model_copy(update={"zone": None})
    devices = [choice.device for choice in resources.choices]
    zones = [zone for region in searched for device in devices for zone in region.zones_for(device)]
    if resources.zone and zones:
        return f"The zones {', '.join(dict.fromkeys(zones))} do. "
    elsewhere = [region.name for region in known.regions if region.offered(anywhere)]
    if elsewhere:
        return f"Elsewhere {', '.join(elsewhere)} would. "
    match resources.device:
        case TpuConfig(slice=slice_):
            model, offered = slice_.generation, [name for region in searched for name in region.tpus]
        case GpuConfig(variant=variant):
            model, offered = gpu_model(variant), [name for region in searched for name in region.gpus]
        case CpuConfig():
            return ""
    near = difflib.get_close_matches(model, dict.fromkeys(offered), n=2, cutoff=0.4) or list(dict.fromkeys(offered))
    return f"Nearest there: {', '.join(near)}. " if near else ""


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
        region = known.of_backend(backend)
        match resources.regions:
            case (only,) if region is None:
                region = known.named(only)
    except BadInput as error:
        return Tariff(why_unknown=f"{error.expected}: {error.found}".splitlines()[0])
    if region is None:
        return Tariff(why_unknown="neither the backend nor resources.regions says which region it runs in")
    return tariff_in(region, resources, known)


def _tariff_here(resources: ResourceConfig, known: Regions) -> Tariff:
    preemptible = None
    zone = None if settings().region else vm_zone()
    name = zone.rpartition("-")[0] if zone else settings().region
    if name is None:
        return Tariff(why_unknown="this machine is in no region that has prices")
    if zone is not None and (told := vm_metadata("scheduling/preemptible")) is not None:
        preemptible = told.upper() == "TRUE"
    region = known.find(name)
    if region is None:
        return Tariff(zone=zone, why_unknown=f"the price list has no region {name}")
    asked = resources if preemptible is None else resources.model_copy(update={"preemptible": preemptible})
    return tariff_in(region, asked, known, zone=zone)


@cache  # machines outside of Google Cloud take a second to fail
def vm_metadata(name: str, metadata_address: str = METADATA) -> str | None:
    """Returns an instance value from this Google VM's metadata; None on other machines, or if it is missing."""
    request = urllib.request.Request(
        f"{metadata_address}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # link-local: never through a proxy
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as answer:
            if answer.headers.get("Metadata-Flavor") == "Google":
                return answer.read().decode().strip()
    except OSError:
        pass  # not a VM at Google, or no such value
    return None


def vm_zone(metadata_address: str = METADATA) -> str | None:
    """Returns the zone of this Google VM, such as us-east1-d; None on other machines."""
    place = vm_metadata("zone", metadata_address)  # projects/1/zones/us-east1-d
    return place and place.rpartition("/")[2]
