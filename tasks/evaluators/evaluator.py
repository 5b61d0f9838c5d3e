"""The protocol of evaluators: a command to run against an endpoint, and the parsing of its output."""

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
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.records.verdicts import EarlyScore
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import EVALUATORS

EvaluatedModel = RunningModel | LocalCheckpoint
"""A served model, or, for evaluators that need no endpoint, a checkpoint's files."""


@dataclass(frozen=True)
class HarnessCommand:
    """A program to run, after `files` are written and `copies` (folders in any store) fetched into its folder.

    `arguments` are those at the end of `argv` that go to the evaluator's own program.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    files: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    model_code: ModelCode | None = None
    """Needs of isolation; set if it runs model-written code."""


@dataclass(frozen=True)
class Progress:
    """Progress of a harness: `done` of `total` requests of `stage`."""

    stage: str
    done: int
    total: int

    @classmethod
    def last_in(cls, log: str, lines: re.Pattern[str]) -> Progress | None:
        """Returns the progress in the last match, by its groups `stage`, `done` and `total`; None without a match."""
        *_, match = None, *lines.finditer(log)
        if match is None:
            return None
        total = int(match["total"])
        return cls(match["stage"], min(int(match["done"]), total), total)


@dataclass(frozen=True)
class Parsed:
    """Metrics that a harness reported, and the counts that decide whether they may be published."""

    metrics: tuple[Metric, ...]
    counts: Counts
    versions: Mapping[str, str]
    links: Mapping[str, str] = field(default_factory=dict)
    """Pages that the harness wrote, by title; relative to its output folder."""
    details: Mapping[str, BenchmarkDetails] = field(default_factory=dict)
    """Details of each benchmark that has questions itself, by the name it is published under."""
    asking: Asking = field(default_factory=Asking)
    endpoint_failure: str | None = None
    """Formatted count of requests that an endpoint failed in all tries; None without any, or if it refused some."""
    endpoint_refusal: str | None = None
    """Formatted count of requests that an endpoint refused, with its first message; None without any."""
    samples: int | None = None  # questions written to `samples.jsonl.gz`; set by the runner
    samples_digest: str | None = None  # SHA-256 of that file; set by the runner
    early: tuple[EarlyScore, ...] = ()
    """Verdicts reached before all questions were requested, in place of metrics; set by the runner."""


class Evaluator(Protocol):
    """A harness that sends questions to an endpoint and scores the answers."""

    @property
    def name(self) -> str:
        """Name in configs and records."""
        ...

    @property
    def environments(self) -> tuple[EnvironmentSpec, ...]:
        """Every environment that it may run in; a machine that only plans uses the first."""
        ...

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        """Returns the environment for an evaluation."""
        ...

    @property
    def needs_endpoint(self) -> bool:
        """True if it uses a served model; else it loads a `LocalCheckpoint` itself."""
        ...

    @property
    def program(self) -> Path | None:
        """Our program that runs it, which a fork server can keep imported; None if there is none.

        Without arguments, the program of an evaluator that loads checkpoints itself reads paths of job files from
        standard input, and after each evaluation prints a line `evaluated`, a space, and the path.
        """
        ...

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        """Returns arguments of the program's `preload`: the data that it reads before it is forked."""
        ...

    @property
    def import_variables(self) -> Mapping[str, str]:
        """Variables that the program reads when it is imported; the same for every cell."""
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
        """Returns the command that writes its results into `output`; deterministic and without side effects."""
        ...

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        """Parses the results of the command in `output`."""
        ...

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        """Yields prompt, answer and scores of each question; called after `parse`."""
        ...

    def progress(self, log: str) -> Progress | None:
        """Returns its progress, from the last lines of its log; None while it sends no requests."""
        ...

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        """Raises early for settings that the harness would reject late."""
        ...


def evaluator_named(name: str) -> Evaluator:
    """Returns the registered evaluator of a name."""
    return import_module(f"{EVALUATORS[name]}.evaluator").EVALUATOR


def harness_environments() -> dict[str, EnvironmentSpec]:
    """Returns every environment that a registered evaluator may run in, by name."""
    specs = (spec for name in EVALUATORS for spec in evaluator_named(name).environments)
    return {spec.name: spec for spec in specs}


def evaluator_of(config: EvaluationConfig) -> Evaluator:
    """Returns the evaluator of an evaluation."""
    return evaluator_named(config.evaluator.name)
