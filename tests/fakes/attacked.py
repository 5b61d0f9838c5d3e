"""An evaluator that runs hostile code as its harness."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pools.endpoint import RunningModel
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed
from tasks.evaluators.isolation import ModelCode
from tasks.evaluators.lm_eval.evaluator import LmEval
from tasks.records.record import Counts
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig


@dataclass(frozen=True)
class Attacked(LmEval):
    attack: Path = Path()
    arguments: tuple[str, ...] = ()
    code: ModelCode | None = None

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        argv = (sys.executable, "-I", str(self.attack), str(output), *self.arguments)
        return HarnessCommand(argv=argv, variables={"OPENAI_API_KEY": "k"}, files={}, model_code=self.code)

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        """Returns no metrics: the tests inspect the attempts."""
        return Parsed(metrics=(), counts=Counts(requested=1, answered=1, scored=1), versions={})

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        return iter(())
