"""Makers of safetensors: of other formats by a program in the engine's environment, of shards by their index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pools.weights.adapter_merging import write_changed, write_merged
from pools.weights.adapters.changes import Change
from pools.weights.formats import (
    ADAPTER_WEIGHTS,
    EXPORTERS,
    INDEX_NAME,
    VERL_RECIPE,
    ZERO_RECIPE,
    package_of,
    read_json,
    read_safetensors_header,
    unwrapped,
    weights_in,
)
from pools.weights.making import Making
from pools.weights.merging import average_inputs, reading
from pools.weights.model_files import small_files
from resources.errors import CheckpointError, StorageError
from resources.jobs import inheritance
from resources.settings import process_environment
from resources.storage import storage
from resources.storage.file_copy import CopyStopped
from resources.storage.regular_files import real_path

_PROGRAM = Path(__file__).parent / "programs" / "make_weights.py"
_EXPORTING = _PROGRAM.with_name("run_exporter.py")
_SILENT_SECONDS = 1800.0  # a shard in torch's older format is read whole before its first line
_LOOK_SECONDS = 0.5
_TAIL_BYTES = 2000
_READ_BYTES = 2**16


def convert_pickled(making: Making) -> None:
    """Makes safetensors of pytorch_model.bin, a file for each of its shards."""
    index = next((name for name in making.folder.weight_files if name.endswith(".json")), None)
    names = [name for name in making.folder.weight_files if name != index]
    weight_map = _weight_map(making, index) if index else {}
    targets = _targets(len(names))
    shards = [
        {
            "name": name,
            "source": str(storage.local_path(making.folder.files[name].place)),
            "target": str(making.content / target),
            "named": [tensor for tensor, shard in weight_map.items() if shard == name],
            "elsewhere": [tensor for tensor, shard in weight_map.items() if shard != name],
        }
        for name, target in zip(names, targets, strict=True)
        if not _is_made(making, target, making.folder.files[name].size)
    ]
    if shards:
        _run(making, {"shards": shards, "ties": _ties(making)})
    for target in targets:
        unwrap_names(making.content / target)


def export_distributed(making: Making) -> None:
    """Makes safetensors of what torch.distributed.checkpoint saved."""
    target = making.content / "model.safetensors"
    if target.is_file():
        return
    folder = making.content.parent / "shards"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in making.folder.weight_files:
        place = real_path(storage.local_path(making.folder.files[name].place))
        (folder / storage.basename(name)).symlink_to(place)
    _run(making, {"folder": str(folder), "target": str(target), "ties": _ties(making)})
    unwrap_names(target)


def export_states(making: Making) -> None:
    """Makes safetensors of shards by their framework's own exporter, in which a checkpoint can run code."""
    recipe = making.folder.made_by
    assert recipe is not None
    folder, target = making.content.parent / "shards", making.content.parent / "exported"
    shards = storage.parent(making.folder.files[making.folder.weight_files[-1]].uri)
    tag, place = storage.basename(shards), storage.parent(shards) if recipe == ZERO_RECIPE else shards
    module, *arguments = (part.format(folder=folder, target=target, tag=tag) for part in EXPORTERS[recipe].split(" "))
    typed = f"python -m {EXPORTERS[recipe]}".format(folder=storage.absolute(place), target="FOLDER", tag=tag)
    if not making.trusted:
        raise CheckpointError(
            expected="weights that are read without running code in them",
            found=f"{making.folder.uri} has shards of {package_of(recipe)}; its exporter unpickles without limits",
            remedy=f"allow it (--engine trust_remote_code=true), or export them: {typed}",
        )
    python = _python_with(package_of(recipe), making, typed)
    for path in (folder, target):
        shutil.rmtree(path, ignore_errors=True)
    described = {f"huggingface/{name}": file for name, file in small_files(making.folder).items()}
    for name, file in ({name: making.folder.files[name] for name in making.folder.weight_files} | described).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(real_path(storage.local_path(file.place)))
    trusting = ["--trust-remote-code"] if recipe == VERL_RECIPE else []
    job = {"module": module, "arguments": [*arguments, *trusting], "target": str(target)}
    _run(making, job, program=_EXPORTING, python=python)
    written = {storage.basename(file.uri): file for file in storage.list_folder(str(target))}
    weights = weights_in(written, [])
    exported = replace(making.folder, files=written, weight_files=weights.files)
    (convert_pickled if weights.made_by else rewrite_shards)(replace(making, folder=exported))


def _python_with(package: str, making: Making, typed: str) -> str:
    on_path = (shutil.which(name, path=folder) for folder in os.get_exec_path() for name in ("python3", "python"))
    places = [str(making.python()), sys.executable, *filter(None, on_path)]
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    for python in dict.fromkeys(places):
        if subprocess.run([python, "-I", "-c", look], check=False, capture_output=True).returncode == 0:
            return python
    raise CheckpointError(
        expected=f"{package}: its exporter reads {making.folder.uri}",
        found=f"none of {', '.join(dict.fromkeys(places))} has it",
        remedy=f"install it for one of them, or export the shards: {typed}",
    )


def rewrite_shards(making: Making) -> None:
    """Copies shards without the tensors that the index gives to other shards, and names without words of wrappers."""
    weight_map = _weight_map(making, INDEX_NAME) if INDEX_NAME in making.folder.files else {}
    with ExitStack() as held:
        read = reading(held)
        for name in making.folder.weight_files:
            tensors = read_safetensors_header(making.folder.files[name])
            plain, _ = unwrapped(tensors)
            kept = {plain[key]: each for key, each in tensors.items() if weight_map.get(key, name) == name}
            write_changed(making, name, {key: Change(each, each) for key, each in kept.items()}, read)


def merge_adapter(making: Making) -> None:
    """Merges an adapter into its base; makes safetensors of a pickled adapter first."""
    name, files = making.folder.weight_files[-1], making.folder.files
    if name != ADAPTER_WEIGHTS:
        source, target = (making.content.parent / "adapter" / each for each in (name, ADAPTER_WEIGHTS))
        storage.write_bytes(str(source), storage.read_bytes(files[name].place))
        shard = {"name": name, "source": str(source), "target": str(target), "named": [], "elsewhere": []}
        _run(making, {"shards": [shard], "ties": False})
        [made] = storage.list_files(str(target))
        making = replace(making, folder=replace(making.folder, files={**files, ADAPTER_WEIGHTS: made}))
    write_merged(making)


def _ties(making: Making) -> bool | None:
    tied = making.folder.config.get("tie_word_embeddings")
    return tied if isinstance(tied, bool) else None


def _targets(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def unwrap_names(path: Path) -> None:
    """Leaves words of wrappers out of the names in a safetensors file; its contents stay where they are."""
    with storage.reported(str(path), "write"), path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        plain, words = unwrapped(header.keys() - {"__metadata__"})
        if words and len({*plain.values()}) == len(plain):
            file.seek(8)
            file.write(
                json.dumps({plain.get(name, name): entry for name, entry in header.items()}).encode().ljust(length)
            )


def _is_made(making: Making, target: str, size: int) -> bool:
    if not (making.content / target).is_file():
        return False
    making.on_bytes(size)
    return True


def _weight_map(making: Making, index: str) -> Mapping[str, str]:
    problems: list[str] = []
    weight_map = read_json(making.folder.files[index], problems).get("weight_map")
    if problems or not isinstance(weight_map, dict):
        raise CheckpointError(
            expected=f"{index} as it was planned",
            found="; ".join(problems) or "no weight_map",
            remedy="let nothing write to a checkpoint once it is complete",
        )
    return {name: str(shard) for name, shard in weight_map.items()}


def _run(making: Making, job: Mapping[str, Any], *, program: Path = _PROGRAM, python: str | None = None) -> None:
    uri = making.folder.uri
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [python or str(making.python()), "-I", str(program)],
            env=process_environment(inherited=inheritance.ENGINE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            _follow(making, process.stdout.fileno())
        except BrokenPipeError:
            pass  # its end and its log say why
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            with suppress(OSError):
                process.stdin.close()
            process.wait()
        if process.returncode:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            report = log.read().decode(errors="replace").strip()
            killed = process.returncode == -9
            raise StorageError(
                expected=f"to make safetensors of {uri}",
                found=f"its program ended with {process.returncode}{f': {report}' if report else ''}",
                remedy="give this machine more memory" if killed else "run again; if that repeats, save safetensors",
            )


def _follow(making: Making, output: int) -> None:
    until, begun = time.monotonic() + _SILENT_SECONDS, b""
    while True:
        if making.stopped():
            raise CopyStopped
        if wait([output], timeout=_LOOK_SECONDS):
            part = os.read(output, _READ_BYTES)
            if not part:
                return
            until = time.monotonic() + _SILENT_SECONDS
            *lines, begun = (begun + part).split(b"\n")
            for line in lines:
                _take(making, json.loads(line))
        elif time.monotonic() > until:
            raise StorageError(
                expected=f"to make safetensors of {making.folder.uri}",
                found=f"nothing was written for {_SILENT_SECONDS:.0f} s",
                remedy="check the disks of both, and run again",
            )


def _take(making: Making, report: Mapping[str, Any]) -> None:
    if "refused" in report:
        raise CheckpointError(
            expected=f"weights in {making.folder.uri} that are tensors alone",
            found=report["refused"],
            remedy="save them again as safetensors, with save_pretrained of transformers",
        )
    if "failed" in report:
        raise StorageError(
            expected=f"to make safetensors of {making.folder.uri}",
            found=report["failed"],
            remedy="check the disks of both, and run again",
        )
    making.on_bytes(report["bytes"])


MAKERS: Mapping[str, Callable[[Making], None]] = {
    "adapter": merge_adapter,
    "dcp": export_distributed,
    "index": rewrite_shards,
    "merge": average_inputs,
    "prefix": rewrite_shards,
    "pytorch_model.bin": convert_pickled,
    "verl": export_states,
    "zero": export_states,
}
"""Makers by the first words of their recipes."""
