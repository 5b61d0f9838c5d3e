"""The flows for suites: one for any suite, one for each that comes with Assay, and one for a single training step."""

from __future__ import annotations

from prefect import flow

from flows.evaluation import evaluate
from flows.hooks import leave_nothing
from tasks.checkpoints.discovery import discover, layouts_for
from tasks.gates.gate import Gate
from tasks.records.record import Record
from tasks.spec.evaluation import CheckpointSelection, EvalTaskConfig, EvaluatorName
from tasks.spec.suites import Suite, SuiteEvaluation, SuiteName, SuiteRequest, load_suite

_LATEST = CheckpointSelection(which="latest")


@flow(
    name="evaluate-suite",
    flow_run_name="evaluate {request.place}{selection.words} · {suite}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def evaluate_suite(
    suite: SuiteName | Suite,
    request: SuiteRequest,
    selection: CheckpointSelection = CheckpointSelection(),
    gate: Gate | None = None,
) -> list[Record]:
    """Makes every evaluation of a suite on checkpoints of a run and on one pool.

    Args:
        suite: One that comes with Assay, a YAML file with one, or a suite whole.
        request: Of which run, and where its records go.
        selection: Which checkpoints.
        gate: What their scores must show; the flow run fails where it says NO-GO.

    Raises:
        AssayError: the request cannot be right, or a wanted cell has no succeeded record in the end.
        GateRefused: the gate says NO-GO.
    """
    chosen = load_suite(suite) if isinstance(suite, str) else suite
    evaluations = chosen.evaluations_of(request)
    checkpoints = discover(request.model_path, selection, **layouts_for(evaluations))
    return evaluate(evaluations, checkpoints, gate=gate)


@flow(flow_run_name="evaluate {request.place}, latest · default_eval", persist_result=False)
def default_eval(request: SuiteRequest, evals: str | None = None) -> list[Record]:
    """The latest checkpoint of a run by the core set, or by another named set."""
    suite = load_suite("default_eval")
    if evals is not None:
        content = {"label": evals.lower(), "evals": evals, "without_prompt_logprobs": "levanter"}
        suite = suite.model_copy(update={"evaluations": (SuiteEvaluation.model_validate(content),)})
    return evaluate_suite(suite, request, _LATEST)


@flow(flow_run_name="evaluate {request.place}, latest · default_key_evals", persist_result=False)
def default_key_evals(request: SuiteRequest) -> list[Record]:
    """The latest checkpoint of a run by key generation and multiple choice."""
    return evaluate_suite("default_key_evals", request, _LATEST)


@flow(flow_run_name="evaluate {request.place}, latest · default_base_eval", persist_result=False)
def default_base_eval(request: SuiteRequest) -> list[Record]:
    """The latest checkpoint of a run, as a base model."""
    return evaluate_suite("default_base_eval", request, _LATEST)


@flow(flow_run_name="evaluate {request.place}, latest · default_sft_eval", persist_result=False)
def default_sft_eval(request: SuiteRequest) -> list[Record]:
    """The latest checkpoint of a run, as a model that follows instructions."""
    return evaluate_suite("default_sft_eval", request, _LATEST)


@flow(flow_run_name="evaluate {request.place}{selection.words} · helm", persist_result=False)
def run_helm(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """MMLU as HELM asks it."""
    return evaluate_suite("helm", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · key_evals", persist_result=False)
def run_key_evals(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """Key generation and multiple choice."""
    return evaluate_suite("key_evals", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · base_model_evals", persist_result=False)
def run_base_model_evals(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """The core set with GPQA, and MMLU in both forms."""
    return evaluate_suite("base_model", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · sft_model_evals", persist_result=False)
def run_sft_model_evals(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """What a model that follows instructions is asked, through its chat template."""
    return evaluate_suite("sft_model", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · alpaca_eval", persist_result=False)
def run_alpaca_eval(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """Win rate over reference answers, as a judge sees them."""
    return evaluate_suite("alpaca_eval", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · on_gpu", persist_result=False)
def run_on_gpu(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """MMLU and the core set, on GPU engines."""
    return evaluate_suite("on_gpu", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · uncheatable_evals", persist_result=False)
def run_uncheatable_evals(
    request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()
) -> list[Record]:
    """Perplexity on fresh texts, which `assay stage --suite uncheatable` fetched."""
    return evaluate_suite("uncheatable", request, selection)


@flow(flow_run_name="evaluate {request.place}{selection.words} · lm_eval_harness", persist_result=False)
def run_lm_eval_harness(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """Ten fields of lm-eval."""
    return evaluate_suite("lm_eval_harness", request, selection)


@flow(flow_run_name="evaluate {request.place}, one step · helm", persist_result=False)
def evaluate_helm_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """HELM's run entries on one training step of a run, or on its latest checkpoint."""
    return _on_step("helm", request, evals, step=step)


@flow(flow_run_name="evaluate {request.place}, one step · lm_evaluation_harness", persist_result=False)
def evaluate_lm_evaluation_harness_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """lm-eval's benchmarks on one training step of a run, or on its latest checkpoint."""
    return _on_step("lm_evaluation_harness", request, evals, step=step)


@flow(flow_run_name="evaluate {request.place}, one step · alpaca_eval", persist_result=False)
def evaluate_alpaca_eval_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """AlpacaEval on one training step of a run, or on its latest checkpoint."""
    return _on_step("alpaca_eval", request, evals, step=step)


@flow(flow_run_name="evaluate {request.place}, one step · levanter", persist_result=False)
def evaluate_levanter_lm_evaluation_harness_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """What Levanter asks the weights, on one training step of a run, or on its latest checkpoint."""
    return _on_step("levanter_lm_evaluation_harness", request, evals, step=step)


def _on_step(
    evaluator: EvaluatorName, request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], *, step: int | None
) -> list[Record]:
    evaluation = SuiteEvaluation(label="on_step", evaluator=evaluator, evals=evals)
    suite = Suite(name="on_step", description="One training step.", evaluations=(evaluation,))
    return evaluate_suite(suite, request, _LATEST if step is None else CheckpointSelection(steps=(step,)))
