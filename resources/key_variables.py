"""Environment variables that hold keys: patterns match them only if they are meant for the key's service."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

_KEY_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_(KEY|AUTH)$", re.I)
_USER_IN_URL = re.compile(r"://[^/\s@]+@")

STORES = ("AWS_*", "S3_*", "GOOGLE_*", "GCS*", "GCE_*", "CLOUDSDK_*", "AZURE_*", "FSSPEC_*")
SERVICES = ("RAY_*", "IRIS_*", "KUBERNETES_*", "UV_*", "PIP_*", "MLFLOW_TRACKING_*")
# Patterns of stores, clusters, package indices and trackers; their keys belong to the jobs that use them.
_WITH_KEYS = (*STORES, *SERVICES, "MLFLOW_*", "WANDB_*")


def is_named(name: str, value: str, patterns: Iterable[str]) -> bool:
    """Returns True if a variable matches a list of names and patterns.

    A variable that holds a key, by its name or as a URL with a user, must be listed with its full name, unless the
    pattern is of `STORES`, `SERVICES` or trackers.
    """
    holds_key = _KEY_NAME.search(name) is not None or _USER_IN_URL.search(value) is not None
    return any(
        name == pattern or (fnmatchcase(name, pattern) and (not holds_key or pattern in _WITH_KEYS))
        for pattern in patterns
    )
