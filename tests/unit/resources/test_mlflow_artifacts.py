"""Reading through an MLflow server with artifacts stored elsewhere: it sends whole files for any request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from fakes.http_server import Answer, Request, http_server
from resources.errors import BadInput
from resources.storage import storage
from resources.storage.file_copy import copy_file
from resources.storage.mlflow_artifacts import pinned, real_location

CONTENT = bytes(range(256)) * 400
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths of the files requested from a fake tracking server, which has `1/run/artifacts/weights`."""
    asked: list[str] = []

    def answer(request: Request) -> Answer:
        place = urlsplit(request.path)
        if place.path != ARTIFACTS:
            asked.append(place.path.removeprefix(f"{ARTIFACTS}/"))
            return 200, {}, CONTENT
        listed = parse_qs(place.query)["path"] == ["1/run/artifacts"]
        files = [{"path": "weights", "is_dir": False, "file_size": str(len(CONTENT))}] if listed else []
        return 200, {}, json.dumps({"files": files}).encode()

    with http_server(answer) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        yield asked


def test_file_in_ranges_is_sent_once_by_a_server_that_knows_no_ranges(sent: list[str], tmp_path: Path):
    [source] = storage.list_files("mlflow-artifacts:/1/run/artifacts")
    assert (storage.basename(source.uri), source.size) == ("weights", len(CONTENT))
    arrived: list[int] = []
    copy_file(
        source,
        tmp_path / "weights",
        sidecar=tmp_path / "sidecar",
        range_bytes=1000,
        stopped=lambda: False,
        on_bytes=arrived.append,
    )
    assert (tmp_path / "weights").read_bytes() == CONTENT and len(arrived) > 100
    assert sent == ["1/run/artifacts/weights"]


def test_range_is_the_same_bytes_where_the_server_knows_no_ranges(sent: list[str]):
    uri = "mlflow-artifacts:/1/run/artifacts/weights"
    assert storage.read_bytes(uri, start=70_000, end=70_010) == CONTENT[70_000:70_010]
    assert storage.read_bytes(uri, start=5, end=9) == CONTENT[5:9]
    assert storage.read_bytes(uri, start=len(CONTENT) - 2, end=len(CONTENT) + 5) == CONTENT[-2:]


def test_place_behind_the_server_names_it_and_what_names_it_stays(sent: list[str]):
    location = real_location("mlflow-artifacts:/1/run/artifacts")
    assert location.startswith("mlflow-artifacts://127.0.0.1:") and location.endswith("/1/run/artifacts")
    assert real_location("mlflow-artifacts://other:5000/1/x") == "mlflow-artifacts://other:5000/1/x"
    assert pinned("models:/llama/3") == "models:/llama/3" and sent == []


def test_place_behind_the_server_cannot_be_written(sent: list[str]):
    with pytest.raises(BadInput, match="mlflow-artifacts"):
        storage.check_writable(real_location("mlflow-artifacts:/1/evaluations"))
