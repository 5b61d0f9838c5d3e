"""Makes safetensors of weights that torch wrote; runs in the engine's environment.

A job is a line of JSON on stdin; the program ends when stdin does, as at the end of the process that started it. It
writes lines of JSON: `bytes`, written since the last line; or `refused`, the reason that the weights are not made.
Nothing but tensors is ever unpickled. A file is written a tensor at a time, since safetensors' own writer would hold
all of them in memory; the format is that of huggingface/safetensors 0.8.
"""

import json
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip
OUTPUTS = ("lm_head", "embed_out")
"""Output layers that share the embedding's memory if they are tied; engines take the embedding then."""
REPORTED_BYTES = 2**26
MOST_TIMES = 4
"""Bytes of all tensors for a byte of the file; a view of few bytes can say that it has any number of them."""
CODE = re.compile(r"(?:GLOBAL|Unsupported class|Can only build Tensor, \S+ but got|code:) ([\w.]+)")


class Refused(Exception):
    """The weights cannot be made, for a reason in them."""


def say(**values: Any) -> None:
    """Writes a line for the process that started this."""
    print(json.dumps(values), flush=True)


def write_safetensors(tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Writes tensors into a file, which appears when it is complete."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    unfinished = target.with_name(f"{target.name}.partial")
    with unfinished.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in order:
            content = tensors[name].detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for at in range(0, content.numel(), REPORTED_BYTES):
                part = content[at : at + REPORTED_BYTES]
                file.write(part.numpy().data)
                say(bytes=part.numel())
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(target)


def require_tensors(held: Any, source: str, most_bytes: int) -> dict[str, torch.Tensor]:
    """Returns what a file holds if those are tensors of types that safetensors has, at most so many bytes."""
    if not isinstance(held, dict) or not held:
        raise Refused(f"{source} holds no dictionary of tensors")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Refused(f"{source} holds {name!a:.100}, a {type(tensor).__name__} and no tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in TYPES:
            kind = "on no device" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
            raise Refused(f"{name!a:.100} in {source} is {kind}, for which safetensors has no type")
    if (size := sum(tensor.numel() * tensor.element_size() for tensor in held.values())) > most_bytes:
        raise Refused(f"the tensors in {source} would be {size} bytes, more than {MOST_TIMES} times the file")
    return held


def without_tied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors without an output layer that is the same memory as another of them."""
    seen: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        seen.setdefault(place if tensor.numel() else name, []).append(name)
    outputs: set[str] = set()
    for same in seen.values():
        tied = [name for name in same if any(part in OUTPUTS for part in name.split("."))]
        outputs.update(tied if len(tied) < len(same) else [])
    return {name: tensor for name, tensor in tensors.items() if name not in outputs}


def load_pickled(path: Path) -> Any:
    """Returns what `torch.save` wrote, tensors alone; in place where the file is of the newer, unpacked format."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = CODE.search(str(error))
        holds = f"{named[1]}, code that would run when it is read" if named else f"more than tensors: {error!s:.200}"
        raise Refused(f"{path.name} holds {holds}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path.name} cannot be read: {str(error).splitlines()[0]:.200}") from error


def convert_pickled(shards: Iterable[Mapping[str, Any]], tied: bool) -> None:
    """Converts each shard: `source` to `target`, without tensors `elsewhere`; it must hold those that are `named`."""
    for shard in shards:
        source = Path(shard["source"])
        held = require_tensors(load_pickled(source), shard["name"], MOST_TIMES * source.stat().st_size)
        if missing := sorted(set(shard["named"]) - held.keys()):
            raise Refused(f"{shard['name']} lacks {missing[0]!a:.100}, which the index gives to it")
        for name in set(shard["elsewhere"]) & held.keys():
            del held[name]
        write_safetensors(without_tied(held) if tied else held, Path(shard["target"]))


def end_with_parent() -> None:
    """Ends this process when its stdin ends."""
    while os.read(0, 1):  # without the buffer of sys.stdin, whose lock the interpreter needs at its end
        pass
    os._exit(1)


def main() -> None:
    """Does the job on stdin."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        convert_pickled(job["shards"], job["tied"])
    except Refused as error:
        say(refused=str(error))
    except OSError as error:
        say(failed=str(error))


if __name__ == "__main__":
    main()
