"""Content of a regions file: devices and buckets of each region, the backend of its jobs, and prices."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from resources.config import Config, CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import unknown

WorkPoolType = Literal["process", "kubernetes", "cloud-run-v2", "vertex-ai"]
"""The types of Prefect work pools that have templates."""
ImageKind = Literal["orchestrator", "cpu", "cuda", "tpu"]
"""The images of `deployments/images/`."""
IMAGES_LINE = "images: {orchestrator: IMAGE, cpu: IMAGE, cuda: IMAGE, tpu: IMAGE}"
"""Template of the line with the images of a region's work pool."""
ADDRESS_LINE = "ray_address: ray://HEAD:10001"
"""Template of the line with the Ray address of a region."""
_GPU_NAMES = {"A100-40GB": "A100", "H100-80GB": "H100", "H100-MEGA-80GB": "H100"}


class Price(Config):
    """USD for a unit."""

    on_demand: Decimal = Field(gt=0)
    """Price on demand, without preemption."""
    preemptible: Decimal | None = Field(default=None, gt=0)
    """Price of preemptible capacity; unknown when unset."""


class EgressPrice(Config):
    """USD per GB (10^9 bytes) that is read from another region."""

    same_continent: Decimal = Field(ge=0)
    """Between two regions of the same continent."""
    other_continent: Decimal = Field(ge=0)
    """Between continents."""


class Prices(Config):
    """Default prices of all regions, in USD."""

    as_of: date
    """Date of the prices."""
    source: str = ""
    """Source of the prices, such as the address of a price list or the name of a contract."""
    note: str = ""
    """Remark on the prices, for readers."""
    chip_hour: dict[str, Price] = {}
    """By TPU generation or GPU model; a TPU's price includes its VM."""
    vcpu_hour: Price
    """A CPU core for an hour."""
    memory_gb_hour: Price
    """A GB of memory for an hour."""
    egress_gb: EgressPrice
    """A GB read from another region."""


class RayCluster(Config):
    """The Ray cluster of a region, for Ray's cluster launcher."""

    file: Path
    """Its cluster file, relative to the folder of the regions file."""
    zone: str
    """The zone of all its machines."""
    project: str | None = None
    """The Google Cloud project that pays for it."""


class Region(Config):
    """A region with compute and buckets."""

    name: str
    """Its name at the cloud, such as us-central2."""
    aliases: tuple[str, ...] = ()
    """Other accepted names of it."""
    cloud: str = "gcp"
    """Its cloud provider."""
    continent: str
    """Continent, for the price of reads from other regions."""
    zones: tuple[str, ...] = ()
    """Its zones."""
    tpus: dict[str, tuple[str, ...]] = {}
    """TPU generations, such as v5litepod, each with the zones that have them."""
    gpus: dict[str, tuple[str, ...]] = {}
    """GPU models, such as H100, each with the zones that have them."""
    buckets: tuple[str, ...] = ()
    """Buckets in this region, without gs://."""
    work_pool: str | None = None
    """The Prefect work pool with workers in this region."""
    work_pool_type: WorkPoolType = "kubernetes"
    """Type of that work pool, which determines where flow runs execute."""
    work_pool_variables: dict[str, Any] = {}
    """Defaults of its job variables, such as image, namespace and service_account_name."""
    images: dict[ImageKind, str] = {}
    """Images of its flow runs, each with its tag: cpu, cuda or tpu by their device, orchestrator for flow runs that
    submit jobs to the region's cluster. Default: `image` of `work_pool_variables`.
    """
    ray_address: str | None = None
    """Address of its Ray, such as ray://10.0.0.2:10001."""
    ray_cluster: RayCluster | None = None
    """The Ray cluster that `assay cluster up` starts."""
    iris_address: str | None = None
    """Address of its Iris controller, such as iris://10.0.0.2:10000."""
    chip_hour: dict[str, Price] = {}
    """Prices that differ in this region, by TPU generation or GPU model."""
    vcpu_hour: Price | None = None
    """A CPU core for an hour, if different in this region."""
    memory_gb_hour: Price | None = None
    """A GB of memory for an hour, if different in this region."""

    def zones_for(self, device: Device) -> tuple[str, ...]:
        """Returns the zones that offer a device; empty if the region does not offer it."""
        match device:
            case TpuConfig(slice=slice_):
                return self.tpus.get(slice_.generation, ())
            case GpuConfig(variant="auto"):
                return tuple(dict.fromkeys(zone for zones in self.gpus.values() for zone in zones))
            case GpuConfig(variant=variant):
                return self.gpus.get(gpu_model(variant), ())
            case CpuConfig():
                return self.zones

    def offered(self, resources: ResourceConfig) -> ResourceConfig | None:
        """Returns the first requested choice that this region offers, in the requested zone; None if it offers none."""
        for choice in resources.choices:
            zones = self.zones_for(choice.device)
            if resources.zone in zones if resources.zone else zones:
                return choice
        return None

    @property
    def backend_url(self) -> str | None:
        """Returns the address for jobs of this region, as in `ASSAY_JOBS`; None if unset."""
        return self.ray_address or self.iris_address

    @property
    def named_images(self) -> list[str]:
        """Returns every image that flow runs of its work pool may have."""
        usual = self.work_pool_variables.get("image")
        return [*self.images.values(), *([usual] if isinstance(usual, str) else [])]

    def unwritten(self) -> dict[str, str]:
        """Returns the lines that the file lacks for the work pool and Ray cluster of this region, by field."""
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
    """All regions, and default prices."""

    prices: Prices
    """Default prices."""
    regions: tuple[Region, ...] = Field(min_length=1)
    """Regions, in the order of preference."""

    @field_validator("regions")
    @classmethod
    def _prices_for_each(cls, regions: tuple[Region, ...], known: ValidationInfo) -> tuple[Region, ...]:
        prices: Prices | None = known.data.get("prices")
        if prices is None:  # pydantic reports it
            return regions
        return tuple(
            region.model_copy(
                update={
                    "chip_hour": {**prices.chip_hour, **region.chip_hour},
                    "vcpu_hour": region.vcpu_hour or prices.vcpu_hour,
                    "memory_gb_hour": region.memory_gb_hour or prices.memory_gb_hour,
                }
            )
            for region in regions
        )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Regions:
        names = [name for region in self.regions for name in (region.name, *region.aliases)]
        buckets = [bucket for region in self.regions for bucket in region.buckets]
        for kind, listed in (("name", names), ("bucket", buckets)):
            twice = sorted({value for value in listed if listed.count(value) > 1})
            if twice:
                raise ValueError(f"the {kind} {twice[0]} names two regions")
        return self

    def find(self, name: str) -> Region | None:
        """Returns the region with a name or alias, or None."""
        return next((region for region in self.regions if name in (region.name, *region.aliases)), None)

    def named(self, name: str) -> Region:
        """Returns the region with a name or alias."""
        if (region := self.find(name)) is not None:
            return region
        expected = "a region that deployments/regions.yaml describes, or the file in ASSAY_REGIONS"
        names = [known for region in self.regions for known in (region.name, *region.aliases)]
        raise unknown(expected, name, names, "correct the name, or add it there")

    def of_bucket(self, bucket: str) -> Region | None:
        return next((region for region in self.regions if bucket in region.buckets), None)

    def of_backend(self, backend: str) -> Region | None:
        """Returns the region with a backend, as in `Client.url`; None if no region has it."""
        at = (region for region in self.regions if backend in (region.ray_address, region.iris_address))
        return next(at, None)

    def continent_of(self, region: str) -> str | None:
        """Returns the continent of a region, or None; of an unlisted region, from the start of its name."""
        if (known := self.find(region)) is not None:
            return known.continent
        beginnings = {"us": "north-america", "northamerica": "north-america", "europe": "europe", "asia": "asia"}
        return beginnings.get(region.partition("-")[0])

    def egress_price(self, region: str, other: str) -> Decimal:
        """Returns USD per GB (10^9 bytes) between two regions; the higher price if a continent is unknown."""
        if region == other:
            return Decimal(0)
        continents = {self.continent_of(region), self.continent_of(other)}
        known = None not in continents and len(continents) == 1
        return self.prices.egress_gb.same_continent if known else self.prices.egress_gb.other_continent


def gpu_model(name: str) -> str:
    """Returns the name of a GPU in the regions file: H100 for h100, T4 for nvidia-tesla-t4."""
    model = name.upper().removeprefix("NVIDIA-").removeprefix("TESLA-")
    return _GPU_NAMES.get(model, model)
