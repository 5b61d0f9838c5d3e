"""The evaluators there are, by the name that `EvaluationConfig.evaluator` gives them."""

from __future__ import annotations

from tasks.evaluators.alpaca_eval.evaluator import AlpacaEval
from tasks.evaluators.evaluator import Evaluator
from tasks.evaluators.helm.evaluator import Helm
from tasks.evaluators.levanter.evaluator import Levanter
from tasks.evaluators.lm_eval.evaluator import LmEval
from tasks.spec.evaluation import EvaluatorName

EVALUATORS: dict[EvaluatorName, Evaluator] = {
    "levanter_lm_evaluation_harness": Levanter(),
    "lm_evaluation_harness": LmEval(),
    "alpaca_eval": AlpacaEval(),
    "helm": Helm(),
}
