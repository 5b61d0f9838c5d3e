"""The HTTP proxy of a network, in the environments of processes that query servers of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.http_server import http_server
from fakes.web_proxy import VARIABLES, web_proxy
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.jobs.inheritance import HARNESS
from resources.jobs.jobs import Command, JobRequest, create_environment
from resources.settings import ask_this_machine_directly, process_environment

PAST = ("NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *PAST):
        monkeypatch.delenv(name, raising=False)


def past(variables: dict[str, str]) -> list[str]:
    """Returns the hosts that bypass the proxy, the same in both spellings."""
    upper, lower = (variables[name] for name in PAST)
    assert upper == lower
    return upper.split(",")


def test_environment_without_a_proxy_has_nothing_past_it() -> None:
    assert not set(PAST) & set(process_environment())


@pytest.mark.parametrize("name", VARIABLES)
def test_environment_with_a_proxy_has_this_machine_past_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://proxy:3128")
    assert past(process_environment(inherited=HARNESS)) == ["localhost", "127.0.0.1", "::1"]


def test_environment_keeps_what_is_past_the_proxy_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "intranet, 127.0.0.1")
    variables = process_environment({"NO_PROXY": "10.0.0.7"})
    assert past(variables) == ["intranet", "127.0.0.1", "10.0.0.7", "localhost", "::1"]
    monkeypatch.setenv("NO_PROXY", "*")
    assert past(process_environment()) == ["*"]


@pytest.fixture
def server() -> Iterator[str]:
    with http_server(lambda request: (200, {}, b"here")) as address:
        yield address


ASKS = """
import sys, urllib.request, httpx, openai, requests
from prefect.client.orchestration import get_client
print(httpx.get(sys.argv[1]).text, requests.get(sys.argv[1]).text, urllib.request.urlopen(sys.argv[1]).read().decode())
print(openai.OpenAI(api_key="none", base_url=sys.argv[1]).get("/", cast_to=str))
print(get_client(sync_client=True).api_healthcheck())
"""


def test_job_asks_this_machine_past_the_proxy_with_any_client(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = LocalClient(tmp_path / "jobs")
    with web_proxy() as proxy:
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        asks = Command(sys.executable, ("-c", ASKS, server))
        environment = create_environment(env_vars={"PREFECT_API_URL": server})
        job = client.submit(JobRequest("asks", asks, resources=ResourceConfig(), environment=environment))
        job.wait(90)
        assert job.logs().split() == ["here"] * 4 + ["None"]
        assert not proxy.was_asked
    client.shutdown()


def test_process_of_ours_asks_this_machine_directly_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    for name in PAST:
        monkeypatch.setenv(name, "intranet")  # restored afterwards
    ask_this_machine_directly()
    assert past(process_environment())[:2] == ["intranet", "localhost"]
