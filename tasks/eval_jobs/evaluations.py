"""The evaluation configuration of a job, once its model is a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pools.config import InferencePoolConfig, ModelConfig
from resources.config import Device, ResourceConfig
from resources.errors import BadInput
from tasks.eval_jobs.helm_conf import RunEntry
from tasks.eval_jobs.job_file import UNSET_MODEL, HelmRun, JobEvaluation, JobFile, JobSuite
from tasks.eval_jobs.model import model_name
from tasks.evaluators.helm.entries import ALL_ENTRIES
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import build_config
from tasks.spec.sinks import Sink
from tasks.spec.suites import SuiteRequest

_SET_BY_THE_JOB = {"suite", "model_path", "model_name", "evaluation_path", "sinks", "pool_config", "resource_config"}


def evaluation_of(
    job: JobFile,
    *,
    model_path: str = UNSET_MODEL,
    evaluation_path: str = "evaluations",
    device: Device | None = None,
    helm_config: str | None = None,
    entries: Sequence[RunEntry] = (),
    sinks: tuple[Sink, ...] = (),
) -> EvaluationConfig | SuiteRequest:
    """Returns the evaluation of a job; a suite request if `job.request` is a suite.

    Args:
        device: the local device if it differs from the job's.
        sinks: sinks in addition to the job's own.
    """
    request, compute = job.request, job.compute_config
    resources = ResourceConfig(
        cpu=compute.cpu,
        ram=compute.memory,
        disk=compute.disk,
        device=device or compute.device,
        preemptible=compute.spot,
    )
    own = request.model_fields_set - _SET_BY_THE_JOB if not isinstance(request, HelmRun) else ()
    name = getattr(request, "model_name", None) or model_name(job.model)
    content: dict[str, Any] = {
        **{field: getattr(request, field) for field in own},
        "model_path": model_path,
        "model_name": name,
        "evaluation_path": request.evaluation_path
        if "evaluation_path" in request.model_fields_set
        else evaluation_path,
        "sinks": (*job.sinks, *sinks),
    }
    if isinstance(request, JobSuite):
        pool = _pool(request.pool_config, resources, name, engine_kwargs={}) if request.pool_config else None
        return build_config(
            {**content, "resource_config": resources, "pool_config": pool}, SuiteRequest, source="the job"
        )
    if isinstance(request, HelmRun):
        options = request.options
        content |= {
            "evaluator": {"name": "helm", "run_specs_path": helm_config, **options.options},
            "evals": [{"name": name} for name in _scenarios(entries, options.options)],
            "max_eval_instances": options.max_eval_instances,
            "wandb_tags": (f"helm_suite={request.suite}",) if request.suite else (),
        }
    if isinstance(request, JobEvaluation) and request.native:
        return build_config({**content, "resource_config": resources}, EvaluationConfig, source="the job")
    given = None if isinstance(request, HelmRun) else request.pool_config
    pool = _pool(given, resources, name, engine_kwargs=getattr(request, "engine_kwargs", {}))
    return build_config({**content, "pool_config": pool}, EvaluationConfig, source="the job")


def _scenarios(entries: Sequence[RunEntry], options: Mapping[str, Any]) -> list[str]:
    if "groups" in options:  # only HELM can resolve groups
        return [ALL_ENTRIES]
    priority = options.get("priority")
    selected = [entry for entry in entries if priority is None or (entry.priority or 0) <= priority]
    if entries and not selected:
        raise BadInput(
            expected=f"run entries with a priority of {priority} or a lower number, as helm.args says",
            found=f"none of {len(entries)}",
            remedy="raise --priority, or leave it out",
        )
    return list(dict.fromkeys(entry.name for entry in selected))


def _pool(
    given: InferencePoolConfig | None, resources: ResourceConfig, name: str, *, engine_kwargs: dict[str, Any]
) -> InferencePoolConfig:
    if given is None:
        return InferencePoolConfig(resource_config=resources, model=ModelConfig(name=name, engine_kwargs=engine_kwargs))
    return given.model_copy(
        update={"resource_config": resources.model_copy(update={"replicas": given.resource_config.replicas})}
    )
