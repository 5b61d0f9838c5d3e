"""Model folders in Hugging Face's layout: their completeness, served files, and digests.

Only headers are read to check completeness and architecture; weights are read once, for their digest, and only if the
store has no checksum of its own. Every served file is digested.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pools.architectures import why_not_served
from pools.weights.content import content_digest, hash_of
from pools.weights.formats import (
    ADAPTER_RECIPE,
    INDEX_NAME,
    INDEX_RECIPE,
    PREFIX_RECIPE,
    Tensor,
    Weights,
    cut_off,
    files_of_model,
    irregular,
    is_adapter,
    read_json,
    read_safetensors_header,
    tensor_names,
    unwrapped,
    weights_in,
)
from pools.weights.merges import merge_of
from pools.weights.overrides import without_options
from pools.weights.tokenizers import FilesIn, described_by
from resources.errors import CheckpointError, CheckpointGone, IncompleteCheckpoint
from resources.settings import settings
from resources.storage import storage
from resources.storage.storage import FileInfo

CONFIG_FILES = ("config.json", "generation_config.json")
"""Files that the config's digest is over."""
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
"""Keys of a config that have no effect on a model."""
_LARGEST_SMALL_BYTES = 2**27  # the largest vocabularies have a quarter of it
_READ_WHOLE = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of the files that tokenizers and engines read in addition to the weights."""
_FIRST_COMPARED_BYTES, _COMPARED_BYTES = 4096, 2**24
_OF_ADAPTERS = frozenset({"base_layer", "lora_A", "lora_B", "modules_to_save"})
_MERGING = "merge 1"  # increase it when the same names and files give other numbers
_NOT_THERE = (" is missing", " is there", " is not there", " is gone", " weight shards without ")
_NEVER_SERVED = (
    # Weights in other formats, and adapters, which engines would mistake for the weights.
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.npz", "*.npy", "*.pkl",
    "*.onnx", "*.distcp", "consolidated*", "adapter_*", INDEX_NAME,
    # Files of trainers and users, different at every step.
    ".*", "*.partial", "*.md", "*.log", "*.jsonl", "*.csv", "trainer_state.json", "*_results.json", "latest",
    "events.out.tfevents*", "STABLE",
)  # fmt: skip
"""Files that are hidden from engine and tokenizer, and so are in no digest, unless they are the weights."""


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

    `kind` is its layout. For Levanter's own, `reference` is the folder with config and tokenizer. A merged checkpoint,
    or a checkpoint with options, has its name as `uri`. `weight_files` of weights that must be made are the inputs of
    their recipe; `inputs` are further models that it needs.
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
    made_by: str | None = None
    """Recipe by which weights that no engine reads are made into safetensors while staged: a word, its version."""
    notes: tuple[str, ...] = ()
    """Choices between files of the folder, the files left out, and the origin of files from elsewhere."""

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
        if "/" not in name and not _is_never_served(name):
            yield name, file


@lru_cache(4096)  # 4 µs a name, and checkpoints of a run have the same
def _is_never_served(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _NEVER_SERVED)


def served_files(folder: ModelFolder) -> dict[str, FileInfo]:
    """Returns the files that an engine reads of a complete model in Hugging Face's layout: weights and small files."""
    weights = [name for name in (*folder.weight_files, INDEX_NAME) if name in folder.files]
    return {**small_files(folder), **{name: folder.files[name] for name in weights}}


def inspect_model_folder(
    uri: str, files: Sequence[FileInfo] | None = None, *, files_in: FilesIn = storage.list_folder
) -> ModelFolder:
    """Checks that a folder holds a whole model that an engine can serve; failures go into `problems`. The arguments are
    those of `inspect_reference_folder`. An adapter is never whole here: see `inspect_checkpoint`."""
    described = inspect_reference_folder(uri, files, files_in=files_in)
    if is_adapter(described.files):
        return replace(described, made_by=ADAPTER_RECIPE, problems=("an adapter without its base",))
    problems = list(described.problems)
    weights = weights_in(described.files, problems)
    problems += [
        f"{ascii(name)[1:-1]} is named by {weights.index_name} and is not there"
        for name in weights.files
        if name not in described.files
    ]
    present = [name for name in weights.files if name in described.files]
    made_by, notes = weights.made_by, weights.notes
    if made_by is not None:
        inputs = [described.files[name] for name in present]
        problems += filter(None, (irregular(file) or cut_off(file) for file in inputs))
    else:
        names, twice = _names_in([described.files[name] for name in present], weights, problems)
        plain, words = unwrapped(names)
        if twice:
            made_by = INDEX_RECIPE
            notes += (f"{ascii(twice[0])[1:-1]} is in several shards: the shard in {INDEX_NAME} counts",)
        if inside := next((name for name in names if _OF_ADAPTERS & set(name.split("."))), None):
            problems.append(
                f"{ascii(inside)[1:-1]} is of an adapter inside its base; save the result of PEFT's merge_and_unload"
            )
        elif words and len({*plain.values()}) == len(plain):
            made_by = f"{PREFIX_RECIPE} {','.join(words)} 1"
            notes += (
                f"names of tensors hold {', '.join(words)} of a wrapper, which is left out while they are staged",
            )
    return replace(
        described, problems=tuple(problems), weight_files=tuple(present), made_by=made_by, notes=described.notes + notes
    )


def _names_in(
    shards: Sequence[FileInfo], weights: Weights, problems: list[str]
) -> tuple[Collection[str], Sequence[str]]:
    holders: dict[str, list[str]] = {}
    before = len(problems)
    for file in shards:
        try:
            for tensor in tensor_names(file):
                holders.setdefault(tensor, []).append(storage.basename(file.uri))
        except CheckpointError as error:
            problems.append(error.found)
    twice = sorted(tensor for tensor, names in holders.items() if names[1:])
    unclear = [tensor for tensor in twice if weights.shard_of.get(tensor) not in holders[tensor]]
    problems += [
        f"{ascii(f'{tensor} is in {holders[tensor][0]} and in {holders[tensor][1]}')[1:-1]}; write the weights again"
        for tensor in unclear[:1]
    ]
    if (
        len(problems) == before
        and len(shards) == len(weights.files)
        and (missing := sorted(weights.shard_of.keys() - holders.keys()))
    ):
        named = ascii(", ".join(missing[:3]))[1:-1]
        problems.append(f"{INDEX_NAME} names {named}, which no shard holds; write the weights again")
    return holders.keys(), twice


def inspect_staged_folder(folder: Path) -> ModelFolder:
    """Inspects a staging folder, which has links to the files of a checkpoint."""
    return inspect_model_folder(str(folder), storage.list_files(str(folder), within="/"))


def inspect_reference_folder(
    uri: str, files: Sequence[FileInfo] | None = None, *, files_in: FilesIn = storage.list_folder
) -> ModelFolder:
    """Inspects a folder of which only config and tokenizer are needed, not the weights.

    `uri` may be a name with options. `files` are those in its folder, and
    `files_in` lists others, if known already.
    """
    place = without_options(uri)
    listed = checkpoint_files(place) if files is None else files
    prefix = place.rstrip("/") + "/"
    own = files_of_model({info.uri.removeprefix(prefix): info for info in listed})
    by_name, missing, notes = described_by(uri, own, files_in)
    problems: list[str] = []
    config = _read_config(by_name, problems)
    problems += missing
    folder = ModelFolder(
        uri=uri,
        files=by_name,
        problems=(),
        config=config,
        weight_files=(),
        modified=max((info.modified for info in by_name.values()), default=0.0),
        notes=notes,
    )
    others = (file for name, file in small_files(folder).items() if name != "config.json")
    problems += [
        f"{ascii(name)[1:-1]} has {file.size} bytes; files other than weights may have at most {_LARGEST_SMALL_BYTES}"
        for name, file in _auxiliary_files(folder)
        if name.endswith(_READ_WHOLE) and file.size > _LARGEST_SMALL_BYTES
    ]
    return replace(folder, problems=(*problems, *filter(None, map(irregular, others))))


def checkpoint_files(uri: str) -> list[FileInfo]:
    """Lists a checkpoint's files; links may lead into its run: the folder above it, and above its `hf/`. Those of
    staged and kept folders, which Assay writes, may lead anywhere."""
    run = storage.parent(storage.absolute(uri))
    own = str(settings().staging_dir.absolute())
    if run.startswith(own) and Path(storage.resolved(run)).is_relative_to(storage.resolved(own)):
        return storage.list_files(uri, within="/")
    return storage.list_files(uri, within=storage.parent(run) if storage.basename(run) == "hf" else run)


def _read_config(files: Mapping[str, FileInfo], problems: list[str]) -> Mapping[str, Any]:
    if "config.json" not in files:
        problems.append("config.json is missing")
        return {}
    before = len(problems)
    config = read_json(files["config.json"], problems)
    if len(problems) == before and (why := why_not_served(config)) is not None:
        problems.append(why)
    return config


def read_tensors(folder: ModelFolder) -> dict[str, Tensor]:
    """Returns every parameter of a complete model, over all its shards; weights must not have to be made."""
    folder.require_complete()
    assert folder.made_by is None, "weights that are made are read from their staged folder"
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

    The digest of a merge is over its recipe and its inputs' weights; tokenizer and config are from the last input. That
    of weights that must be made is over their recipe, the files, and its further inputs.
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
        if folder.made_by is not None:
            inputs = (digest_model_folder(each).weights for each in folder.inputs)
            weights = [folder.made_by.encode(), *weights, *(digest.encode() for digest in inputs)]
        config = [storage.read_bytes(files[name].place) for name in CONFIG_FILES if name in files]
        texts = sorted(files.keys() - set(CONFIG_FILES))
        tokenizer = [part for name in texts for part in (os.fsencode(name), storage.read_bytes(files[name].place))]
    return ModelDigests(weights=hash_of(*weights), tokenizer=hash_of(*tokenizer), config=hash_of(*config))
