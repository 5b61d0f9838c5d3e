"""Levanter: loads a checkpoint itself on the requested resources, and scores lm-eval's log-probability benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pools.endpoint import LocalCheckpoint
from resources.config import ResourceConfig, TpuConfig
from resources.errors import BadInput
from resources.settings import settings
from resources.tpu import largest_single_vm_slice
from tasks.evaluators.environments import LEVANTER
from tasks.evaluators.evaluator import Evaluator, Parsed
from tasks.evaluators.levanter.options import LevanterOptions
from tasks.evaluators.lm_eval.evaluator import check_benchmarks, own_benchmarks, preload_arguments
from tasks.evaluators.lm_eval.files import RESULTS_FOLDER
from tasks.evaluators.lm_eval.results import read_results
from tasks.evaluators.reading import read_result
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig


class _Facts(BaseModel):
    versions: dict[str, str]


def _job(model: LocalCheckpoint, config: EvaluationConfig, output: Path, _: object) -> dict[str, Any]:
    options = config.options(LevanterOptions)
    return {
        "max_truncated": config.max_truncated,
        "apply_chat_template": config.asks_in_chat,
        "prompt_logprobs": True,
        "conversations": False,
        "long_prompts": options.long_prompts,
        "allow_code_execution": list(options.allow_code_execution),
        "device": config.resources.device.kind,
        "max_length": options.max_length,
        "precision": options.precision,
        "rows": options.rows_per_device,
        "checkpoint": {
            "name": model.name,
            "uri": model.uri,
            "kind": model.kind,
            "reference": model.tokenizer or model.uri,
        },
        "compiled": str(settings().jax_cache_dir),
        "results_folder": RESULTS_FOLDER,
    }


def _read(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    parsed, samples = read_results(output, config)
    facts = read_result("Levanter", output / "levanter.json", _Facts)
    return replace(parsed, versions={**parsed.versions, **facts.versions}), samples


def _check(config: EvaluationConfig, python: Path) -> None:
    _check_single_vm(config.resources)
    check_benchmarks(config, python)
    generate = own_benchmarks(config).generate
    if writing := [task.name for task in config.evals if task.name in generate]:  # some are refused only in the program
        raise BadInput(
            expected="benchmarks that compare log-probabilities, which is all that Levanter evaluates",
            found=f"{', '.join(writing)}, which lets the model write",
            remedy="Send generation to the endpoint: evaluate it with lm_evaluation_harness",
        )


def _check_single_vm(resources: ResourceConfig) -> None:
    device = resources.device
    if isinstance(device, TpuConfig) and device.slice.vms > 1:
        raise BadInput(
            expected="a TPU slice of a single VM, as Levanter requires",
            found=f"{device.variant}, which has {device.slice.vms}",
            remedy=f"Ask for {largest_single_vm_slice(device.variant)}, or serve the model to lm_evaluation_harness",
        )


EVALUATOR = Evaluator(
    name="levanter_lm_evaluation_harness",
    environments=tuple(LEVANTER.values()),
    environment_of=lambda config: LEVANTER[config.resources.device.kind],
    program=Path(__file__).parent / "programs" / "run_levanter.py",
    job=_job,
    read=_read,
    bar=re.compile(r"^Scoring \((?P<stage>.*)\): (?P<done>\d{1,15})/(?P<total>\d{1,15})$", re.MULTILINE),
    check=_check,
    needs_endpoint=False,
    preload_arguments=preload_arguments,
    import_variables={"TOKENIZERS_PARALLELISM": "false"},
)
"""lm-eval's benchmarks on a model that Levanter loads."""
