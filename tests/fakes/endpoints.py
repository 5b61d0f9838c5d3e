"""The deterministic engine as an endpoint in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fakes import engine as engine_program
from fakes.polling import eventually
from pools.endpoint import RunningModel

KEY = "sk-a-key-that-nobody-may-see"
"""Key of the models below; tests check that it does not leak."""


@dataclass(frozen=True)
class Endpoint:
    url: str
    process: subprocess.Popen[bytes]

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def requests(self) -> int:
        with urllib.request.urlopen(f"{self.url}/fake/stats", timeout=10) as response:
            return json.load(response)["requests"]

    def answers_take(self, seconds: float) -> None:
        body = json.dumps({"delay_seconds": seconds}).encode()
        request = urllib.request.Request(f"{self.url}/fake/faults", body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def endpoint(folder: Path, *models: str, label: str = "w0", port: int = 0, **faults: Any) -> Iterator[Endpoint]:
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


def planned_model(**changes: Any) -> RunningModel:
    """Returns a model with an endpoint that is only named, never asked."""
    plain = {"model": "run-100", "capacity": 7, "max_model_len": None}
    return replace(served_model("http://127.0.0.1:9/v1", Path("tokenizer")), **{**plain, **changes})
