"""`assay pool up`: checkpoints that it cannot serve, its messages about them, and its use of the accelerator limit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from fakes.cli import invoke
from fakes.hub import running_hub, use_hub
from fakes.models import write_nano_llama, write_run
from fakes.tokenizers import write_byte_tokenizer
from flows.cli import pools
from flows.cli.pools import accelerators_counted, checkpoints_to_serve
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import KeptPool
from resources.errors import BadInput, ProxyFailed
from tasks.errors import NoCheckpoints


def test_pool_up_names_checkpoints_left_out_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run-a", [1, 2, 3])
    binary, adapter = run / "hf" / "step-2", run / "hf" / "step-3"
    (binary / "model.safetensors").rename(binary / "pytorch_model-1.bin")
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "config.json").rename(adapter / "adapter_config.json")
    assert [checkpoint.step for checkpoint in checkpoints_to_serve(str(run))] == [1]
    shown = capsys.readouterr().err
    assert f"left out {binary}: 1 weight shards without pytorch_model.bin.index.json" in shown
    assert f"left out {adapter}: an adapter of type None, which is not merged here" in shown


def test_pool_up_without_a_complete_checkpoint_says_why_of_each(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1])
    (run / "hf" / "step-1" / "model.safetensors").rename(run / "hf" / "step-1" / "pytorch_model-1.bin")
    with pytest.raises(NoCheckpoints, match=r"step-1: 1 weight shards without"):
        checkpoints_to_serve(str(run))


@dataclass
class Kept:
    name: str
    config: InferencePoolConfig
    checkpoints: list[Servable]
    options: dict[str, Any]


@pytest.fixture
def kept_up(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    asked: list[Kept] = []

    def keep_up(name: str, config: InferencePoolConfig, checkpoints: list[Servable], **options: Any) -> KeptPool:
        asked.append(Kept(name, config, checkpoints, options))
        raise ProxyFailed(expected="a pool", found="a test", remedy="none")

    monkeypatch.setattr(pools, "keep_up", keep_up)
    monkeypatch.setattr(pools, "ensure_environment", lambda spec: None)
    return asked


def pool_up(*arguments: str | Path) -> BaseException | None:
    return invoke(["pool", "up", *arguments]).exception


@pytest.mark.parametrize(("gpu", "reserved"), [(("--gpu", "H100:2"), accelerators_counted), ((), nullcontext)])
def test_pool_up_takes_its_accelerators_of_the_limit_of_the_server_that_this_machine_knows(
    gpu: tuple[str, ...], reserved: object, tmp_path: Path, kept_up: list[Kept]
) -> None:
    run = write_run(tmp_path / "run-a", [1])
    server = "http://127.0.0.1:9/api"
    variables = {"PREFECT_API_URL": server} if gpu else {}
    with temporary_settings({PREFECT_API_URL: server}):
        assert isinstance(pool_up("--model", run, "--idle-minutes", "2", *gpu), ProxyFailed)
    [asked] = kept_up
    assert asked.name == "run-a"
    assert asked.options == {"idle_seconds": 120, "reserved": reserved, "variables": variables}


def test_pool_up_from_a_file_is_the_pool_of_the_same_options(tmp_path: Path, kept_up: list[Kept]) -> None:
    run, file = write_run(tmp_path / "run-a", [1, 2]), tmp_path / "pool.yaml"
    engine = {"max_model_len": 64}
    device = {"kind": "gpu", "variant": "L4", "count": 2}
    content = {
        "model": {"name": "mine", "path": str(run), "engine_kwargs": engine},
        "resource_config": {"device": device, "ram": "9g", "replicas": 2},
        "longest_wait_seconds": 5,
    }
    file.write_text(yaml.safe_dump(content))
    pool_up("--config", file, "--name", "warm")
    given = ("--engine", "max_model_len=64", "--gpu", "L4:2", "--ram", "9g", "--replicas", "2", "--longest-wait", "5")
    pool_up("--model", run, "--run-name", "mine", "--name", "warm", *given)
    from_file, from_options = kept_up
    assert from_file == from_options
    assert (from_file.name, from_file.config.longest_wait_seconds, from_file.config.model.path) == ("warm", 5, None)
    assert [checkpoint.name for checkpoint in from_file.checkpoints] == ["mine-1", "mine-2"]


def test_pool_up_serves_a_repository_of_the_hub_by_its_name_by_options_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_up: list[Kept]
) -> None:
    folder, file = write_byte_tokenizer(write_nano_llama(tmp_path / "model")), tmp_path / "pool.yaml"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    file.write_text(yaml.safe_dump({"model": {"name": "judge", "path": "acme/judge@v1"}}))
    with running_hub({}, {"models/acme/judge": {"main": {}, "refs/tags/v1": files}}) as hub:
        use_hub(hub, monkeypatch, home=tmp_path / "hf")
        pool_up("--model", "acme/judge@v1", "--run-name", "judge")
        pool_up("--config", file)
        with pytest.raises(BadInput, match="a folder acme/other, or a repository of that name"):
            checkpoints_to_serve("acme/other")
    from_options, from_file = kept_up
    assert from_options.checkpoints == from_file.checkpoints and from_options.name == from_file.name == "judge"
    [served] = from_file.checkpoints
    assert (served.name, served.uri) == ("judge", "hf://acme/judge@v1")
    assert hub.large_bytes < len(files["model.safetensors"]) / 2  # its header


def test_pool_up_says_what_a_file_lacks_or_would_override(tmp_path: Path, kept_up: list[Kept]) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text("model: {name: mine}")
    assert "model.path" in str(pool_up("--config", file))
    for given in (("--model", "runs/a"), ("--ram", "9g"), ("--longest-wait", "5")):
        assert given[0] in str(pool_up("--config", file, *given))
    assert "--model" in str(pool_up())
    file.write_text("model: {name: mine}\nreplica: 2")
    assert "replica" in str(pool_up("--config", file))
    assert kept_up == []
