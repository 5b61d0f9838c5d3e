"""Cells: planned from evaluations and checkpoints, and concluded by their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import SecretStr

from pools.architectures import language_config
from pools.engine.engines import with_engine_variables
from pools.pool.access import PoolAccess
from pools.pool.kept import access_to
from pools.weights.kept import keep
from pools.weights.layouts import inspect_again
from pools.weights.merges import locations_of
from pools.weights.model_files import ModelDigests, ModelFolder, digest_model_folder
from pools.weights.own_code import require_code_allowed
from pools.weights.tokenizers import TOKENIZER_FILES
from resources.backends.current import current_client
from resources.environments.environments import ensure_environment
from resources.errors import BadInput, CheckpointGone, StorageError
from resources.storage import storage
from resources.storage.mlflow_artifacts import is_behind_server
from tasks.checkpoints.checkpoint import Checkpoint
from tasks.checkpoints.merged import merge_reference
from tasks.checkpoints.naming import way_out
from tasks.checkpoints.run_snapshot import listing_of
from tasks.errors import EvaluationIncomplete, EvaluationInterrupted, SinkFailed
from tasks.evaluators.early import WantedEarly
from tasks.evaluators.evaluator import evaluator_of
from tasks.prefect_server.lazy import deployment_id, step
from tasks.prefect_server.progress import Notice, report_event
from tasks.records.cost import Predicted
from tasks.records.details import CheckpointReference, cell_place
from tasks.records.record import FoundRecord, Record, find_records, read_record, record_to_replace
from tasks.records.samples import encodable
from tasks.records.search import former_record
from tasks.records.verdicts import EarlyVerdict
from tasks.sinks.credentials import loaded_block
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig, digest_of
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import check_deployed_paths, how_many, in_few_words, place_of

_MOST_NAMES_IN_A_CELL = 3
_KEYS = ("key", "admin_key")
_Hashed = tuple[EvaluationConfig, str, tuple[EvaluationConfig, str] | None]  # an evaluation, its hash, its fallback


@dataclass(frozen=True, eq=False)
class Cell:
    """A checkpoint with a set of benchmarks. `uri` is its folder; `record` its record at planning time.

    `levanter_fallback` is the same evaluated by Levanter, used if the engine returns no prompt log-probabilities.
    """

    config: EvaluationConfig
    folder: ModelFolder
    digests: ModelDigests
    reference: CheckpointReference
    evaluation_hash: str
    uri: str
    record: Record | None
    levanter_fallback: Cell | None = None
    early: WantedEarly | None = None
    """Decisions that may end the evaluation before all requests are sent, if any."""
    early_verdict: EarlyVerdict | None = None
    predicted: Predicted | None = None

    @property
    def settled(self) -> bool:
        """True if it is done, or was decided early as requested."""
        return self.done or self.early_verdict is not None

    @property
    def done(self) -> bool:
        """True if it had a succeeded record when it was planned, so that nothing is left to do."""
        return any(cell.record is not None and cell.record.succeeded for cell in self.ways)

    @property
    def ways(self) -> tuple[Cell, ...]:
        """The cell and its fallback, if any: a record of either is an outcome."""
        return (self,) if self.levanter_fallback is None else (self, self.levanter_fallback)

    @property
    def title(self) -> str:
        return f"{self.reference.name} · {self.config.evaluator.title}"


def configs_of(cells: Iterable[Cell]) -> list[EvaluationConfig]:
    """Returns the evaluations of cells, each once: all checkpoints share the object."""
    return list({id(cell.config): cell.config for cell in cells}.values())


def as_served(config: EvaluationConfig) -> EvaluationConfig:
    """Returns the evaluation with the pool configuration of its kept pool, or its own with engine variables added."""
    if config.pool_name is None and config.pool_config is not None:
        return config.model_copy(update={"pool_config": with_engine_variables(config.pool_config)})
    if config.pool_name is None or config.native:
        return config
    served = access_of(config.pool_name, config.pool_key_block).config
    pool_config = served.model_copy(update={"model": served.model.model_copy(update={"path": None})})
    return config.model_copy(update={"pool_config": pool_config, "model_name": config.named})


def access_of(pool: str, key_block: str | None = None) -> PoolAccess:
    """Returns access to a kept pool, given by name or address; see `access_to`.

    `key_block` is a Prefect secret block with the key of the pool at an address, or with an object of `key` and
    `admin_key`; without it, the keys come from the settings. A block with other content is refused.
    """
    return access_to(pool, **(_keys_in(key_block) if key_block is not None else {}))


def _keys_in(block: str) -> dict[str, SecretStr]:
    from prefect.blocks.system import Secret

    try:
        content: Any = loaded_block(Secret, block).get()
    except SinkFailed as error:
        raise BadInput(expected=error.expected, found=error.found, remedy=error.remedy) from error
    keys = content if isinstance(content, dict) else {"key": content}
    if not keys or set(keys) - set(_KEYS) or not all(isinstance(key, str) and key for key in keys.values()):
        raise BadInput(
            expected=f"a pool's key in the Prefect block {block}, or an object with {' and '.join(_KEYS)}",
            found="something else",
            remedy="write there what `assay pool env NAME` prints where the pool was started",
        )
    return {name: SecretStr(key) for name, key in keys.items()}


@step(task_run_name="plan")
def plan_cells(configs: Sequence[EvaluationConfig], checkpoints: Sequence[Checkpoint]) -> list[Cell]:
    """Returns a cell for each checkpoint and evaluation, grouped by checkpoint, with the existing record if any.

    Leaves out checkpoints that were removed since they were listed, and reports them. Not retried: failures come from
    the request, a changed checkpoint, or a folder that is not writable.
    """
    _check_together(configs)
    hashed: list[_Hashed] = []
    is_folder = cache(storage.is_folder)
    for config in configs:
        _check_request(config, checkpoints)
        storage.check_writable(config.evaluation_path)
        fallback = config.levanter_fallback()
        for asked in filter(None, (config, fallback)):
            _look_at_request(asked)
        hashed.append((config, evaluation_hash(config), fallback and (fallback, evaluation_hash(fallback))))
    cells = []
    for checkpoint in checkpoints:
        try:
            cells += _cells_of(checkpoint, hashed, is_folder)
        except CheckpointGone as gone:
            report_event(f"{checkpoint.name} is gone: {gone.found}", Notice)
    for cell in cells:
        if not cell.settled and cell.config.protect:
            keep(cell.folder, cell.digests, wanted_by=cell.uri)
    _check_names(cells)
    done = sum(cell.done for cell in cells)
    if cells:
        count = how_many(len(cells), "cell")
        report_event(f"{count} wanted, {done} recorded already, {len(cells) - done} to evaluate")
    return cells


def _cells_of(checkpoint: Checkpoint, hashed: Iterable[_Hashed], is_folder: Callable[[str], bool]) -> Iterator[Cell]:
    folder = checkpoint.folder
    assert folder is not None, "only complete checkpoints become cells"
    try:
        digests = digest_model_folder(folder)
        for config, hash_, fallback in hashed:
            cell = _cell(config, checkpoint, digests, hash_, is_folder)
            if fallback is not None:
                cell = replace(cell, levanter_fallback=_cell(fallback[0], checkpoint, digests, fallback[1], is_folder))
            yield cell
    except StorageError:
        inspect_again(folder).require_complete(planned=True)
        raise


def _look_at_request(config: EvaluationConfig) -> None:
    evaluator = evaluator_of(config)
    elsewhere = config.native and not current_client().is_local  # its own is built remotely, maybe for another device
    spec = evaluator.environments[0] if elsewhere else evaluator.environment(config)
    evaluator.check(config, ensure_environment(spec).python)


def _check_together(configs: Sequence[EvaluationConfig]) -> None:
    if not configs:
        raise BadInput(expected="an evaluation", found="none", remedy="name a benchmark or a suite")
    for field, values in {
        "run": {config.run_name for config in configs},
        "evaluation_path": {config.evaluation_path for config in configs},
        "model_path": {config.model_path for config in configs},
    }.items():
        if len(values) > 1:
            raise BadInput(
                expected=f"the same {field} in evaluations that are made together",
                found=", ".join(sorted(values)),
                remedy="make them separately, or set model_name in each",
            )
    twice = [key for key, times in Counter(_identity(config) for config in configs).items() if times > 1]
    if twice:
        raise BadInput(
            expected="evaluations that differ",
            found=f"{evaluator_title(twice[0][0])} twice with the same benchmarks and options",
            remedy="leave one of them out",
        )


def _identity(config: EvaluationConfig) -> tuple[str, str]:
    return config.evaluator.name, digest_of(config.score_inputs())


def _check_request(config: EvaluationConfig, checkpoints: Sequence[Checkpoint]) -> None:
    twice = [
        name for name, times in Counter(_name(config, checkpoint) for checkpoint in checkpoints).items() if times > 1
    ]
    if twice:
        places = [checkpoint.uri for checkpoint in checkpoints if _name(config, checkpoint) == twice[0]]
        raise BadInput(
            expected=f"a single checkpoint of each name below {config.model_path}",
            found=f"{twice[0]} at {', '.join(places)}",
            remedy=way_out(config.model_path, places),
        )
    if config.served_model_name is not None and len(checkpoints) > 1:
        raise BadInput(
            expected="a single checkpoint for served_model_name",
            found=f"{len(checkpoints)} checkpoints",
            remedy="name one of them as model_path",
        )
    places = [getattr(sink, name, None) for sink in config.sinks for name in ("url", "path", "folder")]
    _check_resources(config, checkpoints)
    if config.pool_config is not None:
        require_code_allowed((each.folder for each in checkpoints if each.folder), allowed=config.trusts_code)
    elif config.base_url is not None and config.evaluator.reads_tokenizer:
        require_code_allowed((each.folder for each in checkpoints if each.folder), allowed=False, engine=False)
    for each in checkpoints if config.evaluator.reads_tokenizer else ():
        if each.folder and {"tekken.json"} == {*TOKENIZER_FILES} & each.folder.files.keys():
            raise BadInput(
                expected=f"a tokenizer that the harness reads, too, in {each.uri}",
                found="tekken.json alone, which only mistral-common reads",
                remedy="name another with --tokenizer: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER), "
                "where mistral-common is installed, converts it",
            )
    paths = [config.evaluation_path, config.model_path, *filter(None, [config.benchmarks_path, *places])]
    for path in filter(None, (*paths, config.native_reference, *(checkpoint.uri for checkpoint in checkpoints))):
        if encodable(path) != path:
            raise BadInput(
                expected="paths in UTF-8, as records are", found=ascii(path), remedy="give the folder another name"
            )
    if deployment_id():
        check_deployed_paths(paths)


def _check_names(cells: Sequence[Cell]) -> None:
    planned = {cell.reference.uri: cell for cell in cells if cell.record is None}
    rejected: dict[str, str] = {}
    for cell in planned.values():
        own, path = cell.reference, cell.config.evaluation_path
        for item in find_records(storage.join(path, own.run, own.folder), rejected=rejected):
            other = item.record.checkpoint
            elsewhere = place_of(other.uri) != place_of(own.uri)
            if elsewhere and other.name == own.name and other.digest != own.digest:
                raise BadInput(
                    expected=f"a single checkpoint called {own.name} with records in {cell.config.evaluation_path}",
                    found=f"records of the checkpoint at {other.uri}, which differs from {own.uri}",
                    remedy="give its run a name of its own (model_name, --name), or choose another evaluation_path",
                )
    for uri, reason in rejected.items():
        again = any(way.uri == uri for cell in cells for way in cell.ways)
        words = BadInput(
            expected=f"the record of this cell in {uri}",
            found=reason,
            remedy="none, if it may be replaced: the cell counts as not evaluated, and is evaluated now"
            if again
            else "move the folder back, or delete it; until then it counts for nothing",
        )
        report_event(str(words), Notice)


def _check_resources(config: EvaluationConfig, checkpoints: Sequence[Checkpoint]) -> None:
    pool = config.pool_config if config.pool_name is None else None
    resources = config.resource_config if config.native else pool.resource_config if pool else None
    if resources is not None:
        current_client().check_resources(resources.by_machine())
    behind = [each for each in checkpoints if config.native and any(map(is_behind_server, locations_of(each.uri)))]
    if behind and (not current_client().is_local or behind[0].kind == "levanter"):
        raise BadInput(
            expected="a checkpoint in Hugging Face layout and jobs on this machine, or a checkpoint in a store that "
            f"{config.evaluator.title} reads itself",
            found=f"{behind[0].uri}, which is read through MLflow's server",
            remedy="download it first (mlflow artifacts download), or evaluate it with an evaluator that asks a pool",
        )
    asked = pool.model.engine_kwargs.get("max_model_len") if pool else None
    if not isinstance(asked, int):
        return
    for checkpoint in checkpoints:
        described = language_config(checkpoint.folder.config) if checkpoint.folder else {}
        held = described.get("max_position_embeddings")
        scaled = described.get("rope_scaling") or described.get("rope_parameters")
        if isinstance(held, int) and not scaled and asked > held:
            raise BadInput(
                expected=f"at most max_model_len={held}, which is what {checkpoint.name} holds",
                found=f"max_model_len={asked} in engine_kwargs, or from the suite",
                remedy=f"set it: --engine max_model_len={held}",
            )


def _name(config: EvaluationConfig, checkpoint: Checkpoint) -> str:
    return f"{config.run_name}{checkpoint.name.removeprefix(checkpoint.run)}"


def _cell(
    config: EvaluationConfig,
    checkpoint: Checkpoint,
    digests: ModelDigests,
    hash_: str,
    is_folder: Callable[[str], bool],
) -> Cell:
    assert checkpoint.folder is not None, "only complete checkpoints become cells"
    reference = CheckpointReference(
        uri=checkpoint.uri,
        run=config.run_name,
        name=_name(config, checkpoint),
        step=checkpoint.step,
        label=checkpoint.label,
        digest=digests.checkpoint,
        weights_digest=digests.weights,
        listing=listing_of(checkpoint),
        merge=merge_reference(checkpoint),
        notes=checkpoint.notes,
    )
    keys = [task.metric_key for task in config.evals]
    more = len(keys) - _MOST_NAMES_IN_A_CELL
    shown = "-".join(keys[:_MOST_NAMES_IN_A_CELL]) + (f"-and-{more}-more" if more > 0 else "")
    place = cell_place(reference, config.evaluator.name, evaluation_hash=hash_, shown=shown[:80])
    uri = storage.join(config.evaluation_path, place)
    record = record_to_replace(uri)
    if record is None:
        record = former_record(uri, reference, config.model_path, is_folder=is_folder)
        if record is not None:
            report_event(
                f"{reference.name}: a record of {', '.join(record.benchmarks)} had another name, and was copied"
            )
    return Cell(config, checkpoint.folder, digests, reference, hash_, uri, record)


def conclude(cells: Sequence[Cell]) -> list[Record]:
    """Returns the current records of the cells.

    Raises:
        EvaluationIncomplete, EvaluationInterrupted: a cell has no succeeded record, though its checkpoint is not gone,
            or all checkpoints are gone.
    """
    standing = {cell: standing_record(cell) for cell in cells}
    records = {cell: item.record if item else None for cell, item in standing.items()}
    missing = {
        cell.title: record.status if record else "infra_failed"
        for cell, record in records.items()
        if record is None or not record.succeeded
    }
    gone = [title for title, status in missing.items() if status == "gone"]
    if len(missing) == len(gone) < max(1, len(cells)):
        if gone:
            report_event(f"gone before their evaluation: {in_few_words(gone)}", Notice)
        return [record for record in records.values() if record is not None]
    ours = set(missing.values()) == {"infra_failed"}
    reasons = [record.reason for record in records.values() if record and record.reason]
    kind = EvaluationInterrupted if ours else EvaluationIncomplete
    raise kind(
        expected=f"a succeeded record for {'each of ' if len(cells) > 1 else ''}{how_many(len(cells), 'cell')}",
        found=f"{', '.join(f'{name}: {status}' for name, status in missing.items())}"
        + (f". The first reason:\n{reasons[0]}" if reasons else ""),
        remedy="run it again: only these are evaluated" if ours else "see the reason in each record.json",
    )


def standing_record(cell: Cell) -> FoundRecord | None:
    """Returns the record that counts for a cell and its fallback: the newest success, else the newest record."""
    records = [FoundRecord(way.uri, record) for way in cell.ways if (record := read_record(way.uri)) is not None]
    return max(records, key=lambda item: (item.record.succeeded, item.record.created), default=None)
