"""The proxy's job: started again where it was, which is the only place where anybody looks for it."""

from __future__ import annotations

import pytest

from fakes.jobs import FakeClient, FakeJob
from pools.config import InferencePoolConfig
from pools.proxy.client import ProxyAddress
from pools.proxy.process import ProxyProcess
from resources.errors import ProxyFailed
from resources.jobs.jobs import Command, JobStatus
from resources.settings import ProxyKeys


def started_at(*addresses: ProxyAddress) -> tuple[ProxyProcess, FakeClient]:
    """A proxy that was started and has ended; it announces one address at each start."""
    left = list(addresses)

    def announces(job: FakeJob) -> None:
        job.announcement = left.pop(0).model_dump_json()

    client = FakeClient(announces)
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    process = ProxyProcess(config, client=client, keys=ProxyKeys.new())
    assert process.start() == addresses[0]
    client.submitted[0].says(JobStatus.FAILED)
    return process, client


def test_proxy_that_has_ended_is_started_again_on_its_port() -> None:
    again = ProxyAddress(host="10.0.0.1", port=4321, pid=2)
    process, client = started_at(again.model_copy(update={"pid": 1}), again)
    assert process.restart_if_ended()
    assert process.address == again
    command = client.requests[1].entrypoint
    assert isinstance(command, Command)
    assert command.args[command.args.index("--port") + 1] == "4321"


def test_proxy_that_comes_back_on_another_machine_is_given_up_and_can_be_ended() -> None:
    first = ProxyAddress(host="10.0.0.1", port=4321, pid=1)
    process, client = started_at(first, first.model_copy(update={"host": "10.0.0.2"}))
    with pytest.raises(ProxyFailed, match=r"at 10\.0\.0\.2:4321"):
        process.restart_if_ended()
    assert process.address == first
    process.stop()
    assert client.submitted[1].status() is JobStatus.STOPPED
