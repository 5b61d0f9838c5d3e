"""The flows for suites, and for a single training step; each runner of a suite is a deployment of these flows."""

from __future__ import annotations

from prefect import Flow

from flows.evaluation import evaluate
from flows.hooks import pipeline
from flows.series import evaluate_checkpoints
from tasks.checkpoints.discovery import with_pinned_model
from tasks.records.record import Record
from tasks.running.planning import Request, plan
from tasks.spec.evaluation import CheckpointSelection, EvalTaskConfig, EvaluationConfig
from tasks.spec.evaluators import EvaluatorName
from tasks.spec.suites import Suite, SuiteEvaluation, SuiteName, SuiteRequest, load_suite
from tasks.verdicts.gate import Gate


@pipeline("evaluate-suite", run_name="evaluate {request.place}{selection.words} · {suite}")
def evaluate_suite(
    suite: SuiteName | Suite,
    request: SuiteRequest,
    selection: CheckpointSelection = CheckpointSelection(),
    gate: Gate | None = None,
) -> list[Record]:
    """Runs every evaluation of a suite on checkpoints of a run, on a shared pool.

    Args:
        suite: Name of a suite that ships with Assay, a YAML file with a suite, or a whole suite.
        request: The run, and the folder of its records.
        selection: The checkpoints.
        gate: Gate on their scores; the flow run fails on NO-GO.
    """
    return _evaluate(load_suite(suite) if isinstance(suite, str) else suite, request, selection, gate=gate)


@pipeline("default-eval", run_name="evaluate {request.place}, latest · default_eval")
def default_eval(request: SuiteRequest, evals: str | None = None) -> list[Record]:
    """Evaluates the latest checkpoint of a run on the core set, or on another named set."""
    suite = load_suite("default_eval")
    if evals is not None:
        content = {"label": evals.lower(), "evals": evals, "evaluator": {"without_prompt_logprobs": "levanter"}}
        suite = suite.model_copy(update={"evaluations": (SuiteEvaluation.model_validate(content),)})
    return _evaluate(suite, request, CheckpointSelection(which="latest"))


@pipeline("evaluate-on-step", run_name="evaluate {request.place}, single step · {evaluator}")
def evaluate_on_step(
    evaluator: EvaluatorName, request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """Evaluates a training step of a run, or its latest checkpoint, with a single evaluator."""
    evaluation = SuiteEvaluation.model_validate({"label": "on_step", "evaluator": evaluator, "evals": evals})
    suite = Suite(name="on_step", description="A single training step.", evaluations=(evaluation,))
    selection = CheckpointSelection(which="latest") if step is None else CheckpointSelection(steps=(step,))
    return _evaluate(suite, request, selection)


def evaluate_request(
    request: EvaluationConfig | SuiteRequest,
    suite: SuiteName | Suite | None = None,
    selection: CheckpointSelection = CheckpointSelection(),
    gate: Gate | None = None,
) -> list[Record]:
    """Runs the flow for a suite, or that for a run."""
    if isinstance(request, SuiteRequest):
        assert suite is not None, "a request for a suite comes with the suite"
        return evaluate_suite(suite, request, selection, gate)
    return evaluate_checkpoints(request, selection, gate)


def _evaluate(
    suite: Suite, request: SuiteRequest, selection: CheckpointSelection, *, gate: Gate | None = None
) -> list[Record]:
    evaluations = tuple(suite.evaluations_of(with_pinned_model(request, selection.series)))
    return evaluate(plan(Request(evaluations, selection, gate)), gate=gate)


_RUNNERS = {
    **dict.fromkeys(
        (
            *("default_key_evals", "default_base_eval", "default_sft_eval", "run_helm", "run_key_evals"),
            *("run_base_model_evals", "run_sft_model_evals", "run_alpaca_eval", "run_on_gpu", "run_uncheatable_evals"),
            "run_lm_eval_harness",
        ),
        evaluate_suite,
    ),
    **dict.fromkeys(
        (
            *("evaluate_helm_on_step", "evaluate_lm_evaluation_harness_on_step", "evaluate_alpaca_eval_on_step"),
            *("evaluate_inspect_ai_on_step", "evaluate_levanter_lm_evaluation_harness_on_step"),
        ),
        evaluate_on_step,
    ),
}
"""The flow of each runner; its deployments begin with its name, with parameters in `deployments/prefect.yaml`."""


def __getattr__(name: str) -> Flow[..., list[Record]]:
    if name not in _RUNNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # made on access: Prefect takes 70 ms for the parameter form of each runner.
    return globals().setdefault(name, _RUNNERS[name].with_options(name=name.replace("_", "-")))
