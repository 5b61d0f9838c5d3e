"""vLLM whose `reload_weights` says it did, and did not. Run by the interpreter of its environment, as the real one.

python stale_vllm.py <program that serves vLLM> <arguments of the program>
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def imported(path: str) -> Any:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location("served", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_weights(*_arguments: object, **_named: object) -> None:
    """What a reload does here."""


if __name__ == "__main__":
    worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    worker.Worker.reload_weights = keep_weights
    sys.exit(imported(sys.argv[1]).main(sys.argv[2:]))
