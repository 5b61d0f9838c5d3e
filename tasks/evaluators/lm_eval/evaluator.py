"""lm-evaluation-harness, driven by our program in its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pools.endpoint import RunningModel
from resources.environments.environments import EnvironmentSpec
from resources.errors import BadInput, unknown
from resources.settings import settings
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.evaluators.isolation import ModelCode
from tasks.evaluators.lm_eval.environment import LM_EVAL
from tasks.evaluators.lm_eval.index import PROGRAM, OwnBenchmarks, listing, own_benchmarks
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.evaluators.lm_eval.results import NO_ANSWER, RESULTS_FOLDER, read_results
from tasks.evaluators.lm_eval.samples import read_samples
from tasks.records.samples import Sample
from tasks.spec.benchmarks import benchmarks_here, benchmarks_uri, copied_benchmarks, named_elsewhere
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import LmEvalBenchmarkOptions

FETCH_OPTION = "--fetch"
_JOB_FILE = "job.json"
_SHARED_PROGRAMS = str(PROGRAM.parents[2] / "programs")
_PROMPTS_PER_REQUEST = 8
"""More would save little, and lose more in flight at a kill: 580 prompts took 1.4 s instead of 2.3 s."""

_BAR = re.compile(
    r"Requesting API(?: \((?P<stage>[^)\r\n]*); (?P<before>\d{1,15}) before, (?P<all>\d{1,15}) in all\))?:"
    r"[^\r\n]{0,200}?(?P<done>\d{1,15})/(?P<total>\d{1,15}) \["
)


@dataclass(frozen=True)
class LmEval:
    """lm-evaluation-harness 0.4."""

    name: str = "lm_evaluation_harness"
    needs_endpoint: bool = True
    environments: tuple[EnvironmentSpec, ...] = (LM_EVAL,)
    program: Path | None = PROGRAM
    import_variables: Mapping[str, str] = field(
        default_factory=lambda: {
            "LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": NO_ANSWER,
            "TOKENIZERS_PARALLELISM": "false",
        }
    )

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        return LM_EVAL

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        own = own_benchmarks(config).names
        return () if all(task.name in own for task in config.evals) else ("--built-in",)

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        assert isinstance(model, RunningModel), "lm-eval asks an endpoint"
        options = config.options(LmEvalOptions)
        job = {
            "benchmarks": [
                {
                    "name": task.name,
                    "num_fewshot": task.num_fewshot,
                    "force_fewshot": task.force_fewshot,
                    "cluster_by": task.cluster_by,
                    "key": task.metric_key,
                    "task_kwargs": task.task_kwargs,
                }
                for task in config.evals
            ],
            "benchmarks_path": benchmarks_here(config),
            "prompts_per_request": _PROMPTS_PER_REQUEST,
            "limit": config.max_eval_instances,
            "max_truncated": config.max_truncated,
            "apply_chat_template": model.apply_chat_template,
            "conversations": options.endpoint == "chat_completions",
            "prompt_logprobs": model.prompt_logprobs,
            **model.scoring.model_dump(),
            "trust_folder": str(settings().cache_dir / "loglikelihood"),
            "pool": model.direct,
            "max_model_len": model.max_model_len,
            "max_gen_toks": options.max_gen_toks,
            "long_prompts": options.long_prompts,
            "failed_control": options.failed_control,
            "allow_code_execution": list(options.allow_code_execution),
            # A pool serves the checkpoint that the tokenizer comes from; for other endpoints that is unknown.
            "prove_tokenizer": config.base_url is not None,
            "model_args": {
                "model": model.model,
                "base_url": f"{model.base_url.rstrip('/')}/{options.endpoint.replace('_', '/')}",
                "tokenizer_backend": "huggingface",
                "tokenizer": model.tokenizer,
                # Prompts travel as token ids: as text, an engine puts a BOS in front that the harness did not count,
                # so the log-probabilities it sums are off by a token; and chat templates need it.
                "tokenized_requests": True,
                # With 1, the harness takes another path, which sends other stop strings.
                "num_concurrent": max(2, model.capacity),
                "max_retries": 3,
                "timeout": max(1, int(model.request_timeout_seconds)),
            },
            "output": str(output),
            "results_folder": RESULTS_FOLDER,
        }
        program = (str(python), "-I", "-u", str(PROGRAM))
        return HarnessCommand(
            argv=(*program, _JOB_FILE),
            variables={"OPENAI_API_KEY": model.api_key, **self.import_variables},
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
        bars = list(_BAR.finditer(log))
        if not bars:
            return None
        bar = bars[-1]
        done, total = int(bar["done"]), int(bar["total"])
        if bar["stage"] is None:
            return Progress("requests", done, total)
        return Progress(bar["stage"], min(int(bar["before"]) + done, int(bar["all"])), int(bar["all"]))

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        """Looks up every benchmark: first in the user's folder, then among lm-eval's own."""
        own = own_benchmarks(config)
        run_code = set(own.run_code)
        if any(task.name not in own.names for task in config.evals):
            known = listing(python)
            for task in config.evals:
                if task.name not in own.names and task.name not in known.benchmarks:
                    raise _unknown(task.name, own=own, known=known.benchmarks, place=benchmarks_uri(config))
            run_code |= set(known.run_code) - own.names
        _check_code(config, run_code)


def _model_code(model: RunningModel, config: EvaluationConfig, program: tuple[str, ...]) -> ModelCode:
    named = [place for place in sorted(named_elsewhere(config)) if storage.is_local(place)]
    tokenizer = [model.tokenizer] if Path(model.tokenizer).is_absolute() else []
    return ModelCode(
        endpoint=model.base_url,
        prepare=(*program, FETCH_OPTION, _JOB_FILE),
        reads=(str(PROGRAM.parent), _SHARED_PROGRAMS, *tokenizer, *(str(storage.local_path(place)) for place in named)),
        scratch=() if copied_benchmarks(config) else (benchmarks_here(config),),
    )


def _check_code(config: EvaluationConfig, run_code: set[str]) -> None:
    allowed = config.options(LmEvalBenchmarkOptions).allow_code_execution
    for task in config.evals:
        if task.name in run_code and not allowed:
            raise BadInput(
                expected=f"evaluator.allow_code_execution to name {task.name}, which runs code that the model writes "
                "on this machine",
                found="an empty list",
                remedy=f"Add {task.name} to evaluator.allow_code_execution (--allow-code {task.name}) if the machine "
                "may be put at risk, or leave it out",
            )


def _unknown(name: str, *, own: OwnBenchmarks, known: list[str], place: str) -> BadInput:
    broken = f" (not readable there: {', '.join(own.unreadable)})" if own.unreadable else ""
    expected = f"a benchmark in {place}{broken}, or in lm-eval itself"
    remedy = "Correct its name in evals, or set benchmarks_path to the folder with its YAML file"
    return unknown(expected, name, [*own.names, *known], remedy, kind=UnknownBenchmark)


EVALUATOR = LmEval()
