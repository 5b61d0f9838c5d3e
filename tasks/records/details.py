"""Parts of a record beside its numbers: the checkpoint, details of each benchmark, the way its questions were put."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pools.weights.merges import MergeKind
from tasks.spec.names import in_steps


class Part(BaseModel):
    """A part of a record: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class MergedInput(Part):
    """A checkpoint that went into a merged one."""

    uri: str
    """Its folder."""
    run: str
    """The training run that wrote it, by its folder."""
    step: int
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
    run: str
    """The training run that wrote it, or the last checkpoint in it."""
    name: str
    """Its name in requests and reports, such as run-a-2000."""
    step: int
    """Training step; of a merged one, the last in it."""
    digest: str
    """Over weights, config, tokenizer and chat template."""
    weights_digest: str
    """Over the weights alone."""
    listing: str | None = None
    """Over names, sizes, and checksums or times of its files, and of those that a native one refers to."""
    merge: MergeReference | None = None
    """The way it was made of others, if it was never written."""


class BenchmarkDetails(Part):
    """Details of one benchmark that asks questions itself; a group's stand under its parts."""

    questions: int
    """Questions that were asked."""
    truncated: int = 0
    """Questions whose prompts were cut on the left to fit."""
    skipped: int = 0
    """Questions left out because their prompts are too long."""
    finish_reasons: dict[str, int] = {}
    """Answers by the reason the engine gave for their end; empty where nothing is generated, or it gave none."""
    at_limit: int | None = None
    """Questions with an answer that ended at the length limit; empty where nothing is generated or nobody says."""
    unclosed: int = 0
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
    audited: int = 0
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
