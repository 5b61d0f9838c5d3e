"""Offers of each region, and their prices."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from resources.config import ResourceConfig
from resources.errors import BadInput, NoMatchingRegion
from resources.regions.region_table import Regions
from resources.regions.regions import (
    known_regions,
    load_regions,
    price_per_hour,
    regions_file,
    regions_for,
    tariff_in,
    tariff_of,
)
from resources.settings import settings, variable_set
from resources.tpu import TPU_TOPOLOGIES

CONTENT = {
    "prices": {
        "as_of": "2025-01-01",
        "source": "the contract of January",
        "chip_hour": {"v4": {"on_demand": 3, "preemptible": 1}, "H100": {"on_demand": 10}},
        "vcpu_hour": {"on_demand": 0.5, "preemptible": 0.25},
        "memory_gb_hour": {"on_demand": 0.125, "preemptible": 0.125},
        "egress_gb": {"same_continent": 0.02, "other_continent": 0.08},
    },
    "regions": [
        {
            "name": "us-near1",
            "continent": "north-america",
            "zones": ["us-near1-a"],
            "tpus": {"v4": ["us-near1-a"]},
            "gpus": {"H100": ["us-near1-a"], "T4": ["us-near1-a"]},
            "buckets": ["data-near"],
            "ray_address": "ray://head:10001",
        },
        {
            "name": "europe-far1",
            "aliases": ["eu-far1"],
            "continent": "europe",
            "zones": ["europe-far1-b"],
            "tpus": {"v4": ["europe-far1-b"], "v6e": ["europe-far1-b"]},
            "chip_hour": {"v4": {"on_demand": 4, "preemptible": 2}},
        },
    ],
}
REGIONS = Regions.model_validate(CONTENT)


def names(resources: ResourceConfig) -> list[str]:
    return [region.name for region in regions_for(resources, REGIONS)]


def test_regions_for_a_device_come_in_the_order_of_the_file_or_of_the_request():
    assert names(ResourceConfig.with_tpu("v4-8")) == ["us-near1", "europe-far1"]
    assert names(ResourceConfig.with_tpu("v4-8", regions=("eu-far1", "us-near1"))) == ["europe-far1", "us-near1"]
    assert names(ResourceConfig.with_tpu("v4-8", zone="europe-far1-b")) == ["europe-far1"]
    assert names(ResourceConfig.with_tpu(["v6e-8", "v5e-8"])) == ["europe-far1"]
    assert names(ResourceConfig.with_tpu(["v6e-4", "v4-8"])) == ["us-near1", "europe-far1"]
    assert names(ResourceConfig.with_gpu("nvidia-h100-80gb", 8)) == ["us-near1"]
    assert names(ResourceConfig.with_gpu("auto")) == ["us-near1"]
    assert names(ResourceConfig(regions=("eu-far1", "europe-far1"))) == ["europe-far1"]


@pytest.mark.parametrize(
    ("resources", "searched", "hint"),
    [
        (ResourceConfig.with_tpu("v6e-8", regions=("us-near1",)), "us-near1", "europe-far1"),
        (ResourceConfig.with_tpu("v5p-8"), "us-near1, europe-far1", "v4"),
        (ResourceConfig.with_tpu(["v5p-8", "v5e-4"]), "us-near1, europe-far1", "v4"),
        (ResourceConfig.with_gpu("H200"), "us-near1, europe-far1", "H100"),
        (ResourceConfig.with_tpu("v6e-8", zone="europe-far1-a"), "us-near1, europe-far1", "europe-far1-b"),
    ],
)
def test_regions_for_what_none_offers_says_what_was_searched_and_what_comes_nearest(
    resources: ResourceConfig, searched: str, hint: str
):
    with pytest.raises(NoMatchingRegion) as caught:
        regions_for(resources, REGIONS)
    assert searched in caught.value.found
    assert hint in caught.value.remedy and "regions.yaml" in caught.value.remedy


def test_unknown_region_is_refused_with_near_names():
    with pytest.raises(BadInput) as caught:
        regions_for(ResourceConfig(regions=("eu-far",)), REGIONS)
    assert "eu-far1" in caught.value.found


@pytest.mark.parametrize(
    ("resources", "near", "far"),
    [
        (ResourceConfig.with_tpu("v4-16", 2), "16", "32"),
        (ResourceConfig.with_tpu("v4-8", preemptible=False), "12", "16"),
        (ResourceConfig(cpu=2, ram="1g", replicas=3, preemptible=False), "3.4027", "3.4027"),
        (ResourceConfig.with_gpu("H100", 2, cpu=4, ram="1g", preemptible=False), "22.1342", "22.1342"),
        (ResourceConfig.with_gpu("H100", 2), None, None),
        (ResourceConfig.with_gpu("T4"), None, None),
        (ResourceConfig.with_tpu("v6e-8"), None, None),
        (ResourceConfig.with_tpu(["v6e-4", "v4-8"]), "4", None),  # of the first type that each offers
        (ResourceConfig.with_tpu(["v4-8", "v6e-4"]), "4", "8"),
    ],
)
def test_price_per_hour_counts_all_replicas_and_is_none_where_unknown(
    resources: ResourceConfig, near: str | None, far: str | None
):
    prices = [price_per_hour(region, resources) for region in REGIONS.regions]
    assert [price if price is None else price.quantize(Decimal("0.0001")) for price in prices] == [
        expected if expected is None else Decimal(expected).quantize(Decimal("0.0001")) for expected in (near, far)
    ]


def test_prices_of_cores_and_memory_hold_everywhere_also_where_no_chip_has_a_price():
    prices = {name: price for name, price in CONTENT["prices"].items() if name != "chip_hour"}
    for chips in ({}, {"chip_hour": {}}):
        near, far = Regions.model_validate({**CONTENT, "prices": {**prices, **chips}}).regions
        on_cpu = ResourceConfig(cpu=2, ram="1g", preemptible=False)
        assert price_per_hour(near, on_cpu) == price_per_hour(far, on_cpu) is not None
        assert price_per_hour(near, ResourceConfig.with_tpu("v4-8")) is None
        assert price_per_hour(far, ResourceConfig.with_tpu("v4-8")) == 8, "its own price"


def test_region_with_prices_that_are_no_table_is_refused():
    regions = [{**region, "chip_hour": 5} for region in CONTENT["regions"]]
    with pytest.raises(ValidationError, match="chip_hour"):
        Regions.model_validate({**CONTENT, "regions": regions})


def test_egress_price_follows_continents():
    assert REGIONS.egress_price("us-near1", "us-near1") == 0
    assert REGIONS.egress_price("us-near1", "us-elsewhere9") == Decimal("0.02")
    assert REGIONS.egress_price("us-near1", "eu-far1") == Decimal("0.08")
    assert REGIONS.egress_price("us-near1", "mars-1") == Decimal("0.08")


def test_regions_file_of_the_settings_replaces_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "regions.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    monkeypatch.setenv("ASSAY_REGIONS", str(path))
    settings.cache_clear()
    assert known_regions() == REGIONS
    for wrong in ("nonsense: [", "regions: []", yaml.safe_dump({**CONTENT, "regions": CONTENT["regions"][:1] * 2})):
        path.write_text(wrong)
        with pytest.raises(BadInput, match=r"regions\.yaml"):
            load_regions(path)


def test_our_own_regions_offer_known_slices_and_have_a_price_for_each_device():
    ours = load_regions(regions_file())
    known = {variant.partition("-")[0]: variant for variant in TPU_TOPOLOGIES}
    for region in ours.regions:
        assert set(region.tpus) <= set(known)
        zones = {zone for offered in (region.tpus, region.gpus) for zones in offered.values() for zone in zones}
        assert zones <= set(region.zones), region.name
        asked = [ResourceConfig.with_tpu(known[family]) for family in region.tpus]
        asked += [ResourceConfig.with_gpu(model) for model in region.gpus] + [ResourceConfig()]
        assert not [resources.device for resources in asked if not price_per_hour(region, resources)], region.name
    assert ours.named("eu-west4").name == "europe-west4"


SLICES = ResourceConfig.with_tpu("v4-8", slice_count=4)
ELSEWHERE = "iris://elsewhere:10000"


def test_tariff_is_per_replica_in_the_backends_region_with_its_source():
    tariff = tariff_of(SLICES, backend="ray://head:10001", regions=REGIONS)
    assert (tariff.usd_per_hour, tariff.region, tariff.preemptible) == (4, "us-near1", True)
    assert (tariff.as_of, tariff.source) == (date(2025, 1, 1), "the contract of January")
    named = SLICES.model_copy(update={"regions": ("us-near1",), "preemptible": False})
    assert tariff_of(named, backend=ELSEWHERE, regions=REGIONS).usd_per_hour == 12
    noted = REGIONS.model_copy(update={"prices": REGIONS.prices.model_copy(update={"source": "", "note": "a guess"})})
    assert tariff_in(noted.regions[0], SLICES, noted).source == "a guess"


@pytest.mark.parametrize(
    ("resources", "backend", "why"),
    [
        (SLICES, ELSEWHERE, "neither the backend nor resources.regions says which region"),
        (SLICES.model_copy(update={"regions": ("us-near1", "europe-far1")}), ELSEWHERE, "neither the backend nor"),
        (ResourceConfig.with_gpu("H100"), "ray://head:10001", "no price for it in us-near1, preemptible"),
        (ResourceConfig.with_gpu("auto"), "ray://head:10001", "no price for it in us-near1"),
        (ResourceConfig(regions=("nowhere",)), ELSEWHERE, "'nowhere'"),
    ],
)
def test_tariff_without_a_price_says_why(resources: ResourceConfig, backend: str, why: str):
    tariff = tariff_of(resources, backend=backend, regions=REGIONS)
    assert tariff.usd_per_hour is None
    assert why in (tariff.why_unknown or "")


def test_tariff_of_this_machine_is_its_regions():
    two = ResourceConfig(cpu=2, ram="4g", preemptible=False)
    with variable_set("ASSAY_REGION", "europe-far1"):
        tariff = tariff_of(two, backend=None, regions=REGIONS)
    assert tariff.usd_per_hour == pytest.approx(float(price_per_hour(REGIONS.regions[1], two) or 0), abs=1e-6)
    assert tariff.region == "europe-far1"
    with variable_set("ASSAY_REGION", "elsewhere"):
        unknown = tariff_of(two, backend=None, regions=REGIONS)
    assert (unknown.usd_per_hour, unknown.why_unknown) == (None, "the price list has no region elsewhere")
