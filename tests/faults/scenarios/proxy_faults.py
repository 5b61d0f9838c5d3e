"""A proxy that is killed, and a proxy without disk space for its journal."""

from __future__ import annotations

import asyncio
import resource
import signal

from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.processes import send
from faults.scenarios.target import Target
from faults.scenarios.trial import plan_of, tried
from resources.settings import settings

_JOURNAL_WARNING = "journal"


async def _proxy_killed(target: Target, scale: Scale) -> ScenarioOutcome:
    # clients must retry after a broken connection: the proxy was their only address
    leases: set[str] = set()

    async def kill() -> None:
        leases.update((await asyncio.to_thread(target.status)).leases)
        send(signal.SIGKILL, [target.proxy_pid])

    plan = plan_of(scale, retries=1)
    killed = target.proxy_pid
    trial = await tried(target, plan, kill)
    rules = trial.broken_rules()
    if trial.duplicates <= plan.concurrency:  # kept, then the proxy died before it was sent: so it was requested again
        rules = [rule for rule in rules if "the journal holds" not in rule]
    if target.proxy_pid == killed:
        rules.append("no other proxy was started")
    if trial.engine_answers > plan.requests + plan.concurrency:
        rules.append(f"engines gave {trial.engine_answers} answers to {plan.requests} requests")
    leases_after = set((await asyncio.to_thread(target.status)).leases)
    if not leases <= leases_after:
        rules.append(f"{len(leases - leases_after)} of {len(leases)} leases are gone")
    return trial.outcome("proxy-killed", rules, asked_again=trial.report.retried, engine_answers=trial.engine_answers)


async def _disk_full(target: Target, scale: Scale) -> ScenarioOutcome:
    # the proxy's files cannot grow; reads still work
    pid = target.proxy_pid
    before = target.proxy_log()
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    kept_before = (await asyncio.to_thread(target.status)).journal

    async def fill() -> None:
        log_bytes = len(target.proxy_log().encode())
        smallest = log_bytes + 64 * 1024  # the log must not fill up
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (smallest, hard))

    plan = plan_of(scale)
    try:
        trial = await tried(target, plan, fill, share=0.1)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    rules = [rule for rule in trial.broken_rules() if "the journal lacks" not in rule]
    written = target.proxy_log()[len(before) :].splitlines()
    warnings = [line for line in written if "WARNING" in line and _JOURNAL_WARNING in line.lower()]
    kept = trial.kept.answers if trial.kept else 0
    errors = 0
    kept_after = (await asyncio.to_thread(target.status)).journal
    if kept_before is not None and kept_after is not None:
        errors = kept_after.errors - kept_before.errors
    if kept >= plan.requests:
        rules.append("the journal went on as before: its disk was not full")
    if len(warnings) != 1:
        rules.append(f"{len(warnings)} warnings were written, expected 1")
    return trial.outcome("disk-full", rules, kept=kept, errors=errors, journal_bytes=_journal_bytes())


def _journal_bytes() -> int:
    path = settings().journal_path
    return path.stat().st_size if path.is_file() else 0


PROXY_SCENARIOS = (
    Scenario(
        "proxy-killed",
        "kills the proxy under load",
        "clients that ask once more see no error; engines answer again only what was in flight",
        _proxy_killed,
    ),
    Scenario(
        "disk-full",
        "lets no file of the proxy grow any more",
        "requests are answered as before, and a single warning is written",
        _disk_full,
    ),
)
