"""Discovery of a run's checkpoints. Completeness is read from the files' headers, not from their age, so a checkpoint
that is still being written is never selected."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pools.weights.adapters.folder import NO_BASE
from pools.weights.formats import EXPORTERS, INDEX_NAME, SHARDED_FOLDER
from pools.weights.layouts import Exports, inspect_checkpoint, inspect_native_folder, is_native
from pools.weights.merges import merge_of, with_each_location
from pools.weights.model_files import ModelFolder, checkpoint_files
from pools.weights.overrides import Override, override_of, without_options
from pools.weights.tokenizers import NO_TOKENIZER, KnownFiles
from resources.errors import BadInput, not_there
from resources.storage import storage
from resources.storage.hub import is_repository
from resources.storage.listings import FileInfo
from resources.storage.mlflow_artifacts import pinned
from tasks.checkpoints.checkpoint import LOADED_NATIVELY, SERVED, Checkpoint, Kind, select
from tasks.checkpoints.foreign import described_as
from tasks.checkpoints.frameworks import Marks, TrainingState, marks_in, only_state, training_states
from tasks.checkpoints.merged import merged_checkpoint
from tasks.checkpoints.naming import Named, Names, counted, is_checkpoint, names_below, not_alike
from tasks.errors import NoCheckpoints, SeveralSeries
from tasks.prefect_server.lazy import step
from tasks.prefect_server.progress import report_event
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.labels import order_of
from tasks.spec.names import in_few_words, name_of, name_of_series, run_name_of
from tasks.spec.steps import has_step, is_export, step_of
from tasks.spec.suites import SuiteRequest

Request = TypeVar("Request", EvaluationConfig, SuiteRequest)

_MODEL_FILES = ("config.json", "adapter_config.json", "model.safetensors", INDEX_NAME)
_INCOMPLETE_POLL_SECONDS = 1.0
_TOKENIZER_SECONDS = 30.0  # since the last write: trainers write the tokenizer after the weights, or never
_SHARDED = "sharded"  # torchtitan's per-rank files, before they are consolidated in the parent folder


def find_checkpoints(
    path: str,
    *,
    kinds: Collection[Kind] = SERVED,
    reference: str | None = None,
    steps_from: str | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> list[Checkpoint]:
    """Returns every checkpoint at or below a path, complete or not, by step and then by modification time, labels
    last. All are of the run that the path names; `<path>/hf` means the same run, and a link is resolved first.
    Lists the store once and reads each folder's headers. `path`: a checkpoint, a run, or the name of a merged
    checkpoint of inputs in Hugging Face layout. `kinds`: layouts that can be evaluated; others are incomplete. An
    export hides the native checkpoint of its step. `reference`: folder with config and tokenizer for native
    checkpoints; when None, an export next to them. `steps_from`: an expression for steps in place of the usual
    words. `note`: is called with a sentence on each folder that is left out. Raises BadInput if the path does not
    exist or is a file, CheckpointError if the inputs of a merged checkpoint do not match."""
    if (merge := merge_of(path)) is not None:
        averaged: list[Kind] = [kind for kind in kinds if kind != "levanter"]
        return [merged_checkpoint(merge, partial(find_checkpoints, kinds=averaged, steps_from=steps_from))]
    options = override_of(path)
    path = storage.behind_link(without_options(path))  # the link may point elsewhere by the time an engine starts
    alone = step_of(storage.basename(path)) is not None and not is_repository(path)
    files = checkpoint_files(path) if alone else storage.list_run(path, belongs=has_step)
    layouts = layouts_in(files)
    if alone and not layouts.is_checkpoint(path):  # a run, within which links must stay
        files = storage.list_run(path, belongs=has_step)
        layouts = layouts_in(files)
    expected = "a folder: a checkpoint, or a run that holds checkpoints"
    if [file.uri for file in files] == [path] and not storage.is_folder(path):
        raise BadInput(expected=expected, found=f"{path} is a file", remedy="name the folder it lies in")
    if not files and not storage.exists(path):
        raise not_there(expected, path, "check the path; in an object store, also that you may list it")
    names = layouts.names(path, steps_from=steps_from)
    exports: dict[str, tuple[ModelFolder, tuple[str, ...]]] = {}
    files_in = KnownFiles(path, files)
    for folder, held, _ in layouts.named_exports(names):
        model = inspect_checkpoint(options.at(folder) if options else folder, held, files_in=files_in)
        exports[folder] = model, (*model.problems, *layouts.marks.missing(folder, held))
    complete = {folder: not problems for folder, (_, problems) in exports.items()}
    names = counted(names, complete, lambda folder: exports[folder][0])
    for text in (*names.notes, *not_alike(path, names, filter(complete.get, complete))):
        note(text)

    def export(folder: str, named: Named) -> Checkpoint:
        model, problems = exports[folder]
        return checkpoint_of(named, folder, model.modified, problems=problems, folder=model)

    named = layouts.checkpoints(names, export, kinds, reference=reference, options=options)
    checkpoints = [replace(made, uri=options.at(made.uri)) if options else made for made, _ in named]
    if not checkpoints:
        raise NoCheckpoints(
            expected=f"checkpoints at {path}, {path}/step-N or {path}/hf/step-N",
            found=described_as(files) if files else "an empty folder",
            remedy="wait until the first checkpoint is written, or name the folder that holds the checkpoints",
        )
    return sorted(checkpoints, key=lambda each: (order_of(each.step, each.label), each.modified, each.uri))


def checkpoint_at(folder: str, *, kinds: Collection[Kind] = SERVED, steps_from: str | None = None) -> Checkpoint | None:
    """Returns the checkpoint in a folder, complete or not, or None. An export within it counts as the folder's."""
    try:
        checkpoints = find_checkpoints(folder, kinds=kinds, steps_from=steps_from)
    except BadInput:
        return None
    own = storage.behind_link(folder)
    inside = {each.uri: [part for part in each.uri.removeprefix(own).split("/") if part] for each in checkpoints}
    return next((each for each in checkpoints if all(map(is_export, inside[each.uri]))), None)


class Layouts(NamedTuple):
    """Folders of checkpoints in a listing, with their files: exports to Hugging Face layout, native checkpoints, and
    states that only trainers load."""

    exports: dict[str, list[FileInfo]]
    native: dict[str, list[FileInfo]]
    states: list[TrainingState]
    marks: Marks

    def names(self, path: str, *, steps_from: str | None) -> Names:
        """Names the checkpoints by the path that was listed."""
        return names_below(path, self.exports, self._others(), steps_from=steps_from)

    def is_checkpoint(self, path: str) -> bool:
        """Returns True if the path that was listed, which has a step in its name, is a checkpoint of that step."""
        return is_checkpoint(path, self.exports, self._others())

    def _others(self) -> list[str]:
        return [*self.native, *(state.folder for state in self.states)]

    def named_exports(self, names: Names) -> Iterator[tuple[str, list[FileInfo], Named]]:
        """Yields folder, files and name of each export that has a name."""
        for folder, held in self.exports.items():
            if (named := names.by_folder.get(folder)) is not None:
                yield folder, held, named

    def checkpoints(
        self,
        names: Names,
        export: Callable[[str, Named], Checkpoint],
        kinds: Collection[Kind] = LOADED_NATIVELY,
        *,
        reference: str | None,
        options: Override | None,
    ) -> Iterator[tuple[Checkpoint, Sequence[FileInfo]]]:
        """Yields the checkpoints with `names`, with their files: native checkpoints and training states only if their
        step has no complete export, and states only if no export lies in them. `export`: makes the checkpoint of an
        export's folder. `kinds` and `reference`: as in `find_checkpoints`. `options`: of the run, for its reference."""
        complete: set[tuple[str, int]] = set()
        for folder, held, named in self.named_exports(names):
            made = export(folder, named)
            if made.complete and made.label is None:
                complete.add((made.run, made.step))
            yield made, held
        near, holding = Exports(), {*self.exports}
        for folder, held in self.native.items():
            if (named := names.by_folder.get(folder)) is None:
                continue
            if "levanter" not in kinds:
                yield _not_served(folder, held, named), held
                continue
            described = reference or near.export_for(folder)
            made = _levanter(folder, held, named, options.at(described) if options and described else described)
            if (made.run, made.step) not in complete:
                holding.add(folder)
                yield made, held
        holding |= {storage.parent(folder) for folder in holding} if self.states else set()
        for folder, files, kind, problem in self.states:
            named = names.by_folder.get(folder)
            if named is not None and folder not in holding and (named.run, named.step) not in complete:
                made = inspect_checkpoint(options.at(folder) if options else folder) if kind in kinds else None
                if made is not None and made.made_by in EXPORTERS:
                    yield checkpoint_of(named, folder, made.modified, problems=made.problems, folder=made), files
                else:
                    modified = max(file.modified for file in files)
                    yield checkpoint_of(named, folder, modified, kind=kind, problems=(problem,)), files


def layouts_in(files: Iterable[FileInfo]) -> Layouts:
    """Sorts the files of a listing by checkpoint and layout."""
    folders: dict[str, list[FileInfo]] = defaultdict(list)
    for file in files:
        folders[file.uri.rpartition("/")[0]].append(file)
    native, states = _native_folders(folders), training_states(folders)
    of_states = {state.folder for state in states}
    for place in [storage.parent(folder) for folder in folders if folder.endswith(f"/{SHARDED_FOLDER}")]:
        folders.setdefault(place, [])
    whole = {folder: [*held, *folders.get(f"{folder}/{SHARDED_FOLDER}", ())] for folder, held in folders.items()}
    exports = {
        folder: held
        for folder, held in whole.items()
        if not (native and any(outer in native for outer in _upwards(folder)))
        and not (of_states and only_state(folder, held, of_states))
        and _looks_like_checkpoint(folder, held)
    }
    return Layouts(exports, native, states, marks_in(folders))


def _looks_like_checkpoint(folder: str, files: Sequence[FileInfo]) -> bool:
    place, _, last = folder.rpartition("/")
    if step_of(last) is not None:
        return True
    if last == _SHARDED and step_of(place.rpartition("/")[2]) is not None:
        return False
    names = [file.uri.rpartition("/")[2] for file in files]
    return any(name in _MODEL_FILES or name.endswith(".safetensors") for name in names)


def _native_folders(folders: Mapping[str, list[FileInfo]]) -> dict[str, list[FileInfo]]:
    marked = {
        folder
        for folder, held in folders.items()
        if any(file.uri.endswith(("/metadata.json", "/manifest.ocdbt")) for file in held)
        and not any(file.uri.endswith("/_METADATA") for file in held)  # of orbax
    }
    held_by: dict[str, list[FileInfo]] = defaultdict(list)
    for folder, held in folders.items() if marked else ():
        for outer in _upwards(folder):
            if outer in marked:
                held_by[outer] += held
    return {
        folder: held
        for folder, held in held_by.items()
        if is_native([file.uri.removeprefix(f"{folder}/") for file in held])
    }


def _upwards(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def checkpoint_of(named: Named, uri: str, modified: float, **more: Any) -> Checkpoint:
    """Returns a checkpoint under a name; `more` are further fields of it."""
    return Checkpoint(uri, named.run, named.name, named.step, modified, label=named.label, series=named.series, **more)


def _levanter(folder: str, files: Sequence[FileInfo], named: Named, reference: str | None) -> Checkpoint:
    held, held_step = inspect_native_folder(folder, files, reference=reference)
    if held_step is not None and held_step != named.step:
        named = replace(named, step=held_step, label=None, alone=False)
    return checkpoint_of(named, folder, held.modified, kind="levanter", problems=held.problems, folder=held)


def _not_served(folder: str, files: Sequence[FileInfo], named: Named) -> Checkpoint:
    problem = (
        "a native Levanter checkpoint: export it to Hugging Face format to serve it, or evaluate it with "
        "levanter_lm_evaluation_harness"
    )
    return checkpoint_of(named, folder, max(file.modified for file in files), kind="levanter", problems=(problem,))


@step(task_run_name="look at {path}")
def discover(
    path: str,
    selection: CheckpointSelection,
    *,
    kinds: Collection[Kind] = SERVED,
    reference: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Checkpoint]:
    """Returns the complete and selected checkpoints, and reports incomplete checkpoints as events. Waits for them up
    to `wait_for_incomplete_seconds`, with a listing every second. `kinds` and `reference` are those of
    `find_checkpoints`."""
    deadline = clock() + selection.wait_for_incomplete_seconds
    while True:
        notes: list[str] = []
        listed = find_checkpoints(
            path, kinds=kinds, reference=reference, steps_from=selection.steps_from, note=notes.append
        )
        checkpoints = in_series(listed, selection.series, path)
        incomplete = [checkpoint for checkpoint in checkpoints if not checkpoint.complete]
        if not any(map(_can_complete, incomplete)) or clock() >= deadline:
            break
        sleep(_INCOMPLETE_POLL_SECONDS)
    selected = select(complete_among(checkpoints, path, on_left_out=report_event), selection)
    noted: dict[str, list[str]] = defaultdict(list)
    for checkpoint in selected:
        for text in checkpoint.notes:
            noted[text].append(checkpoint.name)
    for text in (*notes, *(f"{in_few_words(names)}: {text}" for text, names in noted.items())):
        report_event(text)
    return selected


def in_series(checkpoints: Sequence[Checkpoint], series: str | None, path: str) -> list[Checkpoint]:
    """Returns the checkpoints of a series below a path; raises SeveralSeries if there are several and none is named.
    `series`: its name, or `.` for the checkpoints that are in none of the others."""
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.complete] or checkpoints
    names = sorted({checkpoint.series or "." for checkpoint in complete})
    if series is None and len(names) > 1:
        raise SeveralSeries(
            expected=f"checkpoints of a single series below {path}",
            found=f"{len(names)} series: {', '.join(names)}",
            remedy=f"evaluate each by itself (series): {' or '.join(f'--series {name}' for name in names)}",
        )
    if series is not None and series not in names and merge_of(path) is None:
        raise NoCheckpoints(
            expected=f"checkpoints of the series {series} below {path}",
            found=f"the series {', '.join(names)}",
            remedy="correct --series (series), or leave it out",
        )
    return [checkpoint for checkpoint in checkpoints if series in (None, checkpoint.series or ".")]


def _can_complete(checkpoint: Checkpoint) -> bool:
    return checkpoint.has_known_layout and not any(map(_lacks_tokenizer, checkpoint.lacking))


def _lacks_tokenizer(checkpoint: Checkpoint) -> bool:
    lacks = all(problem.startswith(NO_TOKENIZER) for problem in checkpoint.problems)
    return lacks and time.time() - checkpoint.modified > _TOKENIZER_SECONDS


@step(task_run_name="look at {path}")
def discover_checkpoint(
    path: str,
    *,
    latest: bool,
    kinds: Collection[Kind] = SERVED,
    reference: str | None = None,
    steps_from: str | None = None,
) -> Checkpoint:
    """Returns the single checkpoint at a path or, with `latest`, the newest complete checkpoint below it."""
    checkpoints = discover.fn(path, CheckpointSelection(steps_from=steps_from), kinds=kinds, reference=reference)
    if len(checkpoints) > 1 and not latest:
        raise BadInput(
            expected=f"a single checkpoint at {path}",
            found=f"{len(checkpoints)}, from {checkpoints[0].name} to {checkpoints[-1].name}",
            remedy="name one of them, set discover_latest_checkpoint, or evaluate them all with evaluate_checkpoints",
        )
    return select(checkpoints, CheckpointSelection(which="latest"))[0]


def with_pinned_model(config: Request, series: str | None = None) -> Request:
    """Returns a request in which aliases of models in MLflow's registry are replaced by version numbers, under the name
    of a selected series. If all branches of a repository on the hub are of a single series, the run has its
    name, as a branch named directly has. Another run has the name that `run_named_by` returns."""
    path = with_each_location(config.model_path, pinned)
    changes: dict[str, Any] = {"model_path": path}
    if config.model_name is None:
        former, name, pool = name_of(config.model_path)[0], run_named_by(path), config.pool_config
        if is_repository(path):
            named = {name_of(place)[0] for place, _ in storage.refs_of_run(path, has_step) if place != path}
            name = named.pop() if len(named) == 1 else name
        if pool is not None and pool.model.name == former:
            changes["pool_config"] = pool.model_copy(update={"model": pool.model.model_copy(update={"name": name})})
        elif pool is None and name != name_of(path)[0]:
            changes["model_name"] = name
    config = config.model_copy(update=changes)
    name = name_of_series(config.run_name, series)
    return config if name == config.run_name else config.model_copy(update={"model_name": name})


def run_named_by(path: str) -> str:
    """Returns the name of the run at a path. If the last part has a step, it is listed: see `naming.is_checkpoint`."""
    if (merge := merge_of(path)) is not None:
        source = merge.sources[-1]
        return run_name_of(source.location) if source.steps else run_named_by(source.location)
    run, name, _ = name_of(path)
    if name == run:
        return run
    place = storage.behind_link(without_options(path))
    single = layouts_in(storage.list_run(place, belongs=has_step)).is_checkpoint(place)
    return run if single else run_name_of(path)


def complete_among(every: Sequence[Checkpoint], path: str, *, on_left_out: Callable[[str], object]) -> list[Checkpoint]:
    """Returns the complete checkpoints among those of a path; calls `on_left_out` with the problems of each other."""
    incomplete = [checkpoint for checkpoint in every if not checkpoint.complete]
    for checkpoint in incomplete:
        on_left_out(f"left out {checkpoint.uri}: {'; '.join(checkpoint.problems)}")
    complete = [checkpoint for checkpoint in every if checkpoint.complete]
    if not complete:
        lacking = [each for checkpoint in incomplete for each in checkpoint.lacking]
        reasons = "; ".join(f"{storage.basename(c.uri)}: {', '.join(c.problems)}" for c in incomplete[:5])
        raise NoCheckpoints(
            expected=f"a complete checkpoint at {path}",
            found=f"{len(incomplete)} incomplete ({reasons})",
            remedy="name a tokenizer with --tokenizer (tokenizer in YAML): a folder, or owner/name on the hub"
            if all(map(_lacks_tokenizer, lacking))
            else "name their base with --base (base in YAML): a folder, or owner/name on the hub"
            if all(NO_BASE in problem for checkpoint in lacking for problem in checkpoint.problems)
            else "wait until a checkpoint is complete; `assay checkpoints` shows what is missing"
            if any(checkpoint.has_known_layout for checkpoint in incomplete)
            else "export a checkpoint to Hugging Face format",
        )
    return complete
