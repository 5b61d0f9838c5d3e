"""Formats of weights in a model folder: which counts if there are several, and which an engine cannot read.

The choice is that of vLLM's loader (vllm-project/vllm 0.32, model_executor/model_loader/default_loader.py): safetensors
before pytorch_model.bin, and of several safetensors files those in model.safetensors.index.json. It would prefer
Mistral's `consolidated*.safetensors` to both; they have other names of tensors, and are hidden from it.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from resources.errors import IncompleteCheckpoint, StorageError
from resources.storage import storage
from resources.storage.hub import in_hub, place_of
from resources.storage.storage import FileInfo

INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAME = "pytorch_model.bin"
"""Weights as `torch.save` writes them; shards have numbers in their names, and `.index.json` follows the whole name."""
PICKLED_RECIPE = f"{PICKLED_NAME} 1"
INDEX_RECIPE = "index 1"
"""Recipe for shards of which some hold tensors that the index gives to others: engines read all of every shard."""
PREFIX_RECIPE = "prefix"
"""First word of the recipe for tensors with a wrapper's words in their names; the words and a version follow."""
_FIRST_OF_NAMES = ("module.", "_forward_module.", "base_model.model.")  # of DDP, Lightning, PEFT
_ANYWHERE_IN_NAMES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch alone
_MOST_WRAPPERS = 8  # around each other
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED_ADAPTER = "adapter_model.bin"
ADAPTER_RECIPE = "adapter 1"
"""Recipe for an adapter on its base; increase its number when the same files give other numbers."""
DISTRIBUTED_RECIPE = "dcp 1"
ZERO_RECIPE, VERL_RECIPE = "zero 1", "verl 1"
EXPORTERS = {
    ZERO_RECIPE: "deepspeed.utils.zero_to_fp32 {folder} {target} --tag {tag}",
    VERL_RECIPE: "verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir {target}",
}
"""Module, of the package in its name, and arguments with which a framework exports its own shards (deepspeed 0.19.8,
verl 0.9.1). Both unpickle without limits: a checkpoint can run code in them. DeepSpeed's writes tied tensors as
pytorch_model.bin alone, not with `--safe_serialization`."""
_OF_RANK = re.compile(r"pytorch_model_fsdp_(?:\d+_)?rank\d+\.bin")
_OF_VERL = re.compile(r"(?:actor/)?model_world_size_(\d+)_rank_(\d+)\.pt")
_OF_ZERO = re.compile(r"([^/]+)/[^/]+_states\.pt")
SHARDED_FOLDER = "pytorch_model_fsdp_0"
"""Folder in a checkpoint of accelerate 1.15 with FSDP's shards, written by torch.distributed.checkpoint."""
_FULL_NAME = "pytorch_model_fsdp.bin"  # the same by accelerate with FULL_STATE_DICT
_DISTRIBUTED = ".distcp"
_PICKLED_INDEX = f"{PICKLED_NAME}.index.json"
_ZIP_FIRST, _ZIP_LAST, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_WEIGHTS = (
    "*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*.gguf", "tf_model.h5", "flax_model.msgpack",
    "consolidated*.pth",
)  # fmt: skip
_MOST_NAMED = 3
_LARGEST_HEADER_BYTES = 100_000_000  # limit of the safetensors format itself
_CANNOT_BE_READ = "cannot be read"
_NAMES_ON_HUB: dict[tuple[str, str, int], tuple[str, ...]] = {}  # by repository, path and size


class Weights(NamedTuple):
    """The weights that count in a folder.

    `files` are in order of name, and may not be there. `shard_of` has the file of each tensor by the index, if there is
    an index. `made_by` is the recipe by which they are made into safetensors first. `notes` name other weights in the
    folder.
    """

    files: tuple[str, ...] = ()
    shard_of: Mapping[str, str] = {}
    index_name: str = INDEX_NAME
    made_by: str | None = None
    notes: tuple[str, ...] = ()


def weights_in(files: Mapping[str, FileInfo], problems: list[str]) -> Weights:
    """Returns the weights that count among the files of a folder, by name; a failure is appended to `problems`."""
    for single, recipe in (("model.safetensors", None), (PICKLED_NAME, PICKLED_RECIPE), (_FULL_NAME, PICKLED_RECIPE)):
        index = f"{single}.index.json"
        if index in files:
            weight_map = read_json(files[index], problems).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                problems.append(f"{index} has no weight_map")
                return Weights()
            shard_of = {name: str(shard) for name, shard in weight_map.items()}
            shards = tuple(sorted(set(shard_of.values())))
            counted = (index, *shards) if recipe else shards
            return Weights(counted, shard_of, index, recipe, _notes(files, counted, index, recipe))
        if single in files:
            return Weights((single,), made_by=recipe, notes=_notes(files, (single,), single, recipe))
    for place in (f"{SHARDED_FOLDER}/", ""):
        held = tuple(sorted(name for name in files if name.startswith(place) and _is_distributed(name[len(place) :])))
        if any(name.endswith(_DISTRIBUTED) for name in held):
            if f"{place}.metadata" not in held:
                problems.append(f"{place}.metadata is not there, which is written when all shards are")
            chosen = f"the shards of torch.distributed.checkpoint{' in ' if place else ''}{place}"
            return Weights(held, made_by=DISTRIBUTED_RECIPE, notes=_notes(files, held, chosen, DISTRIBUTED_RECIPE))
    for recipe, held in ((ZERO_RECIPE, _of_zero(files, problems)), (VERL_RECIPE, _of_verl(files, problems))):
        if held:
            return Weights(held, made_by=recipe, notes=_notes(files, held, f"shards of {package_of(recipe)}", recipe))
    shards = [name for name in files if name.endswith(".safetensors")]
    if "consolidated.safetensors" in files or "consolidated.00.pth" in files:
        problems.append(
            "weights are in Mistral's or Meta's own format (consolidated), with other names of tensors; convert them "
            "with transformers' convert_mistral_weights_to_hf.py or convert_llama_weights_to_hf.py"
        )
    elif ranks := [name for name in files if _OF_RANK.fullmatch(name)]:
        problems.append(
            f"weights are a shard of each of {len(ranks)} ranks (LOCAL_STATE_DICT, or use_dcp=False) by accelerate, "
            "which only as many processes load; load them there, and save them with SHARDED_STATE_DICT and use_dcp"
        )
    elif shards:
        problems.append(f"{len(shards)} weight shards without {INDEX_NAME}")
    elif pickled := [name for name in files if fnmatch.fnmatchcase(name, "pytorch_model-*.bin")]:
        problems.append(f"{len(pickled)} weight shards without {_PICKLED_INDEX}")
    else:
        problems.append("no weights: neither model.safetensors nor an index is there")
    return Weights()


def package_of(recipe: str) -> str:
    """Returns the package with the exporter of a recipe."""
    return EXPORTERS[recipe].partition(".")[0]


def _of_zero(files: Mapping[str, FileInfo], problems: list[str]) -> tuple[str, ...]:
    held = sorted(name for name in files if _OF_ZERO.fullmatch(name))
    tags = {name.partition("/")[0] for name in held}
    if not any(name.endswith("_optim_states.pt") for name in held):
        return ()
    if len(tags) > 1:
        problems.append(f"states of several steps: {', '.join(sorted(tags))}")
    if "latest" not in files:
        problems.append("latest is not there, which is written when all shards are")
    return ("latest", *held)


def _of_verl(files: Mapping[str, FileInfo], problems: list[str]) -> tuple[str, ...]:
    shards = {name: matched for name in sorted(files) if (matched := _OF_VERL.fullmatch(name))}
    if not shards:
        return ()
    sizes = {int(matched[1]) for matched in shards.values()}
    if {int(matched[2]) for matched in shards.values()} != set(range(max(sizes))) or len(sizes) > 1:
        problems.append(f"shards of {len(shards)} ranks where {max(sizes)} are named: not all are there")
    return ("fsdp_config.json", *shards)


def files_of_model(listed: Mapping[str, FileInfo]) -> dict[str, FileInfo]:
    """Returns those files of a listing, by names relative to its folder, that a model may consist of: directly in it,
    shards of FSDP, of ZeRO if there are no other weights, and those below verl's `actor/`, without the folder."""
    if any(_OF_VERL.fullmatch(name) for name in listed):
        listed = {name.removeprefix("actor/").removeprefix("huggingface/"): file for name, file in listed.items()}
    whole = any("/" not in name and _is_weights(name) for name in listed)
    return {
        name: file
        for name, file in listed.items()
        if name.rpartition("/")[0] in ("", SHARDED_FOLDER) or (not whole and _OF_ZERO.fullmatch(name))
    }


def is_adapter(files: Mapping[str, FileInfo]) -> bool:
    """Returns True if a folder with these files holds an adapter, and no weights of a whole model."""
    return ADAPTER_CONFIG in files and not {"model.safetensors", INDEX_NAME, PICKLED_NAME, _PICKLED_INDEX} & set(files)


def _is_distributed(name: str) -> bool:
    return name == ".metadata" or ("/" not in name and name.endswith(_DISTRIBUTED))


def _notes(files: Mapping[str, FileInfo], counted: Sequence[str], chosen: str, recipe: str | None) -> tuple[str, ...]:
    made = (f"safetensors are made of {chosen} while it is staged",) if recipe else ()
    left = sorted(set(filter(_is_weights, files)) - set(counted))
    if not left:
        return made
    more = f" and {len(left) - _MOST_NAMED} more" if left[_MOST_NAMED:] else ""
    return (*made, f"weights are from {chosen}; left out: {ascii(', '.join(left[:_MOST_NAMED]))[1:-1]}{more}")


@lru_cache(4096)
def _is_weights(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHTS)


def cut_off(file: FileInfo) -> str | None:
    """Returns the problem of a file of torch without its end, which is written last; None for other files."""
    name, end = storage.basename(file.uri), max(0, file.size - _ZIP_END_BYTES)
    if not name.endswith((".bin", ".pt")):
        return None
    try:
        first = storage.read_bytes(file.place, start=0, end=len(_ZIP_FIRST))
        last = storage.read_bytes(file.place, start=end, end=file.size)
    except FileNotFoundError:
        return f"{name} is gone"
    except StorageError as error:
        return _unreadable(file, error)
    cut = not first or (first == _ZIP_FIRST and not last.startswith(_ZIP_LAST))
    return f"{name} is cut off ({file.size} bytes)" if cut else None


def unwrapped(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns tensors' names without the words of wrappers (torch.compile, DDP, FSDP, PEFT), and those words.

    Words that a model could use itself count only if each name begins with them.
    """
    plain = {name: name for name in names}
    words: list[str] = []
    for _ in range(_MOST_WRAPPERS if plain else 0):
        word = next((word for word in _FIRST_OF_NAMES if all(name.startswith(word) for name in plain.values())), None)
        if word is not None:
            plain = {name: short.removeprefix(word) for name, short in plain.items()}
        else:
            inside = (word for word in _ANYWHERE_IN_NAMES if any(f".{word}" in f".{name}" for name in plain.values()))
            if (word := next(inside, None)) is None:
                break
            plain = {name: f".{short}".replace(f".{word}", ".").removeprefix(".") for name, short in plain.items()}
        words.append(word)
    return plain, tuple(dict.fromkeys(words))


BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Width in bytes of the types that merges compute with, by their names in safetensors."""


@dataclass(frozen=True)
class Tensor:
    """A parameter as described by a safetensors header, with the file and the byte range of its content."""

    dtype: str
    shape: tuple[int, ...]
    uri: str = field(default="", compare=False)
    span: tuple[int, int] = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


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


def tensor_names(file: FileInfo) -> Collection[str]:
    """Returns the names of the parameters in a safetensors file, as `read_safetensors_header` does.

    A commit on the hub is whole: of its files with a common path and size, only that of the first revision is read.
    """
    if not in_hub(file.uri):
        return read_safetensors_header(file).keys()
    place = place_of(file.uri)
    key = place.repository, place.path, file.size
    if key not in _NAMES_ON_HUB:
        _NAMES_ON_HUB[key] = tuple(read_safetensors_header(file))
    return _NAMES_ON_HUB[key]


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


def safetensors_header(tensors: Mapping[str, tuple[Tensor, int]]) -> tuple[bytes, dict[str, int]]:
    """Returns the header of a safetensors file with these tensors in this order, each given with its size in bytes, and
    the place of each behind the header."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name, (tensor, size) in tensors.items():
        places[name], end = end, end + size
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [places[name], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places
