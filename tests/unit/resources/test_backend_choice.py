"""Choice of the backend that an address names; a backend needs only a folder and a line in the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.backends.current import BACKENDS, Backend, client_from_url
from resources.config import ResourceConfig
from resources.errors import BadInput
from resources.jobs.jobs import Entrypoint, JobRequest, JobStatus

ENTRY = """
from pathlib import Path

from resources.backends.local.client import LocalClient


class FakeClient(LocalClient):
    @property
    def url(self):
        return f"fake://here{self._root}"


def client_from_address(host, path):
    assert host == "here"
    return FakeClient(Path(path))
"""


def test_backend_added_from_outside_runs_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_backend").mkdir()
    (tmp_path / "fake_backend" / "entry.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BACKENDS, "fake", Backend("fake_backend.entry", "fake://here/folder"))
    url = f"fake://here{tmp_path}/jobs"
    client = client_from_url(url)
    script = Entrypoint.from_binary("sh", ["-c", "echo $ASSAY_JOBS"])
    job = client.submit(JobRequest("job", script, resources=ResourceConfig.with_cpu()))
    assert job.wait(30) is JobStatus.SUCCEEDED
    assert job.logs().strip() == url
    assert client_from_url(url) is client
    client.shutdown()


@pytest.mark.parametrize("url", ["pbs://host", "iris://", "local://elsewhere/jobs", "://", ""])
def test_address_of_no_backend_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="ASSAY_JOBS"):
        client_from_url(url)


def test_backend_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "rare", Backend("nowhere.entry", "rare://", package="no_such_package"))
    with pytest.raises(BadInput, match=r"assay-evals\[no_such_package\]"):
        client_from_url("rare://host")
