"""Benchmark files, and the external files that they reference: paths in data, metric, `include` or `!function`, and
any other text that is a file's path. Data on a hub or the web is ignored, and so is data that Python files open
themselves."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import BoundedLoader, YamlBeyondBounds, load_yaml

# Keys below which a text may also be a folder or contain wildcards.
_DATA = ("dataset_path", "dataset_kwargs", "metric")
_SCHEME = re.compile(r"^(?:file|local):(?://)?(?=[/~])")
_OTHER_SCHEME = re.compile(r"^[a-z0-9+]+://")
_LONGEST_PATH = 4096


class _Function(str):
    __slots__ = ()


class _Loader(BoundedLoader): ...


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
_Loader.add_constructor("!function", lambda loader, node: _Function(node.value))


def read_benchmark(content: bytes) -> Any:
    """Returns a benchmark file's content, with functions as their names. Raises ValueError or YAMLError if invalid."""
    return load_yaml(content.decode(), _Loader)


def is_hidden(name: str) -> bool:
    """Returns True if lm-eval ignores a file: hidden files other than YAML, and Jupyter's copies."""
    return "/." in f"/{name}" and (".ipynb_checkpoints" in name or not name.endswith(".yaml"))


def files_elsewhere(root: str, names: Iterable[str], *, arguments: Any, all_is_data: bool) -> set[str]:
    """Returns every file, outside of a folder or hidden in it, that its benchmarks or `arguments` reference,
    recursively. `names` are files below `root`; with `all_is_data`, any argument may be a folder or contain
    wildcards."""
    files = sorted(names)
    # lm-eval uses the folder of the loaded benchmark or group as working directory; HELM also reads its own.
    bases = {posixpath.dirname(name) for name in files if name.endswith((".yaml", ".json"))} or {""}
    described, elsewhere = _described(root, [name for name in files if name.endswith(".yaml")])
    texts = [*_texts(arguments, is_data=all_is_data)]
    texts += [text for content in described for text in _texts(content, is_data=False)]
    if all_is_data:
        entries, _ = _described(root, [name for name in files if name.endswith(".json")])
        own = [entry.get("arguments") for entry in entries if isinstance(entry, dict) and "run_entry" in entry]
        texts += _texts(own, is_data=True)
    for text, is_data in set(texts):
        for part in text.split("::") if is_data else (text,):
            for place in {_outside(root, base, part) for base in bases} - {None}:
                assert place is not None
                elsewhere.update(_files_at(place, is_data=is_data))
    return elsewhere


def _described(root: str, names: Iterable[str]) -> tuple[list[Any], set[str]]:
    contents: list[Any] = []
    elsewhere: set[str] = set()
    seen: set[str] = set()
    pending = list(names)
    resolved_root = storage.resolved(root)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        place = _outside(root, "", name)
        uri = place or storage.join(root, name)
        if storage.is_local(uri) and not os.path.isfile(storage.local_path(uri)):  # noqa: PTH113 - a pipe hangs
            continue
        try:
            content = read_benchmark(storage.read_bytes(uri, within="/"))
        except YamlBeyondBounds as error:
            raise BadInput(
                expected=f"YAML in {uri}", found=str(error), remedy="Correct it, or move it elsewhere"
            ) from None
        except (FileNotFoundError, ValueError, yaml.YAMLError):
            continue
        contents.append(content)
        elsewhere.update([place] if place else [])
        folder = posixpath.dirname(name)
        included = content.get("include") if isinstance(content, dict) else None
        pending += [
            _normal(resolved_root, posixpath.join(folder, text))
            for text in (included if isinstance(included, list) else [included])
            if isinstance(text, str)
        ]
        modules = {text.rpartition(".")[0].replace(".", "/") for text in _strings(content) if type(text) is _Function}
        for module in modules:
            place = _outside(root, folder, f"{module}.py")
            elsewhere.update(_files_at(place, is_data=False) if place else [])
    return contents, elsewhere


def _texts(value: Any, *, is_data: bool, seen: set[tuple[int, bool]] | None = None) -> Iterator[tuple[str, bool]]:
    seen = set() if seen is None else seen  # a YAML alias repeats a value, or refers to an enclosing value
    if isinstance(value, dict | list | tuple):
        if (id(value), is_data) in seen:
            return
        seen.add((id(value), is_data))
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(part, is_data=is_data or key in _DATA, seen=seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, is_data=is_data, seen=seen)
    elif isinstance(value, str) and len(value) < _LONGEST_PATH and "\0" not in value:
        yield value, is_data


def _strings(value: Any) -> Iterator[str]:
    return (text for text, _ in _texts(value, is_data=False))


def _outside(root: str, base: str, text: str) -> str | None:
    if _OTHER_SCHEME.match(text) and not _SCHEME.match(text):
        return text if storage.has_whole_files(text) and not text.startswith(root + "/") else None
    path = posixpath.join(base, os.path.expanduser(_SCHEME.sub("", text)))  # noqa: PTH111
    if not (posixpath.isabs(path) or "/." in f"/{path}"):
        return None
    if not posixpath.isabs(path) and not storage.is_local(root):
        return None  # the folder is copied first, without its neighbours
    resolved_root = storage.resolved(root)
    place = posixpath.normpath(posixpath.join(resolved_root, _normal(resolved_root, path)))
    real = f"{storage.resolved(place)}/"
    inside = real.startswith(f"{resolved_root}/") and not is_hidden(real[len(resolved_root) + 1 : -1])
    return None if place.strip("/") == "" or inside else place


def _normal(resolved_root: str, path: str) -> str:
    if ".." not in path.split("/") or not storage.is_local(resolved_root):
        return posixpath.normpath(path)
    folder, name = posixpath.split(posixpath.join(resolved_root, path))
    return os.path.relpath(posixpath.join(storage.resolved(folder), name), resolved_root)


def _files_at(place: str, *, is_data: bool) -> list[str]:
    if is_data:
        return [file for file in storage.matching_files(place) if file.count("/.") <= place.count("/.")]
    return [place] if os.path.isfile(place) else []  # noqa: PTH113 - a text may be no path at all
