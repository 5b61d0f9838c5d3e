"""AlpacaEval: our program generates outputs through the endpoint; a judge compares them with a baseline's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pools.endpoint import RunningModel
from resources.errors import unknown
from resources.storage import storage
from tasks.evaluators.alpaca_eval.environment import ALPACA_EVAL
from tasks.evaluators.alpaca_eval.instructions import BUNDLED_SETS, check_instructions, instruction_sets
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.alpaca_eval.results import folder_of, read_results
from tasks.evaluators.evaluator import Evaluator, endpoint_of, is_same_endpoint
from tasks.spec.benchmarks import COPIED, benchmarks_here, copied_benchmarks
from tasks.spec.evaluation import EvaluationConfig

_BUNDLED_ANNOTATORS = BUNDLED_SETS / "annotators"
_DEFAULT_NEW_TOKENS = 2048
"""AlpacaEval's own default; half of what the model holds where that is less, so that prompts have room."""


def _job(model: RunningModel, config: EvaluationConfig, output: Path, judge: RunningModel | None) -> dict[str, Any]:
    options = config.options(AlpacaEvalOptions)
    judged_by = judge or model  # without a judge, the model judges itself
    key_variable = "OPENAI_API_KEY" if is_same_endpoint(judged_by, model) else "ASSAY_JUDGE_API_KEY"
    return {
        "sets": [
            {
                "key": instruction_set.key,
                "path": _path_here(instruction_set.uri, config),
                "references": _absolute(instruction_set.references),
                "folder": str(folder_of(output, instruction_set.key, config)),
            }
            for instruction_set in instruction_sets(config)
        ],
        "model": endpoint_of(model),
        "chat": model.apply_chat_template,
        "tokenizer": model.tokenizer,
        "prompt_template": options.prompt_template,
        "prompt_stops": options.prompt_stops,
        "sampling": _sampling(config, model),
        "engine_parameters": options.engine_parameters,
        "judge": {
            **endpoint_of(judged_by),
            "key_variable": key_variable,
            "elsewhere": options.judge.base_url is not None,
            "annotator": options.judge.annotator,
            "annotator_folders": _annotator_folders(config),
            "constrained": options.judge.constrained,
        },
        "length_control": _absolute(options.length_control_path),
    }


def _sampling(config: EvaluationConfig, model: RunningModel) -> dict[str, Any]:
    given = config.pool_config.model.generation_params if config.pool_config else None
    room = model.max_model_len // 2 if model.max_model_len else _DEFAULT_NEW_TOKENS
    longest = {"max_new_tokens": max(1, min(_DEFAULT_NEW_TOKENS, room))}
    return {**longest, **config.options(AlpacaEvalOptions).sampling(given)}


def _absolute(path: str | None) -> str | None:
    return str(storage.local_path(path).absolute()) if path is not None else None


def _path_here(uri: str | None, config: EvaluationConfig) -> str | None:
    if uri is not None and copied_benchmarks(config) and config.options(AlpacaEvalOptions).instructions_path is None:
        return f"{COPIED}/{storage.basename(uri)}"
    return _absolute(uri)


def _annotator_folders(config: EvaluationConfig) -> list[str]:
    if config.benchmarks_path is None:
        return [str(_BUNDLED_ANNOTATORS)]
    return [benchmarks_here(config), str(_BUNDLED_ANNOTATORS)]


def _check(config: EvaluationConfig, python: Path) -> None:
    check_instructions(config)
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


EVALUATOR = Evaluator(
    name="alpaca_eval",
    environments=(ALPACA_EVAL,),
    program=Path(__file__).parent / "programs" / "run_alpaca_eval.py",
    job=_job,
    read=read_results,
    bar=re.compile(
        r"(?P<stage>[^\r\n]{1,200}, (?:answers|verdicts)):[^\r\n]*?(?P<done>\d{1,15})/(?P<total>\d{1,15}) \["
    ),
    check=_check,
    import_variables={"TOKENIZERS_PARALLELISM": "false"},
)
"""AlpacaEval 0.6: our program generates outputs through the endpoint; a judge compares them with a baseline's."""
