"""Adapters as PEFT writes them: the folder, its config and its base.

An adapter folder has `adapter_config.json`, and `adapter_model.safetensors` or `adapter_model.bin`. Its config names
the base: a folder (a relative path starts at the adapter's), or a repository with its `revision`; PEFT writes no digest
of it. Names are those of PEFT 0.21 (`tuners/lora/config.py`).
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pools.weights.adapters.changes import changed_config, changes_of, is_nothing
from pools.weights.content import hash_of
from pools.weights.formats import (
    ADAPTER_CONFIG,
    ADAPTER_RECIPE,
    ADAPTER_WEIGHTS,
    PICKLED_ADAPTER,
    cut_off,
    irregular,
    is_adapter,
    read_json,
)
from pools.weights.merges import merge_of, with_each_location
from pools.weights.model_files import CONFIG_FILES, ModelFolder, checkpoint_files, small_files
from pools.weights.overrides import override_of, without_options
from pools.weights.tokenizers import FilesIn, described_by, has_vocabulary, is_part_of_tokenizer
from resources.errors import CheckpointError
from resources.settings import settings
from resources.storage import storage
from resources.storage.hub import hub_location, in_hub
from resources.storage.storage import FileInfo

NO_BASE = "name it with --base"
"""Part of the problem of an adapter without its base."""
_TYPES = frozenset({"LORA", "TRAINABLE_TOKENS"})
_USED = frozenset(
    {
        *("alpha_pattern", "base_model_name_or_path", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "peft_type"),
        *("revision", "token_indices", "trainable_token_indices", "use_dora", "use_rslora"),
    }
)
_WITHOUT_EFFECT = frozenset(  # on merging: they are about training, or the names and shapes of tensors show them
    {
        *("auto_mapping", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules"),
        *("inference_mode", "init_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
        *("lora_dtype", "lora_ga_config", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core", "modules_to_save"),
        *("peft_version", "qalora_group_size", "r", "rank_pattern", "runtime_config", "target_modules", "task_type"),
    }
)
_CHANGING_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # PEFT repeats these when it loads the adapter

_bases: dict[str, ModelFolder] = {}  # complete bases by location: many adapters have the same
_MOST_BASES = 16


def inspect_adapter(own: ModelFolder, inspect: Callable[..., ModelFolder], *, files_in: FilesIn) -> ModelFolder:
    """Returns the model that an adapter makes of its base: with the base's config, and its tokenizer unless the
    adapter has its own. Failures go into `problems`. Weights that must be made, or are pickled, are looked at then.

    `own`: the adapter's folder, inspected as a reference; its name may give the base. `inspect`: `inspect_checkpoint`,
    for the base. `files_in`: as there.
    """
    is_pickled = PICKLED_ADAPTER in own.files and ADAPTER_WEIGHTS not in own.files
    weights = (ADAPTER_CONFIG, PICKLED_ADAPTER if is_pickled else ADAPTER_WEIGHTS)
    files = {name: file for name, file in own.files.items() if name not in CONFIG_FILES}
    problems = [f"{name} is missing" for name in weights if name not in files]
    problems += filter(None, (irregular(files[name]) or cut_off(files[name]) for name in weights if name in files))
    base = None if problems else _base(own, inspect, files_in, problems)
    folder = replace(own, problems=(), weight_files=weights, made_by=ADAPTER_RECIPE, config=base.config if base else {})
    if base is None or problems:
        return replace(folder, problems=tuple(problems))
    folder = replace(folder, inputs=(base,))
    kept = small_files(base)
    if has_vocabulary(files):
        kept = {name: file for name, file in kept.items() if not is_part_of_tokenizer(name)}
    files, missing, notes = described_by(own.uri, kept | files, files_in)
    try:
        changes = changes_of(folder) if base.made_by is None and not is_pickled else {}
    except CheckpointError as error:
        return replace(folder, problems=(error.found,))
    config = {**base.config, **(changed_config(base, changes) if changes else {})}
    if config != base.config:
        files = {**files, "config.json": _written(config)}
    notes = (f"an adapter of {base.uri}", *notes)
    if is_pickled:
        notes += (f"safetensors are made of {PICKLED_ADAPTER} while it is staged",)
    if changes and is_nothing(changes):
        notes += (f"it changes nothing of its base {base.uri}: all that it adds is zero",)
    served = small_files(replace(folder, files=files)) | {name: files[name] for name in weights}
    served |= {f"base/{name}": base.files[name] for name in base.weight_files}  # so that listings differ with them
    return replace(folder, files=served, problems=tuple(missing), config=config, notes=(*notes, *base.notes))


def _base(
    own: ModelFolder, inspect: Callable[..., ModelFolder], files_in: FilesIn, problems: list[str]
) -> ModelFolder | None:
    config = read_adapter_config(own.files, problems)
    override = override_of(own.uri)
    given = override.base if override else None
    location = given or base_location(without_options(own.uri), config)
    named = ascii(given or config.get("base_model_name_or_path"))
    if problems:
        return None
    gone = (
        f"its base {named} is not there; {NO_BASE}, as a folder or owner/name "
        "(a path in its config starts at its own folder)"
    )
    if location is None:
        problems.append(gone)
        return None
    if merge_of(location) is not None:
        return inspect(location)
    location = with_each_location(location, storage.absolute)
    place = without_options(location)
    list_in = partial(files_in, within=storage.parent(storage.absolute(place)))
    listed = list_in(place)
    files = {storage.basename(file.uri): file for file in listed}
    if is_adapter(files):
        problems.append(f"its base {named} is an adapter, too; merge that first")
        return None
    base = _bases.get(location)
    if base is None or any(files.get(name) != file for name, file in base.files.items()):
        base = inspect(location, listed, files_in=files_in)
        if not base.complete:  # shards of training frameworks lie in folders of it
            folders = {storage.parent(file.uri) for file in checkpoint_files(place)}
            if not folders:
                problems.append(gone)
                return None
            base = inspect(location, [file for each in sorted(folders) for file in list_in(each)], files_in=files_in)
        problems += [f"{problem} in {base.uri}, its base" for problem in base.problems]
        if base.complete and len(_bases) < _MOST_BASES:
            _bases[location] = base
    return base


def base_location(uri: str, config: Mapping[str, Any]) -> str | None:
    """Returns the location of the base that an adapter's config names: a folder, or a repository of the hub with the
    revision there; None if it names neither."""
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(named, str) or not named.strip():
        return None
    if "://" in named or named.startswith("/"):
        return named
    repository = hub_location(f"{named}@{revision}" if isinstance(revision, str) and revision else named)
    scheme, mark, path = storage.join(uri, named).rpartition("://")
    nearby = f"{scheme}{mark}{posixpath.normpath(path)}"
    if not (in_hub(uri) and in_hub(repository)) and storage.is_folder(nearby):
        return nearby
    return repository if in_hub(repository) else None


def read_adapter_config(files: Mapping[str, FileInfo], problems: list[str]) -> dict[str, Any]:
    """Returns an adapter's config; appends to `problems` what it cannot be, or asks for and cannot be merged."""
    config = read_json(files[ADAPTER_CONFIG], problems)
    kind = config.get("peft_type")
    if config and kind not in _TYPES:
        problems.append(f"an adapter of type {ascii(kind)[:40]}, which is not merged here: LORA is")
        return config
    for name, value in config.items():
        if value not in (None, False, "", [], {}) and name not in _USED | _WITHOUT_EFFECT:
            problems.append(f"its {ADAPTER_CONFIG} asks for {ascii(name)[1:-1]}, which is not merged here")
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGING_THE_BASE):
        problems.append(
            f"init_lora_weights {ascii(start)[1:-1]} changed its base, too; save it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    return config


def _written(config: Mapping[str, Any]) -> FileInfo:
    content = json.dumps(config, indent=2, sort_keys=True).encode()
    digest = hash_of(content)
    file = settings().cache_dir / "configs" / digest / "config.json"
    if not file.is_file():
        storage.write_bytes(str(file), content)
    return FileInfo(str(file), len(content), 0.0, digest)
