"""The deterministic engine as an endpoint in a process of its own: what it has seen, and how it answers."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes import engine as engine_program
from fakes.polling import eventually
from pools.endpoint import RunningModel

KEY = "sk-a-key-that-nobody-may-see"
"""Key of the models below, to look for where it must not be."""


@dataclass(frozen=True)
class Endpoint:
    """An engine that listens at `url`."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def requests(self) -> int:
        """Completion requests it has seen so far."""
        with urllib.request.urlopen(f"{self.url}/fake/stats", timeout=10) as response:
            return json.load(response)["requests"]

    def answers_take(self, seconds: float) -> None:
        """From now on."""
        body = json.dumps({"delay_seconds": seconds}).encode()
        request = urllib.request.Request(f"{self.url}/fake/faults", body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def endpoint(folder: Path, *models: str, label: str = "w0", port: int = 0, **faults: Any) -> Iterator[Endpoint]:
    """An endpoint that serves weights of a label under some names, for as long as the block lasts."""
    address = folder / f"engine-{label}.json"
    command = [sys.executable, str(engine_program.__file__), "--address-file", str(address)]
    command += ["--label", label, "--port", str(port)]
    command += ["--faults", json.dumps(faults), *(part for name in models for part in ("--model", name))]
    address.unlink(missing_ok=True)
    process = subprocess.Popen(command)
    try:
        eventually(address.is_file)
        yield Endpoint(json.loads(address.read_text())["url"], process)
    finally:
        process.kill()
        process.wait()


def served_model(base_url: str, tokenizer: Path, **changes: Any) -> RunningModel:
    """A model behind an endpoint of the tests."""
    given = {
        "base_url": base_url,
        "model": "m",
        "tokenizer": str(tokenizer),
        "capacity": 8,
        "prompt_logprobs": True,
        "request_timeout_seconds": 60.0,
        "max_model_len": 2048,
        "api_key": KEY,
    }
    return RunningModel(**{**given, **changes})
