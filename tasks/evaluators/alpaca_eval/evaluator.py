"""AlpacaEval: our program generates outputs through the endpoint; a judge compares them with a baseline's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pools.endpoint import RunningModel
from resources.environments.environments import EnvironmentSpec
from resources.errors import unknown
from resources.storage import storage
from tasks.evaluators.alpaca_eval.environment import ALPACA_EVAL
from tasks.evaluators.alpaca_eval.instructions import BUNDLED_SETS, check_instructions, instruction_sets
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.alpaca_eval.results import folder_of, read_results, read_samples
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.records.samples import Sample
from tasks.spec.benchmarks import COPIED, benchmarks_here, copied_benchmarks
from tasks.spec.evaluation import EvaluationConfig

_PROGRAM = Path(__file__).parent / "programs" / "run_alpaca_eval.py"
_JOB_FILE = "job.json"
_BUNDLED_ANNOTATORS = BUNDLED_SETS / "annotators"
_DEFAULT_NEW_TOKENS = 2048
"""AlpacaEval's own default; half of what the model holds where that is less, so that prompts have room."""
_BAR = re.compile(r"(?P<stage>answers|verdicts) \((?P<key>[^)]*)\):[^\r\n]*?(?P<done>\d{1,15})/(?P<total>\d{1,15}) \[")


@dataclass(frozen=True)
class AlpacaEval:
    """AlpacaEval 0.6."""

    name: str = "alpaca_eval"
    needs_endpoint: bool = True
    environments: tuple[EnvironmentSpec, ...] = (ALPACA_EVAL,)
    program: Path | None = _PROGRAM
    import_variables: Mapping[str, str] = field(default_factory=lambda: {"TOKENIZERS_PARALLELISM": "false"})

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        return ALPACA_EVAL

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
        """Returns our program with a job file of everything but the keys; without a judge, the model judges itself."""
        assert isinstance(model, RunningModel), "AlpacaEval asks an endpoint"
        options = config.options(AlpacaEvalOptions)
        remote = bool(copied_benchmarks(config))
        judged_by = judge or model
        same_endpoint = (judged_by.base_url, judged_by.api_key) == (model.base_url, model.api_key)
        model_params = config.pool_config.model.generation_params if config.pool_config else None
        job = {
            "output": str(output),
            "sets": [
                {
                    "key": instruction_set.key,
                    "path": _path_here(instruction_set.uri, config, remote=remote),
                    "references": _absolute(instruction_set.references),
                    "folder": str(folder_of(output, instruction_set.key, config)),
                }
                for instruction_set in instruction_sets(config)
            ],
            "limit": config.max_eval_instances,
            "model": _endpoint(model),
            "chat": model.apply_chat_template,
            "tokenizer": model.tokenizer,
            "prompt_template": options.prompt_template,
            "prompt_stops": options.prompt_stops,
            "sampling": _sampling(config, model, model_params=model_params),
            "engine_parameters": options.engine_parameters,
            "judge": {
                **_endpoint(judged_by),
                "key_variable": "OPENAI_API_KEY" if same_endpoint else "ASSAY_JUDGE_API_KEY",
                "elsewhere": options.judge.base_url is not None,
                "annotator": options.judge.annotator,
                "annotator_folders": _annotator_folders(config),
                "constrained": options.judge.constrained,
            },
            "length_control": _absolute(options.length_control_path),
        }
        keys = {"OPENAI_API_KEY": model.api_key}
        if not same_endpoint:
            keys["ASSAY_JUDGE_API_KEY"] = judged_by.api_key
        return HarnessCommand(
            argv=(str(python), "-I", "-u", str(_PROGRAM), _JOB_FILE),
            variables={**keys, **self.import_variables},
            arguments=(_JOB_FILE,),
            files={_JOB_FILE: json.dumps(job, indent=2, sort_keys=True)},
            copies=copied_benchmarks(config),
        )

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        return read_results(output, config)

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        return read_samples(output, config)

    def progress(self, log: str) -> Progress | None:
        bars = list(_BAR.finditer(log))  # first of outputs, then of verdicts
        if not bars:
            return None
        bar = bars[-1]
        done, total = int(bar["done"]), int(bar["total"])
        return Progress(f"{bar['key']}, {bar['stage']}", min(done, total), total)

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        check_instructions(config)
        _check_annotator(config, python)


def _endpoint(model: RunningModel) -> dict[str, object]:
    return {
        "base_url": model.base_url.rstrip("/"),
        "model": model.model,
        "capacity": model.capacity,
        "timeout": model.request_timeout_seconds,
    }


def _sampling(config: EvaluationConfig, model: RunningModel, *, model_params: dict[str, object] | None) -> object:
    room = model.max_model_len // 2 if model.max_model_len else _DEFAULT_NEW_TOKENS
    return {
        "max_new_tokens": max(1, min(_DEFAULT_NEW_TOKENS, room)),
        **config.options(AlpacaEvalOptions).sampling(model_params),
    }


def _absolute(path: str | None) -> str | None:
    return str(storage.local_path(path).absolute()) if path is not None else None


def _path_here(uri: str | None, config: EvaluationConfig, *, remote: bool) -> str | None:
    if remote and uri is not None and config.options(AlpacaEvalOptions).instructions_path is None:
        return f"{COPIED}/{storage.basename(uri)}"
    return _absolute(uri)


def _annotator_folders(config: EvaluationConfig) -> list[str]:
    if config.benchmarks_path is None:
        return [str(_BUNDLED_ANNOTATORS)]
    return [benchmarks_here(config), str(_BUNDLED_ANNOTATORS)]


def _check_annotator(config: EvaluationConfig, python: Path) -> None:
    annotator = config.options(AlpacaEvalOptions).judge.annotator
    own = [config.benchmarks_path] if config.benchmarks_path else []
    if any(
        storage.exists(storage.join(place, annotator, "configs.yaml")) for place in (*own, str(_BUNDLED_ANNOTATORS))
    ):
        return
    theirs = list(python.absolute().parents[1].glob("lib/python3*/site-packages/alpaca_eval/evaluators_configs"))
    if not theirs or (theirs[0] / annotator / "configs.yaml").is_file():
        return
    names = [path.parent.name for place in (_BUNDLED_ANNOTATORS, theirs[0]) for path in place.glob("*/configs.yaml")]
    expected = f"a configuration of a judge: {', '.join(sorted(names))}; or a folder in benchmarks_path"
    raise unknown(expected, annotator, names, "Correct evaluator.judge.annotator")


EVALUATOR = AlpacaEval()
