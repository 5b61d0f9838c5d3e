"""Levanter: loads a checkpoint itself on the requested resources, and scores lm-eval's log-probability benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ValidationError

from pools.endpoint import LocalCheckpoint, RunningModel
from resources.config import ResourceConfig, TpuConfig
from resources.environments.environments import EnvironmentSpec
from resources.errors import BadInput
from resources.settings import settings
from resources.storage import storage
from resources.tpu import largest_single_vm_slice
from tasks.errors import HarnessOutputInvalid
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.evaluators.levanter.environment import LEVANTER
from tasks.evaluators.levanter.options import LevanterOptions
from tasks.evaluators.lm_eval.evaluator import LmEval
from tasks.evaluators.lm_eval.index import local_benchmarks
from tasks.evaluators.lm_eval.results import RESULTS_FOLDER, read_results
from tasks.evaluators.lm_eval.samples import read_samples
from tasks.records.samples import Sample
from tasks.spec.benchmarks import benchmarks_here, copied_benchmarks
from tasks.spec.evaluation import EvaluationConfig

_PROGRAM = Path(__file__).parent / "programs" / "run_levanter.py"
_JOB_FILE = "job.json"
_FACTS_NAME = "levanter.json"
_LM_EVAL = LmEval()
_SCORING = re.compile(r"^Scoring \((?P<stage>.*)\): (?P<done>\d{1,15})/(?P<total>\d{1,15})$", re.MULTILINE)


class _Facts(BaseModel):
    versions: dict[str, str]


@dataclass(frozen=True)
class Levanter:
    """lm-eval's benchmarks on a model that Levanter loads."""

    name: str = "levanter_lm_evaluation_harness"
    needs_endpoint: bool = False
    environments: tuple[EnvironmentSpec, ...] = tuple(LEVANTER.values())
    program: Path | None = _PROGRAM
    import_variables: Mapping[str, str] = field(default_factory=lambda: {"TOKENIZERS_PARALLELISM": "false"})

    def environment(self, config: EvaluationConfig) -> EnvironmentSpec:
        return LEVANTER[(config.resource_config or ResourceConfig()).device.kind]

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        return _LM_EVAL.preload_arguments(config)

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        assert isinstance(model, LocalCheckpoint), "Levanter is given a checkpoint"
        options = config.options(LevanterOptions)
        resources = config.resource_config or ResourceConfig()
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
            "limit": config.max_eval_instances,
            "max_truncated": config.max_truncated,
            "apply_chat_template": config.asks_in_chat,
            "prompt_logprobs": True,
            "conversations": False,
            "long_prompts": options.long_prompts,
            "allow_code_execution": list(options.allow_code_execution),
            "device": resources.device.kind,
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
            "output": str(output),
            "results_folder": RESULTS_FOLDER,
        }
        return HarnessCommand(
            argv=(str(python), "-I", "-u", str(_PROGRAM), _JOB_FILE),
            variables=self.import_variables,
            arguments=(_JOB_FILE,),
            files={_JOB_FILE: json.dumps(job, indent=2, sort_keys=True)},
            copies=copied_benchmarks(config),
        )

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        parsed = read_results(output, config)
        try:
            facts = _Facts.model_validate_json((output / _FACTS_NAME).read_bytes())
        except (OSError, ValidationError) as error:
            raise HarnessOutputInvalid(
                expected=f"{_FACTS_NAME} in {output}, with versions",
                found=str(error).splitlines()[0],
                remedy="Read harness.log next to the record, then evaluate again",
            ) from error
        return replace(parsed, versions={**parsed.versions, **facts.versions})

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        return read_samples(output, config)

    def progress(self, log: str) -> Progress | None:
        return Progress.last_in(log, _SCORING)

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        """Looks up every benchmark as for lm-eval; refuses benchmarks that generate, some only in the program."""
        _check_single_vm(config.resource_config or ResourceConfig())
        _LM_EVAL.check(config, python=python)
        writing = [task.name for task in config.evals if task.name in _known_to_generate(config)]
        if writing:
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


def _known_to_generate(config: EvaluationConfig) -> set[str]:
    if config.benchmarks_path is not None and not storage.is_local(config.benchmarks_path):
        return set()
    names: set[str] = set()
    for path in local_benchmarks(config).rglob("*.yaml"):
        try:
            text = path.read_text()
        except (OSError, ValueError):
            continue
        named = re.search(r"^task:\s*['\"]?([^\s'\"#]+)", text, re.MULTILINE)
        if named and re.search(r"^output_type:\s*['\"]?generate_until\b", text, re.MULTILINE):
            names.add(named[1])
    return names


EVALUATOR = Levanter()
