"""Tokenizers of checkpoints: their own, that of their run's folder, or that of a folder in their name.

A checkpoint without a tokenizer takes that of a folder above it, up to its run's folder, or of a `tokenizer/` in such a
folder, as trainers write them that keep a single tokenizer for a run (NVIDIA-NeMo/RL: `step_N/policy/tokenizer` next to
`step_N/policy/weights`). The search depends on the checkpoint's path and these folders only, so every machine finds the
same.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pools.weights.formats import SHARDED_FOLDER
from pools.weights.overrides import override_of
from resources.storage import storage
from resources.storage.storage import FileInfo

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tekken.json")
"""Files with the vocabulary, of which any is sufficient; `tokenizer_config.json` is required as well."""
SETTINGS_NAME = "tokenizer_config.json"
NO_TOKENIZER = "no tokenizer"
"""Words that begin the problem of a checkpoint without a tokenizer, which waiting seldom helps."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_PARTS = (
    *("tokenizer*.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "tekken.json", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.*", "tokenization*.py"),
)
_FOLDER = "tokenizer"
_CONTAINERS = ("hf", "huggingface", "weights", "checkpoint", "checkpoints", "ckpt", "ckpts", "steps", "exports")
_STEP = re.compile(r"[0-9]+|.*(step|checkpoint|ckpt|iter|iteration|batch|ba|rollout|epoch)[-_=]?[0-9].*")
_MOST_LEVELS = 6

Files = Mapping[str, FileInfo]
"""Files of a folder by name."""


class FilesIn(Protocol):
    """Lists the files directly in a folder, as `storage.list_folder`."""

    def __call__(self, folder: str, /, *, within: str | None = None) -> Sequence[FileInfo]: ...


class KnownFiles:
    """The files of a listing of everything below `root`, by folder. Other folders are listed when asked for, once;
    `others` has them."""

    def __init__(self, root: str, files: Iterable[FileInfo]) -> None:
        self._root, self._start = storage.absolute(root).rstrip("/"), len(root.rstrip("/"))
        self._folders: dict[str, list[FileInfo]] = defaultdict(list)
        self.others: dict[str, list[FileInfo]] = {}
        for file in files:
            self._folders[file.uri.rpartition("/")[0][self._start :]].append(file)

    def __call__(self, folder: str, /, *, within: str | None = None) -> Sequence[FileInfo]:
        place = storage.absolute(folder).rstrip("/")
        if f"{place}/".startswith(f"{self._root}/"):
            return self._folders.get(place[len(self._root) :], ())
        if place not in self.others:
            self.others[place] = storage.list_folder(place, within=within)
        return self.others[place]


class Described(NamedTuple):
    """The files of a checkpoint, some from other folders; its problems; notes on the origin of its tokenizer."""

    files: Files
    problems: list[str]
    notes: tuple[str, ...] = ()


def described_by(uri: str, own: Files, files_in: FilesIn = storage.list_folder) -> Described:
    """Returns a checkpoint's files, with those of another tokenizer and template in place of its own if its name gives
    them, or if it has none and its run has. `own`: the files in its folder. `files_in`: a listing that is known
    already saves requests."""
    override = override_of(uri)
    files, problems, notes = dict(own), list[str](), list[str]()
    place = override.tokenizer if override else None
    is_sharded = any(name.startswith(f"{SHARDED_FOLDER}/") for name in own)
    taken: Files = {}
    if place is not None:
        taken = _named(files_in(place))
        files = _with_tokenizer(own, taken)
        notes.append(f"its tokenizer is that of {place}")
    elif (
        (is_sharded or "config.json" in own)
        and not has_vocabulary(own)
        and (above := _above(override.location if override else uri, files_in)) is not None
    ):
        place, taken = above
        files = _with_tokenizer(own, taken)
        notes.append(f"it has no tokenizer, so it takes that of its run, in {place}")
    if "config.json" not in own and "config.json" in taken:  # accelerate writes none; nor do trainers next to shards
        files["config.json"] = taken["config.json"]
        notes.append(f"it has no config, so it takes that of {place}")
    elif is_sharded and "config.json" not in own:
        problems.append("shards of FSDP alone; name a folder with the model's config and tokenizer with --tokenizer")
    if override and override.template is not None:
        files = {name: file for name, file in files.items() if name not in _TEMPLATES}
        problems += _take_template(override.template, files, files_in)
        notes.append(f"its chat template is that of {override.template}")
    return Described(files, [*problems, *_problems(files, place)], tuple(notes))


def has_vocabulary(files: Files) -> bool:
    """Returns True if a folder with these files holds a tokenizer, whole or not."""
    return any(name in files for name in TOKENIZER_FILES)


def is_part_of_tokenizer(name: str) -> bool:
    """Returns True for the names of files that a tokenizer consists of, its chat template among them."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _PARTS)


def _problems(files: Files, place: str | None) -> list[str]:
    named = f" in {place}" if place else ""
    if not has_vocabulary(files):
        where = "there" if place else "there or in its run's folder"
        missing = f"{NO_TOKENIZER}{named}: none of {', '.join(TOKENIZER_FILES)} is {where}"
        return [f"{missing}; name a folder that has it with --tokenizer"]
    problems = [] if SETTINGS_NAME in files else [f"{SETTINGS_NAME} is missing{named}"]
    read_with = {"merges.txt", *TOKENIZER_FILES} - {"vocab.json"}
    if read_with.isdisjoint(files) and not any(name.endswith(".py") for name in files):
        problems.append(f"vocab.json without merges.txt{named}, which no program reads: add merges.txt")
    return problems


def _with_tokenizer(own: Files, taken: Files) -> dict[str, FileInfo]:
    kept = {name: file for name, file in own.items() if not is_part_of_tokenizer(name)}
    if not has_vocabulary(own) and (templates := {name: own[name] for name in _TEMPLATES if name in own}):
        taken = {name: file for name, file in taken.items() if name not in _TEMPLATES}
        kept |= templates  # a template without a tokenizer was put there for this checkpoint
    return {**{name: file for name, file in taken.items() if is_part_of_tokenizer(name)}, **kept}


def _take_template(place: str, files: dict[str, FileInfo], files_in: FilesIn) -> list[str]:
    template = _named(files_in(storage.parent(place))).get(storage.basename(place))
    if template is None:
        return [f"no chat template in {place}: no file is there"]
    files[_TEMPLATES[0]] = template  # which transformers and vLLM prefer to that of tokenizer_config.json
    return []


def _above(uri: str, files_in: FilesIn) -> tuple[str, Files] | None:
    folder = storage.absolute(uri).rstrip("/")
    outwards = _outwards(folder)
    for place in [each for above in outwards for each in (above, storage.join(above, _FOLDER))][1:]:
        files = _named(files_in(place, within=outwards[-1]))
        if has_vocabulary(files) and SETTINGS_NAME in files:
            return place, files
    return None


def _outwards(folder: str) -> list[str]:
    folders = [folder]
    while len(folders) <= _MOST_LEVELS and _is_folder(outer := storage.parent(folders[-1])):
        folders.append(outer)
    steps = [at for at, each in enumerate(folders[:-1]) if _STEP.fullmatch(storage.basename(each))]
    run = (steps[0] if steps else 0) + 1
    while run < len(folders) - 1 and storage.basename(folders[run]) in _CONTAINERS:
        run += 1
    return folders[: run + 1]


def _is_folder(place: str) -> bool:
    store, _, path = place.rpartition("://")  # without a store's name, path is the whole place
    return path.count("/") >= 1 if store == "hf" else bool(path.strip("/")) and not path.endswith(":")


def _named(files: Sequence[FileInfo]) -> dict[str, FileInfo]:
    return {storage.basename(file.uri): file for file in files}
