"""Serves a model with vLLM on NVIDIA GPUs, like `vllm serve` but quicker to start. Executed by vLLM's environment.

    python serve_vllm_cuda.py <arguments of vllm serve>

Also a program for `fork_server.py`: `preload` imports, `main` serves. A process that is forked from a process which has
touched a GPU cannot use it. So a fork server that touched a GPU by importing ends, and each run starts cold, in its own
process. vLLM forks its engine too, and spawns it if a GPU was touched.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

READ_AT_IMPORT = (
    *("CUDA_", "FLASHINFER_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_"),
    *("TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_"),
)
"""Prefixes of the variables that a fork server must have been started with, too."""
MODULES = (
    "uvloop",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.platforms.cuda",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
)
LATE_MODULES = (
    "vllm.entrypoints.generate.api_router",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
)
"""Imported later by vLLM, some only for some models; a missing module does no harm."""
_MEMORY_DEVICE = "/dev/nvidia-uvm"
"""Opened by the driver for computing only: listing the GPUs (NVML) leaves it closed."""
_set_by_imports: dict[str, str] = {}


def preload(arguments: list[str]) -> None:
    """Imports the modules of a server, and ends the process if that touched a GPU."""
    import_everything()
    if (trace := touched()) is not None:
        sys.exit(f"importing vLLM touched a GPU ({trace}), so it cannot be forked")


def main(arguments: list[str]) -> None:
    """Serves until the process is stopped, or checks tensors if that is requested."""
    sys.path.append(str(Path(__file__).parent))
    if importlib.import_module("serve_vllm").checks_tensors(arguments):
        return
    import_everything()
    for name, value in _set_by_imports.items():  # a fork gets the variables of its run
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # vLLM spawns if this process touched a GPU
    entry: Any = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
    shared: Any = importlib.import_module("serve_vllm")
    shared.remember_texts_of_tokens()
    shared.keep_address_from_forks(entry)
    shared.run(entry, arguments)


def import_everything() -> None:
    """Imports vLLM's modules, and stores the variables that they set for the process."""
    if (own_folder := str(Path(__file__).parent)) not in sys.path:
        sys.path.append(own_folder)  # an isolated interpreter does not search it, also for middleware and worker
    before = dict(os.environ)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise counting GPUs touches them
    importlib.import_module("serve_vllm").import_all(MODULES, late=LATE_MODULES)
    _set_by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})


def touched() -> str | None:
    """Returns the evidence that this process has touched a GPU, or None."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    for link in Path("/proc/self/fd").glob("*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(_MEMORY_DEVICE):
            return f"{target} is open"
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
