"""Names of the checkpoints below a folder: run, series, step or label; and those that count among equal names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from pools.weights.model_files import ModelFolder, digest_model_folder, read_json
from resources.storage import storage
from resources.storage.listings import FileInfo
from tasks.spec.labels import slug_of
from tasks.spec.names import in_few_words, name_of, parts_of
from tasks.spec.steps import Stepped, is_export, is_place, label_of, left_out_because, names_series, rank_of, step_in

Files = Mapping[str, Sequence[FileInfo]]
"""Folders of checkpoints, with their files."""
_STATES = {"trainer_state.json": "global_step", "training_state.json": "step", "train_state.json": "step"}
_LARGEST_STATE_BYTES = 2**26  # a line of its log for each logged step
_COMPARED_BYTES = 2**16
_COUNTED = re.compile("checkpoint_[0-9]{1,18}")
_FINAL = "final"
_WORDS = frozenset({"best", "final", "last", "latest", "merged", "out", "output"})


@dataclass(frozen=True)
class Named:
    """The name of a checkpoint in its run. `order` is that among the exports of its step, `root` the part of its path
    by which they are of the same; `by_path` is False if the step is from its trainer's state."""

    run: str
    step: int = 0
    label: str | None = None
    series: str = ""
    order: tuple[int, str] = (0, "")
    root: str = ""
    by_path: bool = True
    alone: bool = False

    @property
    def name(self) -> str:
        return self.run if self.alone else f"{self.run}-{self.step if self.label is None else slug_of(self.label)}"


@dataclass(frozen=True)
class Names:
    """The names of checkpoints by folder, and notes on folders that are left out, or that have no step."""

    by_folder: Mapping[str, Named]
    notes: tuple[str, ...]


def names_below(path: str, exports: Files, others: Iterable[str] = (), *, steps_from: str | None = None) -> Names:
    """Names the checkpoints below a path: all are of the run that it names, and of a series of it if several lie there.

    Args:
        exports: folders in Hugging Face layout, which determine the series.
        others: folders of native checkpoints and training states.
        steps_from: an expression for steps, see `tasks.spec.steps`; folders with another step only are left out.
    """
    notes: list[str] = []
    every = {folder: _below(path, folder) for folder in (*exports, *others)}
    reasons = {folder: why for folder, parts in every.items() if (why := left_out_because(parts)) is not None}
    if any(folder not in reasons for folder in exports):
        notes += [f"left out {folder}: {why}" for folder, why in reasons.items()]
        every = {folder: parts for folder, parts in every.items() if folder not in reasons}
    if len(every) > 1 and (() in every.values()):  # configs and tokenizers lie in a run's folder, too
        every = {folder: parts for folder, parts in every.items() if parts or _has_weights(exports.get(folder, ()))}
    steps = {folder: _step_of(path, parts, steps_from) for folder, parts in every.items()}
    if steps_from is not None:
        others_by_word = [f for f, parts in every.items() if steps[f] is None and _step_of(path, parts, None)]
        notes += [f"left out {folder}: no match for --steps-from '{steps_from}'" for folder in others_by_word]
        every = {folder: parts for folder, parts in every.items() if folder not in others_by_word}
    keys = {folder: _key(parts, steps[folder]) for folder, parts in every.items()}
    of_series = sorted({keys[folder] for folder in exports if folder in keys and steps[folder] is not None})
    several = len(of_series) > 1
    shared = len(list(takewhile(lambda part: len(set(part)) == 1, zip(*of_series, strict=False))))
    series = {key: slug_of("-".join(key[shared:])) if several and key[shared:] else "" for key in of_series}
    run = name_of(path)[0]
    named: dict[str, Named] = {}
    for folder, parts in every.items():
        key, stepped = keys[folder], steps[folder]
        own = series.get(key, "")
        common = Named(f"{run}-{own}" if own else run, series=own, root="/".join(parts))
        if stepped is not None:
            order = rank_of(parts, stepped.at) if stepped.at >= 0 else rank_of(("", *parts), 0)
            named[folder] = replace(
                common, step=stepped.step, order=order, root="/".join((*parts[: max(stepped.at, 0)], stepped.root))
            )
        elif (label := _label(parts)) is None and len(every) == 1:
            named[folder] = replace(common, alone=True)
        else:
            held = None if steps_from is not None or folder not in exports else _state_step(exports[folder])
            inside = () if key in of_series or not key else key
            label = " ".join((*inside, label or _FINAL))
            named[folder] = replace(common, step=held or 0, label=None if held else label, by_path=False)
    return Names(named, (*notes, *_hints(path, named, steps_from)))


def _has_weights(files: Sequence[FileInfo]) -> bool:
    return any(file.uri.endswith((".safetensors", ".safetensors.index.json", ".bin")) for file in files)


def _below(path: str, folder: str) -> tuple[str, ...]:
    return tuple(part for part in folder.removeprefix(path.rstrip("/")).removeprefix("@").split("/") if part)


def _step_of(path: str, parts: Sequence[str], steps_from: str | None) -> Stepped | None:
    place = parts_of(path)
    if stepped := step_in(parts, above=place[-1] if place else "", steps_from=steps_from):
        return stepped
    _, name, step = name_of(path)
    if steps_from is not None:
        stepped = step_in(place[-1:], steps_from=steps_from)
        return stepped and stepped._replace(at=-1)
    return Stepped(-1, step, "", "") if name != name_of(path)[0] else None


def _key(parts: Sequence[str], stepped: Stepped | None) -> tuple[str, ...]:
    if stepped is None:
        return tuple(filter(names_series, parts[:-1]))
    inside = [part for part in parts[stepped.at + 1 :] if names_series(part)]
    before = [part for part in parts[: max(stepped.at, 0)] if names_series(part)]
    return tuple(filter(None, (*before, stepped.series, *inside)))


def _label(parts: Sequence[str]) -> str | None:
    named = list(parts)
    while named and (is_place(named[-1]) or is_export(named[-1])) and (len(named) > 1 or "merged" not in named[-1]):
        named.pop()
    return label_of(named[-1]) if named else None


def _state_step(files: Sequence[FileInfo]) -> int | None:
    for file in files:
        key = _STATES.get(storage.basename(file.uri))
        if key is not None and file.size <= _LARGEST_STATE_BYTES:
            step = read_json(file, []).get(key)
            if isinstance(step, int) and 0 < step < 10**18:
                return step
    return None


def way_out(path: str, folders: Sequence[str]) -> str:
    """Returns what to do about different checkpoints of one step below a path."""
    first, *others = folders
    below = "/".join(_below(path, first))
    *_, number = None, *re.finditer("[0-9]+", below)
    if number is None:
        return f"name the folder of the intended checkpoint, such as {first}"
    before = re.escape(below[: number.start()]).replace(r"\-", "-")
    digits = r"(0\d*)" if number[0].startswith("0") else r"([1-9]\d*)"
    alike = any(re.search(f"^{before}{digits}", "/".join(_below(path, other))) for other in others)
    expression = f"^{before}{digits if number[0] != '0' else '(0)'}"
    choice = "" if alike else f", or take such folders only, with --steps-from '{expression}' (steps_from)"
    return f"name the folder of the intended checkpoint, such as {first}{choice}"


def _hints(path: str, named: Mapping[str, Named], steps_from: str | None) -> list[str]:
    numbers = [_COUNTED.fullmatch(storage.basename(folder)) for folder in named]
    if len(numbers) > 1 and all(numbers) and sorted(each.step for each in named.values()) == list(range(len(numbers))):
        return [f"the numbers of the checkpoints below {path} are a count, as accelerate writes it, not training steps"]
    labels = [each.label for each in named.values() if each.label is not None]
    if len(labels) < 2 or len(labels) < len(named) or steps_from is not None or _WORDS.issuperset(labels):
        return []
    return [
        f"no step in the names of {len(labels)} checkpoints below {path}, {in_few_words(labels)}: they have labels and "
        f"no curve; if there are steps in their paths, add --steps-from '{_suggested(list(named))}'"
    ]


def _suggested(folders: Sequence[str]) -> str:
    names = [storage.basename(folder) for folder in folders]
    if all(label_of(name).startswith("epoch ") for name in names):
        return "epoch"
    texts, numbers = [re.split("[0-9]+", name) for name in names], [re.findall("[0-9]+", name) for name in names]
    if len({tuple(text) for text in texts}) == 1:
        differing = [at for at in range(len(numbers[0])) if len({found[at] for found in numbers}) == len(names)]
        if differing:
            before, after = texts[0][differing[-1]], texts[0][differing[-1] + 1]
            return re.escape(before).replace(r"\-", "-") + r"(\d+)" + re.escape(after).replace(r"\-", "-")
    return r"step(\d+)-tokens"


def counted(names: Names, complete: Sequence[str], model_of: Callable[[str], ModelFolder]) -> Names:
    """Returns the names of the checkpoints that count. Of several complete exports of a step one counts, the first in
    the order of `EXPORTS`; of two folders with equal digests the one with the shorter path. What has no step in its
    path is the step whose digest it has. Different checkpoints of one step keep their common name, and are refused
    where they are evaluated.

    Args:
        complete: folders with a complete checkpoint.
        model_of: reads a complete checkpoint's folder.
    """
    kept, notes = dict(names.by_folder), list(names.notes)

    def leave_out(folder: str, why: str) -> None:
        del kept[folder]
        notes.append(f"left out {folder}: {why}")

    exports: dict[tuple[str, str], list[str]] = defaultdict(list)
    for folder, named in names.by_folder.items():
        exports[named.name, named.root].append(folder)
    for folders in exports.values():
        if len(folders) > 1 and (whole := [folder for folder in folders if folder in complete] or folders):
            taken = min(whole, key=lambda folder: kept[folder].order)
            for folder in folders:
                if folder != taken:
                    leave_out(folder, f"{taken} is an export of the same step")
    counting: dict[tuple[str, int], list[str]] = defaultdict(list)
    whole = [folder for folder in complete if folder in kept]
    for folder in sorted(whole, key=lambda folder: (not kept[folder].by_path, len(folder), folder)):
        named = kept[folder]
        if named.by_path:
            rivals = counting[named.run, named.step] if not named.alone else []
        else:
            of_run = sorted((each for each in counting if each[0] == named.run or not named.series), reverse=True)
            rivals = [other for counted in of_run for other in counting[counted]]
        same = next((other for other in rivals if _same(model_of(folder), model_of(other))), None)
        if same is not None:
            leave_out(folder, f"its content is that of {same}")
            continue
        if not named.by_path and named.label is None and counting[named.run, named.step]:
            kept[folder] = named = replace(named, step=0, label=_label(_parts_of_root(named)) or _FINAL)
        counting[named.run, named.step if named.label is None else -1].append(folder)
    return Names(kept, tuple(notes))


def _parts_of_root(named: Named) -> list[str]:
    return [part for part in named.root.split("/") if part]


def _same(model: ModelFolder, other: ModelFolder) -> bool:
    pairs = [(model.files[name], other.files.get(name)) for name in model.weight_files]
    if model.weight_files != other.weight_files or not all(map(_may_be_equal, pairs)):
        return False
    return digest_model_folder(model).checkpoint == digest_model_folder(other).checkpoint


def _may_be_equal(pair: tuple[FileInfo, FileInfo | None]) -> bool:
    file, other = pair
    if other is None or file.size != other.size:
        return False
    if file.checksum and other.checksum:
        return file.checksum == other.checksum
    start = max(0, file.size - _COMPARED_BYTES)
    end = storage.read_bytes(file.place, start=start, end=file.size)
    return end == storage.read_bytes(other.place, start=start, end=file.size)
