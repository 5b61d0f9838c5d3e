"""Evaluators: a program to run against an endpoint, the readers of its output, and the writer of its samples."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pools.endpoint import LocalCheckpoint, RunningModel
from resources.environments.environments import EnvironmentSpec
from resources.storage import storage
from tasks.evaluators.isolation import ModelCode
from tasks.evaluators.reading import Unanswered
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import LENGTH, Question, Sample, agrees, question_of, scale_of, scores_in, write_samples
from tasks.records.verdicts import EarlyScore
from tasks.spec.benchmarks import benchmarks_here, copied_benchmarks, named_elsewhere
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import EVALUATORS, CodeOptions
from tasks.verdicts.statistics.composition import with_interval

FETCH_OPTION = "--fetch"
"""Makes a program only fetch its data."""
_JOB_FILE = "job.json"

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
    unanswered: Unanswered = field(default_factory=Unanswered)
    samples: int | None = None  # questions written to `samples.jsonl.gz`; set by the runner
    samples_digest: str | None = None  # SHA-256 of that file; set by the runner
    early: tuple[EarlyScore, ...] = ()
    """Verdicts reached before all questions were requested, in place of metrics; set by the runner."""


@dataclass(frozen=True)
class Evaluator:
    """A harness: its program, the program's input, and the readers of its output and its log.

    `job` makes the content of the program's job file from the model (a `RunningModel` if `needs_endpoint`, else a
    `LocalCheckpoint`), the evaluation, the output folder and the judge's endpoint. It is deterministic and has no side
    effects. `read` returns the results in the output folder with prompt, answer and scores of each question. `bar`
    matches a line of progress, by its groups `stage`, `done` and `total`, and perhaps `before` and `all`. `check`
    raises early for settings that the harness would reject late.
    """

    name: str
    environments: tuple[EnvironmentSpec, ...]  # a machine that only plans uses the first
    program: Path
    job: Callable[[Any, EvaluationConfig, Path, RunningModel | None], Mapping[str, Any]]
    read: Callable[[Path, EvaluationConfig], tuple[Parsed, Iterable[Sample]]]
    bar: re.Pattern[str]
    check: Callable[[EvaluationConfig, Path], None]
    needs_endpoint: bool = True
    """False if it loads a `LocalCheckpoint` itself.

    Then, without arguments, the program reads paths of job files from standard input, and after each evaluation prints
    a line `evaluated`, a space, and the path.
    """
    preloads: bool = True
    """True if the program has `preload` and `main`, so that a fork server can keep it imported."""
    preload_arguments: Callable[[EvaluationConfig], tuple[str, ...]] = lambda config: ()
    """Arguments of the program's `preload`: the data that it reads before it is forked."""
    import_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the program reads when it is imported."""
    environment_of: Callable[[EvaluationConfig], EnvironmentSpec] | None = None
    """Returns the environment for an evaluation; None if there is only one."""

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        return self.environment_of(config) if self.environment_of else self.environments[0]

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        """Returns the command that writes its results into `output`, isolated if it may run model-written code."""
        program, keys, code = (str(python), "-I", "-u", str(self.program)), {}, None
        if isinstance(model, RunningModel):
            keys = {"OPENAI_API_KEY": model.api_key}
            if judge is not None and not is_same_endpoint(judge, model):
                keys["ASSAY_JUDGE_API_KEY"] = judge.api_key
            if isinstance(config.evaluator, CodeOptions) and config.evaluator.allow_code_execution:
                code = _model_code(model, config, program)
        content = {
            "benchmarks": benchmarks_of(config),
            "benchmarks_path": benchmarks_here(config),
            "limit": config.max_eval_instances,
            "output": str(output),
            **self.job(model, config, output, judge),
        }
        return HarnessCommand(
            argv=(*program, _JOB_FILE),
            arguments=(_JOB_FILE,),
            variables={**keys, **self.import_variables},
            files={_JOB_FILE: json.dumps(content, indent=2, sort_keys=True)},
            copies=copied_benchmarks(config),
            model_code=code,
        )

    def progress(self, log: str) -> Progress | None:
        """Returns the progress in the last lines of its log; None while it sends no requests."""
        *_, bar = None, *self.bar.finditer(log)
        if bar is None:
            return None
        groups = bar.groupdict()
        total = int(groups.get("all") or bar["total"])
        done = int(groups.get("before") or 0) + int(bar["done"])
        return Progress(bar["stage"] or "requests", min(done, total), total)


def benchmarks_of(config: EvaluationConfig) -> list[dict[str, Any]]:
    """Returns the benchmarks of an evaluation as programs read them."""
    plain = ("name", "num_fewshot", "force_fewshot", "cluster_by", "task_kwargs")
    return [{"key": task.metric_key, **{name: getattr(task, name) for name in plain}} for task in config.evals]


def is_same_endpoint(judge: RunningModel, model: RunningModel) -> bool:
    """Returns True if a judge answers where the model does, with the same key."""
    return (judge.base_url, judge.api_key) == (model.base_url, model.api_key)


def endpoint_of(model: RunningModel) -> dict[str, Any]:
    """Returns the endpoint of a model as programs with OpenAI's client read it."""
    return {
        "base_url": model.base_url.rstrip("/"),
        "model": model.model,
        "capacity": model.capacity,
        "timeout": model.request_timeout_seconds,
    }


def _model_code(model: RunningModel, config: EvaluationConfig, program: tuple[str, ...]) -> ModelCode:
    named = [str(storage.local_path(place)) for place in sorted(named_elsewhere(config)) if storage.is_local(place)]
    tokenizer = [model.tokenizer] if Path(model.tokenizer).is_absolute() else []
    return ModelCode(
        endpoint=model.base_url,
        prepare=(*program, FETCH_OPTION, _JOB_FILE),
        reads=(str(Path(program[-1]).parent), str(Path(__file__).parent / "programs"), *tokenizer, *named),
        scratch=() if copied_benchmarks(config) else (benchmarks_here(config),),
    )


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


def with_samples(parsed: Parsed, samples: Iterable[Sample], path: Path) -> Parsed:
    """Writes samples to a new file, and completes parsed results with them."""
    questions: dict[str, list[Question]] = {}

    def noted() -> Iterator[Sample]:
        for sample in samples:
            questions.setdefault(sample.benchmark, []).append(question_of(sample))
            yield sample

    number = write_samples(path, noted())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    metrics = tuple(
        with_interval(metric, questions, parsed.metrics).model_copy(
            update={"recomputed": agrees(metric, questions, parsed.metrics)}
        )
        for metric in parsed.metrics
    )
    details = {
        benchmark: _completed(parsed.details.get(benchmark), asked, [m for m in metrics if m.benchmark == benchmark])
        for benchmark, asked in questions.items()
    }
    return replace(
        parsed, metrics=metrics, details={**parsed.details, **details}, samples=number, samples_digest=digest
    )


def _completed(
    details: BenchmarkDetails | None, asked: Sequence[Question], metrics: Sequence[Metric]
) -> BenchmarkDetails:
    if details is None:
        details = BenchmarkDetails(
            questions=sum(question.scored for question in asked),
            truncated=sum(question.truncated for question in asked),
        )
    finishes = Counter(question.finish for question in asked if question.finish)
    shown = {
        "finish_reasons": details.finish_reasons or dict(finishes),
        "at_limit": finishes[LENGTH] if details.at_limit is None and finishes else details.at_limit,
        "completed": details.completed or _over_completed(asked, metrics),
        "prompts": details.prompts or _digest(asked),
    }
    return details.model_copy(update=shown)


def _over_completed(asked: Sequence[Question], metrics: Sequence[Metric]) -> dict[str, float]:
    completed = [question for question in asked if question.finish != LENGTH]
    if len(completed) == len(asked):
        return {}
    values = {}
    for metric in metrics:
        scale, scores = scale_of(metric, scores_in(metric, asked)), scores_in(metric, completed)
        if scale is not None and scores:
            values[metric.name] = scale * math.fsum(scores) / len(scores)
    return values


def _digest(asked: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for name, prompt in sorted((question.id, question.prompt) for question in asked):
        digest.update(name.encode() + b"\0" + prompt)
    return digest.hexdigest()
