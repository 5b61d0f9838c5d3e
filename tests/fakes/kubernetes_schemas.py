"""Published schemas of manifests, checked strictly: those of Kubernetes and of JobSet.

`jobset_schema.json` is cut from the CustomResourceDefinition of JobSet 0.12.0.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

ValidationError = jsonschema.ValidationError
kubernetes_validate.utils.schema_contents = cache(
    kubernetes_validate.utils.schema_contents
)  # 1.5 MB, read for each object


def validate(manifest: dict[str, Any], version: str) -> None:
    """Raises ValidationError if a manifest violates the schema of that version of Kubernetes."""
    if manifest.get("kind") != "JobSet":
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest, _jobset_schema())
    if manifest["apiVersion"] != "jobset.x-k8s.io/v1alpha2":
        raise ValidationError(f"no such version: {manifest['apiVersion']}")
    for part in manifest["spec"]["replicatedJobs"]:
        template = {"apiVersion": "batch/v1", "kind": "Job", **part["template"]}
        kubernetes_validate.validate(template, version, strict=True)


@cache
def _jobset_schema() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
