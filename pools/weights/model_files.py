"""Model folders in Hugging Face's layout: whether one is whole, what it holds, and its digests.

Only headers are read to judge completeness and architecture; weights are read once, for their digest, and only
where the store has no checksum of its own.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from resources.errors import CheckpointError, IncompleteCheckpoint
from resources.settings import settings
from resources.storage import storage
from resources.storage.storage import FileInfo

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""One of these holds the vocabulary; `tokenizer_config.json` is wanted beside it."""
_TEMPLATE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_LARGEST_HEADER_BYTES = 100_000_000  # the bound of the safetensors format itself


@dataclass(frozen=True)
class Tensor:
    """One parameter as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelDigests:
    """Hex digests: of the weights, of tokenizer and chat template, of the config, and of all of them together."""

    weights: str
    tokenizer: str
    config: str

    @property
    def checkpoint(self) -> str:
        """Identifies the checkpoint as a whole."""
        return _hash(self.weights.encode(), self.tokenizer.encode(), self.config.encode())


@dataclass(frozen=True)
class ModelFolder:
    """A model folder as found. `problems` is empty if and only if it is complete and can be evaluated.

    `kind` is its layout. For Levanter's own, `reference` is the folder that config and tokenizer come from.
    """

    uri: str
    files: Mapping[str, FileInfo] = field(repr=False)
    problems: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    weight_files: tuple[str, ...]
    modified: float
    kind: Literal["huggingface", "levanter"] = "huggingface"
    reference: ModelFolder | None = field(default=None, repr=False)

    @property
    def complete(self) -> bool:
        """True if everything needed to evaluate it is there."""
        return not self.problems

    def require_complete(self) -> None:
        """Raises `IncompleteCheckpoint` with every problem found."""
        if self.problems:
            raise IncompleteCheckpoint(
                expected=f"a complete checkpoint in {self.uri}",
                found="; ".join(self.problems),
                remedy="wait until it is written, or copy the missing files again",
            )


def inspect_model_folder(uri: str, files: Sequence[FileInfo] | None = None) -> ModelFolder:
    """Judges whether a folder holds a whole model that an engine can serve.

    Args:
        uri: the folder.
        files: its files, if a listing was made already.
    """
    prefix = uri.rstrip("/") + "/"
    described = inspect_reference_folder(uri, files)
    by_name, problems = described.files, list(described.problems)
    weights = _weight_files(prefix, by_name, problems)
    for name in weights:
        if name not in by_name:
            problems.append(f"{name} is named by {INDEX_NAME} and is not there")
            continue
        try:
            read_safetensors_header(by_name[name])
        except CheckpointError as error:
            problems.append(error.found)
    weight_files = tuple(name for name in weights if name in by_name)
    return replace(described, problems=tuple(problems), weight_files=weight_files)


def inspect_reference_folder(uri: str, files: Sequence[FileInfo] | None = None) -> ModelFolder:
    """Inspects a folder of which only config and tokenizer are needed, not the weights."""
    listed = storage.list_files(uri) if files is None else files
    prefix = uri.rstrip("/") + "/"
    by_name = {info.uri.removeprefix(prefix): info for info in listed}
    by_name = {name: info for name, info in by_name.items() if "/" not in name}
    problems: list[str] = []
    config = _read_config(prefix, by_name, problems)
    if "tokenizer_config.json" not in by_name:
        problems.append("tokenizer_config.json is missing")
    if not any(name in by_name for name in TOKENIZER_FILES):
        problems.append(f"no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    return ModelFolder(
        uri=uri,
        files=by_name,
        problems=tuple(problems),
        config=config,
        weight_files=(),
        modified=max((info.modified for info in by_name.values()), default=0.0),
    )


def _read_config(prefix: str, files: Mapping[str, FileInfo], problems: list[str]) -> Mapping[str, Any]:
    if "config.json" not in files:
        problems.append("config.json is missing")
        return {}
    config = _read_json(prefix + "config.json", problems)
    architectures = config.get("architectures") or []
    causal = [name for name in architectures if name.endswith(("ForCausalLM", "LMHeadModel"))]
    if config and not causal:
        problems.append(
            f"config.json names {', '.join(architectures) or 'no architecture'}, which is not a causal language model"
        )
    return config


def _read_json(uri: str, problems: list[str]) -> dict[str, Any]:
    name = storage.basename(uri)
    try:
        content = json.loads(storage.read_bytes(uri))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
        return {}
    except ValueError:
        problems.append(f"{name} is not valid JSON (cut off?)")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{name} holds no JSON object")
        return {}
    return content


def _weight_files(prefix: str, files: Mapping[str, FileInfo], problems: list[str]) -> list[str]:
    if INDEX_NAME in files:
        weight_map = _read_json(prefix + INDEX_NAME, problems).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            problems.append(f"{INDEX_NAME} has no weight_map")
            return []
        return sorted({str(shard) for shard in weight_map.values()})
    if "model.safetensors" in files:
        return ["model.safetensors"]
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        problems.append(f"{len(shards)} weight shards without {INDEX_NAME}")
    elif any(name.startswith("pytorch_model") for name in files):
        problems.append("weights are in pytorch_model*.bin; save them as safetensors")
    else:
        problems.append("no weights: neither model.safetensors nor an index is there")
    return []


def read_safetensors_header(file: FileInfo) -> dict[str, Tensor]:
    """Parameter names, dtypes and shapes of one safetensors file, whose length must match its header.

    Raises:
        IncompleteCheckpoint: the file is shorter or longer than its header says, or has no readable header.
    """
    name = storage.basename(file.uri)
    problem: str | None = None
    tensors: dict[str, Tensor] = {}
    try:
        (header_bytes,) = struct.unpack("<Q", storage.read_bytes(file.uri, start=0, end=8))
        if header_bytes > min(_LARGEST_HEADER_BYTES, file.size):
            problem = f"{name} is cut off within its header ({file.size} bytes)"
        else:
            header = json.loads(storage.read_bytes(file.uri, start=8, end=8 + header_bytes))
            header.pop("__metadata__", None)
            data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            wanted = 8 + header_bytes + data_bytes
            if file.size != wanted:
                problem = f"{name} has {file.size} bytes where its header says {wanted}"
            tensors = {key: Tensor(entry["dtype"], tuple(entry["shape"])) for key, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        problem = f"{name} has no readable safetensors header ({file.size} bytes)"
    except FileNotFoundError:
        problem = f"{name} is gone"
    if problem:
        raise IncompleteCheckpoint(
            expected=f"a whole safetensors file {file.uri}", found=problem, remedy="copy or write the file again"
        )
    return tensors


def read_tensors(folder: ModelFolder) -> dict[str, Tensor]:
    """Every parameter of a complete model, over all its shards."""
    folder.require_complete()
    tensors: dict[str, Tensor] = {}
    for name in folder.weight_files:
        tensors.update(read_safetensors_header(folder.files[name]))
    return tensors


def digest_model_folder(folder: ModelFolder) -> ModelDigests:
    """Digests of a complete model. The weights' one is remembered by path, size and modification time.

    Raises:
        IncompleteCheckpoint: it is not complete.
    """
    folder.require_complete()
    weights = [part for name in folder.weight_files for part in (name.encode(), _content_digest(folder.files[name]))]
    files = (folder.reference or folder).files
    texts = sorted(name for name in files if name in TOKENIZER_FILES + _TEMPLATE_FILES)
    tokenizer = [part for name in texts for part in (name.encode(), storage.read_bytes(files[name].uri))]
    config = [json.dumps(folder.config, sort_keys=True).encode()]
    if "generation_config.json" in files:
        config.append(storage.read_bytes(files["generation_config.json"].uri))
    return ModelDigests(weights=_hash(*weights), tokenizer=_hash(*tokenizer), config=_hash(*config))


def _hash(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _content_digest(file: FileInfo) -> bytes:
    if file.checksum:
        return file.checksum.encode()
    if not storage.is_local(file.uri):  # a store without checksums, such as memory://
        return _hash(storage.read_bytes(file.uri)).encode()
    path = storage.local_path(file.uri).resolve()
    key = f"{path}|{file.size}|{path.stat().st_mtime_ns}"
    memory = settings().cache_dir / "digests" / _hash(key.encode())
    if memory.is_file():
        return memory.read_bytes()
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest().encode()
    storage.write_bytes(str(memory), digest)
    return digest
