"""The plan of an evaluation that is not started: its cells, machines and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from resources.backends.current import current_client
from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from resources.jobs.jobs import Client
from resources.regions.regions import price_per_hour, regions_for
from tasks.running.cells import Cell
from tasks.running.planning import Plan, Request, plan
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import how_many


@dataclass(frozen=True)
class Asked:
    """Machines that would be requested, their backend and cost."""

    resources: ResourceConfig
    backend: str
    usd_per_hour: dict[str, float | None]
    """USD per hour for all replicas, by region that offers them; None for an unknown price. Empty on this machine."""
    is_rented: bool

    def lines(self) -> Iterator[str]:
        machine = self.resources
        parts = [
            *_device(machine),
            how_many(machine.cpu, "core"),
            f"{machine.ram} of memory",
            f"{machine.disk} of disk",
        ]
        parts += ["preemptible" if machine.preemptible else "on demand"] if self.is_rented else []
        parts += [f"zone {machine.zone}"] if machine.zone else []
        parts += [f"image {machine.image}"] if machine.image else []
        machines = f"{machine.replicas} × {machine.hosts}" if machine.hosts > 1 else f"{machine.replicas}"
        yield f"{machines} × {', '.join(parts)}; on {self.backend}"
        for region, price in self.usd_per_hour.items():
            yield f"  {region}: " + ("price not known" if price is None else f"{price:.2f} USD an hour")


@dataclass(frozen=True, eq=False)
class DryRun(Plan):
    """A plan with the machines to request, none for an existing pool or endpoint."""

    machines: tuple[Asked, ...] = ()

    def lines(self) -> Iterator[str]:
        recorded = sum(cell.done for cell in self.cells)
        left = len(self.cells) - recorded
        yield f"{how_many(len(self.cells), 'cell')} wanted, {recorded} recorded already, {left} to evaluate"
        for cell in self.cells:
            yield f"  {_described(cell)}{' (recorded)' if cell.done else ''}"
        for asked in self.machines:
            yield from asked.lines()
        if self.expected.cells:
            yield from self.expected.lines()

    def as_dict(self) -> dict[str, Any]:
        machines = [
            {
                "resources": asked.resources.model_dump(mode="json"),
                "backend": asked.backend,
                "usd_per_hour": asked.usd_per_hour,
            }
            for asked in self.machines
        ]
        return {
            "wanted": len(self.cells),
            "recorded": sum(cell.done for cell in self.cells),
            "cells": [{"cell": _described(cell), "uri": cell.uri, "recorded": cell.done} for cell in self.cells],
            "machines": machines,
            "expected": self.expected.as_dict(),
        }


def plan_of(request: Request) -> DryRun:
    """Plans an evaluation like its flow, with the same errors."""
    made = plan(request)
    needed = [each for config in request.configs if (each := _resources_of(config)) is not None]
    machines = [_asked(each, current_client()) for place, each in enumerate(needed) if each not in needed[:place]]
    return DryRun(made.cells, made.expected, machines=tuple(machines))


def _described(cell: Cell) -> str:
    return f"{cell.title}: {', '.join(task.metric_key for task in cell.config.evals)}"


def _resources_of(config: EvaluationConfig) -> ResourceConfig | None:
    if config.native:
        return config.resource_config or ResourceConfig()
    return config.pool_config.resource_config if config.pool_name is None and config.pool_config else None


def _asked(resources: ResourceConfig, client: Client) -> Asked:
    elsewhere = not client.is_local or bool(resources.regions)
    prices = {region.name: price_per_hour(region, resources) for region in regions_for(resources)} if elsewhere else {}
    known = {name: None if price is None else round(float(price), 4) for name, price in prices.items()}
    return Asked(resources, "this machine" if client.is_local else client.description, known, is_rented=elsewhere)


def _device(resources: ResourceConfig) -> list[str]:
    match resources.device:
        case CpuConfig():
            return []
        case GpuConfig(variant=variant, count=count):
            return [how_many(count, "GPU" if variant == "auto" else f"{variant} GPU")]
        case TpuConfig(types=types):
            return [f"TPU slice {' or '.join(types)}"]
