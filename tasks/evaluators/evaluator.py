"""The protocol of evaluators: a command to run against an endpoint, and the reading of its output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

from pools.endpoint import LocalCheckpoint, RunningModel
from resources.environments.environments import EnvironmentSpec
from tasks.evaluators.isolation import ModelCode
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.early import EarlyScore
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import EVALUATORS

EvaluatedModel = RunningModel | LocalCheckpoint
"""An endpoint that answers, or, for evaluators that need none, a checkpoint's files."""


@dataclass(frozen=True)
class HarnessCommand:
    """A program to run. First `files` are written, and `copies` (folders in any store) fetched, into its folder.

    `arguments` are those at the end of `argv` that go to the evaluator's own program.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    files: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    model_code: ModelCode | None = None
    """Set where it runs code that the model wrote, which is isolated then: its needs."""


@dataclass(frozen=True)
class Progress:
    """Progress of a harness: `done` of `total` requests, now asking for `stage`."""

    stage: str
    done: int
    total: int

    @classmethod
    def last_in(cls, log: str, lines: re.Pattern[str]) -> Progress | None:
        """By the last of a log's lines that tell it, as groups `stage`, `done` and `total`; None before the first."""
        *_, found = None, *lines.finditer(log)
        if found is None:
            return None
        total = int(found["total"])
        return cls(found["stage"], min(int(found["done"]), total), total)


@dataclass(frozen=True)
class Parsed:
    """Metrics that a harness reported, and the three numbers that say whether it may be published."""

    metrics: tuple[Metric, ...]
    counts: Counts
    versions: Mapping[str, str]
    links: Mapping[str, str] = field(default_factory=dict)
    """Pages the harness made, by title; relative to its output folder."""
    details: Mapping[str, BenchmarkDetails] = field(default_factory=dict)
    """Details of each benchmark that asks questions itself, by the name it is published under."""
    asking: Asking = field(default_factory=Asking)
    """The way questions were put."""
    endpoint_failure: str | None = None
    """Requests that an endpoint failed for good, in words; None where there is none, or some were refused by it."""
    endpoint_refusal: str | None = None
    """Requests that an endpoint refused, with its words for the first; None where there is none."""
    samples: int | None = None
    """Questions written to `samples.jsonl.gz`; set by the runner."""
    samples_digest: str | None = None
    """SHA-256 of that file; set by the runner."""
    early: tuple[EarlyScore, ...] = ()
    """Verdicts that were known before all questions were asked, in place of metrics; set by the runner."""


class Evaluator(Protocol):
    """A harness that asks an endpoint questions and scores the answers."""

    @property
    def name(self) -> str:
        """Name in configs and records."""
        ...

    @property
    def environments(self) -> tuple[EnvironmentSpec, ...]:
        """Every environment that it may run in; the first is what a machine that only plans asks."""
        ...

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        """The environment that it runs in for an evaluation."""
        ...

    @property
    def needs_endpoint(self) -> bool:
        """True if it talks to a served model; else it is given a `LocalCheckpoint`, and loads that itself."""
        ...

    @property
    def program(self) -> Path | None:
        """A program of ours that runs it, which a fork server can keep imported; None where there is none.

        Without arguments, that of an evaluator which loads checkpoints itself reads paths of job files from standard
        input, and after each evaluation prints a line `evaluated`, a space, and the path.
        """
        ...

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        """Arguments of that program's `preload`: the data it reads before it is forked."""
        ...

    @property
    def import_variables(self) -> Mapping[str, str]:
        """Variables that its program reads when it is imported; the same for every cell."""
        ...

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        """The command that leaves its results in `output`; touches nothing, and the same input gives the same."""
        ...

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        """Reads what the command left in `output`."""
        ...

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        """Yields prompt, answer and scores of each question; called after `parse`."""
        ...

    def progress(self, log: str) -> Progress | None:
        """Returns its progress, from the last lines of its log; None while it asks nothing."""
        ...

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        """Refuses early what the harness would refuse late."""
        ...


def evaluator_named(name: str) -> Evaluator:
    """Return the registered evaluator of a name."""
    return import_module(f"{EVALUATORS[name]}.evaluator").EVALUATOR


def harness_environments() -> dict[str, EnvironmentSpec]:
    """Return every environment that a registered evaluator may run in, by its name."""
    specs = (spec for name in EVALUATORS for spec in evaluator_named(name).environments)
    return {spec.name: spec for spec in specs}


def evaluator_of(config: EvaluationConfig) -> Evaluator:
    """Return the evaluator that makes an evaluation."""
    return evaluator_named(config.evaluator.name)
