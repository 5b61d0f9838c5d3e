"""Upstream requests of a job that was killed half-way and run again: with the journal, and without.

    make bench NAME=resume

The job is a cell's: half of its requests are greedy, all different, and half are sampled, each sent 4 times, through
the cell's own address at the proxy. A separate engine counts requests; an answer takes 50 ms. After half of the
answers, the job and the proxy get SIGKILL, with requests in flight. Then both are restarted, as a second attempt at the
same cell, and the job begins from its first request.

With the journal the second attempt may send the engine only the requests without an answer and those in flight at the
kill; each answer of the first attempt must reappear in the second, also sampled answers, though the engine samples
another answer every time. A third figure is that of another machine, which has only the copy of the journal next to the
cell. Without a journal, the second attempt sends every request again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import CLIENT_KEY, tell
from side_by_side import (
    BENCH,
    Comparison,
    background,
    end_children_on_sigterm,
    environment_of_a_user,
    give_up,
    print_comparisons,
    say,
    wait_until,
)

from fakes.proxy import RunningProxy, running_proxy

WORK = BENCH / "resume"
MODEL = "tiny"
CELL = "cell"
CONCURRENCY = 16
SAME_SAMPLES = 4
_ENGINE = Path(__file__).resolve().parents[1] / "fakes" / "engine.py"
_DELAY_SECONDS = 0.05
_JOB_SECONDS = 300.0
_POLL_SECONDS = 0.01
_SETTLE_SECONDS = 10.0


def bodies(requests: int) -> list[dict[str, Any]]:
    """Returns the requests of a job, in its order: greedy and sampled requests in turns, the latter repeated."""
    asked: list[dict[str, Any]] = []
    for number in range(requests):
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 8}
        if number % 2 == 0:
            asked.append({**body, "prompt": f"greedy {number}", "temperature": 0, "logprobs": 1})
        else:
            asked.append({**body, "prompt": f"sampled {number // (2 * SAME_SAMPLES)}", "temperature": 1.0})
    return asked


def run_job(port: int, attempt: str, requests: int, answers: Path) -> None:
    """Runs the job: sends all requests, and writes a line for each answer as it comes."""
    writing = threading.Lock()
    local = threading.local()
    headers = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}

    def ask(body: dict[str, Any]) -> None:
        connection = getattr(local, "connection", None)
        if connection is None:
            connection = local.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_JOB_SECONDS)
        connection.request("POST", f"/cells/{CELL}/{attempt}/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        content = json.loads(reply.read())
        if reply.status != 200:
            raise RuntimeError(f"{body['prompt']} was answered with {reply.status}: {content}")
        with writing, answers.open("a") as file:
            file.write(json.dumps([body["prompt"], content["choices"][0]["text"]]) + "\n")

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        for done in [threads.submit(ask, body) for body in bodies(requests)]:
            done.result()


@dataclass(frozen=True)
class Upstream:
    """The engine that counts, in a process of its own."""

    port: int

    def stats(self) -> dict[str, Any]:
        """Returns counts of completion requests so far: `requests` that arrived, `answered`, `in_flight`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/fake/stats", timeout=30) as response:
            return json.loads(response.read())

    def settled(self) -> dict[str, Any]:
        """Returns the counts once no request is in flight."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (stats := self.stats())["in_flight"] and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return stats


@contextmanager
def upstream(folder: Path) -> Iterator[Upstream]:
    """Runs an engine that answers after a delay, and samples another answer every time."""
    address = folder / "engine.json"
    faults = {"delay_seconds": _DELAY_SECONDS, "fresh_samples": True}
    command = [sys.executable, _ENGINE, "--model", MODEL, "--address-file", address, "--faults", json.dumps(faults)]
    log = folder / "engine.log"
    with background(command, log=log, env=environment_of_a_user({})) as process:
        wait_until(address.exists, process=process, log=log)
        yield Upstream(json.loads(address.read_text())["port"])


@contextmanager
def proxy_for(
    engine: Upstream, folder: Path, attempt: str, *, journal: Path | None, mirror: Path | None
) -> Iterator[RunningProxy]:
    with running_proxy(folder, journal=journal) as proxy:
        tell(proxy, [engine.port], model=MODEL)
        proxy.client.open_cell(CELL, attempt, mirror=str(mirror) if mirror is not None else None)
        yield proxy


@contextmanager
def job(proxy: RunningProxy, attempt: str, requests: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the job as a process; its answers are in `folder`, by attempt."""
    command = [sys.executable, Path(__file__), "--job", str(proxy.address.port), attempt, str(folder / attempt)]
    command += ["--requests", str(requests)]
    with background(command, log=folder / f"{attempt}.log", env=environment_of_a_user({})) as process:
        yield process


def answered(folder: Path, attempt: str) -> list[tuple[str, str]]:
    """Returns prompt and text of every answer of an attempt; skips a line cut by the kill."""
    lines = (folder / attempt).read_text().splitlines(keepends=True)
    return [(prompt, text) for prompt, text in (json.loads(line) for line in lines if line.endswith("\n"))]


@dataclass(frozen=True)
class ResumeOutcome:
    requests: int
    got_before: int
    asked_before: int
    in_flight: int
    asked_after: int
    replayed: int

    @property
    def bound(self) -> int:
        """Upstream requests that the second attempt may send: unanswered requests, and those in flight at the kill."""
        return self.requests - self.got_before + self.in_flight


def kill_and_run_again(name: str, requests: int, *, keeps_journal: bool, other_machine: bool = False) -> ResumeOutcome:
    folder = WORK / name
    folder.mkdir(parents=True)
    journal = folder / "journal.sqlite" if keeps_journal else None
    mirror = folder / "mirror" if keeps_journal else None
    with upstream(folder) as engine:
        with (
            proxy_for(engine, folder, "first", journal=journal, mirror=mirror) as proxy,
            job(proxy, "first", requests, folder) as process,
        ):
            in_flight = kill_half_way(engine, proxy, process, requests)
        before = engine.settled()
        if other_machine:
            journal = folder / "another" / "journal.sqlite"
        with proxy_for(engine, folder, "second", journal=journal, mirror=mirror) as proxy:
            with job(proxy, "second", requests, folder) as process:
                if process.wait(_JOB_SECONDS):
                    give_up("the second attempt failed", folder / "second.log")
            replayed = proxy.client.cell_counts(CELL, "second").journal_hits
        after = engine.settled()
    first, second = answered(folder, "first"), answered(folder, "second")
    check_answers(first, second, requests, replays=keeps_journal and not other_machine)
    asked_after = after["requests"] - before["requests"]
    say(f"{name}: killed after {len(first)} of {requests} answers; then {asked_after} upstream, {replayed} replayed")
    return ResumeOutcome(requests, len(first), before["requests"], in_flight, asked_after, replayed)


def kill_half_way(engine: Upstream, proxy: RunningProxy, process: subprocess.Popen[bytes], requests: int) -> int:
    """Sends SIGKILL to the job and its proxy after half of the answers; returns the number of requests in flight."""
    deadline = time.monotonic() + _JOB_SECONDS
    while (stats := engine.stats())["answered"] < requests // 2:
        if process.poll() is not None or time.monotonic() > deadline:
            give_up("the job ended before it could be killed")
        time.sleep(_POLL_SECONDS)
    for victim in (process, proxy.process):
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    return stats["in_flight"]


def check_answers(first: list[tuple[str, str]], second: list[tuple[str, str]], requests: int, *, replays: bool) -> None:
    """Ends the script unless the second attempt got all answers, with `replays` also those of the first."""
    asked = Counter(body["prompt"] for body in bodies(requests))
    if Counter(prompt for prompt, _ in second) != asked:
        give_up(f"{len(second)} answers for {requests} requests")
    lost = Counter(first) - Counter(second) if replays else Counter()
    if lost:
        give_up(f"{lost.total()} answers of the first attempt were not given again, such as {next(iter(lost))}")


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of the job (default: 2000)")
    parser.add_argument("--job", nargs=3, metavar=("PORT", "ATTEMPT", "ANSWERS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        port, attempt, answers = given.job
        run_job(int(port), attempt, given.requests, Path(answers))
        return
    shutil.rmtree(WORK, ignore_errors=True)
    with_journal = kill_and_run_again("journal", given.requests, keeps_journal=True)
    elsewhere = kill_and_run_again("other-machine", given.requests, keeps_journal=True, other_machine=True)
    without = kill_and_run_again("no-journal", given.requests, keeps_journal=False)
    report(with_journal, elsewhere, without)
    if with_journal.asked_after > with_journal.bound:
        give_up(f"{with_journal.asked_after} upstream requests after the kill, where {with_journal.bound} are allowed")


def report(with_journal: ResumeOutcome, elsewhere: ResumeOutcome, without: ResumeOutcome) -> None:
    facts = {
        "requests": with_journal.requests,
        "in_flight_at_the_kill": with_journal.in_flight,
        "answers_before_the_kill": with_journal.got_before,
        "allowed": with_journal.bound,
        "upstream_in_all": with_journal.asked_before + with_journal.asked_after,
        "on_another_machine": elsewhere.asked_after,
        "answers_before_found_again": True,
    }
    compared = Comparison(
        "resume",
        "upstream requests after a kill half-way",
        with_journal.asked_after,
        without.asked_after,
        better="less",
        facts=facts,
    )
    print_comparisons("Requests after a kill half-way", [compared])


if __name__ == "__main__":
    main()
