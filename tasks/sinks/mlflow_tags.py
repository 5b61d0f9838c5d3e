"""Metadata of a record for MLflow: tags and data sets."""

from __future__ import annotations

import json
import re
from typing import Any

from tasks.records.cost import Cost
from tasks.records.current import how_merged
from tasks.records.record import Record
from tasks.sinks.announcement import Announcement

_IN_A_RUN = re.compile(r"/([0-9a-f]{32})/artifacts/(.+)")
_DIGEST_CHARACTERS = 36  # MLflow's limit


def run_tags(announcement: Announcement) -> dict[str, str]:
    """Returns tags about the evaluation, the machine and the job; the text `None` if not applicable."""
    record = announcement.known
    evaluation = record.evaluation
    pool = evaluation.get("pool_config") or {}
    resources = pool.get("resource_config") or evaluation.get("resource_config") or {}
    device = resources.get("device") or {}
    image, image_tag = _image(resources.get("image"))
    run_id, artifact_path = _artifact(record)
    uri = record.checkpoint.uri
    asked = {name: evaluation[name] for name in ("evals", "max_eval_instances", "evaluator") if name in evaluation}
    tags: dict[str, Any] = {
        "config_git_sha": None,
        "config_path_git_repo": None,
        **({"helm_config_path_git_repo": None} if record.evaluator == "helm" else {}),
        f"{'helm' if record.evaluator == 'helm' else 'harness'}_args": json.dumps(asked),
        "image_build_assay_version": record.versions.get("assay"),
        "code_git_sha": record.git_commit,
        "code_git_dirty": record.git_dirty,
        "model_run_id": run_id,
        "model_artifact_path": artifact_path,
        "model_name": record.checkpoint.run,
        "model_path": evaluation.get("model_path"),
        "model_uri": uri,
        "model_digest": record.checkpoint.digest,
        "model_gs_uri": uri if uri.startswith("gs://") else None,
        "accelerator": device.get("variant") or device.get("kind"),
        "cpu": resources.get("cpu"),
        "memory": resources.get("ram"),
        "image": image,
        "image_tag": image_tag,
        "job_name": record.flow_run,
        "training_step": record.checkpoint.step if record.checkpoint.label is None else None,
        **({"checkpoint_label": record.checkpoint.label} if record.checkpoint.label else {}),
        **({"merge": how_merged(record.checkpoint)} if record.checkpoint.merge else {}),
        **_cost(record.cost),
        **series_tags(announcement),
    }
    return {key: str(value) for key, value in tags.items()}


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "cost_usd": "unknown" if cost.usd is None else cost.usd,
        "cost_unknown_since": cost.why_unknown,
        "cost_predicted": cost.predicted.how if cost.predicted else None,
        "price_usd_per_hour": cost.usd_per_hour,
        "price_list_date": cost.as_of,
        "price_list_source": cost.source,
        "region": cost.region,
        "preemptible": cost.preemptible,
    }


def series_tags(announcement: Announcement) -> dict[str, str]:
    """Returns tags that all records of a series share."""
    series = announcement.series
    return {
        "model_name": series.run,
        "evaluator": series.evaluator,
        "evaluation_hash": series.evaluation_hash,
        "evaluation_path": series.evaluation_path,
        "benchmarks": ", ".join(series.benchmarks),
        **({"merged_by": series.merged_by.strip(" ()")} if series.merged_by else {}),
    }


def _image(image: Any) -> tuple[str | None, str | None]:
    name, at, digest = str(image or "").partition("@")
    if at:
        return name, digest
    folder, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{folder}{slash}{last}" or None, tag or None


def _artifact(record: Record) -> tuple[str | None, str | None]:
    asked = str(record.evaluation.get("model_path") or "")
    if not asked.startswith(("runs:/", "models:/", "mlflow-artifacts:/")):
        return None, None
    match = _IN_A_RUN.search(record.checkpoint.uri)
    return (match[1], match[2]) if match else (None, None)


def datasets(record: Record) -> dict[str, dict[str, str]]:
    """Returns the data set of each benchmark that has questions of its own, in MLflow's form. Its digest is the
    revision, or that of its rows; if neither is known, that of the prompts."""
    by_benchmark: dict[str, dict[str, str]] = {}
    for benchmark, details in record.details.items():
        place, at, revision = (details.data or "").partition("@")
        digest = revision if at else place.rpartition(":")[2]
        source = {"data": details.data, "prompts": details.prompts, "asked by": record.evaluator}
        by_benchmark[benchmark] = {
            "name": place if at else benchmark,
            "digest": (digest or details.prompts or "unknown")[:_DIGEST_CHARACTERS],
            "source_type": "hugging_face_hub" if at else record.evaluator,
            "source": json.dumps({key: value for key, value in source.items() if value is not None}),
            "profile": json.dumps({"num_rows": details.questions}),
        }
    return by_benchmark
