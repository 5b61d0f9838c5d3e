"""HELM, driven by our program in its environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pools.endpoint import RunningModel
from resources.settings import settings
from tasks.evaluators.evaluator import Evaluator, benchmarks_of
from tasks.evaluators.helm.entries import check_entries, read_entries_file
from tasks.evaluators.helm.environment import HELM
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.helm.results import read_results
from tasks.evaluators.helm.runs import RESULTS_FOLDER
from tasks.records.record import SCOPE_NAME
from tasks.spec.evaluation import EvaluationConfig

_MOST_THREADS = 64
"""HELM uses a thread per request; more than 64 slow each other down."""


def _job(model: RunningModel, config: EvaluationConfig, output: Path, _: object) -> dict[str, Any]:
    options = config.options(HelmOptions)
    entries = read_entries_file(options.run_specs_path).decode() if options.run_specs_path is not None else None
    same = ("priority", "groups", "num_train_trials", "request_retries", "exit_on_error", "skip_completed_runs")
    return {
        "benchmarks": [{**benchmark, "arguments": benchmark["task_kwargs"]} for benchmark in benchmarks_of(config)],
        "run_specs": entries,
        **options.model_dump(mode="json", include={*same, "failed_control", "site"}),
        "num_threads": options.num_threads or max(1, min(model.capacity, _MOST_THREADS)),
        "begun_with": str(output.parent / SCOPE_NAME),
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
        "results_folder": RESULTS_FOLDER,
    }


EVALUATOR = Evaluator(
    name="helm",
    environments=(HELM,),
    program=Path(__file__).parent / "programs" / "run_helm.py",
    job=_job,
    read=read_results,
    bar=re.compile(r"Answered (?P<done>\d{1,15}) of (?P<total>\d{1,15}) requests of (?P<stage>[^\r\n]+)"),
    check=check_entries,
    import_variables={"TOKENIZERS_PARALLELISM": "false"},
)
"""HELM 0.5."""
