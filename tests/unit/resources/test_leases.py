"""Renewal of the leases of a process' jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fakes.polling import eventually
from resources.backends.leases import LeaseRenewer
from resources.errors import BackendUnavailable, BadInput


@dataclass
class Job:
    job_id: str
    renewals: int = 0
    error: Exception | None = None
    has_finished: bool = False

    def renew(self) -> bool:
        self.renewals += 1
        if self.error is not None:
            raise self.error
        return not self.has_finished


@pytest.fixture
def leases() -> Iterator[LeaseRenewer]:
    leases = LeaseRenewer(lease_seconds=0.1)
    yield leases
    leases.close()


@pytest.mark.parametrize("error", [BackendUnavailable, BadInput])
def test_lease_that_fails_delays_no_other_and_is_tried_again(leases: LeaseRenewer, error: type) -> None:
    failing = Job("failing", error=error(expected="a renewal", found="none", remedy="Wait."))
    last = Job("last")
    for job in (failing, last):
        leases.add(job.job_id, job.renew)
    eventually(lambda: failing.renewals > 1 and last.renewals > 1)


def test_finished_job_is_not_renewed_again(leases: LeaseRenewer) -> None:
    job = Job("job", has_finished=True)
    other = Job("other")
    for each in (job, other):
        leases.add(each.job_id, each.renew)
    eventually(lambda: other.renewals > 2)
    assert job.renewals == 1


def test_job_added_after_a_shutdown_is_renewed_alone(leases: LeaseRenewer) -> None:
    before, after = Job("before"), Job("after")
    leases.add("before", before.renew)
    eventually(lambda: before.renewals)
    leases.close()
    leases.add("after", after.renew)
    eventually(lambda: after.renewals)
    renewals = before.renewals
    eventually(lambda: after.renewals > 3)
    assert before.renewals == renewals
