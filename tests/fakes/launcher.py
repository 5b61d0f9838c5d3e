"""Starts the deterministic engine in place of vLLM."""

from __future__ import annotations

import fcntl
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pools.engine.launch import HostPart, Launch, Launcher, ServedCheckpoint
from resources.jobs.jobs import Client

_RANK = """
import hashlib, pathlib, socket, sys, threading, time
host, port, folder, _ = sys.argv[1:]
label = hashlib.sha256((pathlib.Path(folder) / "model.safetensors").read_bytes()).hexdigest()[:16]
while True:
    try:
        server = socket.create_connection((host, int(port)))
        break
    except OSError:
        time.sleep(0.05)
server.sendall(label.encode())
threading.Event().wait()
"""
"""Part of an engine on another host: sends its weights to the server, and outlives the server."""
_CHECK = """
import json, pathlib, sys
order, answer, unfit = sys.argv[1:]
shapes = json.loads(pathlib.Path(order).read_text())["shapes"]
pathlib.Path(answer).write_text(json.dumps({"why": f"{unfit} is of no use" if unfit in shapes else None}))
"""
_ENGINE = Path(__file__).with_name("engine.py")


@dataclass
class FakeLauncher:
    """Launches `fakes/engine.py` on a checkpoint's weights, and logs every launch in `folder`.

    `faults` go to every engine from its start; `scripts` replace the engines of some launches, counted from 0, by
    Python code; with `notes_requests` every engine logs its requests into `asked.txt`. Checkpoints with a tensor of the
    name `unfit` do not fit their config.
    """

    folder: Path
    faults: dict[str, Any] = field(default_factory=dict)
    scripts: dict[int, str] = field(default_factory=dict)
    identity: str = "fake-engine"
    notes_requests: bool = False
    unfit: str = ""

    @property
    def launches(self) -> list[str]:
        noted = self.folder / "launches.txt"
        return noted.read_text().split() if noted.is_file() else []

    def launch(self, checkpoint: ServedCheckpoint, *, port: int, part: HostPart | None = None) -> Launch:
        if part is not None and part.rank:
            return Launch(sys.executable, ("-c", _RANK, *map(str, (*part.meeting, checkpoint.folder, self.folder))), {})
        with (self.folder / "launches.txt").open("a+") as noted:
            fcntl.flock(noted, fcntl.LOCK_EX)  # replicas launch at the same time
            noted.seek(0)
            number = len(noted.read().split())
            noted.write(f"{checkpoint.name}\n")
        if number in self.scripts:
            return Launch(sys.executable, ("-c", self.scripts[number], str(port)), {})
        arguments = [str(_ENGINE), "--port", str(port), "--weights", str(checkpoint.folder)]
        arguments += ["--address-file", str(self.folder / f"engine-{port}.json"), "--faults", json.dumps(self.faults)]
        arguments += ["--ranks", str(part.hosts), "--meeting", *map(str, part.meeting)] if part is not None else []
        arguments += ["--asked-file", str(self.folder / "asked.txt")] if self.notes_requests else []
        return Launch(sys.executable, tuple(arguments), {})

    def check(self, order: Path, answer: Path) -> Launch | None:
        return Launch(sys.executable, ("-c", _CHECK, str(order), str(answer), self.unfit), {}) if self.unfit else None

    def warmed(self, client: Client) -> AbstractContextManager[Launcher]:
        return nullcontext(self)
