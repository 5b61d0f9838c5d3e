"""Weights as torch, transformers 4 and accelerate write them: made into safetensors bit by bit while staged."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.stores import folder_store
from fakes.tokenizers import write_byte_tokenizer
from fakes.trainers import run_trainer
from pools.engine.launch import free_port
from pools.weights.formats import read_safetensors_header
from pools.weights.model_files import digest_model_folder, inspect_model_folder, inspect_staged_folder
from pools.weights.staging import Staging
from resources.errors import CheckpointError
from resources.storage import storage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WRITERS = Path(__file__).parents[1] / "fakes" / "torch_writers.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run, and the same checkpoints by transformers' save_pretrained."""
    scratch = tmp_path_factory.mktemp("written")
    tokenizer = write_byte_tokenizer(scratch / "tokenizer")
    run_trainer(WRITERS, tokenizer, scratch / "run", scratch / "whole", str(free_port()))
    return scratch / "run", scratch / "whole"


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    with Staging(tmp_path / "staged", max_bytes=10**9) as staging:
        yield staging


def contents(folder: str | Path) -> dict[str, tuple[str, bytes]]:
    files = (file for file in storage.list_folder(str(folder)) if file.uri.endswith(".safetensors"))
    return {
        name: (str(tensor), storage.read_bytes(tensor.uri, start=tensor.span[0], end=tensor.span[1]))
        for file in files
        for name, tensor in read_safetensors_header(file).items()
    }


@pytest.mark.parametrize(
    ("step", "recipe"),
    [*((step, "pytorch_model.bin 1") for step in (1, 2, 3, 6)), *((step, "dcp 1") for step in (4, 5, 7))],
)
def test_made_tensors_are_those_of_the_model_bit_by_bit(
    step: int, recipe: str, written: tuple[Path, Path], staging: Staging
) -> None:
    run, whole = (folder / f"checkpoint-{step}" for folder in written)
    folder = inspect_model_folder(str(run))
    assert (folder.problems, folder.made_by) == ((), recipe)
    with staging.stage(str(run), digest_model_folder(folder)) as staged:
        assert inspect_staged_folder(staged.path).made_by is None
        assert contents(staged.path) == contents(whole)


@pytest.mark.parametrize("step", [3, 4])
def test_made_tensors_of_a_store_are_those_of_the_folder(
    step: int, written: tuple[Path, Path], staging: Staging, tmp_path: Path
) -> None:
    run, whole = (folder / f"checkpoint-{step}" for folder in written)
    with folder_store(tmp_path / "reads"):
        folder = inspect_model_folder(f"store:/{run}")
        with staging.stage(folder.uri, digest_model_folder(folder)) as staged:
            assert contents(staged.path) == contents(whole)


class _Hostile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("step", [1, 4])
def test_code_in_weights_is_named_and_does_not_run(
    step: int, tmp_path: Path, written: tuple[Path, Path], staging: Staging
) -> None:
    folder = shutil.copytree(written[0] / f"checkpoint-{step}", tmp_path / "run" / "checkpoint-1")
    place = "pytorch_model.bin" if step == 1 else "pytorch_model_fsdp_0/.metadata"
    (folder / place).write_bytes(pickle.dumps({"weight": _Hostile(str(tmp_path / "ran"))}, protocol=2))
    digests = digest_model_folder(inspect_model_folder(str(folder)))
    with pytest.raises(CheckpointError, match=f"{os.mkdir.__module__}.mkdir, code that would run"):
        staging.stage(str(folder), digests)
    assert not (tmp_path / "ran").exists()
