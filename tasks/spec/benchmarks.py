"""The bundled benchmarks, and a digest of any folder of benchmarks and of the external files that it references: paths
in data, metric, `include` or `!function`, and any other text that is a file's path. Data on a hub or the web, and data
that Python files open themselves, are ignored."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import BoundedLoader, YamlBeyondBounds, load_yaml
from tasks.spec.evaluation import EvaluationConfig, digest_of
from tasks.spec.evaluators import EVALUATORS, LmEvalBenchmarkOptions

# Keys below which a text may also be a folder or contain wildcards.
_DATA = ("dataset_path", "dataset_kwargs", "metric")
_SCHEME = re.compile(r"^(?:file|local):(?://)?(?=[/~])")
_OTHER_SCHEME = re.compile(r"^[a-z0-9+]+://")
_LONGEST_PATH = 4096
BUNDLED = Path(__file__).parent / "bundled"
"""lm-eval benchmarks, a YAML and a JSONL file each; other harnesses' are in subfolders."""
COPIED = "benchmarks"
"""Name of a folder from a store after it is copied into a harness's working folder."""


def benchmarks_uri(config: EvaluationConfig) -> str:
    """Returns the folder of an evaluation's benchmarks; the bundled benchmarks by default."""
    return config.benchmarks_path or str(BUNDLED)


def copied_benchmarks(config: EvaluationConfig) -> dict[str, str]:
    """Returns the folder to copy into a harness's working folder, by its name in it; empty for local folders."""
    path = config.benchmarks_path
    return {} if path is None or storage.is_local(path) else {COPIED: path}


def benchmarks_here(config: EvaluationConfig) -> str:
    """Returns the path to an evaluation's benchmarks: local, or as copied into the working folder."""
    return COPIED if copied_benchmarks(config) else str(storage.local_path(benchmarks_uri(config)).absolute())


def evaluation_hash(config: EvaluationConfig) -> str:
    """Returns a digest over every input of the scores except the checkpoint."""
    return digest_of({**config.score_inputs(), "benchmarks": benchmarks_digest(config)})


def benchmarks_digest(config: EvaluationConfig) -> str:
    """Returns a digest over the benchmarks folder and the external files that it references."""
    root, names = _files_of(config)
    return digest_of(
        [
            *([f"/{name}", storage.read_bytes(storage.join(root, name), within=root).hex()] for name in names),
            *([place, _content_of(place)] for place in sorted(named_elsewhere(config))),
        ]
    )


def named_elsewhere(config: EvaluationConfig) -> set[str]:
    """Returns the files outside of the benchmarks folder that benchmarks or their arguments reference."""
    root, names = _files_of(config)
    return _files_elsewhere(
        root,
        names if config.benchmarks_path is not None else (),
        arguments=[task.task_kwargs for task in config.evals],
        all_is_data=not isinstance(config.evaluator, LmEvalBenchmarkOptions),
    )


def _files_of(config: EvaluationConfig) -> tuple[str, list[str]]:
    root = benchmarks_uri(config).rstrip("/")
    files = storage.list_files(root)
    names = [file.uri.removeprefix(f"{root}/") for file in files if file.regular]
    if storage.is_local(root):
        _refuse_linked_folders(storage.local_path(root))
        others = (file.uri.removeprefix(f"{root}/") for file in files if not file.regular)
        _refuse_links_out(storage.local_path(root), [name for name in others if not _is_hidden(name)])
        names = [name for name in names if not _is_hidden(name)]
    names = [name for name in names if "__pycache__" not in name]
    if config.benchmarks_path is None:
        names = [name for name in names if _is_asked_by(config.evaluator.name, name)]
    return root, names


def _refuse_linked_folders(root: Path) -> None:
    for folder, below, _ in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        for path in (Path(folder, name) for name in below):
            if path.is_symlink():
                raise BadInput(
                    expected="a benchmarks folder without links to other folders; linked files would not count",
                    found=f"{path}, a link to {path.resolve()}",
                    remedy="Let benchmarks name that folder itself, or copy its files",
                )


def _refuse_links_out(root: Path, names: Iterable[str]) -> None:
    for path in (root / name for name in names):
        if path.is_symlink() and path.exists():  # pipes and dangling links are ignored
            raise BadInput(
                expected=f"regular files in {root}, and links that stay in it",
                found=f"{path}, a link to {path.resolve()}",
                remedy="Copy the file there, or let the benchmark name it by its whole path",
            )


def _content_of(place: str) -> str:
    digest = storage.content_digest(place)
    if digest is None:
        raise BadInput(
            expected="benchmarks that name files which can be read",
            found=f"{place}, which cannot",
            remedy="Correct the path, or put the file into the benchmarks folder",
        )
    return digest


def _is_asked_by(evaluator: str, name: str) -> bool:
    folder = name.partition("/")[0] if "/" in name else ""
    return folder == evaluator if (BUNDLED / evaluator).is_dir() else folder not in EVALUATORS


class _Function(str):
    __slots__ = ()


class _Loader(BoundedLoader): ...


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
_Loader.add_constructor("!function", lambda loader, node: _Function(node.value))


def read_benchmark(content: bytes) -> Any:
    """Returns a benchmark file's content, with functions as their names. Raises ValueError or YAMLError if invalid."""
    return load_yaml(content.decode(), _Loader)


def _is_hidden(name: str) -> bool:
    # by lm-eval, and Jupyter's copies
    return "/." in f"/{name}" and (".ipynb_checkpoints" in name or not name.endswith(".yaml"))


def _files_elsewhere(root: str, names: Iterable[str], *, arguments: Any, all_is_data: bool) -> set[str]:
    # with `all_is_data`, any argument may be a folder or contain wildcards
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
        functions = [text for text, _ in _texts(content, is_data=False) if type(text) is _Function]
        modules = {text.rpartition(".")[0].replace(".", "/") for text in functions}
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
    inside = real.startswith(f"{resolved_root}/") and not _is_hidden(real[len(resolved_root) + 1 : -1])
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
