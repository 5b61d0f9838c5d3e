"""The flows for suites: one for any suite, one for each that comes with Assay, and one for a single training step."""

from __future__ import annotations

from prefect import flow

from flows.evaluation import evaluate_each
from tasks.checkpoints import discover, layouts_for
from tasks.config import CheckpointSelection, EvalTaskConfig, EvaluatorName
from tasks.records import Record
from tasks.suites import Suite, SuiteEvaluation, SuiteRequest, load_suite

_LATEST = CheckpointSelection(which="latest")


@flow(name="evaluate-suite", flow_run_name="evaluate run {request.model_path}", persist_result=False)
def evaluate_suite(
    suite: Suite | str, request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()
) -> list[Record]:
    """Makes every evaluation of a suite, given whole, by name or as a file, on checkpoints of a run and on one pool.

    Raises:
        AssayError: the request cannot be right, or a wanted cell has no succeeded record in the end.
    """
    chosen = load_suite(suite) if isinstance(suite, str) else suite
    evaluations = chosen.evaluations_of(request)
    return evaluate_each(evaluations, discover(request.model_path, selection, **layouts_for(evaluations)))


@flow(persist_result=False)
def default_eval(request: SuiteRequest, evals: str | None = None) -> list[Record]:
    """The latest checkpoint of a run by the core set, or by another named set."""
    suite = load_suite("default_eval")
    if evals is not None:
        content = {"label": evals.lower(), "evals": evals, "without_prompt_logprobs": "levanter"}
        suite = suite.model_copy(update={"evaluations": (SuiteEvaluation.model_validate(content),)})
    return evaluate_suite(suite, request, _LATEST)


@flow(persist_result=False)
def default_key_evals(request: SuiteRequest) -> list[Record]:
    """The latest checkpoint of a run by key generation and multiple choice."""
    return evaluate_suite("default_key_evals", request, _LATEST)


@flow(persist_result=False)
def default_base_eval(request: SuiteRequest) -> list[Record]:
    """The latest checkpoint of a run, as a base model."""
    return evaluate_suite("default_base_eval", request, _LATEST)


@flow(persist_result=False)
def default_sft_eval(request: SuiteRequest) -> list[Record]:
    """The latest checkpoint of a run, as a model that follows instructions."""
    return evaluate_suite("default_sft_eval", request, _LATEST)


@flow(persist_result=False)
def run_helm(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """MMLU as HELM asks it."""
    return evaluate_suite("helm", request, selection)


@flow(persist_result=False)
def run_key_evals(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """Key generation and multiple choice."""
    return evaluate_suite("key_evals", request, selection)


@flow(persist_result=False)
def run_base_model_evals(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """The core set with GPQA, and MMLU in both forms."""
    return evaluate_suite("base_model", request, selection)


@flow(persist_result=False)
def run_sft_model_evals(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """What a model that follows instructions is asked, through its chat template."""
    return evaluate_suite("sft_model", request, selection)


@flow(persist_result=False)
def run_alpaca_eval(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """Win rate over reference answers, as a judge sees them."""
    return evaluate_suite("alpaca_eval", request, selection)


@flow(persist_result=False)
def run_on_gpu(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """MMLU and the core set, on GPU engines."""
    return evaluate_suite("on_gpu", request, selection)


@flow(persist_result=False)
def run_uncheatable_evals(
    request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()
) -> list[Record]:
    """Perplexity on fresh texts, which `assay stage --suite uncheatable` fetched."""
    return evaluate_suite("uncheatable", request, selection)


@flow(persist_result=False)
def run_lm_eval_harness(request: SuiteRequest, selection: CheckpointSelection = CheckpointSelection()) -> list[Record]:
    """Ten fields of lm-eval."""
    return evaluate_suite("lm_eval_harness", request, selection)


@flow(persist_result=False)
def evaluate_helm_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """HELM's run entries on one training step of a run, or on its latest checkpoint."""
    return _on_step("helm", request, evals, step=step)


@flow(persist_result=False)
def evaluate_lm_evaluation_harness_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """lm-eval's benchmarks on one training step of a run, or on its latest checkpoint."""
    return _on_step("lm_evaluation_harness", request, evals, step=step)


@flow(persist_result=False)
def evaluate_alpaca_eval_on_step(
    request: SuiteRequest, evals: tuple[EvalTaskConfig, ...], step: int | None = None
) -> list[Record]:
    """AlpacaEval on one training step of a run, or on its latest checkpoint."""
    return _on_step("alpaca_eval", request, evals, step=step)


@flow(persist_result=False)
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
