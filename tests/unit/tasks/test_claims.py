"""Claims: winners and losers of a cell, and no double publication for any order of deaths and pauses."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.conditional_store import ConditionalStore, Steps, conditional_store
from resources.process_marks import ProcessMark
from resources.storage import storage
from resources.storage.conditional_writes import creates_exclusively
from tasks.errors import ClaimLost
from tasks.running.claimed_cells import described
from tasks.running.claims.files import Claim, Subject, end_claim, read_claims
from tasks.running.claims.leases import LEASE_SECONDS, Claims

LEASE = 60.0
CELL = Subject(key="step-1.facts-0123456789", checkpoint="run-1", evaluation_hash="hash")


class Clock:
    def __init__(self, seconds: float = 1_000_000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def elsewhere(number: int = 0) -> ProcessMark:
    """Returns a process of another machine: only time reveals its end."""
    return ProcessMark(machine=f"machine-{number}", pid=number + 1, started="1")


def claims(folder: Path | str, clock: Clock, number: int = 0, **changes: Any) -> Claims:
    given: dict[str, Any] = {"now": clock, "process": elsewhere(number), "lease_seconds": LEASE, "in_background": False}
    return Claims(str(folder), **{**given, **changes})


@pytest.fixture
def store() -> Iterator[type[ConditionalStore]]:
    creates_exclusively.cache_clear()
    with conditional_store() as store:
        yield store
    creates_exclusively.cache_clear()


def test_claimed_cell_is_refused_to_others_until_it_is_given_up(tmp_path: Path):
    clock = Clock()
    with claims(tmp_path, clock, 0) as first, claims(tmp_path, clock, 1) as second:
        assert first.acquire([CELL]).ours == {CELL.key}
        [standing] = second.acquire([CELL]).others
        assert standing.live(clock())
        assert standing.holder is not None and standing.holder.process == elsewhere(0)
        first.release(CELL.key)
        assert second.acquire([CELL]).ours == {CELL.key}
        with pytest.raises(ClaimLost):
            first.prove(CELL.key)
    assert [seen.claim.released for seen in read_claims(str(tmp_path))] == [True]


def test_silent_holder_loses_its_cell_after_the_lease_and_notices(tmp_path: Path):
    clock = Clock()
    with claims(tmp_path, clock, 0) as first, claims(tmp_path, clock, 1) as second:
        first.acquire([CELL])
        clock.seconds += LEASE - 1
        first.renew()
        clock.seconds += LEASE - 1
        assert not second.acquire([CELL]).ours, "it was heard of since"
        clock.seconds += 30
        second.renew()
        assert second.acquire([CELL]).ours == {CELL.key}
        [seen] = read_claims(str(tmp_path))
        assert seen.claim.deaths == 1
        first.renew()  # it wakes up
        with pytest.raises(ClaimLost):
            first.raise_if_lost(CELL.key)
        first.release(CELL.key)
        second.prove(CELL.key)


def test_holder_that_could_not_renew_in_time_counts_itself_out_without_asking(tmp_path: Path):
    clock = Clock()
    with claims(tmp_path, clock) as mine:
        mine.acquire([CELL])
        clock.seconds += LEASE + 1
        with pytest.raises(ClaimLost):
            mine.raise_if_lost(CELL.key)


def test_dead_process_of_the_same_machine_is_succeeded_at_once(tmp_path: Path):
    code = f"""
from tasks.running.claims.files import Subject
from tasks.running.claims.leases import Claims
import os, signal
claims = Claims({str(tmp_path)!r}).__enter__()
claims.acquire([Subject.model_validate_json({CELL.model_dump_json()!r})])
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=Path(__file__).parents[3])
    [seen] = read_claims(str(tmp_path))
    assert seen.holder is not None
    with Claims(str(tmp_path), in_background=False) as mine:
        assert mine.acquire([CELL]).ours == {CELL.key}


def test_claim_that_a_person_ends_is_lost(tmp_path: Path):
    with claims(tmp_path, Clock()) as mine:
        mine.acquire([CELL])
        end_claim(read_claims(str(tmp_path))[0])
        with pytest.raises(ClaimLost):
            mine.prove(CELL.key)


def test_cell_with_a_claim_ended_by_a_person_can_be_claimed(tmp_path: Path):
    clock = Clock()
    with claims(tmp_path, clock, 0) as first, claims(tmp_path, clock, 1) as second:
        first.acquire([CELL])
        end_claim(read_claims(str(tmp_path))[0])
        assert second.acquire([CELL]).ours == {CELL.key}, "before the first holder has noticed"
        with pytest.raises(ClaimLost):
            first.prove(CELL.key)
        first.release(CELL.key)  # leaves its old claim behind
        second.prove(CELL.key)
    with claims(tmp_path, clock, 2) as third:
        assert third.acquire([CELL]).ours == {CELL.key}


@pytest.mark.parametrize("withdrawn", [True, False], ids=["withdrawn", "died before it withdrew"])
def test_claim_after_a_premature_look_does_not_block_others(tmp_path: Path, withdrawn: bool):
    clock = Clock()
    with claims(tmp_path, clock, 0) as first, claims(tmp_path, clock, 1) as second:
        first.acquire([CELL])
        first.release(CELL.key)
        assert second.acquire([CELL]).ours == {CELL.key}
        late = Claim(subject=CELL, number=1, holder="late", released=withdrawn, at=clock())
        storage.write_bytes(str(tmp_path / f"{CELL.key}.1.json"), late.model_dump_json().encode())
        second.prove(CELL.key)
    with claims(tmp_path, clock, 2) as third:
        assert third.acquire([CELL]).ours == {CELL.key}


DAY = 86_400.0


def renew(holder: Claims, folder: Path, clock: Clock) -> None:
    """Renews the holder, and sets the store's times to the clock's."""
    holder.renew()
    for path in (folder / "holders").iterdir():
        if json.loads(path.read_text())["renewed"] == clock():
            os.utime(path, (clock(), clock()))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"subject": '], ids=["empty", "of another kind", "cut off"])
@pytest.mark.parametrize("number", [1, 3])
def test_unreadable_claim_is_reported_and_succeeded_after_a_lease(tmp_path: Path, content: bytes, number: int):
    clock = Clock(time.time())
    (tmp_path / f"{CELL.key}.{number}.json").write_bytes(content)
    with claims(tmp_path, clock) as mine:
        [standing] = mine.acquire([CELL]).others
        assert "cannot be read" in described(standing)
        clock.seconds += LEASE_SECONDS + 11
        renew(mine, tmp_path, clock)
        assert mine.acquire([CELL]).ours == {CELL.key}
        mine.prove(CELL.key)


@pytest.mark.parametrize("copied", [{"number": 1}, {"number": 7, "subject": {"key": "step-2.another"}}, None])
def test_claim_under_another_name_and_link_to_nothing_are_succeeded(tmp_path: Path, copied: dict[str, Any] | None):
    path = tmp_path / f"{CELL.key}.7.json"
    if copied is None:
        path.symlink_to("nowhere")
    else:
        standing = Claim(subject=CELL, number=7, holder="gone", released=True, at=1.0).model_dump()
        path.write_text(
            json.dumps({**standing, **copied, "subject": {**standing["subject"], **copied.get("subject", {})}})
        )
    with claims(tmp_path, Clock(time.time())) as mine:
        assert mine.acquire([CELL]).ours == {CELL.key}
        mine.prove(CELL.key)
        assert [seen.claim.number for seen in read_claims(str(tmp_path))] == [8]


def test_claims_with_fields_of_a_newer_version_are_understood(tmp_path: Path):
    clock = Clock(time.time())

    def newer(path: Path) -> None:
        content = json.loads(path.read_text())
        nested = {name: {**part, "new": 1} for name, part in content.items() if isinstance(part, dict)}
        path.write_text(json.dumps({**content, **nested, "new": 1}))

    first = claims(tmp_path, clock, 0).__enter__()
    first.acquire([CELL])
    for path in tmp_path.rglob("*.json"):
        newer(path)
    with claims(tmp_path, clock, 1) as second:
        [standing] = second.acquire([CELL]).others
        assert standing.live(clock()) and standing.holder is not None
        first.release(CELL.key)
        newer(tmp_path / f"{CELL.key}.1.json")
        assert second.acquire([CELL]).ours == {CELL.key}


SKEWS = [-3 * DAY, -3600.0, -LEASE, -9.0, 0.0, 9.0, LEASE, 3600.0, 3 * DAY]


@pytest.mark.parametrize("skew", SKEWS)
def test_silent_holder_with_a_skewed_clock_keeps_its_cell_two_leases(tmp_path: Path, skew: float):
    clock, skewed = Clock(time.time()), Clock(time.time() + skew)
    first = claims(tmp_path, skewed, 0).__enter__()
    first.acquire([CELL])
    with claims(tmp_path, clock, 1) as second:
        if skew >= -LEASE:  # anything older counts as silent by the reader's clock, which the store's agrees with
            assert not second.acquire([CELL]).ours
        clock.seconds += 2 * LEASE + 21
        renew(second, tmp_path, clock)
        assert second.acquire([CELL]).ours == {CELL.key}
        with pytest.raises(ClaimLost):
            first.prove(CELL.key)


def test_claimant_with_a_late_clock_takes_no_cell_from_live_holders(tmp_path: Path):
    with claims(tmp_path, Clock(time.time()), 0) as first, claims(tmp_path, Clock(time.time() - DAY), 1) as second:
        assert first.acquire([CELL]).ours
        assert not second.acquire([CELL]).ours
        first.prove(CELL.key)


def test_sixty_races_of_six_have_a_single_winner_each(tmp_path: Path):
    start = threading.Barrier(6)

    def race(holder: Claims, subject: Subject) -> bool:
        start.wait()
        return bool(holder.acquire([subject]).ours)

    with ExitStack() as held, ThreadPoolExecutor(6) as threads:
        holders = [held.enter_context(claims(tmp_path, Clock(time.time()), number)) for number in range(6)]
        for number in range(60):
            subject = CELL.model_copy(update={"key": f"step-{number}.cell"})
            won = list(threads.map(race, holders, [subject] * 6))
            assert won.count(True) == 1


RACE = """
import sys
from pathlib import Path
from tasks.running.claims.files import Subject
from tasks.running.claims.leases import Claims
folder, work = sys.argv[1], Path(sys.argv[2])
subjects = [Subject(key=f"step-{n}.cell", checkpoint=f"c-{n}", evaluation_hash="h") for n in range(12)]
print("ready", flush=True)
sys.stdin.readline()
with Claims(folder) as claims:
    for _ in range(50):
        left = [subject for subject in subjects if not (work / subject.key).exists()]
        for key in claims.acquire(left).ours:
            if not (work / key).exists():
                with (work / f"{key}.log").open("a") as log:
                    log.write("evaluated\\n")
                claims.prove(key)
                (work / key).touch()
            claims.release(key)
        if not left:
            break
"""


def test_processes_that_race_for_cells_on_disk_evaluate_each_once(tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-c", RACE, str(tmp_path / "claims"), str(work)]
    root = Path(__file__).parents[3]
    processes = [
        subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in processes] == [0] * 4
    assert {path.name: path.read_text() for path in work.glob("*.log")} == {
        f"step-{number}.cell.log": "evaluated\n" for number in range(12)
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.lists(st.integers(0, 5), max_size=80),
    dies_at=st.dictionaries(st.integers(0, 2), st.integers(1, 14), max_size=2),
    sleeps=st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, LEASE / 2, 3 * LEASE]), max_size=3),
    cancelled=st.booleans(),
)
def test_claims_in_any_order_publish_everything_and_nothing_twice(
    store: type[ConditionalStore], order: list[int], dies_at: dict[int, int], sleeps: dict[int, float], cancelled: bool
):
    store.reset()
    creates_exclusively.cache_clear()
    clock, evaluated, published = Clock(), Counter[int](), list[int]()

    def evaluate(number: int) -> Callable[[], None]:
        def body() -> None:
            with claims("cond://claims", clock, number) as mine:
                if not mine.acquire([CELL]).ours or storage.exists("cond://record"):
                    return
                evaluated[number] += 1
                clock.seconds += sleeps.get(number, 0.0)
                try:
                    mine.prove(CELL.key)
                except ClaimLost:
                    return
                if storage.create_bytes("cond://record", str(number).encode()):
                    published.append(number)

        return body

    def cancel() -> None:
        for seen in read_claims("cond://claims") if cancelled else []:
            end_claim(seen)

    steps = Steps(itertools.chain(order, itertools.cycle(range(6))), dies_at=dies_at)
    store.steps = steps
    steps.run([*(evaluate(number) for number in range(3)), cancel])
    assert len(published) <= 1
    if not dies_at and not any(sleeps.values()) and not cancelled:
        assert evaluated.total() <= 1, "no process slept or died, so no cell was taken from its holder"
    clock.seconds += 10 * LEASE
    evaluate(3)()
    assert len(published) == 1
    assert storage.read_bytes("cond://record") == str(published[0]).encode()


def test_store_without_exclusive_writes_is_found_out_and_one_of_two_withdraws(store: type[ConditionalStore]):
    store.reset(exclusive=False)
    clock, got = Clock(), list[bool]()

    def body(number: int) -> Callable[[], None]:
        def claim() -> None:
            with claims("cond://claims", clock, number, sleep=lambda seconds: None) as mine:
                assert not mine.exclusive
                got.append(bool(mine.acquire([CELL]).ours))

        return claim

    # Alternates, so that both read before either writes, and both write before either reads again.
    steps = Steps(itertools.cycle(range(2)), dies_at={})
    store.steps = steps
    steps.run([body(0), body(1)])
    assert sorted(got) == [False, True]
