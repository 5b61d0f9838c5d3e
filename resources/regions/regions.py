"""Choice of a region: the regions that offer a device, and its hourly price in each.

All decisions are pure functions of `deployments/regions.yaml`, or of the file in `ASSAY_REGIONS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path

import yaml
from pydantic import ValidationError

from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import BadInput, NoMatchingRegion
from resources.regions.region_table import Price, Region, Regions, gpu_model, tpu_generation
from resources.settings import deployment_data, settings
from resources.storage.yaml_text import load_yaml

_GB = 10**9


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


@cache
def _loaded(path: Path) -> Regions:
    return load_regions(path)


def regions_for(resources: ResourceConfig, regions: Regions | None = None) -> list[Region]:
    """Returns the regions that offer the requested device and zone, in the order of `resources.regions` or the file."""
    known = regions or known_regions()
    searched = [known.named(name) for name in resources.regions] if resources.regions else list(known.regions)
    unique = {region.name: region for region in searched}.values()
    if matching := [region for region in unique if region.offered(resources)]:
        return matching
    raise NoMatchingRegion(
        expected=f"a region that offers {_described(resources)}",
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
        case TpuConfig(variant=variant):
            chip = rate(region.chip_hour.get(tpu_generation(variant)))
            return None if chip is None else chip * resources.chip_count()
        case GpuConfig(variant=variant, count=count):
            chip, machine = rate(region.chip_hour.get(gpu_model(variant))), host()
            return None if chip is None or machine is None else (chip * count + machine) * machines
        case CpuConfig():
            machine = host()
            return None if machine is None else machine * machines


def _described(resources: ResourceConfig) -> str:
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
        case TpuConfig(variant=variant):
            model, offered = tpu_generation(variant), [name for region in searched for name in region.tpus]
        case GpuConfig(variant=variant):
            model, offered = gpu_model(variant), [name for region in searched for name in region.gpus]
        case CpuConfig():
            return ""
    near = difflib.get_close_matches(model, dict.fromkeys(offered), n=2, cutoff=0.4) or list(dict.fromkeys(offered))
    return f"Nearest there: {', '.join(near)}. " if near else ""
