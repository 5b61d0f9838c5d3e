"""Completeness, digests and interchangeability of model folders."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.models import CONFIG, write_checkpoint, write_safetensors
from pools.engine.launch import Servable, ServedCheckpoint, why_not_reload
from pools.weights.model_files import digest_model_folder, inspect_model_folder, served_files, tensor_in_common
from resources.errors import IncompleteCheckpoint


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def _cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:20])


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _sharded(missing: str) -> Callable[[Path], None]:
    def shard(folder: Path) -> None:
        shutil.rmtree(folder)
        write_checkpoint(folder, shards=2)
        (folder / missing).unlink()

    return shard


def _pickled_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model-00001-of-00002.bin")


def _mistrals(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")


def _not_causal(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertForMaskedLM"]}))


def _nobodys_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [null]}')


def _deeply_nested(name: str) -> Callable[[Path], None]:
    def nest(folder: Path) -> None:
        (folder / name).write_text("[" * 100_000)

    return nest


def _deeply_nested_header(folder: Path) -> None:
    nested = b'{"a": ' + b"[" * 100_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(nested)) + nested)


def _linked(name: str, target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return link


def _piped(name: str) -> Callable[[Path], None]:
    def pipe(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return pipe


def _half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Llama')


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_without("config.json"), "config.json is missing"),
        (_half_a_config, "config.json is not valid JSON"),
        (_without("tokenizer_config.json"), "tokenizer_config.json is missing"),
        (_without("tokenizer.json"), "no tokenizer"),
        (_without("model.safetensors"), "no weights"),
        (_pickled_shards, "1 weight shards without pytorch_model.bin.index.json"),
        (_mistrals, "convert_mistral_weights_to_hf.py"),
        (_sharded("model.safetensors.index.json"), "without model.safetensors.index.json"),
        (_sharded("model-00002-of-00002.safetensors"), "00002.safetensors is named by model.safetensors.index.json"),
        (_truncate, "where its header says"),
        (_cut_header, "cut off within its header"),
        (_not_causal, "BertForMaskedLM, which vLLM 0.32.0 does not list"),
        (_nobodys_architecture, "names no architecture"),
        (_deeply_nested("config.json"), "config.json is not valid JSON"),
        (_deeply_nested("model.safetensors.index.json"), "model.safetensors.index.json is not valid JSON"),
        (_deeply_nested_header, "no readable safetensors header"),
        (_linked("model.safetensors", "model.safetensors"), "model.safetensors is no regular file"),
        (_linked("model.safetensors", "/tmp"), "no weights"),
        (_linked("model.safetensors", "/dev/zero"), "model.safetensors is no regular file"),
        (_linked("tokenizer.json", "/etc/hostname"), "tokenizer.json is no regular file"),
        (_linked("config.json", "/proc/self/environ"), "config.json is no regular file"),
        (_linked("merges.txt", "gone.txt"), "merges.txt is no regular file"),
        (_piped("model.safetensors"), "model.safetensors is no regular file"),
        (_piped("config.json"), "config.json is no regular file"),
        (_piped("added_tokens.json"), "added_tokens.json is no regular file"),
    ],
)
def test_damaged_folder_is_incomplete_and_says_why(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    assert inspect_model_folder(str(folder)).complete
    damage(folder)
    model_folder = inspect_model_folder(str(folder))
    assert not model_folder.complete
    assert problem in "; ".join(model_folder.problems)
    with pytest.raises(IncompleteCheckpoint, match="wait until it is written"):
        digest_model_folder(model_folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
TENSORS = st.dictionaries(
    st.text(), JSON | st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON}), max_size=3
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    config=JSON | st.fixed_dictionaries({"architectures": JSON}),
    index=JSON | st.fixed_dictionaries({"weight_map": JSON}),
    header=JSON | TENSORS,
)
def test_inspection_of_any_json_finds_problems_and_never_fails(
    tmp_path: Path, config: Any, index: Any, header: Any
) -> None:
    for name, content in (("config.json", config), ("model.safetensors.index.json", index)):
        folder = write_checkpoint(tmp_path / os.urandom(8).hex())
        (folder / name).write_text(json.dumps(content))
        assert not inspect_model_folder(str(folder)).complete
    encoded = json.dumps(header).encode()
    folder = write_checkpoint(tmp_path / os.urandom(8).hex())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"x")
    for problem in inspect_model_folder(str(folder)).problems:
        problem.encode()


def test_file_that_may_not_be_read_is_a_problem_of_its_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    (folder / "config.json").chmod(0)
    if os.access(folder / "config.json", os.R_OK):
        pytest.skip("this user may read everything")
    assert "config.json cannot be read" in inspect_model_folder(str(folder)).problems[0]


@pytest.mark.parametrize(
    ("shard", "held", "also_named", "problem"),
    [
        (2, [], [], "names lm_head.weight, which no shard holds"),
        (2, ["lm_head.weight"], ["model.norm.weight"], "names model.norm.weight, which no shard holds"),
    ],
)
def test_shards_that_contradict_themselves_or_their_index_are_incomplete(
    tmp_path: Path, shard: int, held: list[str], also_named: list[str], problem: str
) -> None:
    folder = write_checkpoint(tmp_path / "step-1", shards=2)
    name = f"model-0000{shard}-of-00002.safetensors"
    write_safetensors(folder / name, parameters=dict.fromkeys(held, (16, 8)))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(also_named, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    [message] = inspect_model_folder(str(folder)).problems
    assert problem in message and message.endswith("write the weights again")


def test_digests_tell_weights_from_texts(tmp_path: Path) -> None:
    original = digest_model_folder(inspect_model_folder(str(write_checkpoint(tmp_path / "a", seed=1))))
    same = digest_model_folder(inspect_model_folder(str(write_checkpoint(tmp_path / "b", seed=1))))
    weights = digest_model_folder(inspect_model_folder(str(write_checkpoint(tmp_path / "c", seed=2))))
    template = digest_model_folder(inspect_model_folder(str(write_checkpoint(tmp_path / "d", seed=1, template="x"))))
    assert original == same
    assert original.checkpoint == same.checkpoint
    assert (original.tokenizer, original.config) == (weights.tokenizer, weights.config)
    assert original.weights != weights.weights
    assert original.weights == template.weights
    assert original.tokenizer != template.tokenizer
    assert len({original.checkpoint, weights.checkpoint, template.checkpoint}) == 3


def test_digest_follows_weights_of_equal_size_with_a_restored_time(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "a", seed=1) / "model.safetensors"
    os.utime(weights, (1e9, 1e9))

    def digest() -> str:
        return digest_model_folder(inspect_model_folder(str(tmp_path / "a"))).weights

    before = digest()
    assert digest() == before
    for seed, replaced in ((2, False), (3, True)):
        new = tmp_path / "new.safetensors" if replaced else weights
        write_safetensors(new, seed=seed)
        os.utime(new, (1e9, 1e9))
        new.replace(weights)
        assert digest() != before


def test_digest_needs_no_cache_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    folder = inspect_model_folder(str(write_checkpoint(tmp_path / "a", seed=1)))
    before = digest_model_folder(folder)
    monkeypatch.setattr("pools.weights.content.SETTLED_SECONDS", -1e9)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "digests").write_text("in the place of the folder")
    assert digest_model_folder(folder) == before


EVERY_FILE = {
    "generation_config.json": b'{"eos_token_id": 2}',
    "merges.txt": b"#version: 0.2\na b\n",
    "added_tokens.json": b'{"<x>": 17}',
    "special_tokens_map.json": b"{}",
    "vocab.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "hf_quant_config.json": b"{}",
    "modeling_own.py": b"pass",
    "a file of tomorrow": b"\x00",
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_digest_follows_every_byte_of_every_file_that_is_served(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "a"
    if not folder.exists():
        write_checkpoint(folder, shards=2)
        for name, content in EVERY_FILE.items():
            (folder / name).write_bytes(content)
    before = inspect_model_folder(str(folder))
    assert set(served_files(before)) == {path.name for path in folder.iterdir()}
    path = folder / data.draw(st.sampled_from(sorted(served_files(before))))
    original, written = path.read_bytes(), path.stat()
    place = data.draw(st.integers(0, len(original) - 1))
    digests = digest_model_folder(before)
    try:
        changed = bytearray(original)
        changed[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
        after = inspect_model_folder(str(folder))
        assert not after.complete or digest_model_folder(after).checkpoint != digests.checkpoint
    finally:
        path.write_bytes(original)


def test_tokenizer_too_large_is_a_problem_and_unread_files_are_none(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / "rust_model.ot").touch()
    os.truncate(folder / "rust_model.ot", 2**27 + 1)
    os.truncate(folder / "tokenizer.json", 2**27)
    assert inspect_model_folder(str(folder)).complete
    os.truncate(folder / "tokenizer.json", 2**27 + 1)
    [problem] = inspect_model_folder(str(folder)).problems
    assert problem.startswith("tokenizer.json has 134217729 bytes") and "134217728" in problem


def test_reload_is_refused_for_what_an_engine_cannot_take(tmp_path: Path) -> None:
    def served(name: str, **kwargs: object) -> ServedCheckpoint:
        folder = write_checkpoint(tmp_path / name, **kwargs)  # type: ignore[arg-type]
        return ServedCheckpoint.from_folder(name, folder, digest_model_folder(inspect_model_folder(str(folder))))

    running = served("running")
    assert why_not_reload(running, served("later", seed=5)) is None
    assert why_not_reload(running, served("other-template", template="other")) == (
        "its tokenizer or chat template differs"
    )
    wider = served("wider", config={**CONFIG, "hidden_size": 16})
    assert why_not_reload(running, wider) == "its config differs (hidden_size)"
    shape = served("shape", parameters={"model.embed_tokens.weight": (16, 8), "lm_head.weight": (8, 16)})
    assert why_not_reload(running, shape) == "its parameter lm_head.weight is F32[8, 16], not F32[16, 8]"
    fewer = served("fewer", parameters={"model.embed_tokens.weight": (16, 8)})
    assert why_not_reload(running, fewer) == "its parameters differ (lm_head.weight)"
    relabelled = served("relabelled", config={**CONFIG, "transformers_version": "9"})
    assert why_not_reload(running, relabelled) is None
    assert why_not_reload(running, served("dtype", config={**CONFIG, "dtype": "float16"})) == (
        "its config differs (dtype)"
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_tensor_in_common_is_found_in_any_file(tmp_path: Path, shards: int) -> None:
    parameters = {"model.embed_tokens.weight": (16, 100), "lm_head.weight": (16, 100), "empty": (0,)}
    first, same, other = (
        inspect_model_folder(
            str(write_checkpoint(tmp_path / name, seed=seed, parameters=parameters, reseeded=reseeded, shards=shards))
        )
        for name, seed, reseeded in (("a", 1, {}), ("b", 2, {"lm_head.weight": 1}), ("c", 2, {}))
    )
    sharded = inspect_model_folder(str(write_checkpoint(tmp_path / "d", seed=1, parameters=parameters, shards=2)))
    assert tensor_in_common(first, same) == "lm_head.weight"
    assert tensor_in_common(first, other) is None
    assert tensor_in_common(first, sharded) == "model.embed_tokens.weight"
    almost = inspect_model_folder(str(shutil.copytree(tmp_path / "d", tmp_path / "e")))
    for name in almost.weight_files:  # the last byte of each file, so of its last tensor
        content = (tmp_path / "e" / name).read_bytes()
        (tmp_path / "e" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert tensor_in_common(sharded, almost) is None


def test_checkpoint_in_a_store_brings_its_small_files_here_and_leaves_its_weights_there(tmp_path: Path) -> None:
    from resources.storage import storage

    folder = write_checkpoint(tmp_path / "step-3", seed=3)
    storage.copy_from_local(folder, "memory://models/step-3")
    servable = Servable.from_uri("m", "memory://models/step-3")
    assert servable.digests.tokenizer == digest_model_folder(inspect_model_folder(str(folder))).tokenizer
    assert (servable.tokenizer / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (servable.tokenizer / "model.safetensors").exists()
    assert Servable.from_uri("m", str(folder)).tokenizer == servable.tokenizer
