"""Parts of a record beside its numbers: the checkpoint, details of each benchmark, the way its questions were put."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pools.weights.merges import MergeKind
from resources.storage import storage
from tasks.spec.evaluation import digest_of
from tasks.spec.names import in_steps

if TYPE_CHECKING:
    from tasks.records.early import EarlyVerdict
    from tasks.records.record import Record

_Value = TypeVar("_Value")
_SHAPE = {
    "evals": [{"name": {str}, "task_alias": {str}, "task_kwargs": {}}],
    "max_eval_instances": {int},
    "pool_config": {"model": {"engine_kwargs": {}}, "resource_config": {"device": {}}},
    "resource_config": {"device": {}},
    "engine": {"packages": {}},
    "replica_seconds": {int, float},
}
"""Objects, lists and other kinds of value that readers of records expect, each where there is any."""


def _path_part(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or len(name.encode()) > 255:
        raise ValueError(f"expected a name that is one part of a path, found {name!r:.300}")
    return name


def _inner_path(path: str) -> str:
    for part in path.split("/"):
        _path_part(part)
    return path


def bounded(value: _Value) -> _Value:
    """A value of which readers can add, multiply and store all numbers; NaN and infinities may be among them."""
    if isinstance(value, int | float) and (2**63 if isinstance(value, int) else 1e70) <= abs(value) < math.inf:
        raise ValueError("expected numbers below 1e70, whose fourth power is a float, and whole ones of 64 bits")
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
"""Settings or facts in JSON, with objects, lists and numbers where readers look for them."""
PathPart = Annotated[str, AfterValidator(_path_part)]
"""Name of a file or folder, without a way out of the folder that it is in."""
InnerPath = Annotated[str, AfterValidator(_inner_path)]
"""Path below a folder."""
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Whole number of 64 bits, as indices and columns hold them."""


class Part(BaseModel):
    """A part of a record: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class MergedInput(Part):
    """A checkpoint that went into a merged one."""

    uri: str
    """Its folder."""
    run: str
    """The training run that wrote it, by its folder."""
    step: Whole
    """Training step."""
    digest: str
    """Over weights, config, tokenizer and chat template."""
    weight: float
    """Its weight; all together are 1."""


class MergeReference(Part):
    """The way that a merged checkpoint, which nobody wrote, was made of others."""

    kind: MergeKind
    """Kind of average: mean, ema, wsm or interpolate."""
    parameter: str = ""
    """Decay of an ema, share of an interpolate, shares of a weighted mean, schedule of a wsm."""
    inputs: tuple[MergedInput, ...]
    """The checkpoints in it, in the order in which they were summed."""

    def __str__(self) -> str:
        made = f"{self.kind} of {len(self.inputs)}" + (f", {self.parameter}" if self.parameter else "")
        runs = dict.fromkeys(merged.run for merged in self.inputs)
        steps = {run: [merged.step for merged in self.inputs if merged.run == run] for run in runs}
        return f"{made}: " + ", ".join(f"{run} {in_steps(found)}" for run, found in steps.items())


class CheckpointReference(Part):
    """The model state that was measured."""

    uri: str
    """Its folder; of a merged one, the name by which it can be evaluated again, with the folders in it."""
    run: PathPart
    """The training run that wrote it, or the last checkpoint in it."""
    name: PathPart
    """Its name in requests and reports, such as run-a-2000."""
    step: Whole
    """Training step; of a merged one, the last in it."""
    digest: str
    """Over weights, config, tokenizer and chat template."""
    weights_digest: str
    """Over the weights alone."""
    listing: str | None = None
    """Over names, sizes, and checksums or times of its files, and of those that a native one refers to."""
    merge: MergeReference | None = None
    """The way it was made of others, if it was never written."""


def cell_place(checkpoint: CheckpointReference, evaluator: str, *, evaluation_hash: str, shown: str) -> str:
    """Path of a cell's folder below the evaluation path; its name ends in a digest over settings and weights."""
    identity = digest_of([evaluation_hash, checkpoint.digest])[:10]
    return f"{checkpoint.run}/step-{checkpoint.step}/{evaluator}/{shown}-{identity}"


def misplaced(found: Record | EarlyVerdict, cell_uri: str) -> str | None:
    """The reason that a record or a verdict is not of the cell of its folder; None if it is.

    Only the end of the place counts, `<run>/step-<N>/<evaluator>/<cell>`: all records can be moved together.
    """
    checkpoint, shown = found.checkpoint, found.cell.rpartition("-")[0]
    own = f"{checkpoint.run}/step-{checkpoint.step}/{found.evaluator}/{found.cell}"
    local = storage.is_local(cell_uri)
    parts = storage.local_path(cell_uri).absolute().parts if local else cell_uri.rstrip("/").split("/")
    if "/".join(parts[-4:]) != own:
        return f"record.json is the one of {own}, so it was copied here, or a folder was renamed"
    if own != cell_place(checkpoint, found.evaluator, evaluation_hash=found.evaluation_hash, shown=shown):
        return "record.json has another checkpoint's digest or evaluation hash than its folder's name is made of"
    return None


class BenchmarkDetails(Part):
    """Details of one benchmark that asks questions itself; a group's stand under its parts."""

    questions: Whole
    """Questions that were asked."""
    truncated: Whole = 0
    """Questions whose prompts were cut on the left to fit."""
    skipped: Whole = 0
    """Questions left out because their prompts are too long."""
    finish_reasons: dict[str, Whole] = {}
    """Answers by the reason the engine gave for their end; empty where nothing is generated, or it gave none."""
    at_limit: Whole | None = None
    """Questions with an answer that ended at the length limit; empty where nothing is generated or nobody says."""
    unclosed: Whole = 0
    """Questions with an answer whose reasoning began and never closed."""
    completed: dict[str, float] = {}
    """Metrics over the questions whose answers all ended by themselves, where some did not."""
    control: str | None = None
    """The outcome of scoring known answers: passed, or the reason why there was no such control."""
    prompts: str | None = None
    """Digest over the prompts of all questions, in the order of their ids."""
    data: str | None = None
    """Revision of the data set, or a digest of its files."""
    notes: tuple[str, ...] = ()
    """Facts that a reader of the score has to know, such as settings without effect; a sentence each."""


class Counts(Part):
    """Questions of a cell, counted in three places; a score is published only where they agree."""

    requested: Whole
    """Questions the evaluation asks."""
    answered: Whole
    """Questions to which every needed answer came back."""
    scored: Whole
    """Questions the harness scored."""
    skipped: Whole = 0
    """Questions left out because their prompts are too long; not among those requested."""
    truncated: Whole = 0
    """Questions whose prompts were cut on the left to fit."""
    judge_errors: Whole = 0
    """Answers without a usable verdict of the judge; tolerated ones are not among those requested."""


def together(parts: Sequence[BenchmarkDetails]) -> BenchmarkDetails | None:
    """Numbers of questions in some benchmarks together; None without any. Scores and digests are each one's own."""
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
    """The way the choices of an evaluation were weighed."""

    way: Literal["prefix cache", "echo"]
    """By way of the engine's prefix cache, or each choice whole."""
    audited: Whole = 0
    """Contexts that were asked both ways."""
    largest_difference: float | None = None
    """Largest difference between the two ways in the log-probability of a token, in nats."""
    reason: str | None = None
    """The reason for echoes; empty for the prefix cache."""


class Asking(Part):
    """The way questions were put, as far as the configuration does not say."""

    seeds: dict[str, int | str] = {}
    """Seeds by what is drawn with them, or the rule that they follow."""
    bos: str | None = None
    """Rule by which prompts begin with a token that says so, and whether they do."""
    chat_template: str | None = None
    """Digest of the template that conversations were put into; empty where none was used."""
    loglikelihood: LogLikelihood | None = None
    """The way choices were weighed; empty where there were none, or nobody says."""
    notes: tuple[str, ...] = ()
    """Facts that a reader of every score has to know, such as a template that disagrees with the tokenizer."""
