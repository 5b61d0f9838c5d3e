"""Cleanup after a cancelled or crashed flow run: ends its claims and its jobs on a cluster.

Both also end by themselves, but later: a claim with its lease, a job with its submitter or a lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from resources.errors import AssayError
from resources.jobs.jobs import Client
from tasks.checkpoints.run_snapshot import expand_runs
from tasks.policies.policy import Policy
from tasks.running.claims.files import claims_folder, end_claim, read_claims
from tasks.spec.names import job_label, name_of
from tasks.spec.training import TrainAndEvaluateConfig


def claims_folders(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the claims folder of each run in a flow run's parameters, which contain a policy or a request.

    Raises:
        ValidationError: these are not the parameters of an Assay flow.
    """
    if "policy" in parameters:
        policy = Policy.model_validate(parameters["policy"])
        names = [name_of(run)[0] for run in expand_runs(policy.runs)]
        return {name: claims_folder(policy.evaluation_path, name) for name in names}
    folders: dict[str, str] = {}
    for key in ("config", "request"):
        request = parameters.get(key)
        if isinstance(request, Mapping) and "training" in request:
            first = TrainAndEvaluateConfig.model_validate(request).asked()[0]
            folders[first.run_name] = claims_folder(first.evaluation_path, first.run_name)
        elif isinstance(request, Mapping) and {"evaluation_path", "model_path"} <= request.keys():
            name = _run_of(request)
            folders[name] = claims_folder(request["evaluation_path"], name)
    return folders


def _run_of(request: Mapping[str, Any]) -> str:
    model = (request.get("pool_config") or {}).get("model") or {}
    return request.get("model_name") or model.get("name") or name_of(request["model_path"])[0]


def end_claims(parameters: Mapping[str, Any], *, flow_run: str) -> int:
    """Ends the claims of a flow run before their lease expires; returns their number."""
    ended = 0
    with suppress(ValidationError):
        for folder in claims_folders(parameters).values():
            held = [seen for seen in read_claims(folder) if seen.claim.flow_run == flow_run and not seen.claim.released]
            ended += sum(map(end_claim, held))
    return ended


def end_jobs(client: Client, *, flow_run: str) -> int:
    """Ends leftover cluster jobs of a flow run; returns their number. Local jobs end with their submitting process."""
    if client.is_local:
        return 0
    label = job_label(flow_run)
    ended = 0
    for job in client.jobs():
        if not job.status.finished and label in job.name.split("-"):
            with suppress(AssayError):  # it ended meanwhile
                client.attach(job.job_id).terminate()
                ended += 1
    return ended
