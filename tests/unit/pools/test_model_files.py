"""Completeness, digests and interchangeability of model folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.models import CONFIG, write_checkpoint, write_safetensors
from pools.engine.launch import Servable, ServedCheckpoint, why_not_reload
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.errors import IncompleteCheckpoint


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def _cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:20])


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _not_causal(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertForMaskedLM"]}))


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
        (_truncate, "where its header says"),
        (_cut_header, "cut off within its header"),
        (_not_causal, "BertForMaskedLM, which is not a causal language model"),
    ],
)
def test_damaged_folder_is_incomplete_and_says_why(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    assert inspect_model_folder(str(folder)).complete
    damage(folder)
    found = inspect_model_folder(str(folder))
    assert not found.complete
    assert problem in "; ".join(found.problems)
    with pytest.raises(IncompleteCheckpoint, match="wait until it is written"):
        digest_model_folder(found)


def test_sharded_folder_wants_every_shard_its_index_names(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-1", shards=2)
    assert inspect_model_folder(str(folder)).complete
    (folder / "model-00002-of-00002.safetensors").unlink()
    found = inspect_model_folder(str(folder))
    assert found.problems == (
        "model-00002-of-00002.safetensors is named by model.safetensors.index.json and is not there",
    )


def test_shards_without_an_index_are_incomplete(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-1", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert "without model.safetensors.index.json" in inspect_model_folder(str(folder)).problems[0]


def test_pickled_weights_are_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save them as safetensors" in inspect_model_folder(str(folder)).problems[0]


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


def test_digest_follows_weights_written_again_in_place(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", seed=1)
    before = digest_model_folder(inspect_model_folder(str(folder)))
    write_safetensors(folder / "model.safetensors", seed=2)
    assert digest_model_folder(inspect_model_folder(str(folder))).weights != before.weights


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


def test_checkpoint_in_a_store_brings_its_small_files_here_and_leaves_its_weights_there(tmp_path: Path) -> None:
    from resources.storage import storage

    folder = write_checkpoint(tmp_path / "step-3", seed=3)
    storage.copy_from_local(folder, "memory://models/step-3")
    servable = Servable.from_uri("m", "memory://models/step-3")
    assert servable.digests.tokenizer == digest_model_folder(inspect_model_folder(str(folder))).tokenizer
    assert (servable.tokenizer / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (servable.tokenizer / "model.safetensors").exists()
    assert Servable.from_uri("m", str(folder)).tokenizer == folder
