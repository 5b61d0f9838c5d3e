"""The device of an engine, by its maker's name; a configuration only has the requested device."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

from pools.config import EngineDevice
from resources.settings import process_environment
from resources.tpu import tpu_type_in

_CPU_FACTS = Path("/proc/cpuinfo")
_ASK_SECONDS = 20.0  # the driver of an idle GPU takes some to wake up


@cache
def device_name(device: EngineDevice) -> str | None:
    """Returns the name of this machine's CPU, GPUs or TPU; None if unknown."""
    match device:
        case "cpu":
            return _cpu_name()
        case "cuda":
            return _gpu_names()
        case "tpu":
            return tpu_type_in(process_environment())


def _cpu_name() -> str:
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, named), platform.processor() or platform.machine())


def _gpu_names() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(sorted({line.strip() for line in asked.stdout.splitlines() if line.strip()})) or None
