"""Inspect, driven by our program in its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pools.endpoint import RunningModel
from resources.environments.environments import EnvironmentSpec
from resources.errors import BadInput
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.evaluators.inspect_ai.environment import INSPECT_AI
from tasks.evaluators.inspect_ai.options import InspectOptions
from tasks.evaluators.inspect_ai.results import read_results, read_samples
from tasks.evaluators.inspect_ai.tasks import find_tasks, installed
from tasks.evaluators.isolation import ModelCode
from tasks.records.samples import Sample
from tasks.spec.benchmarks import benchmarks_here, copied_benchmarks, named_elsewhere
from tasks.spec.evaluation import EvaluationConfig

_PROGRAM = Path(__file__).parent / "programs" / "run_inspect.py"
_SHARED_PROGRAMS = str(_PROGRAM.parents[2] / "programs")
_FETCH_OPTION = "--fetch"
_JOB_FILE = "job.json"
_LONGEST_ANSWER = 2048
"""Default limit of tokens of an answer to a plain prompt; half of a shorter context."""
_PROGRESS = re.compile(r"Answered (?P<done>\d{1,15}) of (?P<total>\d{1,15}) (?P<stage>samples)")


@dataclass(frozen=True)
class Inspect:
    """Inspect 0.3."""

    name: str = "inspect_ai"
    needs_endpoint: bool = True
    environments: tuple[EnvironmentSpec, ...] = (INSPECT_AI,)
    program: Path | None = _PROGRAM
    import_variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        return INSPECT_AI

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        return ()

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        assert isinstance(model, RunningModel), "Inspect asks an endpoint"
        options = config.options(InspectOptions)
        same_endpoint = judge is not None and (judge.base_url, judge.api_key) == (model.base_url, model.api_key)
        job = {
            "benchmarks": [
                {
                    "name": task.name,
                    "key": task.metric_key,
                    "task": inspect_task.task,
                    "file": inspect_task.file,
                    "arguments": task.task_kwargs,
                }
                for task, inspect_task in zip(config.evals, find_tasks(config), strict=True)
            ],
            "benchmarks_path": benchmarks_here(config),
            "limit": config.max_eval_instances,
            **options.model_dump(mode="json", exclude={"name", "judge", "higher_is_better"}),
            "model": _endpoint(model),
            "chat": model.apply_chat_template,
            "tokenizer": model.tokenizer,
            "takes_tools": _takes_tools(config),
            "longest_answer": min(_LONGEST_ANSWER, max(1, (model.max_model_len or 2 * _LONGEST_ANSWER) // 2)),
            "judge": {**_endpoint(judge), "same_endpoint": same_endpoint} if judge is not None else None,
            "output": str(output),
        }
        keys = {"OPENAI_API_KEY": model.api_key}
        if judge is not None and not same_endpoint:
            keys["ASSAY_JUDGE_API_KEY"] = judge.api_key
        program = (str(python), "-I", "-u", str(_PROGRAM))
        return HarnessCommand(
            argv=(*program, _JOB_FILE),
            variables={**keys, **self.import_variables},
            arguments=(_JOB_FILE,),
            files={_JOB_FILE: json.dumps(job, indent=2, sort_keys=True)},
            copies=copied_benchmarks(config),
            model_code=_model_code(model, config, program) if options.allow_code_execution else None,
        )

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        return read_results(output, config)

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        return read_samples(output, config)

    def progress(self, log: str) -> Progress | None:
        return Progress.last_in(log, _PROGRESS)

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        """Looks up every task, and refuses settings that Inspect would ignore."""
        for task, inspect_task in zip(config.evals, find_tasks(config), strict=True):
            package = inspect_task.task.partition("/")[0]
            if inspect_task.file is None and not installed(package, python):
                raise UnknownBenchmark(
                    expected=f"a file of tasks called {package}.py, or the package {package} in Inspect's environment",
                    found=f"{task.name!r}, and neither",
                    remedy="Correct its name in evals, or name a pinned list that has the package in "
                    "ASSAY_PINNED_LISTS, as that of inspect-ai",
                )
            if task.num_fewshot is not None:
                raise BadInput(
                    expected=f"no num_fewshot of {task.name}: examples are the task's own affair in Inspect",
                    found=str(task.num_fewshot),
                    remedy="Leave it out, or pass the task's own argument for it, if any, in task_kwargs",
                )
        options = config.options(InspectOptions)
        if options.allow_code_execution and options.judge is not None and options.judge.elsewhere:
            raise BadInput(
                expected="no judge elsewhere where the model's code runs: nothing is reached there but the model",
                found="both evaluator.judge and evaluator.allow_code_execution",
                remedy="Evaluate tasks with a sandbox and tasks with a judge in separate evaluations",
            )


def _endpoint(model: RunningModel) -> dict[str, Any]:
    return {
        "base_url": model.base_url.rstrip("/"),
        "model": model.model,
        "capacity": model.capacity,
        "timeout": model.request_timeout_seconds,
    }


def _takes_tools(config: EvaluationConfig) -> bool | None:
    if config.pool_config is None:
        return None
    given = {name.replace("-", "_") for name, value in config.pool_config.model.engine_kwargs.items() if value}
    return {"enable_auto_tool_choice", "tool_call_parser"} <= given


def _model_code(model: RunningModel, config: EvaluationConfig, program: tuple[str, ...]) -> ModelCode:
    named = [str(storage.local_path(place)) for place in sorted(named_elsewhere(config)) if storage.is_local(place)]
    tokenizer = [model.tokenizer] if Path(model.tokenizer).is_absolute() else []
    return ModelCode(
        endpoint=model.base_url,
        prepare=(*program, _FETCH_OPTION, _JOB_FILE),
        reads=(str(_PROGRAM.parent), _SHARED_PROGRAMS, *tokenizer, *named),
        scratch=() if copied_benchmarks(config) else (benchmarks_here(config),),
    )


EVALUATOR = Inspect()
