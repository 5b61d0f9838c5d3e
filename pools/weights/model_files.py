"""Model folders in Hugging Face's layout: their completeness, served files, and digests.

Only headers are read to check completeness and architecture; weights are read once, for their digest, and only if the
store has no checksum of its own. Every served file is digested.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pools.weights.content import content_digest, hash_of
from pools.weights.merges import merge_of
from resources.errors import CheckpointError, CheckpointGone, IncompleteCheckpoint, StorageError
from resources.storage import storage
from resources.storage.storage import FileInfo

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""Files with the vocabulary, of which any is sufficient; `tokenizer_config.json` is required as well."""
CONFIG_FILES = ("config.json", "generation_config.json")
"""Files that the config's digest is over."""
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
"""Keys of a config that have no effect on a model."""
_LARGEST_HEADER_BYTES = 100_000_000  # limit of the safetensors format itself
_LARGEST_SMALL_BYTES = 2**27  # the largest vocabularies have a quarter of it
_READ_WHOLE = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of the files that tokenizers and engines read in addition to the weights."""
_FIRST_COMPARED_BYTES, _COMPARED_BYTES = 4096, 2**24
_MERGING = "merge 1"  # increase it when the same names and files give other numbers
_CANNOT_BE_READ = "cannot be read"
_NOT_THERE = (" is missing", " is there", " is not there", " is gone", " weight shards without ")
_NEVER_SERVED = (
    # Weights in other formats, and adapters, which engines would mistake for the weights.
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.npz", "*.npy", "*.pkl",
    "*.onnx", "consolidated*", "adapter_*", INDEX_NAME,
    # Files of trainers and users, different at every step.
    ".*", "*.partial", "*.md", "*.log", "*.jsonl", "*.csv", "trainer_state.json", "*_results.json", "latest",
    "events.out.tfevents*", "STABLE",
)  # fmt: skip
"""Files that are hidden from engine and tokenizer, and so are in no digest, unless they are the weights."""


@dataclass(frozen=True)
class Tensor:
    """A parameter as described by a safetensors header, with the file and the byte range of its content."""

    dtype: str
    shape: tuple[int, ...]
    uri: str = field(default="", compare=False)
    span: tuple[int, int] = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ModelDigests:
    """Hex digests: of the weights, of tokenizer and chat template, of the config, and of all of them together."""

    weights: str
    tokenizer: str
    config: str

    @property
    def checkpoint(self) -> str:
        return hash_of(self.weights.encode(), self.tokenizer.encode(), self.config.encode())


@dataclass(frozen=True)
class ModelFolder:
    """An inspected model folder. `problems` is empty if and only if it is complete and can be evaluated.

    `kind` is its layout. For Levanter's own, `reference` is the folder with config and tokenizer. A merged checkpoint
    has its name as `uri`.
    """

    uri: str
    files: Mapping[str, FileInfo] = field(repr=False)
    problems: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    weight_files: tuple[str, ...]
    modified: float
    kind: Literal["huggingface", "levanter"] = "huggingface"
    reference: ModelFolder | None = field(default=None, repr=False)
    inputs: tuple[ModelFolder, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        return not self.problems

    def require_complete(self, *, planned: bool = False) -> None:
        """Raises `IncompleteCheckpoint` with every problem; `CheckpointGone` if all files, or some of a plan, are
        gone."""
        missing = [problem for problem in self.problems if planned and any(words in problem for words in _NOT_THERE)]
        if missing or not self.files:
            gone = f"{'; '.join(missing)}: its folder is being removed" if self.files else None
            raise checkpoint_gone(self.uri, gone)
        if self.problems:
            raise IncompleteCheckpoint(
                expected=f"a complete checkpoint in {self.uri}",
                found="; ".join(self.problems),
                remedy="wait until it is written, or copy the missing files again",
            )


def checkpoint_gone(uri: str, problem: str | None = None) -> CheckpointGone:
    """Returns the error of a checkpoint with a removed folder."""
    return CheckpointGone(
        expected=f"the checkpoint in {uri}",
        found=problem or "no file is there: its folder was removed",
        remedy="let the trainer keep checkpoints until they are evaluated (save_total_limit), or leave it out",
    )


def small_files(folder: ModelFolder) -> dict[str, FileInfo]:
    """Returns config, tokenizer, templates and code: every file except weights and leftovers of trainers."""
    return {name: file for name, file in _auxiliary_files(folder) if file.size <= _LARGEST_SMALL_BYTES}


def _auxiliary_files(folder: ModelFolder) -> Iterator[tuple[str, FileInfo]]:
    for name, file in folder.files.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _NEVER_SERVED) and "/" not in name:
            yield name, file


def served_files(folder: ModelFolder) -> dict[str, FileInfo]:
    """Returns the files that an engine reads of a complete model in Hugging Face's layout: weights and small files."""
    weights = [name for name in (*folder.weight_files, INDEX_NAME) if name in folder.files]
    return {**small_files(folder), **{name: folder.files[name] for name in weights}}


def inspect_model_folder(uri: str, files: Sequence[FileInfo] | None = None) -> ModelFolder:
    """Checks that a folder holds a whole model that an engine can serve; failures go into `problems`."""
    described = inspect_reference_folder(uri, files)
    by_name, problems = described.files, list(described.problems)
    weights, tensors = _weight_files(by_name, problems)
    shard_of: dict[str, str] = {}
    before = len(problems)
    for name in weights:
        if name not in by_name:
            problems.append(f"{ascii(name)[1:-1]} is named by {INDEX_NAME} and is not there")
            continue
        try:
            held = read_safetensors_header(by_name[name])
        except CheckpointError as error:
            problems.append(error.found)
            continue
        # Engines read every shard, so the last of two shards would win, against the index.
        problems += [
            f"{ascii(f'{tensor} is in {shard_of[tensor]} and in {name}')[1:-1]}; write the weights again"
            for tensor in sorted(held.keys() & shard_of.keys())[:1]
        ]
        shard_of |= dict.fromkeys(held, name)
    if len(problems) == before and (missing := sorted(tensors - shard_of.keys())):
        named = ascii(", ".join(missing[:3]))[1:-1]
        problems.append(f"{INDEX_NAME} names {named}, which no shard holds; write the weights again")
    weight_files = tuple(name for name in weights if name in by_name)
    return replace(described, problems=tuple(problems), weight_files=weight_files)


def inspect_staged_folder(folder: Path) -> ModelFolder:
    """Inspects a staging folder, which has links to the files of a checkpoint."""
    return inspect_model_folder(str(folder), storage.list_files(str(folder), within="/"))


def inspect_reference_folder(uri: str, files: Sequence[FileInfo] | None = None) -> ModelFolder:
    """Inspects a folder of which only config and tokenizer are needed, not the weights."""
    listed = checkpoint_files(uri) if files is None else files
    prefix = uri.rstrip("/") + "/"
    by_name = {info.uri.removeprefix(prefix): info for info in listed}
    by_name = {name: info for name, info in by_name.items() if "/" not in name}
    problems: list[str] = []
    config = _read_config(by_name, problems)
    if "tokenizer_config.json" not in by_name:
        problems.append("tokenizer_config.json is missing")
    if not any(name in by_name for name in TOKENIZER_FILES):
        problems.append(f"no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    folder = ModelFolder(
        uri=uri,
        files=by_name,
        problems=(),
        config=config,
        weight_files=(),
        modified=max((info.modified for info in by_name.values()), default=0.0),
    )
    others = (file for name, file in small_files(folder).items() if name != "config.json")
    problems += [
        f"{ascii(name)[1:-1]} has {file.size} bytes; files other than weights may have at most {_LARGEST_SMALL_BYTES}"
        for name, file in _auxiliary_files(folder)
        if name.endswith(_READ_WHOLE) and file.size > _LARGEST_SMALL_BYTES
    ]
    return replace(folder, problems=(*problems, *filter(None, map(irregular, others))))


def checkpoint_files(uri: str) -> list[FileInfo]:
    """Lists a checkpoint's files; links may lead into its run: the folder above it, and above its `hf/`."""
    run = storage.parent(storage.absolute(uri))
    return storage.list_files(uri, within=storage.parent(run) if storage.basename(run) == "hf" else run)


def may_pass(problem: str) -> bool:
    """Returns True if a problem may disappear without a change in the file listing."""
    return _CANNOT_BE_READ in problem


def irregular(file: FileInfo) -> str | None:
    """Returns the problem of a file that must not be opened; None for a regular file."""
    if file.regular:
        return None
    name = ascii(storage.basename(file.uri))[1:-1]
    return f"{name} is no regular file: a pipe, a device, or a link to nothing or out of its run's folder"


def _unreadable(file: FileInfo, error: StorageError) -> str:
    if not storage.is_local(file.uri):
        raise error
    return f"{storage.basename(file.uri)} {_CANNOT_BE_READ}: {error.found}"


def _read_config(files: Mapping[str, FileInfo], problems: list[str]) -> Mapping[str, Any]:
    if "config.json" not in files:
        problems.append("config.json is missing")
        return {}
    before = len(problems)
    config = read_json(files["config.json"], problems)
    listed = config.get("architectures")
    architectures = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if len(problems) == before and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        named = ", ".join(ascii(name)[1:-1] for name in architectures)
        problems.append(f"config.json names {named or 'no architecture'}, which is not a causal language model")
    return config


def read_json(file: FileInfo, problems: list[str]) -> dict[str, Any]:
    """Returns the JSON object in a file; on failure an empty object, with the reason appended to `problems`."""
    name = storage.basename(file.uri)
    if problem := irregular(file):
        problems.append(problem)
        return {}
    try:
        content = json.loads(storage.read_bytes(file.place))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
        return {}
    except (ValueError, RecursionError):
        problems.append(f"{name} is not valid JSON (cut off?)")
        return {}
    except StorageError as error:
        problems.append(_unreadable(file, error))
        return {}
    if not isinstance(content, dict):
        problems.append(f"{name} holds no JSON object")
        return {}
    return content


def _weight_files(files: Mapping[str, FileInfo], problems: list[str]) -> tuple[list[str], set[str]]:
    if INDEX_NAME in files:
        weight_map = read_json(files[INDEX_NAME], problems).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            problems.append(f"{INDEX_NAME} has no weight_map")
            return [], set()
        return sorted({str(shard) for shard in weight_map.values()}), set(weight_map)
    if "model.safetensors" in files:
        return ["model.safetensors"], set()
    shards = [name for name in files if name.endswith(".safetensors")]
    if "adapter_config.json" in files:
        problems.append("an adapter without its model; merge it, and save the whole model")
    elif shards:
        problems.append(f"{len(shards)} weight shards without {INDEX_NAME}")
    elif any(name.startswith("pytorch_model") for name in files):
        problems.append("weights are in pytorch_model*.bin; save them as safetensors")
    else:
        problems.append("no weights: neither model.safetensors nor an index is there")
    return [], set()


def read_safetensors_header(file: FileInfo) -> dict[str, Tensor]:
    """Returns parameters of a safetensors file by name, with dtype and shape; its size must match its header."""
    name = storage.basename(file.uri)
    problem = irregular(file)
    tensors: dict[str, Tensor] = {}
    try:
        if problem is None:
            tensors, problem = _header_of(file)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        problem = f"{name} has no readable safetensors header ({file.size} bytes)"
    except FileNotFoundError:
        problem = f"{name} is gone"
    except StorageError as error:
        problem = _unreadable(file, error)
    if problem:
        raise IncompleteCheckpoint(
            expected=f"a whole safetensors file {file.uri}", found=problem, remedy="copy or write the file again"
        )
    return tensors


def _header_of(file: FileInfo) -> tuple[dict[str, Tensor], str | None]:
    name = storage.basename(file.uri)
    header_bytes = int.from_bytes(storage.read_bytes(file.place, start=0, end=8), "little")
    if header_bytes > min(_LARGEST_HEADER_BYTES, file.size):
        return {}, f"{name} is cut off within its header ({file.size} bytes)"
    header = json.loads(storage.read_bytes(file.place, start=8, end=8 + header_bytes))
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    for key, entry in header.items():
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors[key] = Tensor(entry["dtype"], tuple(entry["shape"]), file.place, (start, end))
    size = max((tensor.span[1] for tensor in tensors.values()), default=8 + header_bytes)
    return tensors, None if file.size == size else f"{name} has {file.size} bytes where its header says {size}"


def read_tensors(folder: ModelFolder) -> dict[str, Tensor]:
    """Returns every parameter of a complete model, over all its shards."""
    folder.require_complete()
    tensors: dict[str, Tensor] = {}
    for name in folder.weight_files:
        tensors.update(read_safetensors_header(folder.files[name]))
    return tensors


def tensor_in_common(folder: ModelFolder, other: ModelFolder) -> str | None:
    """Returns the name of a tensor with the same content in two complete models; None if all tensors differ."""
    others = read_tensors(other)
    for name, tensor in read_tensors(folder).items():
        if name in others and tensor.span[0] < tensor.span[1] and _same_content(tensor, others[name]):
            return name
    return None


def _same_content(tensor: Tensor, other: Tensor) -> bool:
    (start, end), (other_start, other_end) = tensor.span, other.span
    if end - start != other_end - other_start:
        return False
    read, step = 0, _FIRST_COMPARED_BYTES
    while start + read < end:
        length = min(step, end - start - read)
        content = storage.read_bytes(tensor.uri, start=start + read, end=start + read + length)
        if content != storage.read_bytes(other.uri, start=other_start + read, end=other_start + read + length):
            return False
        read, step = read + length, _COMPARED_BYTES
    return True


def digest_model_folder(folder: ModelFolder) -> ModelDigests:
    """Returns digests of a complete model, over every byte of every served file. Digests of local weights are cached.

    The digest of a merge is over its recipe and its inputs' weights; tokenizer and config are from the last input.
    """
    folder.require_complete()
    if (merge := merge_of(folder.uri)) is not None:
        digests = [digest_model_folder(each) for each in folder.inputs]
        recipe = f"{_MERGING} {merge.recipe}".encode()
        return replace(digests[-1], weights=hash_of(recipe, *(each.weights.encode() for each in digests)))
    files = small_files(folder.reference or folder)
    with storage.reported(folder.uri, "read"):
        weights = [part for name in folder.weight_files for part in (name.encode(), content_digest(folder.files[name]))]
        if folder.kind == "huggingface" and INDEX_NAME in folder.files:
            weights.append(storage.read_bytes(folder.files[INDEX_NAME].place))
        config = [storage.read_bytes(files[name].place) for name in CONFIG_FILES if name in files]
        texts = sorted(files.keys() - set(CONFIG_FILES))
        tokenizer = [part for name in texts for part in (os.fsencode(name), storage.read_bytes(files[name].place))]
    return ModelDigests(weights=hash_of(*weights), tokenizer=hash_of(*tokenizer), config=hash_of(*config))
