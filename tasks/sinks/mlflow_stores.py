"""MLflow's stores: a tracking server, an SQLite file, or a folder, which contains such a file."""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path
from shlex import quote

import httpx
import uv

from resources.storage import storage
from tasks.errors import SinkFailed
from tasks.spec.sinks import web_address

DATABASE = "mlflow.db"
"""SQLite file in a folder that is a tracking store."""
_SQLITE = "sqlite:///"
_REACH_SECONDS = 10.0


def tracking_place(text: str) -> str:
    """Returns a server's address without a trailing slash, `sqlite:////absolute/path`, or a folder's absolute path."""
    if text.startswith(("http://", "https://")):
        return web_address(text)
    if text.startswith(_SQLITE) and len(text) > len(_SQLITE):
        return f"{_SQLITE}{storage.absolute(text.removeprefix(_SQLITE))}"
    if not text.strip() or not storage.is_local(text) or re.match(r"[^/]+:(?!//)", text):
        raise ValueError(f"expected http://…, https://…, sqlite:///FILE or a folder, found {text!r}")
    return storage.absolute(text).rstrip("/") or "/"


def local_folder(place: str) -> str | None:
    """Returns the folder of a local store, which contains its artifacts too; None for a server."""
    if place.startswith(("http://", "https://")):
        return None
    return storage.parent(place.removeprefix(_SQLITE)) if place.startswith(_SQLITE) else place


def client_uri(place: str) -> str:
    """Returns the tracking URI for MLflow's client."""
    return place if place.startswith(("http", _SQLITE)) else f"{_SQLITE}{storage.join(place, DATABASE)}"


def command_to_show(place: str) -> str:
    """Returns the address of a server, or a command that shows a local store in MLflow's pages. The installed client
    does not include the pages, so uv fetches them."""
    if local_folder(place) is None:
        return place
    uvx = "uvx" if shutil.which("uvx") else f"{quote(uv.find_uv_bin())} tool run"
    return f"{uvx} mlflow@{metadata.version('mlflow-skinny')} ui --backend-store-uri {quote(client_uri(place))}"


def check_reachable(place: str, name: str) -> None:
    """Raises SinkFailed if a server does not respond or returns HTTP status 500 or above, or if a folder is not
    writable or contains runs in files."""
    folder = local_folder(place)
    if folder is not None:
        if next(Path(folder).glob("*/meta.yaml"), None) is not None:
            raise SinkFailed(
                expected=f"a folder for {name} without runs in files, which MLflow no longer writes",
                found=f"such runs in {folder}",
                remedy="name another folder, or move them first: mlflow migrate-filestore",
            )
        storage.check_writable(folder)
        return
    try:
        response = httpx.get(f"{place}/health", timeout=_REACH_SECONDS, follow_redirects=True)
        problem = f"HTTP status {response.status_code}" if response.status_code >= 500 else None
    except httpx.HTTPError as error:
        problem = str(error) or type(error).__name__
    if problem is not None:
        raise SinkFailed(
            expected=f"an MLflow tracking server that answers at {place}",
            found=problem,
            remedy="start it, correct tracking_uri, or evaluate without this sink and send the records later: "
            "assay publish",
        )
