"""Suites: named groups of evaluations. A suite defines benchmarks; a request names the model and the paths. Together
they yield `EvaluationConfig`s served by a single pool."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pools.config import InferencePoolConfig, ModelConfig, Name
from resources.config import Config, CpuConfig, JsonObject, ResourceConfig
from resources.errors import BadInput, unknown
from resources.settings import settings
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.spec.benchmark_sets import SUITE_DATA, BenchmarkNeeds, expanded, needs_of, split_by_kind
from tasks.spec.evaluation import SERVING_WAYS, Asking, EvalTaskConfig, EvaluationConfig, Request
from tasks.spec.evaluators import (
    DEFAULT_EVALUATOR,
    EVALUATORS,
    AnyEvaluator,
    CodeOptions,
    EvaluatorOptions,
    Judge,
    JudgedOptions,
    JudgeEndpoint,
    LmEvalBenchmarkOptions,
    NativeOptions,
    options_kind,
    spelled_out,
)
from tasks.spec.loading import build_config, load_config

_ENGINE_KWARGS: dict[str, Any] = {"max_model_len": 4096}


class SuiteEvaluation(Asking):
    """An evaluation of a suite: benchmarks that an evaluator runs together."""

    label: Name
    """Its name within the suite."""
    evaluator: AnyEvaluator = Field(default={"name": DEFAULT_EVALUATOR}, validate_default=True)
    """The harness: its name, or its options including its name."""
    evals: Annotated[tuple[EvalTaskConfig, ...], BeforeValidator(expanded)] = Field(min_length=1)
    """Benchmarks, and names of sets in capitals."""
    max_truncated: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a benchmark's questions with truncated prompts; 0.05 when unset."""
    texts: str | None = None
    """A folder of benchmarks that `assay stage` prepares, in place of benchmarks_path."""

    @field_validator("evaluator", mode="before")
    @classmethod
    def _with_defaults_of_suites(cls, evaluator: Any) -> Any:
        content = spelled_out(evaluator)
        if not isinstance(content, dict) or content["name"] not in EVALUATORS:
            return content
        return {**options_kind(content["name"]).in_suites, **content}

    @property
    def needs(self) -> BenchmarkNeeds:
        """Requirements of its benchmarks; only few-shot examples are known for harnesses other than lm-eval."""
        if isinstance(self.evaluator, LmEvalBenchmarkOptions):
            return needs_of(self.evals)
        fewshot = max(task.num_fewshot or 0 for task in self.evals)
        return BenchmarkNeeds(fewshot=fewshot, prompt_logprobs=False, generates=True)


class Suite(Config):
    """Evaluations that belong together, and the engine settings for them."""

    name: str
    """Its name for `--suite`."""
    description: str
    """Its purpose, in a sentence."""
    extends: str | None = None
    """Another suite: its evaluations come first, its engine arguments are defaults."""
    evaluations: tuple[SuiteEvaluation, ...] = Field(min_length=1)
    """The evaluations, in order."""
    engine_kwargs: JsonObject = _ENGINE_KWARGS
    """Default engine arguments; those of the request override them."""
    resources: ResourceConfig | None = None
    """Resources of engines if the request has none; their device if the request names no accelerator."""
    revisions: dict[str, str] = {}
    """Branch, tag or commit by data set, SHA-256 by address, for `assay stage`; else the newest."""

    @model_validator(mode="before")
    @classmethod
    def _extended(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("extends"), str):
            return values
        base = built_in_suite(values["extends"])
        return {
            **values,
            "extends": None,
            "evaluations": [*base.evaluations, *(values.get("evaluations") or ())],
            "engine_kwargs": {**base.engine_kwargs, **(values.get("engine_kwargs") or {})},
            "resources": values.get("resources") or base.resources,
        }

    @field_validator("evaluations")
    @classmethod
    def _labels_differ(cls, evaluations: tuple[SuiteEvaluation, ...]) -> tuple[SuiteEvaluation, ...]:
        twice = [label for label, times in Counter(evaluation.label for evaluation in evaluations).items() if times > 1]
        if twice:
            raise ValueError(f"expected evaluations with labels of their own, found twice: {', '.join(twice)}")
        return evaluations

    def __str__(self) -> str:
        return self.name

    def evaluations_of(self, request: SuiteRequest) -> tuple[EvaluationConfig, ...]:
        """Returns the evaluations of a model, all served by the same pool or endpoint. If Levanter may run benchmarks,
        unsupported benchmarks become a separate evaluation."""
        evaluations = self._chosen(request)
        served = _serving(self, request)
        return tuple(_config(asked, request, served, suite=self.name) for part in evaluations for asked in _parts(part))

    def _chosen(self, request: SuiteRequest) -> tuple[SuiteEvaluation, ...]:
        labels = [evaluation.label for evaluation in self.evaluations]
        if others := [label for label in request.only if label not in labels]:
            raise BadInput(
                expected=f"labels of evaluations of the suite {self.name}: {', '.join(labels)}",
                found=", ".join(others),
                remedy="correct them; `assay suites NAME` shows a suite",
            )
        return tuple(each for each in self.evaluations if not request.only or each.label in request.only)


class SuiteChoice(Asking):
    """The evaluations of a suite to run, and settings in place of the suite's own."""

    only: tuple[str, ...] = ()
    """Labels of the evaluations to run; all when empty."""
    max_truncated: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a benchmark's questions with truncated prompts; the suite's setting when unset."""
    benchmarks_path: str | None = None
    """Folder with your own benchmarks, as files of the harness; the suite's when unset."""
    allow_code_execution: tuple[str, ...] = ()
    """Benchmarks that may run the model's code on this machine, such as humaneval."""
    judge: Judge | None = None
    """The judge of evaluations that need it; the suite's setting when unset."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Time limit of a cell (wall clock)."""


class SuiteRequest(Request, SuiteChoice):
    """The model to run a suite on, and the location of its records."""


class _SuitesAsChoices:
    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        choices = {"type": "string", "enum": list(_contents()), "title": "built in"}
        return {"anyOf": [choices, {"type": "string", "title": "file"}]}


SuiteName = Annotated[str, _SuitesAsChoices()]
"""Name of a suite, or a YAML file with a suite."""


def load_suite(name_or_file: str) -> Suite:
    """Returns a built-in suite, or your own from a YAML file in any store."""
    if not name_or_file.endswith((".yaml", ".yml", ".json")):
        return built_in_suite(name_or_file)
    return load_config(name_or_file, Suite)


@cache
def built_in_suites() -> dict[str, Suite]:
    """Returns every built-in suite by its name, in the order of their file."""
    return {name: built_in_suite(name) for name in _contents()}


@cache
def built_in_suite(name: str) -> Suite:
    """Returns a built-in suite."""
    if name not in _contents():
        expected = "the name of a suite, or a YAML file with a suite"
        raise unknown(expected, name, _contents(), "correct the name; `assay suites` lists them")
    return Suite.model_validate(_contents()[name])


@cache
def _contents() -> dict[str, Any]:
    listed = load_yaml((SUITE_DATA / "suites.yaml").read_text(encoding="utf-8"))
    for evaluation in (evaluation for content in listed for evaluation in content["evaluations"]):
        options = spelled_out(evaluation.get("evaluator", {}))
        if "run_specs_path" in options:
            evaluation["evaluator"] = {**options, "run_specs_path": str(SUITE_DATA / options["run_specs_path"])}
    return {content["name"]: content for content in listed}


def texts_folder(name: str) -> str:
    """Returns the local folder with benchmarks on the staged texts of that name."""
    return str(settings().cache_dir / "benchmarks" / name)


def _parts(evaluation: SuiteEvaluation) -> tuple[SuiteEvaluation, ...]:
    if evaluation.evaluator.levanter_fallback is None:
        return (evaluation,)
    choices, others = split_by_kind(evaluation.evals)
    parts = (
        evaluation.model_copy(update={"evals": choices}),
        evaluation.model_copy(update={"evals": others, "evaluator": evaluation.evaluator.without_fallback()}),
    )
    return tuple(part for part in parts if part.evals)


def _serving(suite: Suite, request: SuiteRequest) -> dict[str, Any]:
    given = [name for name in SERVING_WAYS if getattr(request, name) is not None]
    if len(given) > 1:
        raise BadInput(
            expected="one of pool_config, pool_name and base_url", found=", ".join(given), remedy="keep one of them"
        )
    if request.pool_config is None and given:
        return {name: getattr(request, name) for name in (*given, "served_model_name", "pool_key_block")}
    resources = request.resource_config or suite.resources or ResourceConfig()
    pool = request.pool_config or InferencePoolConfig(resource_config=resources, model=ModelConfig(name=request.named))
    if suite.resources is not None and isinstance(pool.resource_config.device, CpuConfig):
        # A pool given for its engine arguments does not imply a CPU device.
        asked = pool.resource_config.model_dump(exclude_unset=True)
        on_device = ResourceConfig.model_validate({**asked, "device": suite.resources.device})
        pool = pool.model_copy(update={"resource_config": on_device})
    model = pool.model.model_copy(update={"engine_kwargs": {**suite.engine_kwargs, **pool.model.engine_kwargs}})
    return {"pool_config": pool.model_copy(update={"model": model})}


def _config(
    evaluation: SuiteEvaluation, request: SuiteRequest, served: dict[str, Any], *, suite: str
) -> EvaluationConfig:
    shared = ("model_path", "model_name", "evaluation_path", "resource_config", "sinks", "protect")
    wished = ("max_eval_instances", "max_truncated", "max_at_limit", "apply_chat_template", "timeout_seconds")
    every = [(evaluation, name) for name in wished if name in SuiteEvaluation.model_fields]
    every += [(request, name) for name in wished]  # those of the request override those of the suite
    content: dict[str, Any] = {
        **{name: getattr(request, name) for name in shared},
        **{name: value for asked, name in every if (value := getattr(asked, name)) is not None},
        "evaluator": _options(evaluation.evaluator, request),
        "evals": evaluation.evals,
        "benchmarks_path": request.benchmarks_path or _staged(evaluation, suite=suite),
        "wandb_tags": (*request.wandb_tags, f"suite={suite}"),
    }
    if not isinstance(evaluation.evaluator, NativeOptions):
        content.update(served)
    return build_config(content, EvaluationConfig, source=f"a request for {evaluation.label} of the suite {suite}")


def _options(options: EvaluatorOptions, request: SuiteRequest) -> EvaluatorOptions:
    if isinstance(options, CodeOptions):
        allowed = (*options.allow_code_execution, *request.allow_code_execution)
        options = options.model_copy(update={"allow_code_execution": allowed})
    if isinstance(options, JudgedOptions) and request.judge is not None:
        own: JudgeEndpoint = options.judge or JudgeEndpoint()
        wished = request.judge.model_dump(exclude_unset=True)
        known = {name: value for name, value in wished.items() if name in type(own).model_fields}
        options = options.model_copy(update={"judge": type(own).model_validate({**own.model_dump(), **known})})
    return options


def _staged(evaluation: SuiteEvaluation, *, suite: str) -> str | None:
    if evaluation.texts is None:
        return None
    folder = texts_folder(evaluation.texts)
    if not storage.exists(folder):
        raise BadInput(
            expected=f"the texts that {evaluation.label} asks about in {folder}",
            found="nothing there",
            remedy=f"fetch them once with `assay stage --suite {suite}`, or set benchmarks_path to a copy",
        )
    return folder
