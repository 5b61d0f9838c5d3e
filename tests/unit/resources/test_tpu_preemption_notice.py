"""Preemption notices of Google Cloud's metadata server, and their absence on other machines."""

from __future__ import annotations

import pytest

from fakes.http_server import Answer, Request, http_server
from resources.jobs.preemption_notice import preemption_announced

PREEMPTED = "/computeMetadata/v1/instance/preempted"


@pytest.mark.parametrize(
    ("content", "status", "announced"),
    [(b"TRUE", 200, True), (b"FALSE", 200, False), (b"no such page", 404, False), (b"<html>TRUE", 200, False)],
)
def test_preemption_is_announced_only_where_the_metadata_server_says_so(
    content: bytes, status: int, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the metadata server is never behind a proxy

    def answer(request: Request) -> Answer:
        return status if request.headers["Metadata-Flavor"] == "Google" else 403, {}, content

    with http_server(answer) as address:
        assert preemption_announced(url=address + PREEMPTED) is announced


def test_machine_without_a_metadata_server_was_not_preempted() -> None:
    assert not preemption_announced(url="http://127.0.0.1:9/", timeout_seconds=1)
