"""Keys of sinks, from the environment and Prefect blocks, never from a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, SecretStr

from resources.errors import SinkFailed
from resources.settings import process_environment
from tasks.spec.sinks import MlflowSink, ObjectStoreSink, Sink, WeightsAndBiasesSink

_SECRET_VARIABLES = (
    *("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"),
)
# Set by a training job of the user's for itself; in ours they would send results into that job's run.
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
    # gcsfs asks for every bucket whether it is a zonal one, over another API, for up to 60 s.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
}


class Credentials(BaseModel):
    """Secrets and variables for the process that talks to one sink, beside its configuration.

    `variables` is its whole environment. `storage_options` go to the object store's client, and `url` is the place
    that a block named.
    """

    model_config = ConfigDict(frozen=True)

    variables: dict[str, str]
    storage_options: dict[str, Any] = {}
    url: str | None = None
    secrets: tuple[SecretStr, ...] = ()
    """Texts that must not show in anything the process writes."""

    def scrubbed(self, text: str) -> str:
        """A text with all that is secret replaced."""
        return scrub(text, (secret.get_secret_value() for secret in self.secrets))


def credentials_of(sink: Sink) -> Credentials:
    """The credentials for a sink.

    Raises:
        SinkFailed: a block that it names cannot be loaded.
    """
    inherited = {name: value for name, value in process_environment().items() if not _NOT_OURS.fullmatch(name)}
    variables = {**_DEFAULTS, **inherited}
    url, options = None, {}
    match sink:
        case WeightsAndBiasesSink():
            variables |= _from_blocks({"WANDB_API_KEY": sink.api_key_block})
        case MlflowSink():
            blocks = {"MLFLOW_TRACKING_PASSWORD": sink.password_block, "MLFLOW_TRACKING_TOKEN": sink.token_block}
            variables |= _from_blocks(blocks)
            if sink.username is not None:
                variables["MLFLOW_TRACKING_USERNAME"] = sink.username
        case ObjectStoreSink(block=str() as block):
            url, options = _from_bucket_block(block)
        case _:
            pass
    token = options.get("token")
    found = [variables.get(name) for name in _SECRET_VARIABLES]
    found += [str(token.get("private_key"))] if isinstance(token, dict) else []
    secrets = tuple(SecretStr(value) for value in found if value)
    return Credentials(variables=variables, storage_options=options, url=url, secrets=secrets)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """A text without the secrets, nor what looks like one in an address or a header."""
    for secret in secrets:
        if len(secret) >= 4:  # shorter ones would blot out words
            text = text.replace(secret, "***")
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    text = re.sub(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", r"\1 ***", text)
    return re.sub(r"(?i)([?&][\w.-]*(?:key|token|secret|sig|signature|credential)=)[^&\s'\"]+", r"\1***", text)


def _from_blocks(names: dict[str, str | None]) -> dict[str, str]:
    return {variable: _secret(name) for variable, name in names.items() if name is not None}


def _secret(name: str) -> str:
    from prefect.blocks.system import Secret

    value = _loaded(Secret, name).get()
    return value if isinstance(value, str) else str(value)


def _from_bucket_block(name: str) -> tuple[str, dict[str, Any]]:
    """Folder and client options of a GCS Bucket block; the machine's own sign-in where the block has none."""
    from prefect_gcp.cloud_storage import GcsBucket

    bucket = _loaded(GcsBucket, name)
    account = bucket.gcp_credentials.service_account_info
    file = bucket.gcp_credentials.service_account_file
    token = account.get_secret_value() if account is not None else (str(file) if file is not None else None)
    options = {"token": token} if token else {}
    return f"gs://{bucket.bucket}/{bucket.bucket_folder.strip('/')}".rstrip("/"), options


def _loaded(kind: Any, name: str) -> Any:
    try:
        return kind.load(name, _sync=True)
    except Exception as error:  # noqa: BLE001 - a boundary: Prefect raises its client's and pydantic's errors
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SinkFailed(
            expected=f"the Prefect block {name} of type {kind.__name__}",
            found=scrub(said, ()),
            remedy="create it on the server that PREFECT_API_URL names, or name another one",
        ) from None
