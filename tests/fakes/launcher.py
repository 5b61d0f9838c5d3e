"""Starts the deterministic engine where a pool would start vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pools.launch import Launch, ServedCheckpoint

_ENGINE = Path(__file__).with_name("engine.py")


@dataclass
class FakeLauncher:
    """Launches `fakes/engine.py` on a checkpoint's weights; counts its launches.

    `faults` go to every engine from its start; `scripts` replace the engine, one launch each, by Python code.
    """

    folder: Path
    faults: dict[str, Any] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    identity: str = "fake-engine"

    def launch(self, checkpoint: ServedCheckpoint, *, served_names: Sequence[str], port: int) -> Launch:
        """See `pools.launch.Launcher`."""
        self.launches.append(checkpoint.name)
        if self.scripts:
            return Launch(sys.executable, ("-c", self.scripts.pop(0), str(port)), {})
        arguments = [str(_ENGINE), "--port", str(port), "--weights", str(checkpoint.folder)]
        arguments += ["--address-file", str(self.folder / f"engine-{port}.json"), "--faults", json.dumps(self.faults)]
        for name in served_names:
            arguments += ["--model", name]
        return Launch(sys.executable, tuple(arguments), {})
