"""Parts of a record other than its scores: checkpoint, benchmarks, construction of requests."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from pools.weights.merges import MergeKind
from resources.errors import IrregularFile
from resources.storage import storage
from tasks.spec.evaluation import digest_of
from tasks.spec.labels import InRun
from tasks.spec.names import in_steps

_Value = TypeVar("_Value")
_Model = TypeVar("_Model", bound=BaseModel)
_SHAPE = {
    "evals": [{"name": {str}, "task_alias": {str}, "task_kwargs": {}}],
    "max_eval_instances": {int},
    "pool_config": {"model": {"engine_kwargs": {}}, "resource_config": {"device": {}}},
    "resource_config": {"device": {}},
    "engine": {"packages": {}},
    "replica_seconds": {int, float},
}
"""Expected types of values in `Described`; readers of records rely on them where a value exists."""


def _path_part(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or len(name.encode()) > 255:
        raise ValueError(f"expected the name of a single file or folder, found {name!r:.300}")
    return name


def bounded(value: _Value) -> _Value:
    """Raises `ValueError` for numbers too large for readers to add, multiply and store; allows NaN and infinities."""
    if isinstance(value, int | float) and (2**63 if isinstance(value, int) else 1e70) <= abs(value) < math.inf:
        raise ValueError("expected numbers below 1e70, so that their fourth power is a float, and integers of 64 bits")
    inner: Any = vars(value) if isinstance(value, BaseModel) else value
    for each in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else ():
        bounded(each)
    return value


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value or {}, dict) and all(_fits((value or {}).get(name), shape[name]) for name in shape)
    if isinstance(shape, list):
        return isinstance(value or [], list) and all(inner and _fits(inner, shape[0]) for inner in value or [])
    return value is None or type(value) in shape


def _described(content: dict[str, Any]) -> dict[str, Any]:
    json.dumps(content, allow_nan=False)
    if wrong := [name for name, shape in _SHAPE.items() if not _fits(content.get(name), shape)]:
        raise ValueError(f"{', '.join(wrong)} of a kind that no evaluation writes")
    return content


Described = Annotated[dict[str, Any], AfterValidator(_described)]
"""Settings or facts as JSON, with objects, lists and numbers where readers of records expect them."""
PathPart = Annotated[str, AfterValidator(_path_part)]
"""Name of a file or folder that cannot lead out of its folder."""
InnerPath = Annotated[str, AfterValidator(lambda path: "/".join(map(_path_part, path.split("/"))))]
"""Path that stays below a folder."""
Timestamp = Annotated[float, Field(ge=0, lt=253402300800)]
"""Time in seconds since the epoch, before the year 10000."""
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""64-bit integer, as indices and columns store it."""


def read_model(uri: str, kind: type[_Model]) -> _Model | None:
    """Returns the content of a JSON file; None if it is gone, not a regular file, or invalid, as by a newer Assay."""
    try:
        return kind.model_validate_json(storage.read_bytes(uri))
    except (FileNotFoundError, IrregularFile, ValidationError):
        return None


class Part(BaseModel):
    """Base of the parts of a record: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Placed(Part, InRun):
    """A checkpoint's place in its run."""

    step: Whole
    """Training step; 0 for a checkpoint with a label."""
    label: PathPart | None = None
    """Name of a checkpoint without a step, such as best or epoch 2; it is no point of a curve."""


class MergedInput(Placed):
    """An input of a merged checkpoint."""

    uri: str
    """Its folder."""
    run: str
    """Training run that wrote it, from its folder."""
    digest: str
    """Digest over weights, config, tokenizer and chat template."""
    weight: float
    """Its weight; the weights of all inputs sum to 1."""


class MergeReference(Part):
    """Method, weights and inputs of a merged checkpoint."""

    kind: MergeKind
    """Kind of average: mean, ema, wsm or interpolate."""
    parameter: str = ""
    """Decay of an ema, share of an interpolate, shares of a weighted mean, schedule of a wsm."""
    inputs: tuple[MergedInput, ...]
    """Input checkpoints in the order of summation."""

    def __str__(self) -> str:
        made = f"{self.kind} of {len(self.inputs)}" + (f", {self.parameter}" if self.parameter else "")
        runs = dict.fromkeys(merged.run for merged in self.inputs)
        return f"{made}: " + ", ".join(f"{run} {self._places(run)}" for run in runs)

    def _places(self, run: str) -> str:
        inputs = [merged for merged in self.inputs if merged.run == run]
        steps = in_steps([merged.step for merged in inputs if merged.label is None])
        return ", ".join(filter(None, [steps, *(merged.label for merged in inputs)]))


class CheckpointReference(Placed):
    """The evaluated model state."""

    uri: str
    """Its folder; for a merged checkpoint, a name with the input folders, which can be evaluated again."""
    run: PathPart
    """Training run that wrote it; for a merged checkpoint, the run of its last input."""
    name: PathPart
    """Its name in requests and reports, such as run-a-2000."""
    step: Whole
    """Training step; for a merged checkpoint, the step of its last input; 0 for a checkpoint with a label."""
    digest: str
    """Digest over weights, config, tokenizer and chat template."""
    weights_digest: str
    """Digest over the weights alone."""
    listing: str | None = None
    """Digest over names, sizes, and checksums or times of its files, and files that it refers to."""
    merge: MergeReference | None = None
    """Its merge from other checkpoints; empty for a checkpoint written by training."""
    notes: tuple[str, ...] = ()
    """Files that come from other folders, such as its run's tokenizer, and the choice among several formats."""


class OfCell(Part):
    """The part that records and early verdicts share: their cell, and the attempt at it."""

    cell: PathPart
    """Name of the cell's folder."""
    checkpoint: CheckpointReference
    """The evaluated checkpoint."""
    evaluator: PathPart
    """The harness."""
    benchmarks: tuple[str, ...]
    """Benchmark names, as published."""
    evaluation_hash: str
    """Hash over everything but the checkpoint that can change a score."""
    flow_run: str | None = None
    """Name of the flow run that wrote it."""
    attempt: PathPart
    """Folder next to it with the harness's own output."""
    created: AwareDatetime
    """Time of writing, UTC."""


def cell_place(checkpoint: CheckpointReference, evaluator: str, *, evaluation_hash: str, shown: str) -> str:
    """Returns a cell folder's path below the evaluation path; its name ends in a digest over settings and weights."""
    identity = digest_of([evaluation_hash, checkpoint.digest])[:10]
    return f"{checkpoint.run}/{checkpoint.folder}/{evaluator}/{shown}-{identity}"


def misplaced(outcome: OfCell, cell_uri: str) -> str | None:
    """Returns the reason why a record or verdict does not belong to its folder's cell; None if it does.

    Compares only the end of the path, `<run>/step-<N>/<evaluator>/<cell>` or `<run>/label-<label>/…`: all records can
    be moved together.
    """
    checkpoint, shown = outcome.checkpoint, outcome.cell.rpartition("-")[0]
    own = f"{checkpoint.run}/{checkpoint.folder}/{outcome.evaluator}/{outcome.cell}"
    local = storage.is_local(cell_uri)
    parts = storage.local_path(cell_uri).absolute().parts if local else cell_uri.rstrip("/").split("/")
    if "/".join(parts[-4:]) != own:
        return f"record.json is the one of {own}, so it was copied here, or a folder was renamed"
    if own != cell_place(checkpoint, outcome.evaluator, evaluation_hash=outcome.evaluation_hash, shown=shown):
        return "record.json has another checkpoint's digest or evaluation hash than its folder's name is made of"
    return None


class Digests(Part):
    """Digests of a record and of its samples at the time of writing."""

    samples: str | None = None
    """SHA-256 of `samples.jsonl.gz`; empty without that file."""
    record: str | None = None
    """SHA-256 of the record without `sinks`, with `samples`: JSON with sorted keys and without default values."""
    signature: str | None = None
    """HMAC-SHA256 of the same content with the key in `ASSAY_RECORDS_KEY`; empty without a key."""


class BenchmarkDetails(Part):
    """Details of a benchmark with questions of its own; a group has its parts' details instead."""

    questions: Whole
    """Questions requested."""
    truncated: Whole = 0
    """Questions with prompts cut on the left to fit."""
    skipped: Whole = 0
    """Questions left out because their prompts are too long."""
    finish_reasons: dict[str, Whole] = {}
    """Number of answers by finish reason of the engine; empty where nothing is generated, or without reasons."""
    at_limit: Whole | None = None
    """Questions with an answer cut at the length limit; empty where nothing is generated, or if unknown."""
    unclosed: Whole = 0
    """Questions with an answer that started reasoning and never closed it."""
    completed: dict[str, float] = {}
    """Metrics over the questions with only complete answers, if some answers were cut."""
    control: str | None = None
    """Result of scoring known answers: passed, or the reason why there was no such control."""
    prompts: str | None = None
    """Digest over the prompts of all questions, in the order of their ids."""
    data: str | None = None
    """Revision of the data set, or a digest of its files."""
    notes: tuple[str, ...] = ()
    """Facts that readers of the score need, such as settings without effect; a sentence each."""


class Counts(Part):
    """Questions of a cell, counted in three stages; a score is published only if the counts agree."""

    requested: Whole
    """Questions in the evaluation."""
    answered: Whole
    """Questions with all required answers received."""
    scored: Whole
    """Questions the harness scored."""
    skipped: Whole = 0
    """Questions left out because their prompts are too long; not counted as requested."""
    truncated: Whole = 0
    """Questions with prompts cut on the left to fit."""
    judge_errors: Whole = 0
    """Answers without a usable verdict of the judge; tolerated errors are not counted as requested."""


def together(parts: Sequence[BenchmarkDetails]) -> BenchmarkDetails | None:
    """Sums the numbers of questions of some benchmarks, without scores and digests; None without benchmarks."""
    if not parts:
        return None
    at_limit = [part.at_limit for part in parts if part.at_limit is not None]
    return BenchmarkDetails(
        questions=sum(part.questions for part in parts),
        truncated=sum(part.truncated for part in parts),
        skipped=sum(part.skipped for part in parts),
        finish_reasons=dict(sum((Counter(part.finish_reasons) for part in parts), Counter())),
        at_limit=sum(at_limit) if at_limit else None,
        unclosed=sum(part.unclosed for part in parts),
    )


class LogLikelihood(Part):
    """The scoring of the choices of an evaluation."""

    way: Literal["prefix cache", "echo"]
    """With the engine's prefix cache, or by echo: each choice with its whole prompt."""
    audited: Whole = 0
    """Contexts scored both ways."""
    largest_difference: float | None = None
    """Largest difference between the two ways in the log-probability of a token, in nats."""
    reason: str | None = None
    """Reason for using echo; empty for the prefix cache."""


class Asking(Part):
    """Construction of the requests, as far as the configuration does not define it."""

    seeds: dict[str, int | str] = {}
    """Seeds by their purpose, or the rule behind them."""
    bos: str | None = None
    """Rule for a BOS token at the start of prompts, and if prompts have it."""
    chat_template: str | None = None
    """Digest of the chat template; empty where none was used."""
    loglikelihood: LogLikelihood | None = None
    """The scoring of choices; empty without choices, or if unknown."""
    notes: tuple[str, ...] = ()
    """Facts that readers of every score need, such as a template that disagrees with the tokenizer."""
