"""`ResourceConfig`, devices and the TPU table."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from resources.config import (
    CpuConfig,
    Device,
    GpuConfig,
    ResourceConfig,
    TpuConfig,
    infer_device_from_resource_config,
    size_in_bytes,
)
from resources.errors import BadInput
from resources.tpu import CORES_PER_CHIP, GIB_PER_CHIP, TPU_TOPOLOGIES, tpu_topology


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "vms", "per_vm"),
    [
        ("v4-8", 4, 1, 1, 4),
        ("v4-4096", 2048, 512, 512, 4),
        ("v5litepod-8", 8, 1, 1, 8),
        ("v5litepod-16", 16, 2, 4, 4),
        ("v5litepod-256", 256, 32, 64, 4),
        ("v5p-12288", 6144, 1536, 1536, 4),
        ("v6e-8", 8, 1, 1, 8),
        ("v6e-16", 16, 4, 4, 4),
        ("v6e-256", 256, 64, 64, 4),
    ],
)
def test_topology_of_a_slice_has_its_chips_and_machines(
    name: str, chips: int, hosts: int, vms: int, per_vm: int
) -> None:
    topology = tpu_topology(name)
    assert (topology.chips, topology.hosts, topology.vms, topology.chips_per_vm) == (chips, hosts, vms, per_vm)


def test_topologies_chips_are_spread_over_all_vms() -> None:
    assert len(TPU_TOPOLOGIES) == 11 + 12 + 9 + 8
    for topology in TPU_TOPOLOGIES.values():
        assert topology.chips == topology.vms * topology.chips_per_vm, topology


def test_topologies_of_several_cubes_go_up_to_the_whole_machine() -> None:
    topology = tpu_topology("v5p-384")
    assert (topology.chips, topology.vms, topology.chips_per_vm) == (192, 48, 4)
    assert tpu_topology("v5p-12160").chips == 6080
    for beyond in ("v5p-12416", "v4-8320", "v5p-200", "v5p--128"):
        with pytest.raises(BadInput, match="Unknown TPU type"):
            tpu_topology(beyond)
    with pytest.raises(BadInput, match="a multiple of 128 up to 12288"):
        tpu_topology("v5p-200")


def test_topology_of_an_unknown_slice_offers_the_family() -> None:
    with pytest.raises(BadInput, match="Unknown TPU type 'v4-9'") as caught:
        tpu_topology("v4-9")
    assert "v4-8" in caught.value.remedy
    with pytest.raises(ValidationError, match="Unknown TPU type"):
        TpuConfig(variant="v99-8")


def test_tpu_config_accepts_the_names_people_use() -> None:
    assert TpuConfig.model_validate({"type": "v5e-16", "count": 16}).variant == "v5litepod-16"
    assert ResourceConfig.model_validate({"device": {"kind": "tpu", "type": "V4-8"}}).device == TpuConfig(
        variant="v4-8"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"cpus": 3}, "Extra inputs"),
        ({"ram": "much"}, "expected a size such as 512m"),
        ({"device": {"kind": "gpu", "type": "H100", "variant": "A100"}}, "mean the same field"),
        ({"device": {"kind": "tpu", "type": "v5e-16", "count": 8}}, r"16 chips \(4 VMs with 4 each\). Write count=16"),
    ],
)
def test_wrong_resources_are_refused_with_their_remedy(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ResourceConfig.model_validate(content)
    with pytest.raises(ValidationError, match="frozen"):
        ResourceConfig().cpu = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_alternative_tpu_types_have_the_same_shape() -> None:
    either = ResourceConfig.with_tpu(["v5e-8", "V6E-8"])
    assert isinstance(either.device, TpuConfig)
    assert either.device == TpuConfig(variant="v5litepod-8", alternatives=("v6e-8",))
    assert [choice.device for choice in either.choices] == [TpuConfig(variant=name) for name in either.device.types]
    assert (either.hosts_per_replica, either.chip_count()) == (1, 8)
    least = ResourceConfig(device=TpuConfig(variant="v5p-8", alternatives=("v5e-4",)))
    assert (least.cpu, least.ram) == (32, "123g"), "the resources that each type has"


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (["v5e-16", "v6e-8"], "v5litepod-16, 4 VMs with 4 chips each; found that v6e-8 has 1 VM with 8 .* leave these"),
        (["v5p-8", "v6e-8", "v4-8"], "v5p-8, 1 VM with 4 chips each; found that v6e-8 has 1 VM with 8 chips each:"),
        (["v5e-8", "v6e-8", "v5litepod-8"], "v5litepod-8, v6e-8, v5litepod-8: name each once"),
        (["v5e-8", "v9-8"], "Unknown TPU type 'v9-8'"),
    ],
)
def test_tpu_types_that_are_not_alike_are_refused_with_what_differs(types: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ResourceConfig.with_tpu(types)


@pytest.mark.parametrize(
    ("device", "share", "chips", "engine"),
    [
        (CpuConfig(), (1, "4g", "16g"), 0, "cpu"),
        (GpuConfig(), (4, "24g", "100g"), 1, "cuda"),
        (GpuConfig(variant="H100", count=8), (96, "1280g", "100g"), 8, "cuda"),
        (GpuConfig(variant="nvidia-l4"), (3, "12g", "100g"), 1, "cuda"),
        (TpuConfig(variant="v4-8"), (32, "128g", "50g"), 4, "tpu"),
        (TpuConfig(variant="v5litepod-1"), (16, "30g", "50g"), 1, "tpu"),
        (TpuConfig(variant="v6e-8"), (32, "128g", "50g"), 8, "tpu"),
    ],
)
def test_cores_memory_and_disk_go_with_the_device_unless_they_are_given(
    device: Device, share: tuple[int, str, str], chips: int, engine: str
) -> None:
    resources = ResourceConfig(device=device, replicas=2)
    assert (resources.cpu, resources.ram, resources.disk) == share
    assert (resources.chip_count(), infer_device_from_resource_config(resources)) == (2 * chips, engine)
    given = ResourceConfig.model_validate({"device": device, "cpu": 2, "ram": "9g"})
    assert (given.cpu, given.ram, given.disk) == (2, "9g", share[2])


@pytest.mark.parametrize("variant", sorted(TPU_TOPOLOGIES))
def test_share_of_every_tpu_host_fits_into_its_vm(variant: str) -> None:
    slice_, resources = TPU_TOPOLOGIES[variant], ResourceConfig(device=TpuConfig(variant=variant))
    generation = variant.partition("-")[0]
    assert resources.cpu < CORES_PER_CHIP[generation] * slice_.chips_per_vm
    assert 4 < int(resources.ram.removesuffix("g")) < GIB_PER_CHIP[generation] * slice_.chips_per_vm


def test_sizes_are_read_in_powers_of_1024_and_checked() -> None:
    assert size_in_bytes("512m") == 512 * 1024**2
    assert size_in_bytes("1.5G") == int(1.5 * 1024**3)


def test_form_schema_offers_devices_as_any_of_with_help_texts() -> None:
    schema = ResourceConfig.model_json_schema()
    assert len(schema["properties"]["device"]["anyOf"]) == 3
    assert "oneOf" not in schema["properties"]["device"]
    assert all(field.get("description") for field in schema["properties"].values())
