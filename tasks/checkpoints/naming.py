"""Names of the checkpoints below a folder: run, series, and step or label. Of several with the same name some count."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from pools.weights.model_files import ModelFolder, digest_model_folder, read_json
from resources.errors import AssayError
from resources.storage import storage
from resources.storage.hub import is_repository
from resources.storage.listings import FileInfo
from tasks.spec.labels import slug_of
from tasks.spec.names import in_few_words, name_of, parts_of, run_name_of
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
    """The name of a checkpoint in its run. Exports of a step have the same `root`, and count by `order`. Without a step
    in its path, `by_path` is False, and `root` is its label, also if a trainer's state gives it a step."""

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
    `exports`: folders in Hugging Face layout, which determine the series. `others`: folders of native checkpoints and
    training states. `steps_from`: an expression for steps, see `tasks.spec.steps`. Folders that it does not match are
    left out if the usual words give them a step."""
    run, name, step = name_of(path)
    single = (name != run or steps_from is not None) and is_checkpoint(path, exports, others)
    own_words = Stepped(-1, step, "", "") if single and name != run else None
    own = own_words if steps_from is None or not single else _by_expression(path, steps_from)
    run = run if single else run_name_of(path)
    every = {folder: _below(path, folder) for folder in (*exports, *others)}
    reasons = {folder: why for folder, parts in every.items() if (why := left_out_because(parts)) is not None}
    reasons = reasons if any(folder not in reasons for folder in exports) else {}
    if len(every) > 1:  # configs and tokenizers lie in a run's folder, too
        every = {folder: parts for folder, parts in every.items() if parts or _has_weights(exports.get(folder, ()))}
    step_of = partial(step_in, above=storage.basename(path))
    steps = {folder: step_of(parts, steps_from=steps_from) or own for folder, parts in every.items()}
    if steps_from is not None:
        without = (folder for folder, stepped in steps.items() if stepped is None)
        by_words = (folder for folder in without if own_words or step_of(every[folder]))
        reasons |= dict.fromkeys(by_words, f"no match for --steps-from '{steps_from}'")
    every = {folder: parts for folder, parts in every.items() if folder not in reasons}
    keys = {folder: _key(parts, steps[folder]) for folder, parts in every.items()}
    stepped_exports = [folder for folder in exports if folder in keys and steps[folder] is not None]
    with_weights = [folder for folder in stepped_exports if _has_weights(exports[folder])]  # results lie there, too
    of_series = sorted({keys[folder] for folder in with_weights or stepped_exports})
    shared = len(list(takewhile(lambda part: len(set(part)) == 1, zip(*of_series, strict=False))))
    branches = is_repository(path) and all(each and each.at == 0 for each in map(steps.get, stepped_exports))
    if len(of_series) == 1 and branches:
        series = {key: slug_of("-".join(of_series[0])) for key in ((), *of_series)}  # as a revision named directly
    else:
        series = {key: slug_of("-".join(key[shared:])) for key in of_series if len(of_series) > 1 and key[shared:]}
    named: dict[str, Named] = {}
    for folder, parts in every.items():
        own, stepped = series.get(keys[folder], ""), steps[folder]
        common = Named(f"{run}-{own}" if own else run, series=own)
        if stepped is not None:
            root = "/".join((*parts[: max(stepped.at, 0)], stepped.root))
            named[folder] = replace(common, step=stepped.step, order=rank_of(parts, stepped.at), root=root)
        elif (label := _label(parts, keys[folder], of_series)) is None and len(every) == 1:
            named[folder] = replace(common, alone=True)
        else:
            label, held = label or _FINAL, 0 if steps_from is not None else _state_step(exports.get(folder, ()))
            named[folder] = replace(common, step=held, label=None if held else label, root=label, by_path=False)
    notes = [f"left out {folder}: {why}" for folder, why in reasons.items()]
    return Names(named, (*notes, *_hints(path, named, steps_from)))


def is_checkpoint(path: str, exports: Files, others: Iterable[str]) -> bool:
    """Returns True if a folder with a step in its name is a checkpoint of that step, by the folders at and below it:
    the folder itself, or an export in it, holds the model, and no folder has a step of its own. Otherwise it is a run,
    and the step is part of its name. `exports` and `others`: as in `names_below`."""
    weights = [folder for folder, files in exports.items() if _has_weights(files)]
    holding = {folder: _below(path, folder) for folder in (*weights, *others)} or {
        folder: _below(path, folder) for folder in exports
    }
    if any(step_in(parts, above=storage.basename(path)) for parts in holding.values()):
        return False
    return any(all(map(is_export, parts)) or folder not in exports for folder, parts in holding.items())


def _has_weights(files: Sequence[FileInfo]) -> bool:
    return any(file.uri.endswith((".safetensors", ".safetensors.index.json", ".bin")) for file in files)


def _below(path: str, folder: str) -> tuple[str, ...]:
    return tuple(part for part in folder.removeprefix(path.rstrip("/")).removeprefix("@").split("/") if part)


def _by_expression(path: str, steps_from: str) -> Stepped | None:
    stepped = step_in(parts_of(path)[-1:], steps_from=steps_from)
    return stepped and stepped._replace(at=-1)


def _key(parts: Sequence[str], stepped: Stepped | None) -> tuple[str, ...]:
    if stepped is None:
        return tuple(filter(names_series, parts[:-1]))
    inside = [part for part in parts[stepped.at + 1 :] if names_series(part)]
    before = [part for part in parts[: max(stepped.at, 0)] if names_series(part)]
    return tuple(filter(None, (*before, stepped.series, *inside)))


def _label(parts: Sequence[str], key: tuple[str, ...], of_series: Sequence[tuple[str, ...]]) -> str | None:
    named = list(parts)
    while named and (is_place(named[-1]) or is_export(named[-1])) and (len(named) > 1 or "merged" not in named[-1]):
        named.pop()
    return " ".join((*(key if key not in of_series else ()), label_of(named[-1]))) if named else None


def _state_step(files: Sequence[FileInfo]) -> int:
    for file in files:
        key = _STATES.get(storage.basename(file.uri))
        if key is not None and file.size <= _LARGEST_STATE_BYTES:
            step = read_json(file, []).get(key)
            if isinstance(step, int) and 0 < step < 10**18:
                return step
    return 0


def not_alike(path: str, names: Names, complete: Iterable[str]) -> list[str]:
    """Returns a sentence for each name that different complete checkpoints below a path have."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for folder in complete:
        if folder in names.by_folder:
            by_name[names.by_folder[folder].name].append(folder)
    alike = {name: folders for name, folders in by_name.items() if len(folders) > 1}
    return [
        f"{' and '.join(of)} are different checkpoints called {name}: {way_out(path, of)}" for name, of in alike.items()
    ]


def way_out(path: str, folders: Sequence[str]) -> str:
    """Returns what to do about different checkpoints of a step below a path."""
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
        differing = [at for at in range(len(numbers[0])) if len({of_name[at] for of_name in numbers}) == len(names)]
        if differing:
            before, after = texts[0][differing[-1]], texts[0][differing[-1] + 1]
            return re.escape(before).replace(r"\-", "-") + r"(\d+)" + re.escape(after).replace(r"\-", "-")
    return r"step(\d+)-tokens"


def counted(names: Names, exports: Mapping[str, bool], model_of: Callable[[str], ModelFolder]) -> Names:
    """Returns the names of the checkpoints that count. Of several exports of a step this is a complete export before
    others, and then the first in the order of `EXPORTS`; of folders with equal digests the shortest path. A checkpoint
    without a step in its path has the step of the checkpoint with its digest. Different checkpoints of a step keep
    their common name, and are refused where they are evaluated. `exports`: folders in Hugging Face layout, True for
    complete checkpoints. `model_of` reads a complete checkpoint's folder."""
    kept, notes = dict(names.by_folder), list(names.notes)

    def leave_out(folder: str, why: str) -> None:
        del kept[folder]
        notes.append(f"left out {folder}: {why}")

    of_step: dict[tuple[str, str], list[str]] = defaultdict(list)
    for folder in filter(kept.__contains__, exports):
        of_step[kept[folder].name, kept[folder].root].append(folder)
    for folders in of_step.values():
        taken = min(folders, key=lambda folder: (not exports[folder], kept[folder].order, folder))
        for folder in set(folders) - {taken}:
            leave_out(folder, f"{taken} is an export of the same step")
    whole = [folder for folder, complete in exports.items() if complete and folder in kept]
    counting: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in sorted(whole, key=lambda folder: (not kept[folder].by_path, len(folder), folder)):
        named = kept[folder]
        of_run = [counting[named.run]] if named.series else [*counting.values()]
        rivals = [counting[named.run][named.name]] if named.by_path else [each for of in of_run for each in of.values()]
        others = [other for each in reversed(rivals) for other in each]
        if (same := next((other for other in others if _same(model_of(folder), model_of(other))), None)) is not None:
            leave_out(folder, f"its content is that of {same}")
            continue
        if not named.by_path and named.label is None and counting[named.run][named.name]:
            kept[folder] = named = replace(named, step=0, label=named.root)
        counting[named.run][named.name].append(folder)
    for folder, complete in exports.items():
        if folder in kept and not complete and (by_name := counting[kept[folder].run][kept[folder].name]):
            leave_out(folder, f"it is incomplete, and {by_name[0]} has the same step")
    return Names(kept, tuple(notes))


def _same(model: ModelFolder, other: ModelFolder) -> bool:
    pairs = [(model.files[name], other.files.get(name)) for name in model.weight_files if name in model.files]
    try:
        if model.weight_files != other.weight_files or not all(map(_may_be_equal, pairs)):
            return False
        return digest_model_folder(model).checkpoint == digest_model_folder(other).checkpoint
    except (FileNotFoundError, AssayError):  # a folder that changes, or is being removed
        return False


def _may_be_equal(pair: tuple[FileInfo, FileInfo | None]) -> bool:
    file, other = pair
    if other is None or file.size != other.size:
        return False
    if file.checksum and other.checksum:
        return file.checksum == other.checksum
    start = max(0, file.size - _COMPARED_BYTES)
    end = storage.read_bytes(file.place, start=start, end=file.size)
    return end == storage.read_bytes(other.place, start=start, end=file.size)
