"""HELM, driven by our program in its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pools.endpoint import RunningModel
from resources.environments.environments import EnvironmentSpec
from resources.settings import settings
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.evaluators.helm.entries import check_entries, read_entries_file
from tasks.evaluators.helm.environment import HELM
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.helm.results import read_results
from tasks.evaluators.helm.runs import RESULTS_FOLDER
from tasks.evaluators.helm.samples import read_samples
from tasks.records.record import SCOPE_NAME
from tasks.records.samples import Sample
from tasks.spec.benchmarks import benchmarks_here, copied_benchmarks
from tasks.spec.evaluation import EvaluationConfig

_PROGRAM = Path(__file__).parent / "programs" / "run_helm.py"
_JOB_FILE = "job.json"
_ENTRIES_FILE = "run_specs.conf"
_MOST_THREADS = 64
"""HELM uses a thread per request; more than 64 slow each other down."""
_PROGRESS = re.compile(r"Answered (?P<done>\d{1,15}) of (?P<total>\d{1,15}) requests of (?P<stage>[^\r\n]+)")


@dataclass(frozen=True)
class Helm:
    """HELM 0.5."""

    name: str = "helm"
    needs_endpoint: bool = True
    environments: tuple[EnvironmentSpec, ...] = (HELM,)
    program: Path | None = _PROGRAM
    import_variables: Mapping[str, str] = field(default_factory=lambda: {"TOKENIZERS_PARALLELISM": "false"})

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        return HELM

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
        assert isinstance(model, RunningModel), "HELM asks an endpoint"
        options = config.options(HelmOptions)
        files = {}
        if options.run_specs_path is not None:
            files[_ENTRIES_FILE] = read_entries_file(options.run_specs_path).decode()
        job = {
            "benchmarks": [
                {
                    "name": task.name,
                    "key": task.metric_key,
                    "num_fewshot": task.num_fewshot,
                    "arguments": task.task_kwargs,
                }
                for task in config.evals
            ],
            "benchmarks_path": benchmarks_here(config),
            "run_specs_path": _ENTRIES_FILE if files else None,
            "priority": options.priority,
            "groups": list(options.groups),
            "num_train_trials": options.num_train_trials,
            "num_threads": options.num_threads or max(1, min(model.capacity, _MOST_THREADS)),
            "request_retries": options.request_retries,
            "exit_on_error": options.exit_on_error,
            "skip_completed_runs": options.skip_completed_runs,
            "failed_control": options.failed_control,
            "begun_with": str(output.parent / SCOPE_NAME),
            "site": options.site,
            "limit": config.max_eval_instances,
            "max_truncated": config.max_truncated,
            "model": model.model,
            "base_url": model.base_url.rstrip("/"),
            "tokenizer": model.tokenizer,
            "apply_chat_template": model.apply_chat_template,
            "prompt_logprobs": model.prompt_logprobs,
            **model.scoring.model_dump(),
            "trust_folder": str(settings().cache_dir / "loglikelihood"),
            "max_model_len": model.max_model_len,
            "request_timeout_seconds": model.request_timeout_seconds,
            "scenarios_path": str(settings().cache_dir / "helm" / "scenarios"),
            "output": str(output),
            "results_folder": RESULTS_FOLDER,
        }
        return HarnessCommand(
            argv=(str(python), "-I", "-u", str(_PROGRAM), _JOB_FILE),
            variables={"OPENAI_API_KEY": model.api_key, **self.import_variables},
            arguments=(_JOB_FILE,),
            files={**files, _JOB_FILE: json.dumps(job, indent=2, sort_keys=True)},
            copies=copied_benchmarks(config),
        )

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        return read_results(output, config)

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        return read_samples(output, config)

    def progress(self, log: str) -> Progress | None:
        return Progress.last_in(log, _PROGRESS)

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        check_entries(config, python=python)


EVALUATOR = Helm()
