"""Keys of sinks, from the environment and Prefect blocks, never from a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from resources.jobs import inheritance
from resources.settings import process_environment
from tasks.errors import SinkFailed
from tasks.spec.sinks import Access, Sink, sink_kinds

# A user's training job sets these for itself; in Assay they would send results into that job's run.
_NOT_OURS = re.compile(
    r"WANDB_(?!API_KEY$|BASE_URL$|HTTP|HTTPS|CA_|IDENTITY).*|MLFLOW_(RUN_ID|EXPERIMENT_\w+|TRACKING_URI)"
)
_DEFAULTS = {
    # Three tries over about 7 s; MLflow's own default is seven tries over minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0.1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    # gcsfs checks for every bucket if it is zonal, through another API, for up to 60 s.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
}


def credentials_of(sink: Sink) -> Access:
    """Returns the access to a sink with the whole environment of its sender process and every secret in it."""
    names = (*inheritance.SENDER, *sink.variables, *sink.secret_variables)
    environment = process_environment(inherited=names)
    inherited = {name: value for name, value in environment.items() if not _NOT_OURS.fullmatch(name)}
    access = sink.access()
    variables = {**_DEFAULTS, **inherited, **access.variables}
    keys = [variables.get(name) for kind in sink_kinds() for name in kind.secret_variables]
    return replace(access, variables=variables, secrets=tuple(key for key in (*keys, *access.secrets) if key))


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Returns a text without the secrets, and without anything that looks like a secret in an address or a header."""
    for secret in secrets:
        if len(secret) >= 4:  # shorter secrets would match parts of words
            text = text.replace(secret, "***")
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    text = re.sub(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", r"\1 ***", text)
    return re.sub(r"(?i)([?&][\w.-]*(?:key|token|secret|sig|signature|credential)=)[^&\s'\"]+", r"\1***", text)


def secrets_of_blocks(names: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the content of Prefect's Secret blocks by variable, for variables with a block."""
    named = {variable: name for variable, name in names.items() if name is not None}
    if not named:  # without the import, which takes seconds
        return {}
    from prefect.blocks.system import Secret

    return {variable: str(loaded_block(Secret, name).get()) for variable, name in named.items()}


def loaded_block(kind: Any, name: str) -> Any:
    """Returns a Prefect block. Raises SinkFailed if it cannot be loaded."""
    try:
        return kind.load(name, _sync=True)
    except Exception as error:  # noqa: BLE001 - a boundary: Prefect raises its client's and pydantic's errors
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SinkFailed(
            expected=f"the Prefect block {name} of type {kind.__name__}",
            found=scrub(message, ()),
            remedy="create it on the server that PREFECT_API_URL names, or name another block",
        ) from None
