"""Files by which training frameworks mark complete checkpoints, and training states that only trainers load.

A mark is checked on top of the files: it never makes a broken checkpoint complete, but if the framework writes a mark,
a checkpoint without it is incomplete. Sources:

- prime-rl (PrimeIntellect-ai/prime-rl 559b447, v0.8.1.dev67): `STABLE`, after all files, in every `broadcasts/step_N`;
  up to v0.8.1.dev56 also in every `weights/step_N`;
- miles (radixark/miles 31f1ca9): `.complete`, after all files, in every Hugging Face export since 3 August 2026;
  removed before an export is rewritten;
- Megatron-LM (NVIDIA/Megatron-LM d98e8a6) and Megatron-Bridge (NVIDIA-NeMo/Megatron-Bridge 067f987, 0.7.0):
  `latest_checkpointed_iteration.txt` next to `iter_N`, once all ranks have written; valid for `iter_N/hf` too;
- torch.distributed.checkpoint (PyTorch 2.13.0): `.metadata`, or `__0.metadata` where each rank writes its own, moved
  into place after all files. torchtitan (pytorch/torchtitan b5bcd76) resumes from no folder without it;
- accelerate 1.15.0: the same in `pytorch_model_fsdp_0`, which is exported while staged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pools.weights.formats import PICKLED_NAME, SHARDED_FOLDER
from resources.errors import StorageError
from resources.storage import storage
from resources.storage.listings import FileInfo
from tasks.checkpoints.foreign import how_exported, is_foreign
from tasks.spec.steps import is_export, step_of

_MARKS = {"STABLE": "prime-rl", ".complete": "miles"}
_BROADCASTS = "broadcasts"
_TRACKER = "latest_checkpointed_iteration.txt"
_WITHOUT_MARK = "is not there, which {framework} writes when a checkpoint is whole"
_BARE = "prime-rl broadcasts weights alone: deployments/hooks/assay_prime_rl.py adds config and tokenizer"
_TRACKED = f"{_TRACKER} names"
_SHARD = ".distcp"
_LEGACY = "/model_optim_rng.pt"  # Megatron's `torch` format, a file in each `mp_rank_…`

Folders = Mapping[str, Sequence[FileInfo]]
"""Folders of a run, each with the files directly in it."""


@dataclass(frozen=True)
class Marks:
    """Marks in a listing: first marked step by (parent folder, mark), Megatron's last complete iteration by folder."""

    first: Mapping[tuple[str, str], int]
    latest: Mapping[str, int]

    def missing(self, folder: str, files: Sequence[FileInfo]) -> tuple[str, ...]:
        """Returns the problems of a checkpoint that lacks its framework's mark. After the first mark in a folder, every
        later checkpoint there must have it; earlier checkpoints may come from an older version of the framework.
        prime-rl's broadcasts are recognised by their path."""
        if not self.first and not self.latest and _BROADCASTS not in folder:  # true for most runs
            return ()
        place, name = storage.parent(folder), storage.basename(folder)
        step = step_of(name)
        if step is None and is_export(name):
            return self._after_latest(place)
        names = {storage.basename(file.uri) for file in files}
        missing = [
            f"{mark} {_WITHOUT_MARK.format(framework=framework)}"
            for mark, framework in _MARKS.items()
            if mark not in names and self._wanted(place, mark, step)
        ]
        if storage.basename(place) == _BROADCASTS and "STABLE" in names and "config.json" not in names:
            missing.append(_BARE)
        return (*missing, *self._after_latest(folder))

    def _wanted(self, place: str, mark: str, step: int | None) -> bool:
        if mark == "STABLE" and storage.basename(place) == _BROADCASTS:
            return True
        first = self.first.get((place, mark))
        return first is not None and step is not None and step > first

    def _after_latest(self, folder: str) -> tuple[str, ...]:
        latest, step = self.latest.get(storage.parent(folder)), step_of(storage.basename(folder))
        if latest is None or step is None or step <= latest:
            return ()
        return (f"{_TRACKED} {latest}: Megatron is still writing {step}, or gave it up",)


def marks_in(folders: Folders) -> Marks:
    """Finds the marks in a listing; reads Megatron's, which lies next to its checkpoints."""
    first: dict[tuple[str, str], int] = {}
    iterations: set[str] = set()
    for folder, files in folders.items():
        place, _, name = folder.rpartition("/")
        step = step_of(name)
        if step is None:
            if is_export(name):
                iterations.update(_place_of_iterations(place))
            continue
        iterations.update(_place_of_iterations(folder))
        for file in files:
            mark = file.uri.rpartition("/")[2]
            if mark in _MARKS:
                first[place, mark] = min(step, first.get((place, mark), step))
    read = {place: _latest_iteration(place) for place in iterations}
    return Marks(first, {place: latest for place, latest in read.items() if latest is not None})


def is_about_marks(problem: str) -> bool:
    """Returns True if a problem comes from `Marks`, so that it depends on more than the checkpoint's own files."""
    return (
        problem == _BARE
        or _TRACKED in problem
        or any(problem == f"{mark} {_WITHOUT_MARK.format(framework=framework)}" for mark, framework in _MARKS.items())
    )


def _place_of_iterations(folder: str) -> list[str]:
    place, _, name = folder.rpartition("/")
    return [place] if name.startswith("iter_") and step_of(name) is not None else []


def _latest_iteration(place: str) -> int | None:
    try:
        return int(storage.read_bytes(storage.join(place, _TRACKER)))
    except (FileNotFoundError, ValueError, StorageError):  # an unreadable mark counts as absent
        return None


class TrainingState(NamedTuple):
    """A checkpoint that only trainers load: its folder, all its files, its framework, and how to export it."""

    folder: str
    files: Sequence[FileInfo]
    kind: Literal["dcp", "megatron", "foreign"]
    problem: str


def training_states(folders: Folders) -> list[TrainingState]:
    """Returns the checkpoints of torch.distributed.checkpoint and of Megatron in a listing, complete or not."""
    parts: dict[str, list[str]] = {}
    for folder, files in folders.items():
        if any(file.uri.endswith((_SHARD, _LEGACY)) or is_foreign(file.uri.rpartition("/")[2]) for file in files):
            parts.setdefault(_root(folder, folders), []).append(folder)
    return [
        _state(root, [file for part in {root, *shards} for file in folders.get(part, ())])
        for root, shards in parts.items()
    ]


def _root(folder: str, folders: Folders) -> str:
    parent = storage.parent(folder)
    if (step := step_of(storage.basename(folder))) is not None:  # DeepSpeed's in transformers' checkpoint-N
        return parent if step_of(storage.basename(parent)) == step else folder
    within = step_of(storage.basename(parent)) is not None or storage.join(parent, SHARDED_FOLDER) in folders
    return parent if within or _of_nemo(parent, folders) else folder


def _of_nemo(folder: str, folders: Folders) -> bool:
    return storage.join(folder, "context") in folders and storage.join(folder, "weights") in folders


def _state(root: str, files: Sequence[FileInfo]) -> TrainingState:
    below = {file.uri.removeprefix(f"{root}/"): file.uri for file in files}
    names = {name.rpartition("/")[2] for name in below}
    if words := how_exported(root, below, _export_of(root)):
        return TrainingState(root, files, "foreign", words)
    megatron = bool(_place_of_iterations(root))
    kind = "megatron" if megatron or not names.isdisjoint(("metadata.json", "run_config.yaml")) else "dcp"
    whole = any(name == ".metadata" or (name[:2] == "__" and name.endswith(".metadata")) for name in names)
    if any(name.endswith(_SHARD) for name in names) and not whole:
        return TrainingState(root, files, kind, ".metadata is not there, which is written when all shards are")
    if megatron:
        below.setdefault("metadata.json", root)
    return TrainingState(root, files, kind, how_exported(root, below, _export_of(root), sharded=True) or "")


def _export_of(root: str) -> str:
    place = storage.parent(root)
    run = storage.parent(place) if storage.basename(place) == "checkpoints" else place
    return storage.join(run, "hf", storage.basename(root))


def only_state(folder: str, files: Sequence[FileInfo], states: Set[str]) -> bool:
    """Returns True if a folder belongs to a training state and is no export: an export has weights, or is called `hf`,
    or has FSDP's shards, or others and the model's config, so that they are exported while staged."""
    parent = storage.parent(folder)
    if states.isdisjoint((folder, parent, storage.parent(parent))):
        return False
    names = {file.uri.removeprefix(f"{folder}/") for file in files}
    shards = [name for name in names if name.endswith(_SHARD)]
    described = any(name.startswith(SHARDED_FOLDER) for name in shards) or bool(shards and "config.json" in names)
    weights = any(name.endswith(".safetensors") or name.startswith(PICKLED_NAME) for name in names)
    return storage.basename(folder) != "hf" and not weights and not described
