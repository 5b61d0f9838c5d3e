"""lm-evaluation-harness, driven by our program in its environment, on benchmarks of its own or in a user's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import BaseModel

from pools.endpoint import RunningModel
from resources.errors import BadInput, not_there, unknown
from resources.settings import settings
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.evaluator import Evaluator
from tasks.evaluators.listings import remembered
from tasks.evaluators.lm_eval.files import NO_ANSWER, RESULTS_FOLDER
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.evaluators.lm_eval.results import read_results
from tasks.spec.benchmarks import benchmarks_uri, read_benchmark
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import LmEvalBenchmarkOptions

PROGRAM = Path(__file__).parent / "programs" / "run_lm_eval.py"


@dataclass
class OwnBenchmarks:
    """Benchmarks in a user's own folder."""

    names: set[str] = field(default_factory=set)  # benchmarks, groups and tags
    unreadable: list[str] = field(default_factory=list)  # files that are not YAML
    run_code: set[str] = field(default_factory=set)
    """Benchmarks marked in their own file as running model-written code."""
    generate: set[str] = field(default_factory=set)
    """Benchmarks that let the model write according to their own file."""


class Listing(BaseModel):
    """The benchmarks that come with lm-eval."""

    benchmarks: list[str]  # benchmarks, groups and tags
    run_code: list[str]  # names that run model-written code, or have a part that does


def listing(python: Path) -> Listing:
    """Returns all that comes with lm-eval; cached per environment, since listing takes many seconds."""
    return remembered(python, PROGRAM, "--list", kind=Listing)


def own_benchmarks(config: EvaluationConfig) -> OwnBenchmarks:
    """Reads the user's folder of benchmarks, local or in a store."""
    if config.benchmarks_path is not None and not storage.is_local(config.benchmarks_path):
        with TemporaryDirectory() as folder:
            copy = Path(folder) / "benchmarks"
            storage.copy_to_local(config.benchmarks_path, copy)
            return _found_in(copy)
    folder = storage.local_path(benchmarks_uri(config)).absolute()
    if config.benchmarks_path is not None and not folder.is_dir():
        remedy = "Correct the path, or leave it out for the benchmarks that come with Assay and lm-eval"
        raise not_there("a folder with benchmarks as YAML files", f"benchmarks_path={config.benchmarks_path}", remedy)
    return _found_in(folder)


def _found_in(folder: Path) -> OwnBenchmarks:
    benchmarks = OwnBenchmarks()
    for path in sorted(folder.rglob("*.yaml")):
        try:
            content = read_benchmark(path.read_bytes()) if path.is_file() else None
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            benchmarks.unreadable.append(path.name)
            continue
        if isinstance(content, dict):
            tags = content.get("tag") or []
            named = [content.get("task"), content.get("group"), *([tags] if isinstance(tags, str) else tags)]
            names = {name for name in named if isinstance(name, str)}
            benchmarks.names |= names
            if content.get("unsafe_code", False) is not False:
                benchmarks.run_code |= names
            if content.get("output_type") == "generate_until":
                benchmarks.generate |= names
    return benchmarks


_PROMPTS_PER_REQUEST = 8
"""More would save little, and lose more in flight at a kill: 580 prompts took 1.4 s instead of 2.3 s."""

_BAR = re.compile(
    r"Requesting API(?: \((?P<stage>[^)\r\n]*); (?P<before>\d{1,15}) before, (?P<all>\d{1,15}) in all\))?:"
    r"[^\r\n]{0,200}?(?P<done>\d{1,15})/(?P<total>\d{1,15}) \["
)


def _job(model: RunningModel, config: EvaluationConfig, output: Path, _: object) -> dict[str, Any]:
    options = config.options(LmEvalOptions)
    return {
        "prompts_per_request": _PROMPTS_PER_REQUEST,
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
            "trust_remote_code": config.trusts_code,
            # Prompts travel as token ids: as text, an engine puts a BOS in front that the harness did not count,
            # so the log-probabilities it sums are off by a token; and chat templates need it.
            "tokenized_requests": True,
            # With 1, the harness takes another path, which sends other stop strings.
            "num_concurrent": max(2, model.capacity),
            "max_retries": 3,
            "timeout": max(1, int(model.request_timeout_seconds)),
        },
        "results_folder": RESULTS_FOLDER,
    }


def preload_arguments(config: EvaluationConfig) -> tuple[str, ...]:
    """Returns the option to read lm-eval's own benchmarks beforehand, unless all come from the user's folder."""
    own = own_benchmarks(config).names
    return () if all(task.name in own for task in config.evals) else ("--built-in",)


def check_benchmarks(config: EvaluationConfig, python: Path) -> None:
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


EVALUATOR = Evaluator(
    name="lm_evaluation_harness",
    environments=(LM_EVAL,),
    program=PROGRAM,
    job=_job,
    read=read_results,
    bar=_BAR,
    check=check_benchmarks,
    preload_arguments=preload_arguments,
    import_variables={"LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": NO_ANSWER, "TOKENIZERS_PARALLELISM": "false"},
)
"""lm-evaluation-harness 0.4."""
