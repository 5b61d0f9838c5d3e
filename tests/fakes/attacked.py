"""An evaluator that runs hostile code as its harness."""

from __future__ import annotations

import sys
from pathlib import Path

from fakes.evaluators import Commanded
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.evaluator import HarnessCommand
from tasks.evaluators.isolation import ModelCode


def attacked(attack: Path, arguments: tuple[str, ...] = (), code: ModelCode | None = None) -> Commanded:
    """Returns an evaluator without metrics, since tests inspect the attempts."""

    def made(_: object, output: Path, python: Path) -> HarnessCommand:
        argv = (sys.executable, "-I", str(attack), str(output), *arguments)
        return HarnessCommand(argv=argv, variables={"OPENAI_API_KEY": "k"}, files={}, model_code=code)

    return Commanded(made=made, name="lm_evaluation_harness", environments=(LM_EVAL,))
