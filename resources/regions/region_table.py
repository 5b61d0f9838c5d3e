"""Content of a regions file: devices and buckets of each region, the place of its jobs, and prices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from resources.config import Config, CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput

WorkPoolType = Literal["process", "kubernetes", "cloud-run-v2", "vertex-ai"]
"""The types of Prefect work pools that there are templates for."""
ImageKind = Literal["orchestrator", "cpu", "cuda", "tpu"]
"""The images of `deployments/images/`."""
IMAGES_LINE = "images: {orchestrator: IMAGE, cpu: IMAGE, cuda: IMAGE, tpu: IMAGE}"
"""The line that names the images of a region's work pool."""
ADDRESS_LINE = "ray_address: ray://HEAD:10001"
"""The line that says where the Ray of a region is."""
_GPU_NAMES = {"A100-40GB": "A100", "H100-80GB": "H100", "H100-MEGA-80GB": "H100"}


class Price(Config):
    """USD for one unit."""

    on_demand: Decimal = Field(gt=0)
    """Price of what stays until it is given back."""
    preemptible: Decimal | None = Field(default=None, gt=0)
    """Price of what can be taken away; unknown when unset."""


class EgressPrice(Config):
    """USD for a GB, 10^9 bytes, that is read from another region."""

    same_continent: Decimal = Field(ge=0)
    """Between two regions of one continent."""
    other_continent: Decimal = Field(ge=0)
    """Between continents."""


class Prices(Config):
    """Prices where a region says nothing else, in USD."""

    as_of: date
    """Date at which the prices were true."""
    source: str = ""
    """Place that they were taken from, such as the address of a price list or the name of a contract."""
    note: str = ""
    """Remark on the prices, for people."""
    chip_hour: dict[str, Price] = {}
    """By TPU generation or GPU model; a TPU's price includes its VM."""
    vcpu_hour: Price
    """One CPU core for an hour."""
    memory_gb_hour: Price
    """A GB of memory for an hour."""
    egress_gb: EgressPrice
    """A GB read from another region."""


class RayCluster(Config):
    """The Ray cluster of a region, as Ray's cluster launcher describes one."""

    file: Path
    """Its cluster file, from the folder of the regions file."""
    zone: str
    """The zone that all its machines are in."""
    project: str | None = None
    """The Google Cloud project that pays for it."""


class Region(Config):
    """A place with compute and buckets."""

    name: str
    """Its name at the cloud, such as us-central2."""
    aliases: tuple[str, ...] = ()
    """Other names that people use for it."""
    cloud: str = "gcp"
    """Whose it is."""
    continent: str
    """Continent, for the price of reading from elsewhere."""
    zones: tuple[str, ...] = ()
    """Its zones."""
    tpus: dict[str, tuple[str, ...]] = {}
    """TPU generations, such as v5litepod, each with the zones that have them."""
    gpus: dict[str, tuple[str, ...]] = {}
    """GPU models, such as H100, each with the zones that have them."""
    buckets: tuple[str, ...] = ()
    """Buckets that lie here, without gs://."""
    work_pool: str | None = None
    """The Prefect work pool whose workers are here."""
    work_pool_type: WorkPoolType = "kubernetes"
    """Place where that work pool runs flow runs."""
    work_pool_variables: dict[str, Any] = {}
    """Defaults of its job variables, such as image, namespace and service_account_name."""
    images: dict[ImageKind, str] = {}
    """Images of its flow runs, each with its tag: cpu, cuda or tpu by their device, orchestrator for what sends jobs to
    the region's cluster. Otherwise `image` of `work_pool_variables`."""
    ray_address: str | None = None
    """Address of its Ray, such as ray://10.0.0.2:10001."""
    ray_cluster: RayCluster | None = None
    """The Ray cluster that `assay cluster up` starts."""
    iris_address: str | None = None
    """Address of its Iris controller, such as iris://10.0.0.2:10000."""
    chip_hour: dict[str, Price] = {}
    """Prices that differ here, by TPU generation or GPU model."""
    vcpu_hour: Price | None = None
    """One CPU core for an hour, where it differs here."""
    memory_gb_hour: Price | None = None
    """A GB of memory for an hour, where it differs here."""

    def zones_for(self, device: Device) -> tuple[str, ...]:
        """The zones that offer a device; none if the region does not."""
        match device:
            case TpuConfig(variant=variant):
                return self.tpus.get(tpu_generation(variant), ())
            case GpuConfig(variant="auto"):
                return tuple(dict.fromkeys(zone for zones in self.gpus.values() for zone in zones))
            case GpuConfig(variant=variant):
                return self.gpus.get(gpu_model(variant), ())
            case CpuConfig():
                return self.zones

    def offered(self, resources: ResourceConfig) -> ResourceConfig | None:
        """The first choice of what is asked for that this region has, in the zone asked for; None if it has none."""
        for choice in resources.choices:
            zones = self.zones_for(choice.device)
            if resources.zone in zones if resources.zone else zones:
                return choice
        return None

    @property
    def backend_url(self) -> str | None:
        """Returns the address for jobs of this region, as `ASSAY_JOBS` names it; None if nothing is known of it."""
        return self.ray_address or self.iris_address

    @property
    def named_images(self) -> list[str]:
        """Returns every image that flow runs of its work pool may have."""
        usual = self.work_pool_variables.get("image")
        return [*self.images.values(), *([usual] if isinstance(usual, str) else [])]

    def unwritten(self) -> dict[str, str]:
        """Lines that the file lacks for work pool and Ray cluster of this region, each by the name of what it says."""
        cluster, lines = self.ray_cluster, {}
        if self.work_pool and self.work_pool_type != "process" and not self.named_images:
            lines["images"] = IMAGES_LINE
        if cluster is None:
            return lines
        lines |= {} if self.backend_url else {"ray_address": ADDRESS_LINE}
        if cluster.project is None:
            lines["project"] = f"ray_cluster: {{file: {cluster.file}, zone: {cluster.zone}, project: PROJECT}}"
        return lines


class Regions(Config):
    """Every region, and the prices that hold where one names no other."""

    prices: Prices
    """Prices of everything."""
    regions: tuple[Region, ...] = Field(min_length=1)
    """In the order in which they are tried."""

    @model_validator(mode="before")
    @classmethod
    def _prices_for_each(cls, values: Any) -> Any:
        match values:
            case {"prices": Mapping() as prices, "regions": list() | tuple() as regions}:
                common = {key: prices[key] for key in ("vcpu_hour", "memory_gb_hour") if key in prices}
                chips = prices.get("chip_hour") or {}
                if not isinstance(chips, Mapping):
                    return values  # which is reported when the field itself is looked at
                filled = [
                    {**common, **region, "chip_hour": {**chips, **(region.get("chip_hour") or {})}}
                    if isinstance(region, dict) and isinstance(region.get("chip_hour") or {}, Mapping)
                    else region
                    for region in regions
                ]
                return {**values, "regions": filled}
            case _:
                return values

    @model_validator(mode="after")
    def _names_mean_one_region(self) -> Regions:
        names = [name for region in self.regions for name in (region.name, *region.aliases)]
        buckets = [bucket for region in self.regions for bucket in region.buckets]
        for kind, listed in (("name", names), ("bucket", buckets)):
            twice = sorted({value for value in listed if listed.count(value) > 1})
            if twice:
                raise ValueError(f"the {kind} {twice[0]} stands for two regions")
        return self

    def named(self, name: str) -> Region:
        """The region of a name or alias.

        Raises:
            BadInput: none has it; the message offers the nearest ones.
        """
        known = {alias: region for region in self.regions for alias in (region.name, *region.aliases)}
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or [region.name for region in self.regions]
        raise BadInput(
            expected="a region that deployments/regions.yaml describes, or the file in ASSAY_REGIONS",
            found=repr(name),
            remedy=f"Use one of {', '.join(near)}, or add it there.",
        )

    def of_bucket(self, bucket: str) -> Region | None:
        """The region that lists a bucket."""
        return next((region for region in self.regions if bucket in region.buckets), None)

    def continent_of(self, region: str) -> str | None:
        """The continent of a region or of one that nobody described, by how Google Cloud begins its name."""
        for known in self.regions:
            if region in (known.name, *known.aliases):
                return known.continent
        beginnings = {"us": "north-america", "northamerica": "north-america", "europe": "europe", "asia": "asia"}
        return beginnings.get(region.partition("-")[0])

    def egress_price(self, region: str, other: str) -> Decimal:
        """USD for a GB, 10^9 bytes, between two regions; the higher price where a continent is unknown."""
        if region == other:
            return Decimal(0)
        continents = {self.continent_of(region), self.continent_of(other)}
        known = None not in continents and len(continents) == 1
        return self.prices.egress_gb.same_continent if known else self.prices.egress_gb.other_continent


def tpu_generation(variant: str) -> str:
    """Returns the part of a slice's name that its chips have in common: v5litepod for v5litepod-16."""
    return variant.partition("-")[0]


def gpu_model(name: str) -> str:
    """The name of a GPU in the regions file: H100 for h100, T4 for nvidia-tesla-t4."""
    model = name.upper().removeprefix("NVIDIA-").removeprefix("TESLA-")
    return _GPU_NAMES.get(model, model)
