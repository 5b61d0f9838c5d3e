"""Shards of DeepSpeed and verl: exported while staged by the framework's own program, with permission alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.cli import invoke
from fakes.layouts import write_adapter
from fakes.models import write_checkpoint
from pools.weights.layouts import inspect_checkpoint
from pools.weights.model_files import digest_model_folder, read_tensors
from pools.weights.own_code import code_needed
from pools.weights.staging import Staging
from resources.errors import CheckpointError
from resources.storage import storage
from tasks.checkpoints.checkpoint import SERVED, WITH_CODE
from tasks.checkpoints.discovery import discover, find_checkpoints
from tasks.errors import NoCheckpoints
from tasks.spec.evaluation import CheckpointSelection

EXPORTER = """
import pathlib, sys
given = sys.argv[1:]
print("loading", given)
place = dict(zip(given, given[1:]))
source = pathlib.Path(place.get("--local_dir", given[0])).resolve()
target = pathlib.Path(place.get("--target_dir", given[1]))
assert "--trust-remote-code" in given if "--local_dir" in given else place["--tag"] == "global_step100"
shards = sorted(source.rglob("*.pt"))
assert len(shards) == 2 and all(path.is_file() for path in shards), shards
assert (source / "huggingface/config.json").is_file()
target.mkdir()
(target / "model.safetensors").write_bytes(pathlib.Path(__file__).with_name("exported").read_bytes())
"""
ZERO = ("global_step100/zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step100/mp_rank_00_model_states.pt")
VERL = ("actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt", "actor/fsdp_config.json")


def write_shards(path: Path, *names: str) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path / name, "w") as archive:
            archive.writestr("archive/data.pkl", b"weights")


def write_zero(run: Path) -> Path:
    folder = write_checkpoint(run / "checkpoint-100")
    (folder / "model.safetensors").unlink()
    write_shards(folder, *ZERO)
    (folder / "latest").write_text("global_step100")
    return folder


def write_verl(run: Path) -> Path:
    folder = write_checkpoint(run / "global_step_100" / "actor" / "huggingface")
    (folder / "model.safetensors").unlink()
    write_shards(run / "global_step_100", *VERL)
    write_shards(run / "global_step_100", "actor/optim_world_size_2_rank_0.pt", "critic/model_world_size_2_rank_0.pt")
    return run / "global_step_100"


def tensors_in(folder: Path) -> dict[str, bytes]:
    content = (folder / "model.safetensors").read_bytes()
    held = read_tensors(inspect_checkpoint(str(folder)))
    return {name: content[tensor.span[0] : tensor.span[1]] for name, tensor in held.items()}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("with-frameworks")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    [packages] = place.glob("lib/*/site-packages")
    for name in ("deepspeed/__init__.py", "deepspeed/utils/__init__.py", "verl/__init__.py"):
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).touch()
    exported = write_checkpoint(place / "exported", seed=3) / "model.safetensors"
    for name in ("deepspeed/utils/zero_to_fp32.py", "verl/model_merger.py"):
        (packages / name).write_text(EXPORTER)
        shutil.copyfile(exported, (packages / name).with_name("exported"))
    return place / "bin" / "python"


FRAMEWORKS = pytest.mark.parametrize(("write", "recipe"), [(write_zero, "zero 1"), (write_verl, "verl 1")])


@FRAMEWORKS
@pytest.mark.parametrize("remote", [False, True])
def test_shards_are_exported_while_staged_where_code_may_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], Path],
    recipe: str,
    python: Path,
    remote: bool,
) -> None:
    own = Path(sys.executable)
    if remote:
        monkeypatch.setenv("PATH", f"{own.parent}:{python.parent}")  # as in jobs
    run = tmp_path / "run"
    write(run)
    place = f"memory://{tmp_path.name}/{recipe[:4]}" if remote else str(run)
    for file in (path for path in run.rglob("*") if path.is_file() and remote):
        storage.write_bytes(storage.join(place, str(file.relative_to(run))), file.read_bytes())
    [checkpoint] = find_checkpoints(place, kinds=WITH_CODE)
    assert (checkpoint.step, checkpoint.problems, checkpoint.kind) == (100, (), "huggingface")
    assert checkpoint.folder is not None and checkpoint.folder.made_by == recipe
    with (
        Staging(
            tmp_path / "staged", max_bytes=10**8, python=lambda: own if remote else python, trusted=True
        ) as staging,
        staging.stage(checkpoint.uri, digest_model_folder(checkpoint.folder)) as staged,
    ):
        assert (staged.path / "tokenizer.json").is_file()
        exported = tensors_in(python.parent.parent / "exported")
        assert tensors_in(staged.path) == exported


@FRAMEWORKS
def test_shards_are_left_alone_where_code_may_not_run(
    tmp_path: Path, write: Callable[[Path], Path], recipe: str, python: Path
) -> None:
    folder = write(tmp_path / "run")
    [checkpoint] = find_checkpoints(str(tmp_path / "run"), kinds=SERVED)
    [problem] = checkpoint.problems
    assert checkpoint.kind == "foreign" and "python -m " in problem and "trust_remote_code=true" in problem
    held, place = inspect_checkpoint(str(folder)), folder / ("actor" if recipe == "verl 1" else "")
    assert "unpickles without limits" in str(code_needed(held))
    with (
        Staging(tmp_path / "staged", max_bytes=10**8, python=lambda: python) as staging,
        pytest.raises(CheckpointError, match=f"(?s)export them: python -m .*{place} .*FOLDER"),
    ):
        staging.stage(str(folder), digest_model_folder(held))


@FRAMEWORKS
def test_shards_are_averaged_and_adapted_where_code_may_run_alone(
    tmp_path: Path, write: Callable[[Path], Path], recipe: str
) -> None:
    folders = [write(tmp_path / name) for name in ("a", "b")]
    mean = f"mean({folders[0]}, {folders[1]})"
    [trusted], [untrusted] = (find_checkpoints(mean, kinds=kinds) for kinds in (WITH_CODE, SERVED))
    assert trusted.complete and "python -m " in untrusted.problems[0]
    write_adapter(tmp_path / "adapters" / "checkpoint-1", base=folders[0], seed=1)
    [adapter] = find_checkpoints(str(tmp_path / "adapters"))
    assert adapter.folder and adapter.complete and "unpickles without limits" in str(code_needed(adapter.folder))
    shown = invoke(["checkpoints", "--trust-remote-code", str(folders[0])]).output
    assert f"made while staged ({recipe[:4].strip()})" in " ".join(shown.split()), shown


@FRAMEWORKS
@pytest.mark.parametrize("name", ["mean({0}, {1})", "mean({0}@100, {1}@100)", "mean({0}@last:1, {1}@last:1)"])
def test_mean_of_shards_says_how_they_are_exported_as_a_single_checkpoint_does(
    tmp_path: Path, write: Callable[[Path], Path], recipe: str, name: str
) -> None:
    runs = [write(tmp_path / run).parent for run in ("a", "b")]
    for path in (name.format(*runs), str(runs[0])):
        with pytest.raises(NoCheckpoints, match=r"(?s)python -m .*trust_remote_code=true") as refused:
            discover.fn(path, CheckpointSelection(wait_for_incomplete_seconds=60), sleep=lambda _: pytest.fail("waits"))
        assert "export" in refused.value.remedy and "wait" not in refused.value.remedy


@FRAMEWORKS
def test_export_commands_name_folders_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], recipe: str
) -> None:
    write(tmp_path / "runs" / "a")
    write_shards(tmp_path / "runs" / "b", "checkpoint-5/__0_0.distcp", "checkpoint-5/.metadata")
    monkeypatch.chdir(tmp_path)
    for run in ("a", "b"):
        [checkpoint] = find_checkpoints(f"runs/{run}")
        folders = re.findall(rf"\S*runs/{run}\S*", checkpoint.problems[0])
        assert len(folders) >= 2 and all(folder.startswith(f"{tmp_path}/") for folder in folders), checkpoint.problems


@pytest.mark.parametrize("name", ["{0}", "mean({0}, {0})"])
def test_adapter_without_base_says_how_it_is_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run" / "checkpoint-1"
    write_adapter(folder, base=tmp_path / "base", seed=1)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(NoCheckpoints, match=r"its base .* is not there") as refused:
        discover.fn(name.format(folder), CheckpointSelection())
    assert "--base" in refused.value.remedy and "wait" not in refused.value.remedy


def test_package_that_no_interpreter_has_is_named_with_the_command(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "run")
    with (
        Staging(tmp_path / "staged", max_bytes=10**8, python=lambda: Path(sys.executable), trusted=True) as staging,
        pytest.raises(CheckpointError, match=r"(?s)deepspeed.*python -m deepspeed\.utils\.zero_to_fp32"),
    ):
        staging.stage(str(folder), digest_model_folder(inspect_checkpoint(str(folder))))


@pytest.mark.parametrize(
    ("write", "gone", "problem"),
    [
        (write_zero, "latest", "latest is not there"),
        (write_verl, VERL[0], "not all are there"),
        (write_verl, VERL[2], "fsdp_config.json is named by"),
    ],
)
def test_shards_being_written_are_incomplete(
    tmp_path: Path, write: Callable[[Path], Path], gone: str, problem: str
) -> None:
    folder = write(tmp_path / "run")
    (folder / gone).unlink()
    [checkpoint] = find_checkpoints(str(tmp_path / "run"), kinds=WITH_CODE)
    assert any(problem in each for each in checkpoint.problems)


def test_shards_next_to_whole_weights_change_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run" / "checkpoint-100")
    before = inspect_checkpoint(str(folder)).files.keys()
    write_shards(folder, *ZERO)
    after = inspect_checkpoint(str(folder))
    assert after.files.keys() == before and after.made_by is None
