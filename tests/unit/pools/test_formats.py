"""Weights in several formats: the choice, its notes, and shards of safetensors that contradict their index."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.models import PARAMETERS, write_checkpoint, write_safetensors
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import Merge
from pools.weights.model_files import (
    digest_model_folder,
    inspect_model_folder,
    inspect_staged_folder,
    read_tensors,
    served_files,
)
from pools.weights.staging import Staging
from resources.storage import storage
from tasks.checkpoints.discovery import find_checkpoints

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
FSDP = "pytorch_model_fsdp_0"
MADE = "safetensors are made of"


def write_zip(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights")


def _index_of_pickled(folder: Path) -> None:
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name in names:
        write_zip(folder / name)
    weight_map = {"a": names[0], "b": names[1]}
    (folder / f"{PICKLED}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _distributed(folder: Path) -> None:
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        write_zip(folder / FSDP / name)
    (folder / "optimizer_0").mkdir()
    write_zip(folder / "optimizer_0" / "__0_0.distcp")


def _each(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            write_zip(folder / name)

    return write


@pytest.mark.parametrize(
    ("kept", "more", "weights", "recipe", "notes"),
    [
        ([], _each(PICKLED), [PICKLED], "pytorch_model.bin 1", [f"{MADE} {PICKLED} while it is staged"]),
        ([], _each("training_args.bin", PICKLED), [PICKLED], "pytorch_model.bin 1", [MADE]),
        ([], _index_of_pickled, [f"{PICKLED}.index.json", *["pytorch_model-0"] * 2], f"{PICKLED} 1", [MADE]),
        ([SINGLE], _each(PICKLED), [SINGLE], None, [f"weights are from {SINGLE}; left out: {PICKLED}"]),
        ([SINGLE], _each("adapter_model.safetensors"), [SINGLE], None, ["left out: adapter"]),
        ([SINGLE], _each("consolidated.safetensors"), [SINGLE], None, ["left out: consolidated"]),
        ([SINGLE], _distributed, [SINGLE], None, []),
        ([], _each("pytorch_model_fsdp.bin"), ["pytorch_model_fsdp.bin"], "pytorch_model.bin 1", [MADE]),
        ([], _distributed, [f"{FSDP}/.metadata", f"{FSDP}/__0", f"{FSDP}/__1"], "dcp 1", [MADE]),
        ([], _each(".metadata", "__0_0.distcp"), [".metadata", "__0_0"], "dcp 1", [MADE]),
    ],
)  # fmt: skip
def test_format_that_counts_is_chosen_as_vllm_does_and_said(
    tmp_path: Path,
    kept: Sequence[str],
    more: Callable[[Path], None],
    weights: list[str],
    recipe: str | None,
    notes: list[str],
) -> None:
    folder = write_checkpoint(tmp_path / "run" / "checkpoint-1")
    if not kept:
        (folder / SINGLE).unlink()
    more(folder)
    [checkpoint] = find_checkpoints(str(tmp_path / "run"))
    assert (checkpoint.problems, checkpoint.step, checkpoint.kind) == ((), 1, "huggingface")
    held = inspect_model_folder(str(folder))
    assert held.made_by == recipe
    assert all(name.startswith(start) for name, start in zip(held.weight_files, weights, strict=True))
    assert all(start in note for note, start in zip(checkpoint.notes, notes, strict=True))
    assert set(held.weight_files) <= served_files(held).keys() <= {*held.weight_files, *write_names(folder)}


def write_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix == ".json"}


def test_index_counts_rather_than_a_single_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-1", shards=2)
    before = digest_model_folder(inspect_model_folder(str(folder)))
    write_safetensors(folder / SINGLE, seed=9)
    held = inspect_model_folder(str(folder))
    assert digest_model_folder(held) == before
    assert held.notes == (f"weights are from {INDEX}; left out: {SINGLE}",)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: content[:-1], "pytorch_model.bin is cut off"),
        (lambda content: b"", "pytorch_model.bin is cut off (0 bytes)"),
    ],
)
def test_pickled_weights_being_written_are_incomplete(tmp_path: Path, damage: Any, problem: str) -> None:
    folder = write_checkpoint(tmp_path / "run" / "checkpoint-1")
    (folder / SINGLE).unlink()
    write_zip(folder / PICKLED)
    (folder / PICKLED).write_bytes(damage((folder / PICKLED).read_bytes()))
    [checkpoint] = find_checkpoints(str(tmp_path / "run"))
    assert problem in "; ".join(checkpoint.problems)


def test_checkpoints_without_config_take_it_and_the_tokenizer_of_a_named_folder(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    folder = tmp_path / "run" / "checkpoint-2"
    folder.mkdir(parents=True)
    _distributed(folder)
    [alone] = find_checkpoints(str(tmp_path / "run"))
    assert "name a folder with the model's config and tokenizer with --tokenizer" in "; ".join(alone.problems)
    [named] = find_checkpoints(f"with({tmp_path / 'run'}, tokenizer={base})")
    assert (named.problems, named.name) == ((), "run-2")
    by_accelerate = tmp_path / "other" / "checkpoint_0"
    (write_checkpoint(by_accelerate) / "config.json").unlink()
    [other] = find_checkpoints(f"with({by_accelerate.parent}, tokenizer={base})")
    assert (other.problems, other.step) == ((), 0)
    (folder / FSDP / ".metadata").unlink()
    [unfinished] = find_checkpoints(f"with({tmp_path / 'run'}, tokenizer={base})")
    assert ".metadata is not there" in unfinished.problems[0]


def contradicting(folder: Path) -> dict[str, Any]:
    """Gives the second of two shards another value of a tensor of the first; returns the tensors by the index."""
    write_checkpoint(folder, shards=2)
    truth = tensors(folder)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    held = [name for name, shard in index.items() if shard == second]
    other = next(name for name, shard in index.items() if shard == first)
    write_safetensors(
        folder / second, parameters={name: PARAMETERS[name] for name in [*held, other]}, reseeded={other: 7}
    )
    return truth


def tensors(folder: Path) -> dict[str, bytes]:
    described = read_tensors(inspect_staged_folder(folder))
    return {name: storage.read_bytes(t.uri, start=t.span[0], end=t.span[1]) for name, t in described.items()}


def test_index_counts_where_shards_hold_a_tensor_twice(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    truth = contradicting(folder)
    held = inspect_model_folder(str(folder))
    assert (held.problems, held.made_by) == ((), "index 1")
    assert "in several shards" in held.notes[0]
    other = write_checkpoint(tmp_path / "checkpoint-2", seed=3, shards=2)
    with Staging(tmp_path / "staged", max_bytes=10**8) as staging:
        with staging.stage(str(folder), digest_model_folder(held)) as staged:
            assert tensors(staged.path) == truth
        merged = str(Merge.of_folders("interpolate", [str(folder), str(other)], "0"))
        with staging.stage(merged, digest_model_folder(inspect_checkpoint(merged))) as staged:
            assert tensors(staged.path) == truth


def test_shard_of_each_rank_by_accelerate_is_named_with_a_way_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run" / "checkpoint_1")
    (folder / SINGLE).unlink()
    _each("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin")(folder)
    [checkpoint] = find_checkpoints(str(tmp_path / "run"))
    [problem] = checkpoint.problems
    assert "a shard of each of 2 ranks (LOCAL_STATE_DICT" in problem and "SHARDED_STATE_DICT" in problem
