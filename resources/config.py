"""`ResourceConfig`: the compute that a job or a pool requests, independent of the backend that provides it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from resources.addresses import refuse_user_information
from resources.errors import BadInput
from resources.tpu import CORES_PER_CHIP, GIB_PER_CHIP, TpuTopology, canonical_variant, tpu_topology


class Config(BaseModel):
    """A frozen model that rejects unknown keys; field docstrings become help texts in forms."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        populate_by_name=True,
        protected_namespaces=(),
        # pydantic's own titles are the class of a nested configuration, and "Field" if it is optional
        field_title_generator=lambda name, _: name,
    )

    @model_validator(mode="before")
    @classmethod
    def _addresses_hold_no_user_information(cls, values: Any) -> Any:
        refuse_user_information(values, place="")  # no ValueError: pydantic would print the value next to it
        return values


def _json_only(value: Any, place: str = "") -> Any:
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected texts as keys, found {key!r} in {place}: put it in quotes")
            _json_only(part, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            _json_only(part, f"{place}.{number}")
    elif not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise ValueError(
            f"expected a value that JSON has, found {value!r} ({type(value).__name__}) as {place}: "
            "put a text that YAML takes for something else, such as a date, in quotes"
        )
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(lambda value: _json_only(value))]
"""Arguments for another program by name; values that JSON lacks have no portable hash, so they are rejected."""


class CpuConfig(Config):
    """No accelerator."""

    kind: Literal["cpu"] = "cpu"
    """Marks the device as a CPU."""


class GpuConfig(Config):
    """NVIDIA GPUs of a single model in each machine."""

    kind: Literal["gpu"] = "gpu"
    """Marks the device as a GPU."""
    variant: str = "auto"
    """GPU model, such as H100; "auto" takes the model of the machine. `type` is accepted too."""
    count: int = Field(default=1, ge=1)
    """GPUs of each machine: per replica, unless the replica has several `hosts`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_type(cls, values: Any) -> Any:
        return _type_as_variant(values)


class TpuConfig(Config):
    """A TPU slice, with Google Cloud's names."""

    kind: Literal["tpu"] = "tpu"
    """Marks the device as a TPU slice."""
    variant: str = "v5litepod-8"
    """Slice type, such as v4-8, v5litepod-16 (or v5e-16), v5p-8, v6e-8. `type` is accepted too."""
    topology: str | None = None
    """Arrangement of the chips, such as 2x2x1, if the default does not fit."""
    alternatives: tuple[str, ...] = ()
    """Other acceptable slice types, best first, each with the same number of VMs and of chips per VM."""

    @model_validator(mode="before")
    @classmethod
    def _accept_type_and_check_count(cls, values: Any) -> Any:
        values = _type_as_variant(values)
        if not isinstance(values, dict) or "count" not in values:
            return values
        count = values["count"]
        values = {key: value for key, value in values.items() if key != "count"}
        slice_ = _known_topology(str(values.get("variant", cls.model_fields["variant"].default)))
        if count != slice_.chips:
            raise ValueError(
                f"count={count!r} contradicts the TPU type: {slice_.variant} has {slice_.chips} chips "
                f"({slice_.vms} VMs with {slice_.chips_per_vm} each). Write count={slice_.chips} or leave it out"
            )
        return values

    @field_validator("variant")
    @classmethod
    def _known_variant(cls, variant: str) -> str:
        _known_topology(variant)
        return canonical_variant(variant)

    @field_validator("alternatives")
    @classmethod
    def _known_alternatives(cls, alternatives: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(cls._known_variant(variant) for variant in alternatives)

    @model_validator(mode="after")
    def _alternatives_are_alike(self) -> TpuConfig:
        if len(set(self.types)) < len(self.types):
            raise ValueError(f"expected different TPU types, found {', '.join(self.types)}: name each once")
        first, *others = (tpu_topology(variant) for variant in self.types)
        unlike = [other for other in others if (other.vms, other.chips_per_vm) != (first.vms, first.chips_per_vm)]
        if unlike:
            sizes = ", ".join(f"{known.variant} has {_shape(known)}" for known in unlike)
            raise ValueError(
                f"expected TPU types of as many VMs and chips as {first.variant}, {_shape(first)}; found that {sizes}: "
                "leave these out, or submit a job for each"
            )
        return self

    @property
    def types(self) -> tuple[str, ...]:
        return (self.variant, *self.alternatives)

    @property
    def choices(self) -> tuple[TpuConfig, ...]:
        """Returns a configuration without alternatives for each acceptable type, best first."""
        return tuple(self.model_copy(update={"variant": variant, "alternatives": ()}) for variant in self.types)

    @property
    def slice(self) -> TpuTopology:
        return tpu_topology(self.variant)


def _known_topology(variant: str) -> TpuTopology:
    try:
        return tpu_topology(variant)
    except BadInput as error:  # pydantic collects ValueErrors, with the path of the field
        raise ValueError(f"{error.found}; {error.remedy}") from None


def _shape(slice_: TpuTopology) -> str:
    return f"{slice_.vms} VM{'' if slice_.vms == 1 else 's'} with {slice_.chips_per_vm} chips each"


def _type_as_variant(values: Any) -> Any:
    if not isinstance(values, dict) or "type" not in values:
        return values
    if "variant" in values and values["variant"] != values["type"]:
        raise ValueError(
            f"type={values['type']!r} and variant={values['variant']!r} mean the same field: keep one of them"
        )
    return {**{key: value for key, value in values.items() if key != "type"}, "variant": values["type"]}


class AnyOfInForms:
    """Emits `anyOf` for a tagged union: Prefect's run form reverts and merges members under `oneOf`."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        form = handler(schema)
        form.pop("discriminator", None)
        if "oneOf" in form:
            form["anyOf"] = form.pop("oneOf")
        return form


Device = Annotated[CpuConfig | GpuConfig | TpuConfig, Field(discriminator="kind"), AnyOfInForms()]
"""The device that does the arithmetic; `kind` is the discriminator."""

_SIZE = re.compile(r"\d+(\.\d+)?\s*(k|m|g|t)(i?b?)?", re.IGNORECASE)
_SIZE_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


class Share(NamedTuple):
    """The default part of a machine that a replica takes in addition to its accelerator."""

    cpu: int
    ram: str
    disk: str


# Cores and GiB of memory per GPU; Google Cloud's smallest machines with such a GPU have more.
_GPU_SHARES = {
    **dict.fromkeys(("h100", "h200", "b200", "gb200"), (12, 160)),
    "a100": (8, 60),
    **dict.fromkeys(("l4", "t4"), (3, 12)),
}
_ANY_GPU = (4, 24)
_TPU_CORES, _TPU_GIB = 32, 128
_OF_A_VM = 0.7


def default_share(device: Device) -> Share:
    """Returns the default cores, memory and disk for a device; per host, for a TPU slice."""
    match device:
        case CpuConfig():
            return Share(1, "4g", "16g")
        case GpuConfig(variant=variant, count=count):
            named = re.split(r"[^a-z0-9]+", variant.lower())
            cores, gib = next((_GPU_SHARES[word] for word in named if word in _GPU_SHARES), _ANY_GPU)
            return Share(cores * count, f"{gib * count}g", "100g")
        case TpuConfig(types=types, slice=slice_):
            generations, chips = [tpu_topology(variant).generation for variant in types], slice_.chips_per_vm
            cores = int(min(CORES_PER_CHIP[generation] for generation in generations) * chips * _OF_A_VM)
            gib = int(min(GIB_PER_CHIP[generation] for generation in generations) * chips * _OF_A_VM)
            return Share(min(_TPU_CORES, cores), f"{min(_TPU_GIB, gib)}g", "50g")


class ResourceConfig(Config):
    """Resources of a replica, the number of replicas, and their location."""

    device: Device = CpuConfig()
    """The accelerator of a replica, or none."""
    cpu: int = Field(default_factory=lambda known: default_share(known["device"]).cpu, ge=1)
    """CPU cores per replica; when unset, depends on the device: 1 without an accelerator."""
    ram: str = Field(default_factory=lambda known: default_share(known["device"]).ram)
    """Memory per replica, such as 512m or 128g; when unset, depends on the device: 4g without an accelerator."""
    disk: str = Field(default_factory=lambda known: default_share(known["device"]).disk)
    """Local disk per replica, such as 100g; when unset, depends on the device: 16g without an accelerator."""
    hosts: int = Field(default=1, ge=1)
    """Machines of each replica of a pool, each with this device, cores, memory and disk; set by the type for a TPU."""
    replicas: int = Field(default=1, ge=1)
    """Number of replicas; for a pool, engine servers behind its proxy."""
    regions: tuple[str, ...] | None = None
    """Allowed regions, best first; any region when unset."""
    zone: str | None = None
    """A single zone inside the region, if it matters."""
    preemptible: bool = True
    """Accepts a cheaper machine that can be preempted at any time."""
    image: str | None = None
    """Container image, on backends that run containers."""

    @field_validator("ram", "disk")
    @classmethod
    def _size_is_readable(cls, size: str) -> str:
        if not _SIZE.fullmatch(size.strip()):
            raise ValueError(f"expected a size such as 512m or 128g, found {size!r}")
        return size.strip().lower()

    @model_validator(mode="after")
    def _slice_has_its_own_hosts(self) -> ResourceConfig:
        if isinstance(self.device, TpuConfig) and self.hosts > 1:
            raise ValueError(
                f"expected no hosts with a TPU, found {self.hosts}: {self.device.variant} has "
                f"{self.device.slice.vms} VMs, choose another type for another number"
            )
        return self

    @classmethod
    def with_tpu(cls, variant: str | Sequence[str], slice_count: int = 1, **overrides: Any) -> ResourceConfig:
        """Requests `slice_count` slices, each a replica, all of the same TPU type out of `variant`."""
        first, *others = [variant] if isinstance(variant, str) else variant
        device = TpuConfig(variant=first, alternatives=tuple(others))
        defaults: dict[str, Any] = {"cpu": 32, "ram": "128g", "disk": "50g"}
        return cls(**{**defaults, **overrides, "device": device, "replicas": slice_count})

    @classmethod
    def with_gpu(cls, variant: str = "auto", count: int = 1, **overrides: Any) -> ResourceConfig:
        """Requests `count` GPUs of a single model per replica."""
        return cls(**{**overrides, "device": GpuConfig(variant=variant, count=count)})

    @classmethod
    def with_cpu(cls, **overrides: Any) -> ResourceConfig:
        return cls(**{**overrides, "device": CpuConfig()})

    @property
    def hosts_per_replica(self) -> int:
        """Machines of a replica: VMs, for a TPU slice."""
        return self.device.slice.vms if isinstance(self.device, TpuConfig) else self.hosts

    @property
    def choices(self) -> tuple[ResourceConfig, ...]:
        """Returns this configuration with each acceptable TPU type, best first; only itself without alternatives."""
        if not isinstance(self.device, TpuConfig) or not self.device.alternatives:
            return (self,)
        return tuple(self.model_copy(update={"device": tpu}) for tpu in self.device.choices)

    def by_machine(self) -> ResourceConfig:
        """Returns a copy in the units of jobs: each machine is a replica, but a whole TPU slice is a single replica."""
        return self.model_copy(update={"replicas": self.replicas * self.hosts, "hosts": 1})

    @property
    def chips_per_replica(self) -> int:
        """Chips or GPUs of a replica, on all of its machines; 0 on CPU."""
        match self.device:
            case TpuConfig() as tpu:
                return tpu.slice.chips
            case GpuConfig(count=count):
                return count * self.hosts
            case CpuConfig():
                return 0

    def chip_count(self) -> int:
        """Accelerators over all replicas; 0 on CPU."""
        return self.chips_per_replica * self.replicas


def size_in_bytes(size: str) -> int:
    """Converts a size such as `512m` or `128g` to bytes, in powers of 1024."""
    number, unit = re.match(r"^([\d.]+)\s*([kmgt])", size.strip().lower()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(float(number) * 1024 ** _SIZE_POWERS[unit])


def infer_device_from_resource_config(resource_config: ResourceConfig) -> Literal["cpu", "cuda", "tpu"]:
    """Returns the engine family that fits the requested device."""
    kind = resource_config.device.kind
    return "cuda" if kind == "gpu" else kind
