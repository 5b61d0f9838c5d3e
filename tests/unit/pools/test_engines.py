"""Engine command lines: pure data."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.models import write_checkpoint
from pools.config import InferencePoolConfig
from pools.engine.engines import (
    ENGINES,
    SLICE_PROGRAM,
    device_name,
    engine_flags,
    engine_kwargs,
    engine_variables,
    for_text_alone,
    interpreter_arguments,
    replica_capacity,
    server_arguments,
    with_engine_variables,
    with_last_token,
)
from pools.engine.launch import HostPart, Launch, ServedCheckpoint, VllmLauncher
from pools.pool.access import engine_digest
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.environments.environments import Environment
from resources.jobs.addresses import is_loopback, own_address


@pytest.mark.parametrize(
    ("kwargs", "flags"),
    [
        ({"max_model_len": 2048}, ["--max-model-len", "2048"]),
        ({"enable_prefix_caching": True}, ["--enable-prefix-caching"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"quantization": None}, []),
        ({"allowed_origins": ["a", "b"]}, ["--allowed-origins", "a", "b"]),
        ({"speculative_config": {"n": 1}}, ["--speculative-config", '{"n": 1}']),
    ],
)
def test_engine_arguments_become_flags(kwargs: dict, flags: list[str]) -> None:
    assert engine_flags(kwargs) == flags


HELD = {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kwargs", "described", "expected"),
    [
        ({}, HELD, {"max_model_len": 65, "hf_overrides": {"model_max_length": 65}}),
        ({"max_model_len": 64}, HELD, {"max_model_len": 65, "hf_overrides": {"model_max_length": 65}}),
        ({"max_model_len": 32}, HELD, {"max_model_len": 33}),
        ({}, {**HELD, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"max_model_len": 65}),
        ({"max_model_len": 32}, {**HELD, "rope_scaling": {"type": "yarn", "factor": 4}}, {"max_model_len": 32}),
        ({}, {**HELD, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, {}),
        ({}, {**HELD, "model_max_length": 32}, {}),
        ({}, {"n_positions": 64}, {}),
        ({}, {"text_config": HELD}, {"max_model_len": 65, "hf_overrides": {"text_config": {"model_max_length": 65}}}),
        ({"max_model_len": 32}, {"text_config": HELD}, {"max_model_len": 33}),
        ({}, {"thinker_config": {"text_config": HELD}}, {}),
        ({"max_model_len": 65}, HELD, {"max_model_len": 65}),  # vLLM refuses it
        ({"max_model_len": -1}, HELD, {"max_model_len": -1}),
        ({"hf_overrides": {"rope_theta": 1}}, HELD, {"hf_overrides": {"rope_theta": 1}}),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, HELD, {"max_num_batched_tokens": 64}),
    ],
)
def test_engine_has_room_for_the_last_token_that_is_never_read(
    kwargs: dict[str, Any], described: dict[str, Any], expected: dict[str, Any]
) -> None:
    given = dict(kwargs)
    arguments = with_last_token(kwargs, described)
    assert expected.items() <= arguments.items() and kwargs == given
    assert ("max_model_len" in arguments) is ("max_model_len" in expected)


SEES = {"architectures": ["Gemma3ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("kwargs", "described", "added"),
    [
        ({}, SEES, {"language_model_only": True}),
        ({}, {"architectures": ["LlamaForCausalLM"]}, {}),
        ({"limit_mm_per_prompt": {"image": 1}}, SEES, {}),
        ({"language_model_only": False}, SEES, {}),
    ],
)
def test_model_that_sees_is_served_for_text_alone_unless_told_otherwise(
    kwargs: dict[str, Any], described: dict[str, Any], added: dict[str, Any]
) -> None:
    assert for_text_alone(kwargs, described) == {**kwargs, **added}


def pool(device: str = "cpu", **model: Any) -> InferencePoolConfig:
    devices = {"cpu": {"kind": "cpu"}, "tpu": {"kind": "tpu", "variant": "v4-8"}, "cuda": {"kind": "gpu"}}
    resources = {"device": devices[device], "ram": "8g"}
    return InferencePoolConfig.model_validate({"resource_config": resources, "model": {"name": "run", **model}})


def test_arguments_carry_names_template_and_defaults() -> None:
    config = pool(engine_kwargs={"max_model_len": 512, "enforce_eager": False}, generation_params={"temperature": 0.5})
    arguments = server_arguments(engine_kwargs(config), folder="/c/step-1", name="run-1", port=81)
    text = " ".join(arguments)
    assert "--model /c/step-1 --served-model-name run-1 --host 127.0.0.1 --port 81" in text
    assert "--no-enforce-eager" in arguments
    assert "--enforce-eager" not in arguments
    assert arguments[arguments.index("--override-generation-config") + 1] == '{"temperature": 0.5}'
    assert "--chat-template" not in arguments


def test_cpu_engine_takes_a_quarter_of_the_memory_asked_for_unless_told_otherwise() -> None:
    assert engine_kwargs(pool())["kv_cache_memory_bytes"] == 2 * 1024**3
    assert engine_kwargs(pool(engine_kwargs={"kv_cache_memory_bytes": "64M"}))["kv_cache_memory_bytes"] == "64M"
    assert "kv_cache_memory_bytes" not in engine_kwargs(pool(engine_kwargs={"gpu_memory_utilization": 0.3}))
    assert "kv_cache_memory_bytes" not in engine_kwargs(pool("cuda"))


def test_gpus_of_a_replica_share_its_model() -> None:
    resources = {"device": {"kind": "gpu", "count": 4}}
    config = InferencePoolConfig.model_validate({"resource_config": resources, "model": {"name": "run"}})
    assert engine_kwargs(config)["tensor_parallel_size"] == 4
    assert "tensor_parallel_size" not in engine_kwargs(pool("cuda"))


def test_tpu_engine_keeps_its_workers_in_a_single_host() -> None:
    assert engine_kwargs(pool("tpu"))["distributed_executor_backend"] == "mp"


def test_variables_keep_caches_and_stay_off_the_hub() -> None:
    variables = engine_variables("cpu", cache=Path("/cache/x"), cpu=4)
    assert variables["VLLM_CACHE_ROOT"] == "/cache/x"
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert engine_variables("cpu", cache=Path("/c"), cpu=1)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("length", "sockets"), [(70, None), (71, "/tmp")])
def test_engine_with_a_long_temporary_folder_puts_its_sockets_elsewhere(
    length: int, sockets: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/".ljust(length, "x"))
    variables = engine_variables("cpu", cache=Path("/c"), cpu=1)
    assert variables.get("VLLM_RPC_BASE_PATH") == sockets


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_compile_caches_lie_apart_by_engine_arguments(device: Any) -> None:
    def variables(**kwargs: Any) -> dict[str, str]:
        return engine_variables(device, cache=Path("/cache/build"), cpu=4, kwargs=kwargs)

    def folders(**kwargs: Any) -> dict[str, str]:
        environment = variables(**kwargs)
        return {name: value for name, value in environment.items() if value.startswith("/") and name != "PYTHONPATH"}

    first = folders(max_model_len=512, dtype="bfloat16")
    assert len(first) == 3
    assert all(Path(folder).is_relative_to("/cache/build") for folder in first.values())
    assert folders(dtype="bfloat16", max_model_len=512) == first
    assert folders(dtype="bfloat16", max_model_len=512, override_generation_config={"temperature": 0.5}) == first
    other = folders(max_model_len=1024, dtype="bfloat16")
    assert not set(first.values()) & set(other.values())


def test_cpu_engines_share_an_architecture_cache_for_all_arguments() -> None:
    roots = {
        engine_variables("cpu", cache=Path("/c"), cpu=1, kwargs={"max_model_len": length})["VLLM_CACHE_ROOT"]
        for length in (1, 2)
    }
    assert roots == {"/c"}


def test_program_of_ours_takes_the_place_of_the_engines_entry_point() -> None:
    program = ENGINES["cpu"].program
    assert program is not None and program.is_file()
    assert interpreter_arguments(program) == ("-I", "-u", str(program))


def test_capacity_follows_max_num_seqs() -> None:
    assert replica_capacity("cuda", {}) == 256
    assert replica_capacity("cuda", {"max_num_seqs": 7}) == 7


def test_launch_by_hand_can_be_pasted_into_a_shell() -> None:
    assert Launch("py", ("-m", "x y"), {"A": "1 2"}).by_hand() == "A='1 2' py -m 'x y'"


@pytest.mark.parametrize(
    "naming",
    [
        lambda folder: {"quantization_param_path": f"{folder}/kv.json"},
        lambda folder: {"tokenizer": f"{folder}"},
        lambda folder: {"generation_config": f"file://{folder}"},
        lambda folder: {"speculative_config": {"model": f"{folder}"}},
        lambda folder: {"speculative_config": json.dumps({"model": f"{folder}"})},
        lambda folder: {"lora_modules": [f"sql={folder}"]},
    ],
)
def test_engine_digest_differs_with_files_that_its_arguments_name(naming: Any, tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text("1")
    first = engine_digest(pool(engine_kwargs=naming(tmp_path)), "b")
    assert engine_digest(pool(engine_kwargs=naming(tmp_path)), "b") == first
    (tmp_path / "kv.json").write_text("22")
    assert engine_digest(pool(engine_kwargs=naming(tmp_path)), "b") != first


def test_engine_digest_differs_with_variables_that_can_change_an_answer() -> None:
    plain = engine_digest(pool(), "b")
    assert engine_digest(pool(engine_variables={}), "b") == plain
    assert engine_digest(pool(engine_variables={"VLLM_BATCH_INVARIANT": "1"}), "b") != plain


@pytest.mark.parametrize(
    "kwargs",
    [
        {"generation_config": "gen"},
        {"generation_config": "./gen"},
        {"speculative_config": '{"model": "gen"}'},
        {"lora_modules": ["sql=gen"]},
        {"logits_processors": "gen/generation_config.json"},
    ],
)
def test_file_that_arguments_name_by_a_relative_path_is_refused(
    kwargs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pool(engine_kwargs=kwargs)  # the name of a model on a hub, for instance
    (tmp_path / "gen").mkdir()
    (tmp_path / "gen" / "generation_config.json").write_text("{}")
    with pytest.raises(ValidationError, match="engines run in another folder: write its whole path"):
        pool(engine_kwargs=kwargs)
    assert pool(engine_kwargs={"dtype": "gen", "max_model_len": 64})


def test_variables_of_the_process_that_plans_reach_the_engine_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY", "VLLM_MODEL_REDIRECT_PATH"):
        monkeypatch.setenv(name, "1")
    config = with_engine_variables(pool())
    assert config.model.engine_variables == {"VLLM_BATCH_INVARIANT": "1"}
    assert with_engine_variables(pool(engine_variables={})).model.engine_variables == {}
    folder = write_checkpoint(tmp_path / "step-1")
    served = ServedCheckpoint.from_folder("run-1", folder, digest_model_folder(inspect_model_folder(str(folder))))
    launcher = VllmLauncher(config, Environment(tmp_path / "bin" / "python", tmp_path, identity="b"))
    assert launcher.launch(served, port=81).variables["VLLM_BATCH_INVARIANT"] == "1"


def test_engine_sends_traces_to_its_agents_address_except_with_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    served = ServedCheckpoint.from_folder("run-1", folder, digest_model_folder(inspect_model_folder(str(folder))))
    launcher = VllmLauncher(pool(), Environment(tmp_path / "bin" / "python", tmp_path, identity="b"))
    before = launcher.launch(served, port=81).arguments
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    launch = launcher.launch(served, port=81)
    added = [argument for argument in launch.arguments if argument not in before]
    assert added == ["--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]
    assert launch.variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@127.0.0.1:4318")
    assert launcher.launch(served, port=81).arguments == before
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318/v1/traces?token=secret")
    assert launcher.launch(served, port=81).arguments == before


def test_engine_of_a_checkpoint_that_caches_no_prefixes_has_no_prefix_cache(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    served = ServedCheckpoint.from_folder("run-1", folder, digest_model_folder(inspect_model_folder(str(folder))))
    launcher = VllmLauncher(pool(), Environment(tmp_path / "bin" / "python", tmp_path, identity="b"))
    flag = "--no-enable-prefix-caching"
    assert flag not in launcher.launch(served, port=81).arguments
    assert flag in launcher.launch(replace(served, caches_prefixes=False), port=81).arguments


def test_engine_arguments_in_a_file_and_variables_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValidationError, match="write what it says into engine_kwargs"):
        pool(engine_kwargs={"config": "/x.yaml"})
    for name in ("VLLM_MODEL_REDIRECT_PATH", "LD_PRELOAD"):
        with pytest.raises(ValidationError, match=f"found {name}"):
            pool(engine_variables={name: "1"})


def test_device_has_the_name_that_its_machine_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3\\nNVIDIA H100 80GB HBM3\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-8")
    device_name.cache_clear()
    try:
        assert device_name("cuda") == "NVIDIA H100 80GB HBM3"
        assert device_name("tpu") == "v5p-8"
        monkeypatch.setenv("ASSAY_TPU_TYPE", "v6e-4")  # one of several suitable types
        device_name.cache_clear()
        assert device_name("tpu") == "v6e-4"
        facts = Path("/proc/cpuinfo")
        assert device_name("cpu") and (not facts.exists() or "model name" not in facts.read_text()
                                       or str(device_name("cpu")) in facts.read_text())  # fmt: skip
        smi.write_text("#!/bin/sh\nexit 9\n")
        device_name.cache_clear()
        assert device_name("cuda") is None
    finally:
        device_name.cache_clear()


def launched(tmp_path: Path, rank: int, **resources: Any) -> Launch:
    content = {"model": {"name": "run"}, "resource_config": resources}
    config = InferencePoolConfig.model_validate(content)
    launcher = VllmLauncher(config, Environment(tmp_path / "bin" / "python", tmp_path, identity="b"))
    checkpoint = write_checkpoint(tmp_path / f"m-{rank}")
    digests = digest_model_folder(inspect_model_folder(str(checkpoint)))
    part = HostPart(rank, config.resource_config.hosts_per_replica, ("10.0.0.1", 29500), f"10.0.0.{rank + 1}")
    return launcher.launch(ServedCheckpoint.from_folder("m", checkpoint, digests), port=8001, part=part)


@pytest.mark.parametrize("device", [{"kind": "gpu", "count": 8}, {"kind": "cpu"}])
def test_parts_on_hosts_find_each_other_and_only_the_first_serves(tmp_path: Path, device: dict[str, Any]) -> None:
    first, second = (launched(tmp_path, rank, device=device, hosts=2) for rank in (0, 1))
    common = ("--nnodes", "2", "--node-rank")
    for launch, rank in ((first, "0"), (second, "1")):
        at = launch.arguments.index("--nnodes")
        assert launch.arguments[at : at + 8] == (
            *(*common, rank, "--master-addr", "10.0.0.1", "--master-port", "29500"),
        )
    assert ("--headless" in first.arguments, "--headless" in second.arguments) == (False, True)
    assert (first.variables["ASSAY_ENGINE_HOST"], second.variables["ASSAY_ENGINE_HOST"]) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the interface")
def test_parts_meet_on_the_interface_that_has_the_address_of_their_host() -> None:
    program = ENGINES["cpu"].program
    assert program is not None
    interface_of = runpy.run_path(str(program))["interface_of"]
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # reserved for documentation
    if not is_loopback(address := own_address()):
        assert interface_of(address) not in (None, "lo")


def test_parts_on_the_vms_of_a_slice_are_nodes_of_a_ray_of_its_own_and_only_the_first_serves(tmp_path: Path) -> None:
    first, fourth = (launched(tmp_path, rank, device={"kind": "tpu", "variant": "v6e-16"}) for rank in (0, 3))
    own = ("-I", "-u", str(SLICE_PROGRAM))
    assert fourth.arguments == (*own, "4", "3", "10.0.0.1", "29500", "10.0.0.4", "4")
    assert first.arguments[:9] == (*own, "4", "0", "10.0.0.1", "29500", "10.0.0.1", "4")
    served = " ".join(first.arguments[9:])
    assert "--port 8001" in served and "--tensor-parallel-size 16" in served
    assert "--distributed-executor-backend" not in served
    assert {launch.variables["TPU_MULTIHOST_BACKEND"] for launch in (first, fourth)} == {"ray"}
