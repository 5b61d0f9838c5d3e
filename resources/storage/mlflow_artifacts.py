"""MLflow artifacts as files: resolves `runs:/…` and `models:/…`, and reads artifacts behind the tracking server.

The tracking server is in `MLFLOW_TRACKING_URI`. Artifacts in an ordinary store are read from it directly; artifacts
behind the server (`mlflow-artifacts:`) over its REST API, with MLflow's own client, in ranges.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from resources.errors import BadInput, StorageError
from resources.settings import mlflow_tracking_uri, set_process_environment_defaults
from resources.storage.read_only import ReadOnlyFiles

PROTOCOL = "mlflow-artifacts"
_VARIABLE = "MLFLOW_TRACKING_URI"
_PLACE = re.compile(rf"(runs|models|{PROTOCOL}):/")
_NUMBERED = re.compile(r"models:/[^/@]+/\d+(/|$)")
_ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"
_KEPT_STREAMS = 16
_BLOCK_BYTES = 4 * 2**20
_CLIENT = {
    # Three tries over about 7 s; MLflow's own default is seven tries over minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0.1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def in_mlflow(uri: str) -> bool:
    """Returns True if a location has a form of MLflow artifacts."""
    return _PLACE.match(uri) is not None


def is_behind_server(uri: str) -> bool:
    """Returns True if only MLflow's server can read a location, and no other library."""
    return uri.startswith(f"{PROTOCOL}://")


def pinned(uri: str) -> str:
    """Replaces an alias, or `latest`, in a model location by the version number."""
    if not uri.startswith("models:/") or _NUMBERED.match(uri):
        return uri
    named, slash, rest = uri.removeprefix("models:/").strip("/").partition("/")
    name, at, alias = named.partition("@")
    if not at and (not slash or not rest.startswith("latest")):
        return uri
    with _asking(uri) as client:
        if at:
            version = client.get_model_version_by_alias(name, alias).version
            return f"models:/{name}/{version}{slash}{rest}"
        versions = [int(model_version.version) for model_version in client.search_model_versions(f"name='{name}'")]
        if not versions:
            _missing(uri, f"no version of {name}")
        return f"models:/{name}/{max(versions)}{rest.removeprefix('latest')}"


def real_location(uri: str) -> str:
    """Returns the location of an MLflow artifact in a store, or `mlflow-artifacts://server/path` behind the server."""
    return _located(pinned(uri).rstrip("/"), mlflow_tracking_uri())


@lru_cache(maxsize=1024)
def _located(uri: str, _server_asked: str | None) -> str:
    kind, _, path = uri.partition(":/")
    match kind:
        case "runs":
            run, _, rest = path.strip("/").partition("/")
            with _asking(uri) as client:
                location = client.get_run(run).info.artifact_uri
        case "models":
            name, _, rest = path.strip("/").partition("/")
            with _asking(uri) as client:
                if name.startswith("m-") and not rest.partition("/")[0].isdigit():
                    location = client.get_logged_model(name).artifact_location
                else:
                    version, _, rest = rest.partition("/")
                    if not version.isdigit():
                        _missing(uri, "neither version nor alias", "write models:/NAME/VERSION or models:/NAME@ALIAS")
                    location = client.get_model_version_download_uri(name, version)
        case _ if path.startswith("/"):
            return f"{PROTOCOL}:/{path}"
        case _:
            return f"{PROTOCOL}://{urlsplit(_server(uri)).netloc}/{path}"
    location = "/".join(filter(None, [str(location).rstrip("/"), rest]))
    return real_location(location) if in_mlflow(location) else location


def _server(uri: str) -> str:
    address = mlflow_tracking_uri()
    if not address:
        raise BadInput(
            expected=f"the tracking server that has {uri} in {_VARIABLE}",
            found="nothing there",
            remedy=f"set it, such as {_VARIABLE}=http://10.0.0.15:5000",
        )
    return address


@contextmanager
def _asking(uri: str) -> Iterator[Any]:
    address = _server(uri)
    set_process_environment_defaults(_CLIENT)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        yield MlflowClient(tracking_uri=address, registry_uri=address)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND"):
            _missing(uri, error.message.splitlines()[0])
        raise StorageError(
            expected=f"the tracking server {address} to say where {uri} lies",
            found=str(error).splitlines()[0],
            remedy=f"check {_VARIABLE}, the variables with its user or token, and that it can be reached",
        ) from error


def _missing(uri: str, problem: str, remedy: str = f"check the name, and {_VARIABLE}") -> NoReturn:
    raise BadInput(expected=f"{uri} to be there", found=problem, remedy=remedy) from None


class MlflowArtifacts(ReadOnlyFiles):
    """Read access to artifacts behind an MLflow server, as `mlflow-artifacts://server:port/path`."""

    protocol = PROTOCOL

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lock = threading.Lock()
        self._streams: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = str(self._strip_protocol(path))
        entries = self._listed(path) or [self.info(path)]
        return entries if detail else [info["name"] for info in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = str(self._strip_protocol(path))
        folder, slash, _name = path.rpartition("/")
        if not slash:
            return {"name": path, "size": 0, "type": "directory"}
        for info in self._listed(folder):
            if info["name"] == path:
                return info
        raise FileNotFoundError(f"{PROTOCOL}://{path}")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Reads a file, or its bytes from `start` up to `end`, with only these in memory."""
        path, start = str(self._strip_protocol(path)), start or 0
        if end is not None and end <= start:
            return b""
        with self._lock:
            continued = self._streams.pop((path, start), None)
        stream = continued or self._begun(path, start, end)
        blocks, position = [], start
        while end is None or position < end:
            block = self._read(stream, _BLOCK_BYTES if end is None else min(_BLOCK_BYTES, end - position))
            if not block:
                break
            blocks.append(block)
            position += len(block)
        if stream.status_code == 200 and position == end:
            self._keep(path, position, stream)
        else:
            stream.close()
        return b"".join(blocks)

    def _listed(self, path: str) -> list[dict[str, Any]]:
        _, _, folder = path.partition("/")
        answer = self._asked(path, _ARTIFACTS, params={"path": folder} if folder else {})
        return [
            {
                "name": f"{path}/{file['path']}",
                "size": int(file.get("file_size") or 0),
                "type": "directory" if file["is_dir"] else "file",
            }
            for file in answer.json().get("files", ())
        ]

    def _begun(self, path: str, start: int, end: int | None) -> Any:
        headers = {"Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        _, _, name = path.partition("/")
        answer = self._asked(path, f"{_ARTIFACTS}/{quote(name)}", extra_headers=headers, stream=True)
        skipped = 0 if answer.status_code == 206 else start
        while skipped > 0 and (block := self._read(answer, min(_BLOCK_BYTES, skipped))):
            skipped -= len(block)
        return answer

    @staticmethod
    def _read(stream: Any, size: int) -> bytes:
        from urllib3.exceptions import HTTPError

        try:
            return stream.raw.read(size)
        except HTTPError as error:
            stream.close()
            raise OSError(f"the answer broke off: {error}") from error

    def _asked(self, path: str, endpoint: str, **options: Any) -> Any:
        set_process_environment_defaults(_CLIENT)
        from mlflow.exceptions import MlflowException
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        host, tracking = path.partition("/")[0], urlsplit(mlflow_tracking_uri() or "")
        prefix = tracking.path.rstrip("/") if tracking.netloc == host else ""
        credentials = get_default_host_creds(f"{tracking.scheme or 'http'}://{host}{prefix}")
        try:
            answer: Any = http_request(credentials, endpoint, "GET", raise_on_status=False, **options)
        except MlflowException as error:
            raise OSError(str(error).splitlines()[0]) from error
        if answer.status_code in (200, 206):
            return answer
        with answer:
            if answer.status_code == 404:
                raise FileNotFoundError(f"{PROTOCOL}://{path}")
            raise OSError(f"HTTP status {answer.status_code}: {answer.text[:200].strip()}")

    def _keep(self, path: str, position: int, stream: Any) -> None:
        with self._lock:
            replaced = [self._streams.pop((path, position), None)]
            self._streams[path, position] = stream
            while len(self._streams) > _KEPT_STREAMS:
                replaced.append(self._streams.popitem(last=False)[1])
        for former in filter(None, replaced):
            former.close()
