"""The environments of Levanter, for evaluations and trainings: JAX built for each kind of device."""

from __future__ import annotations

from pathlib import Path

from resources.environments.environments import EnvironmentSpec

_REQUIREMENTS = Path(__file__).parent / "requirements"

LEVANTER = {
    device: EnvironmentSpec(
        name=name,
        requirements=_REQUIREMENTS / f"{name}.txt",
        smoke_import="levanter.eval_harness, levanter.models.llama, levanter.checkpoint",
        python=python,
    )
    for device, name, python in (
        ("cpu", "levanter", None),
        ("gpu", "levanter-cuda", "3.12"),
        ("tpu", "levanter-tpu", "3.12"),
    )
}
