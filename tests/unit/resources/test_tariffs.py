"""Prices of a replica by location, and reasons for missing prices."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from resources.config import ResourceConfig
from resources.regions.region_table import Regions
from resources.regions.regions import price_per_hour, tariff_in, tariff_of
from resources.settings import variable_set

PRICES: dict[str, Any] = {
    "as_of": "2026-03-01",
    "source": "the contract of March",
    "chip_hour": {"v5litepod": {"on_demand": 1.2, "preemptible": 0.5}, "H100": {"on_demand": 10}},
    "vcpu_hour": {"on_demand": 0.03, "preemptible": 0.01},
    "memory_gb_hour": {"on_demand": 0.004, "preemptible": 0.001},
    "egress_gb": {"same_continent": 0.02, "other_continent": 0.05},
}
REGIONS = Regions.model_validate(
    {
        "prices": PRICES,
        "regions": [
            {
                "name": "us-east5",
                "continent": "north-america",
                "zones": ["us-east5-a"],
                "tpus": {"v5litepod": ["us-east5-a"]},
                "gpus": {"H100": ["us-east5-a"]},
                "ray_address": "ray://head:10001",
            },
            {"name": "our-cellar", "continent": "europe", "zones": ["rack-1"]},
        ],
    }
)
SLICES = ResourceConfig.with_tpu("v5litepod-8", slice_count=4)


@pytest.fixture(autouse=True)
def _no_vm() -> Iterator[None]:
    with variable_set("ASSAY_REGION", "our-cellar"):
        yield


def test_price_is_per_replica_in_the_backends_region_with_its_source():
    tariff = tariff_of(SLICES, backend="ray://head:10001", regions=REGIONS)
    assert (tariff.usd_per_hour, tariff.region, tariff.preemptible) == (8 * 0.5, "us-east5", True)
    assert (tariff.as_of, tariff.source) == (date(2026, 3, 1), "the contract of March")
    kept = SLICES.model_copy(update={"preemptible": False})
    assert tariff_of(kept, backend="ray://head:10001", regions=REGIONS).usd_per_hour == pytest.approx(8 * 1.2)
    named = SLICES.model_copy(update={"regions": ("us-east5",)})
    assert tariff_of(named, backend="iris://elsewhere:10000", regions=REGIONS).usd_per_hour == 8 * 0.5


@pytest.mark.parametrize(
    ("resources", "backend", "why"),
    [
        (SLICES, "iris://elsewhere:10000", "neither the backend nor resources.regions says which region"),
        (
            SLICES.model_copy(update={"regions": ("us-east5", "our-cellar")}),
            "iris://elsewhere:10000",
            "neither the backend nor",
        ),
        (ResourceConfig.with_gpu("H100"), "ray://head:10001", "no price for it in us-east5, preemptible"),
        (ResourceConfig.with_gpu("auto"), "ray://head:10001", "no price for it in us-east5"),
        (ResourceConfig(regions=("nowhere",)), "iris://elsewhere:10000", "'nowhere'"),
    ],
)
def test_price_without_a_tariff_is_unknown_and_says_why(resources: ResourceConfig, backend: str, why: str):
    tariff = tariff_of(resources, backend=backend, regions=REGIONS)
    assert tariff.usd_per_hour is None
    assert why in (tariff.why_unknown or "")


def test_cpu_has_a_price_where_its_machine_is_in_a_region_and_none_on_a_laptop():
    two = ResourceConfig(cpu=2, ram="4g", preemptible=False)
    assert tariff_of(two, backend=None, regions=REGIONS).usd_per_hour == pytest.approx(
        float(price_per_hour(REGIONS.named("our-cellar"), two) or Decimal(0)), abs=1e-6
    )
    assert tariff_of(two, backend=None, regions=REGIONS).region == "our-cellar"
    with variable_set("ASSAY_REGION", "elsewhere"):
        unknown = tariff_of(two, backend=None, regions=REGIONS)
    assert (unknown.usd_per_hour, unknown.why_unknown) == (None, "the price list has no region elsewhere")


def test_price_without_a_named_source_has_its_remark_as_source():
    noted = REGIONS.model_copy(update={"prices": REGIONS.prices.model_copy(update={"source": "", "note": "a guess"})})
    assert tariff_in(noted.regions[0], SLICES, noted).source == "a guess"
