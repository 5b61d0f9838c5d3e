"""An evaluator with the command of a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pools.endpoint import RunningModel
from resources.environments.environments import EnvironmentSpec
from tasks.evaluators.evaluator import EvaluatedModel, Evaluator, HarnessCommand, Parsed
from tasks.records.record import Counts
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig


def _no_job(*_: object) -> Mapping[str, Any]:
    return {}


def _read(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    return Parsed(metrics=(), counts=Counts(requested=1, answered=1, scored=1), versions={}), ()


def _accepted(config: EvaluationConfig, python: Path) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Commanded(Evaluator):
    """Runs the command that `made` returns for a model, an output folder and an interpreter."""

    made: Callable[[EvaluatedModel, Path, Path], HarnessCommand]
    name: str = "fake"
    environments: tuple[EnvironmentSpec, ...] = (
        EnvironmentSpec(name="fake", requirements=Path("fake.txt"), smoke_import=None),
    )
    program: Path = Path()
    preloads: bool = False
    job: Callable[[Any, EvaluationConfig, Path, RunningModel | None], Mapping[str, Any]] = _no_job
    read: Callable[[Path, EvaluationConfig], tuple[Parsed, Iterable[Sample]]] = _read
    bar: re.Pattern[str] = re.compile(r"(?P<stage>asked) (?P<done>\d)/(?P<total>\d)")
    check: Callable[[EvaluationConfig, Path], None] = _accepted

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        return self.made(model, output, python)
