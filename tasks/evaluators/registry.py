"""The evaluators there are, by the name that `EvaluationConfig.evaluator` gives them."""

from __future__ import annotations

from tasks.config import EvaluatorName
from tasks.evaluators.harness import Evaluator
from tasks.evaluators.lm_eval import LmEval

EVALUATORS: dict[EvaluatorName, Evaluator] = {"lm_evaluation_harness": LmEval()}
