"""Checkpoints with a wrapper's words in the names of their tensors: said, and mended while they are staged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fakes.models import PARAMETERS, write_checkpoint
from fakes.stores import folder_store
from pools.weights.converting import unwrap_names
from pools.weights.formats import Tensor, read_safetensors_header, unwrapped
from pools.weights.model_files import digest_model_folder, inspect_model_folder, read_tensors
from pools.weights.staging import Staging
from resources.storage import storage

NAMES = tuple(PARAMETERS)


def wrapped(form: str) -> dict[str, str]:
    first, *others = NAMES
    if form == "model._orig_mod.":
        return {name: name.replace("model.", form, 1) for name in NAMES}
    if form == "a block":
        return {first: first, **{name: name.replace(".weight", "._orig_mod.weight") for name in others}}
    return {name: form + name for name in NAMES}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("", ()),
        ("_orig_mod.", ("_orig_mod.",)),
        ("module.", ("module.",)),
        ("base_model.model.", ("base_model.model.",)),
        ("module._orig_mod.", ("module.", "_orig_mod.")),
        ("_orig_mod.module.", ("_orig_mod.", "module.")),
        ("model._orig_mod.", ("_orig_mod.",)),
        ("a block", ("_orig_mod.",)),
        ("_fsdp_wrapped_module.", ("_fsdp_wrapped_module.",)),
    ],
)
def test_names_are_read_without_the_words_of_wrappers(form: str, words: tuple[str, ...]) -> None:
    names = {new: old for old, new in wrapped(form).items()}
    assert unwrapped(names) == (names, words)


def test_word_that_a_model_may_use_is_kept_unless_each_name_begins_with_it() -> None:
    names = ["module.a.weight", "lm_head.weight", "x.module.b.weight"]
    assert unwrapped(names) == ({name: name for name in names}, ())


def as_written(folder: Path, form: str, *, shards: int = 1) -> Path:
    shapes: Mapping[str, tuple[int, ...]] = {wrapped(form)[name]: tuple(shape) for name, shape in PARAMETERS.items()}
    return write_checkpoint(folder, parameters=shapes, shards=shards)


@pytest.mark.parametrize("place", ["local", "store"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("form", ["_orig_mod.", "a block"])
def test_staged_copy_has_the_names_of_the_model_and_the_same_content(
    tmp_path: Path, form: str, shards: int, place: str
) -> None:
    folder = as_written(tmp_path / "run" / "step-1", form, shards=shards)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with folder_store(tmp_path / "reads"), Staging(tmp_path / "staged", max_bytes=2**24) as staging:
        uri = str(folder) if place == "local" else f"store:/{folder}"
        inspected = inspect_model_folder(uri)
        assert inspected.problems == () and inspected.made_by == "prefix _orig_mod. 1"
        assert "names of tensors hold _orig_mod. of a wrapper" in "; ".join(inspected.notes)
        with staging.stage(uri, digest_model_folder(inspected)) as staged:
            made = inspect_model_folder(str(staged.path))
            assert made.problems == () and made.made_by is None
            tensors = read_tensors(made)
            assert set(tensors) == set(NAMES)
            source = {
                name: storage.read_bytes(tensor.uri, start=tensor.span[0], end=tensor.span[1])
                for name, tensor in _raw(folder).items()
            }
            for name, tensor in tensors.items():
                content = storage.read_bytes(tensor.uri, start=tensor.span[0], end=tensor.span[1])
                assert content == source[wrapped(form)[name]]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def _raw(folder: Path) -> dict[str, Tensor]:
    files = storage.list_files(str(folder))
    shards = [read_safetensors_header(file) for file in files if file.uri.endswith(".safetensors")]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def test_adapter_inside_its_base_is_said_and_not_mended(tmp_path: Path) -> None:
    names = {f"base_model.model.{name.replace('.weight', '.base_layer.weight')}": (2, 2) for name in NAMES}
    [problem] = inspect_model_folder(str(write_checkpoint(tmp_path / "step-1", parameters=names))).problems
    assert "merge_and_unload" in problem and ".base_layer." in problem


def test_two_tensors_of_a_name_behind_a_wrapper_are_left_as_they_are(tmp_path: Path) -> None:
    names = {name: (2, 2) for pair in ((name, f"_orig_mod.{name}") for name in NAMES) for name in pair}
    assert inspect_model_folder(str(write_checkpoint(tmp_path / "step-1", parameters=names))).made_by is None


def test_converted_file_gets_its_names_in_place(tmp_path: Path) -> None:
    folder = as_written(tmp_path / "step-1", "module.")
    content = (folder / "model.safetensors").read_bytes()
    unwrap_names(folder / "model.safetensors")
    made = inspect_model_folder(str(folder))
    assert made.made_by is None and set(read_tensors(made)) == set(NAMES)
    assert (folder / "model.safetensors").stat().st_size == len(content)
