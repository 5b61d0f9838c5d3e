"""Options of a new pool: its machines and its engines. Each field of a group is an option of a command."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter, validators

from pools.weights.merges import as_named
from resources.errors import BadInput, exclusive
from resources.regions.region_table import Regions
from resources.regions.regions import known_regions
from tasks.checkpoints.discovery import run_named_by

_GPU = re.compile(r"(?P<variant>[A-Za-z][\w-]*)(?::(?P<of_it>\d{1,18}))?|(?P<of_any>\d{1,18})")
_CORES = 2
Positive = Parameter(validator=validators.Number(gte=1))
AtLeastZero = Parameter(validator=validators.Number(gte=0))


class OptionGroup:
    """Options of commands, as fields of a dataclass with a docstring each."""

    def given(self, *names: str) -> list[str]:
        """Returns the options that differ from their defaults, among `names` or all, as they are spelled."""
        defaults = {field.name: field.default for field in fields(self)}  # pyright: ignore[reportArgumentType]
        hints = get_type_hints(type(self), include_extras=True)
        notes = {name: getattr(hints[name], "__metadata__", ()) for name in names or defaults}
        return [
            next((str(*note.name) for note in of_field if note.name), f"--{name.replace('_', '-')}")
            for name, of_field in notes.items()
            if getattr(self, name) not in (None, defaults[name])
        ]


@Parameter(name="*")
@dataclass(frozen=True)
class MachineOptions(OptionGroup):
    """The machine of each engine or replica."""

    cpu: int | None = None
    """CPU cores; as its device needs when left out, 2 without a device."""
    gpu: str | None = None
    """GPUs, such as H100, H100:2, auto, or 8 of any kind."""
    tpu: str | None = None
    """TPU slice, such as v5litepod-8; or several that do, with commas."""
    ram: str | None = None
    """Memory, such as 32g; as its device needs when left out."""
    disk: str | None = None
    """Local disk; as its device needs when left out."""
    region: tuple[str, ...] = ()
    """Region allowed, best first; repeatable."""
    zone: str | None = None
    """A zone of the region."""
    on_demand: Annotated[bool, Parameter(negative="--preemptible")] = False
    """No machine that can be taken away."""
    image: str | None = None
    """Container image, on backends that run containers."""


@Parameter(name="*")
@dataclass(frozen=True)
class EngineOptions(MachineOptions):
    """The machines of an engine."""

    hosts: Annotated[int | None, Positive] = None
    """Machines of each engine, each with such a GPU."""


@Parameter(name="*")
@dataclass(frozen=True)
class PoolOptions(EngineOptions):
    """The engines of a pool, and the machines of each."""

    replicas: int | None = None
    """Engines side by side, 1 when left out."""
    engine: tuple[str, ...] = ()
    """Engine argument key=value; repeatable."""
    chat: bool = False
    """Ask through the model's chat template."""


POOL_OPTIONS = tuple(field.name for field in fields(PoolOptions) if field.name != "chat")
"""Options that describe a new pool, and nothing else."""


def resources_asked(
    options: MachineOptions, *, regions: Regions | None = None, cores: int | None = _CORES
) -> dict[str, Any]:
    """Returns the resources for options, as input for `ResourceConfig`; regions by their names in a table.

    `cores` are the CPU cores without `--cpu` and without a device.
    """
    asked: dict[str, Any] = {"preemptible": not options.on_demand}
    for name in ("cpu", "ram", "disk", "zone", "image", "replicas", "hosts"):
        if (value := getattr(options, name, None)) is not None:
            asked[name] = value
    if options.region:
        known = regions or known_regions()
        asked["regions"] = tuple(known.named(name).name for name in options.region)
    if (device := device_asked(gpu=options.gpu, tpu=options.tpu)) is not None:
        asked["device"] = device
    elif cores is not None:
        asked.setdefault("cpu", cores)
    return asked


def device_asked(*, gpu: str | None, tpu: str | None) -> dict[str, Any] | None:
    """Returns the device of `--gpu` or `--tpu`, as input for `ResourceConfig`."""
    if gpu is not None and tpu is not None:
        raise exclusive(f"--gpu {gpu}", f"--tpu {tpu}")
    if tpu is not None:
        variant, *alternatives = (name.strip() for name in tpu.split(","))
        return {"kind": "tpu", "variant": variant, "alternatives": alternatives}
    if gpu is None:
        return None
    match = _GPU.fullmatch(gpu)
    if match is None:
        raise BadInput(
            expected="--gpu H100, --gpu H100:8 or --gpu 8", found=f"--gpu {gpu}", remedy="correct it, or --gpu auto"
        )
    return {"kind": "gpu", "variant": match["variant"] or "auto", "count": int(match["of_it"] or match["of_any"] or 1)}


def pool_content(options: PoolOptions, *, model: str, name: str | None) -> dict[str, Any]:
    """Returns the pool for options, as input for `InferencePoolConfig`."""
    return {
        "resource_config": resources_asked(options),
        "model": {
            "name": name or run_named_by(as_named(model)),
            "engine_kwargs": dict(key_and_value("--engine", text) for text in options.engine),
            "apply_chat_template": options.chat,
        },
    }


def key_and_value(option: str, text: str) -> tuple[str, Any]:
    """Returns key and value of an option `key=value`; the value is parsed as a literal or boolean if possible."""
    key, separator, value = text.partition("=")
    if not separator:
        example = {"--engine": "max_model_len=4096"}.get(option, "top_k=40")
        raise BadInput(
            expected=f"{option} key=value", found=f"{option} {text}", remedy=f"for example {option} {example}"
        )
    try:
        return key, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return key, value


def refuse_with(option: str, others: Sequence[str], why: str) -> None:
    """Raises BadInput if other options are given that mean nothing with an option."""
    if others:
        raise BadInput(
            expected=f"only options that apply with {option}",
            found=f"{option} and {', '.join(others)}",
            remedy=f"leave {others[0]} out: {why}",
        )


def refuse_with_config(given: Sequence[str], described: str) -> None:
    """Raises BadInput if options are given in addition to a file that sets them."""
    if given:
        raise BadInput(
            expected=f"either --config or the options that describe {described}",
            found=f"--config and {', '.join(given)}",
            remedy="write them into the file",
        )
