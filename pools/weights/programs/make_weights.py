"""Makes safetensors of weights that torch wrote; runs in the engine's environment.

A job is a line of JSON on stdin; the program ends when stdin does, as at the end of the process that started it. It
writes lines of JSON: `bytes`, written since the last line; or `refused` or `failed`, the reason that the weights are
not made: it lies in the weights, or in the machine. Nothing but tensors and their descriptions is unpickled. A file is
written a few tensors at a time, since safetensors' own writer would hold all of them in memory; the format is that of
huggingface/safetensors 0.8.
"""

import json
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip
OUTPUTS = ("lm_head", "embed_out")
"""Output layers that are the embedding if the two are tied; engines take the embedding then."""
REPORTED_BYTES = 2**26
LOADED_BYTES = 2**28
"""Bytes of tensors that are read at once, unless a single tensor has more."""
MOST_TIMES = 4
"""Bytes of all tensors for a byte of the files: a view of few bytes can say that it has any number of them."""
CODE = re.compile(r"GLOBAL ([\w.]+)")
DESCRIBING = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}  # fmt: skip
"""Classes in the metadata of torch.distributed.checkpoint, which torch 2.13 itself unpickles without any limit."""

Types = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor by its name."""
Load = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Returns at least the named tensors."""


class Refused(Exception):
    """The weights cannot be made, for a reason in them."""


def say(**values: Any) -> None:
    """Writes a line for the process that started this."""
    print(json.dumps(values), flush=True)


def write_safetensors(types: Types, load: Load, target: Path) -> None:
    """Writes the named tensors into a file, which appears when it is complete; `load` returns some of them."""
    order = sorted(types, key=lambda name: (-types[name][0].itemsize, name))  # aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        (dtype, shape), start = types[name], end
        end += bytes_of(dtype, shape)
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    unfinished = target.with_name(f"{target.name}.partial")
    with unfinished.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for names in in_parts(order, types):
            loaded = load(names)
            for name in names:
                content = loaded[name].detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
                for part in content.split(REPORTED_BYTES) if content.numel() else ():
                    file.write(part.numpy().data)
                    say(bytes=part.numel())
    unfinished.rename(target)


def bytes_of(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Returns the bytes of a tensor."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def in_parts(order: Iterable[str], types: Types) -> Iterator[list[str]]:
    """Yields names of tensors to read at once."""
    part: list[str] = []
    held = 0
    for name in order:
        size = bytes_of(*types[name])
        if part and held + size > LOADED_BYTES:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    if part:
        yield part


def require_writable(types: Types, source: str, file_bytes: int) -> None:
    """Refuses tensors of types that safetensors lacks, and more bytes than the files can hold."""
    for name, (dtype, _) in types.items():
        if dtype not in TYPES:
            raise Refused(f"{name!a:.100} in {source} is {dtype}, for which safetensors has no type")
    if (size := sum(bytes_of(*each) for each in types.values())) > MOST_TIMES * file_bytes:
        raise Refused(f"the tensors in {source} would have {size} bytes, more than {MOST_TIMES} times their files")


def without_tied(types: Types, load: Load, *, ties: bool | None) -> Types:
    """Returns the tensors without an output layer that is the embedding: in the same memory or, where the config says
    that the two are tied, equal."""
    tied: set[str] = set()
    for name in filter(is_output, types if ties is not False else ()):
        for other in types:
            if not is_output(other) and types[other] == types[name]:
                held = load([name, other])
                if held[name].data_ptr() == held[other].data_ptr() or (ties and torch.equal(held[name], held[other])):
                    tied.add(name)
    return {name: each for name, each in types.items() if name not in tied}


def is_output(name: str) -> bool:
    """Returns True for tensors of the output layer."""
    return any(part in OUTPUTS for part in name.split("."))


def load_pickled(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Returns the tensors that `torch.save` wrote; in place where the file is of the newer, unpacked format."""
    try:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            held = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = CODE.search(str(error))
        why = f"{named[1]}, code that would run when it is read" if named else "more than tensors"
        raise Refused(f"{name} holds {why}") from error
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{name} cannot be read (cut off?): {error!s:.200}") from error
    if not isinstance(held, dict) or not held:
        raise Refused(f"{name} holds no dictionary of tensors")
    for key, tensor in held.items():
        if not isinstance(key, str) or not isinstance(tensor, torch.Tensor):
            raise Refused(f"{name} holds {key!a:.100}, a {type(tensor).__name__} and no tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise Refused(f"{key!a:.100} in {name} is quantised by torch, sparse, or without numbers")
    return held


def convert_pickled(shards: Iterable[Mapping[str, Any]], *, ties: bool | None) -> None:
    """Converts each shard, `source` to `target`, without tensors `elsewhere`; refuses a shard without those `named`."""
    for shard in shards:
        source, name = Path(shard["source"]), shard["name"]
        held = load_pickled(source, name)
        if missing := sorted(set(shard["named"]) - held.keys()):
            raise Refused(f"{name} lacks {missing[0]!a:.100}, which the index gives to it")
        for key in held.keys() & set(shard["elsewhere"]):
            del held[key]
        types: Types = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in held.items()}
        require_writable(types, name, source.stat().st_size)

        def load(_: Sequence[str], held: Mapping[str, torch.Tensor] = held) -> Mapping[str, torch.Tensor]:
            return held

        write_safetensors(without_tied(types, load, ties=ties), load, Path(shard["target"]))


class Description(pickle.Unpickler):
    """Unpickles the metadata of torch.distributed.checkpoint, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of the metadata, or a type of numbers."""
        kind = getattr(torch, name, None) if module == "torch" else None
        if kind is torch.Size or isinstance(kind, torch.dtype):
            return kind
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11 writes a member of an enumeration
            return member_of
        if name in DESCRIBING.get(module, ()):
            return super().find_class(module, name)
        raise Refused(f".metadata holds {module}.{name}, code that would run when it is read"[:200])


def member_of(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Returns a member of the enumeration in the metadata."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise Refused(f".metadata holds {kind!a:.100}.{name}, code that would run when it is read")
    return _MEM_FORMAT_ENCODING[name]


class Reader(dcp.FileSystemReader):
    """Reads a folder by metadata from `Description`, so that torch does not unpickle them itself."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata."""
        return self._metadata


def export_distributed(folder: Path, target: Path, *, ties: bool | None) -> None:
    """Writes a model that torch.distributed.checkpoint saved as a single file, with the names of its tensors there."""
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = Description(file).load()
        keys = tensors_of_model(metadata)
        stored = {str(info.relative_path) for info in metadata.storage_data.values()}
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise Refused(f".metadata cannot be read: {error!s:.200}") from error
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    if missing := sorted(stored - files.keys()):
        raise Refused(f"{missing[0]!a:.100} is named by .metadata and is not there")
    types: Types = {name: (entry.properties.dtype, tuple(entry.size)) for name, (_, entry) in keys.items()}
    require_writable(types, "the shards", sum(files.values()))
    reader = Reader(folder, metadata)

    def load(names: Sequence[str]) -> dict[str, torch.Tensor]:
        state = {keys[name][0]: torch.empty(types[name][1], dtype=types[name][0]) for name in names}
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except (dcp.api.CheckpointException, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise Refused(f"the shards cannot be read (cut off?): {error!s:.300}") from error
        return {name: state[keys[name][0]] for name in names}

    write_safetensors(without_tied(types, load, ties=ties), load, target)


def tensors_of_model(metadata: Metadata) -> dict[str, tuple[str, TensorStorageMetadata]]:
    """Returns key and description of each tensor by its name: of those below `model` if there are any, else of all that
    are below nothing."""
    paths = metadata.planner_data or {}
    below: dict[str, tuple[str, TensorStorageMetadata]] = {}
    bare: dict[str, tuple[str, TensorStorageMetadata]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        path = tuple(map(str, paths.get(key, (key,))))
        if isinstance(entry, TensorStorageMetadata) and path[-2:-1] in (("model",), ()):
            (below if path[1:] else bare)[path[-1]] = (key, entry)
    if not below and not bare:
        raise Refused("no tensor in .metadata is of a model, that is below the key `model`")
    return below or bare


def end_with_parent() -> None:
    """Ends this process when its stdin ends."""
    while os.read(0, 1):  # sys.stdin has a buffer with a lock, which the interpreter takes when it ends
        pass
    os._exit(1)


def main() -> None:
    """Does the job on stdin."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        if "shards" in job:
            convert_pickled(job["shards"], ties=job["ties"])
        else:
            export_distributed(Path(job["folder"]), Path(job["target"]), ties=job["ties"])
    except Refused as error:
        say(refused=str(error))
    except OSError as error:
        say(failed=str(error))


if __name__ == "__main__":
    main()
