"""Loads a checkpoint in Hugging Face's layout or Levanter's own, for `run_levanter.py`."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import equinox as eqx
import fsspec
import haliax as hax
import jax
import jmp
import tensorstore
from haliax.partitioning import ResourceMapping
from haliax.util import is_named_array
from jax.experimental.array_serialization.serialization import get_tensorstore_spec
from levanter.checkpoint import load_checkpoint
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.models.lm_model import LmConfig
from levanter.tensorstore_serialization import build_kvstore_spec
from levanter.trainer import TrainerConfig
from levanter.utils.fsspec_utils import exists
from levanter.utils.jax_utils import leaf_key_paths, parameter_count
from levanter.utils.tree_utils import inference_mode
from refusals import Refused
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

ARCHITECTURES = {
    "apertus": "apertus",
    "gemma": "gemma",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "qwen2": "qwen",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}
"""Levanter's names by `model_type`. Gemma 2 and 3 are left out: its scoring ignores their soft cap of the logits."""
ACCELERATED = "p=f32,c=bfloat16"
PLAIN = "p=f32,c=f32"
NATIVE = "levanter"
LONGEST_REASON = 300  # Levanter names every array it found


@dataclass(frozen=True)
class Model:
    """A loaded model with its tokenizer.

    `max_length` is the longest request in tokens; `packed` is True if a row may hold several requests, which needs
    relative positions; `rows` is the number of rows computed at once, on all devices together.
    """

    network: Any
    tokenizer: Any
    trainer: TrainerConfig
    max_length: int
    packed: bool
    rows: int
    precision: str

    @property
    def mapping(self) -> ResourceMapping:
        return self.trainer.compute_axis_mapping

    @property
    def parameters(self) -> int:
        return parameter_count(self.network)

    def mesh(self) -> AbstractContextManager[None]:
        return self.trainer.use_device_mesh()


def load(checkpoint: dict[str, Any], *, max_length: int, precision: str | None, rows: int) -> Model:
    """Loads weights, configuration and tokenizer.

    Args:
        checkpoint: `uri` and `kind` of the weights; `reference` is a Hugging Face folder of the same model.
        max_length: limit of tokens per request, besides the model's own.
        precision: jmp's policy; chosen by the devices if None.
        rows: rows that a device computes at once.
    """
    policy = precision or (PLAIN if jax.default_backend() == "cpu" else ACCELERATED)
    trainer = TrainerConfig(mp=jmp.get_policy(policy), require_accelerator=False, per_device_eval_parallelism=rows)
    described = _read_config(checkpoint["reference"])
    hf_config = AutoConfig.for_model(**described)
    kind = ARCHITECTURES[described["model_type"]]
    config = LmConfig.get_known_choices()[kind].from_hf_config(hf_config)
    tokenizer = _read_tokenizer(checkpoint["reference"])
    with trainer.use_device_mesh():
        if checkpoint["kind"] == NATIVE:
            network = _load_native(checkpoint["uri"], config, hf_config.vocab_size, trainer)
        else:
            network = _load_huggingface(checkpoint["uri"], config, hf_config, tokenizer, trainer)
    return Model(
        network=inference_mode(network, True),
        tokenizer=tokenizer,
        trainer=trainer,
        max_length=min(max_length, config.max_seq_len, _window_of(described) or config.max_seq_len),
        packed=hasattr(config, "rope") and config.rope is not None,
        rows=trainer.eval_batch_size,
        precision=policy,
    )


def _read_config(folder: str) -> dict[str, Any]:
    described = _read_json(folder, "config.json")
    if described is None:
        raise Refused(
            expected=f"config.json in {folder}",
            found="none that can be read",
            remedy="Set evaluator.reference to a Hugging Face folder of the same model",
        )
    if described.get("model_type") not in ARCHITECTURES:
        raise Refused(
            expected=f"an architecture that Levanter evaluates: {', '.join(sorted(ARCHITECTURES))}",
            found=f"{described.get('model_type')!r} in {folder}",
            remedy="Evaluate this model with lm_evaluation_harness on an engine",
        )
    return _as_transformers_4_reads(described)


def _as_transformers_4_reads(described: dict[str, Any]) -> dict[str, Any]:
    renamed = dict(described)
    if "num_experts" not in renamed and "num_local_experts" in renamed:
        renamed["num_experts"] = renamed["num_local_experts"]
    rope = renamed.pop("rope_parameters", None)
    if not rope:
        return renamed
    by_kind = rope if all(isinstance(part, dict) for part in rope.values()) else {"full_attention": rope}
    thetas = {part.get("rope_theta", 10000.0) for part in by_kind.values()}
    if len(thetas) > 1:
        raise Refused(
            expected="a single rope_theta for all layers, as Levanter requires",
            found=", ".join(map(str, sorted(thetas))),
            remedy="Evaluate this model with lm_evaluation_harness on an engine",
        )
    scaling = {name: value for name, value in by_kind.get("full_attention", {}).items() if name != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {**renamed, "rope_theta": thetas.pop(), "rope_scaling": scaling if scaled else None}


def _window_of(described: dict[str, Any]) -> int | None:
    kind = described["model_type"]
    if kind == "olmo3" or (kind.startswith("qwen") and not described.get("use_sliding_window")):
        return None
    return described.get("sliding_window")


def _read_tokenizer(folder: str) -> Any:
    settings = _read_json(folder, "tokenizer_config.json")
    if settings is None:
        raise Refused(
            expected=f"a tokenizer in {folder}",
            found="no tokenizer_config.json",
            remedy="Copy the tokenizer there, or set evaluator.reference to a Hugging Face folder that has it",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="tokenizer-", dir=".") as place:  # in this attempt's own folder
            _take_tokenizer(folder, place)
            if settings.get("tokenizer_class") == "TokenizersBackend":  # the name that transformers 5 writes
                return PreTrainedTokenizerFast.from_pretrained(place)
            return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # errors of damaged files have no common type
        raise Refused(
            expected=f"a tokenizer in {folder} that loads",
            found=f"{type(error).__name__}: {error}"[:LONGEST_REASON],
            remedy="Put the tokenizer of the training run there, whole, or set evaluator.reference to a folder with it",
        ) from error


def _take_tokenizer(folder: str, place: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(folder)
    take = filesystem.get_file if "://" in folder else os.symlink
    # Deeper files are in no digest of the checkpoint: templates in `additional_chat_templates`, for example.
    for file in filesystem.ls(path, detail=True):
        name = PurePosixPath(file["name"])
        if file["type"] != "directory" and name.suffix in (".json", ".jinja", ".model", ".txt"):
            take(file["name"], f"{place}/{name.name}")


def _read_json(folder: str, name: str) -> dict[str, Any] | None:
    try:
        opened: Any = fsspec.open(f"{folder.rstrip('/')}/{name}")
        with opened as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _load_huggingface(uri: str, config: Any, hf_config: Any, tokenizer: Any, trainer: TrainerConfig) -> Any:
    # Has the configuration already: Levanter's own would read it again, and not from every store.
    class Described(HFCheckpointConverter):
        def hf_config_from_hf_checkpoint(self, ref: Any = None) -> Any:
            return hf_config

    converter = Described(
        type(config),
        reference_checkpoint=uri,
        HfConfigClass=type(hf_config),
        tokenizer=tokenizer,
        ignore_prefix="transformer" if hf_config.model_type == "gpt2" else None,
    )
    return converter.load_pretrained(
        config.model_type, config=config, axis_mapping=trainer.parameter_axis_mapping, dtype=trainer.mp.compute_dtype
    )


def _load_native(uri: str, config: Any, vocabulary: int, trainer: TrainerConfig) -> Any:
    def shape(size: int) -> Any:
        return eqx.filter_eval_shape(config.build, hax.Axis("vocab", size), key=jax.random.PRNGKey(0))

    stored = _stored_vocabulary(uri, shape(vocabulary))
    try:
        network = load_checkpoint(shape(stored), uri, subpath="model", axis_mapping=trainer.parameter_axis_mapping)
    except (FileNotFoundError, ValueError) as error:
        raise Refused(
            expected=f"in {uri} the parameters that its reference's config.json describes",
            found=str(error).splitlines()[0][:LONGEST_REASON],
            remedy="Set evaluator.reference to a Hugging Face folder of the very same model",
        ) from error
    return trainer.mp.cast_to_compute(network)


def _stored_vocabulary(uri: str, network: Any) -> int:
    paths = jax.tree.leaves(leaf_key_paths(network, is_leaf=is_named_array), is_leaf=is_named_array)
    leaves = jax.tree.leaves(network, is_leaf=is_named_array)
    for path, leaf in zip(paths, leaves, strict=True):
        if is_named_array(leaf) and "vocab" in {axis.name for axis in leaf.axes}:
            place = [axis.name for axis in leaf.axes].index("vocab")
            return _stored_shape(uri, str(PurePosixPath("model", *path.split("."))))[place]
    return network.Vocab.size


def _stored_shape(uri: str, path: str) -> tuple[int, ...]:
    if exists(f"{uri}/manifest.ocdbt"):
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": build_kvstore_spec(uri), "path": path}}
    else:
        spec = get_tensorstore_spec(f"{uri}/{path}")

    async def read() -> tuple[int, ...]:
        array = await tensorstore.open(spec, open=True, read=True)
        return tuple(array.shape)

    try:
        return asyncio.run(read())
    except ValueError as error:
        raise Refused(
            expected=f"the array {path} in {uri}",
            found=str(error).splitlines()[0][:LONGEST_REASON],
            remedy="Set evaluator.reference to a Hugging Face folder of the very same model",
        ) from error
