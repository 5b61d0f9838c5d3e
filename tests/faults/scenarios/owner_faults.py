"""The process that runs an evaluation is killed half-way: its pool ends with it, and the same work starts again."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fakes.pools import InferencePool
from faults.scenarios.load import Answer, Endpoint, Load, LoadPlan
from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.processes import descendants, send, state_of
from faults.scenarios.target import Recipe, Target, kept_answers
from faults.scenarios.trial import plan_of
from resources.backends.local.client import LocalJob, local_client
from resources.config import ResourceConfig
from resources.jobs.jobs import Call, JobRequest, create_environment
from resources.settings import settings

_POLL_SECONDS = 0.02
_GONE_SECONDS = 60.0


@dataclass(frozen=True)
class _Work:
    model: str
    plan: LoadPlan
    cell: str
    folder: Path

    def answers_of(self, run: str) -> dict[int, dict[str, object]]:
        file = self.folder / f"{run}.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return {answer["number"]: answer for answer in (json.loads(line) for line in lines if line.endswith("}"))}


def _own_a_pool_and_ask(recipe: Recipe, work: _Work, run: str) -> None:
    # the orchestrator's work: a pool of its own, a cell, and every request of the plan
    with (
        InferencePool(recipe.config, recipe.checkpoints, launcher=recipe.launcher) as pool,
        (work.folder / f"{run}.jsonl").open("w") as noted,
    ):
        mirror = str(work.folder / "mirror")
        opened = pool.session.open(work.model, cell=work.cell, attempt=run, mirror=mirror)
        running = opened.running

        def note(answer: Answer) -> None:
            payload = asdict(answer.payload) if answer.payload is not None else None
            noted.write(json.dumps({"number": answer.number, "problem": answer.problem, "payload": payload}) + "\n")
            noted.flush()

        asyncio.run(_ask_all(Endpoint(running.base_url, running.api_key, running.model), work.plan, note))
        counts = pool.session.cell_counts(opened)
        (work.folder / f"{run}.counts").write_text(json.dumps(asdict(counts)))
        pool.session.close_cell(opened, finished=False)


async def _ask_all(endpoint: Endpoint, plan: LoadPlan, note: Callable[[Answer], None]) -> None:
    async with Load(endpoint, plan, on_answer=note) as load:
        await load.report()


async def _owner_killed(target: Target, scale: Scale) -> ScenarioOutcome:
    assert target.recipe is not None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="assay-faults-") as folder:
        plan = plan_of(scale)
        work = _Work(target.model, plan, f"faults-{secrets.token_hex(6)}", Path(folder))
        rules: list[str] = []
        left = await asyncio.to_thread(_run_and_kill, target.recipe, work)
        if left:
            rules.append(f"{len(left)} processes outlived the process that started them")
        given = work.answers_of("first")
        kept = kept_answers(settings().journal_path, work.cell).answers
        job = _submit(target.recipe, work, "second")
        status = await asyncio.to_thread(job.wait, raise_on_failure=False)
        if status != "succeeded":
            return ScenarioOutcome("owner-killed", violations=(f"the second run {status}: {job.logs(20)}",))
        again = work.answers_of("second")
        counts = json.loads((work.folder / "second.counts").read_text())
    failed = [answer for answer in again.values() if answer["problem"] is not None]
    other = _differing(given, again)
    if failed:
        rules.append(f"{len(failed)} of {plan.requests} requests of the second run failed: {failed[0]['problem']}")
    if other:
        rules.append(f"{len(other)} answers that had been given were others the second time")
    if len(given) > kept:
        rules.append(f"{len(given)} answers had been given, and {kept} kept")
    if counts["upstream"] > plan.requests - kept:
        rules.append(f"engines were asked {counts['upstream']} times more, with {plan.requests - kept} left to answer")
    return ScenarioOutcome(
        "owner-killed",
        requests=plan.requests,
        client_errors=len(failed),
        wrong_answers=len(other),
        seconds=round(time.monotonic() - began, 2),
        violations=tuple(rules),
        figures={
            "given_before_kill": len(given),
            "kept_before_kill": kept,
            "upstream_after": counts["upstream"],
            "replayed": counts["journal_hits"],
        },
    )


def _run_and_kill(recipe: Recipe, work: _Work) -> list[int]:
    # returns leftover processes of the killed run
    job = _submit(recipe, work, "first")
    pid: int | None = None
    while not job.status().finished and len(work.answers_of("first")) < work.plan.requests // 2:
        pid = job.process_details()["replicas"][0]["pid"] if job.process_details()["replicas"] else None
        time.sleep(_POLL_SECONDS)
    if pid is None:
        return []
    below = descendants(pid)
    send(signal.SIGKILL, [pid])
    deadline = time.monotonic() + _GONE_SECONDS
    while (left := [child for child in below if state_of(child) not in ("", "Z")]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    job.wait(raise_on_failure=False)
    return left


def _submit(recipe: Recipe, work: _Work, run: str) -> LocalJob:
    return local_client().submit(
        JobRequest(
            name=f"owner-{run}-{secrets.token_hex(3)}",
            entrypoint=Call(_own_a_pool_and_ask, (recipe, work, run)),
            resources=ResourceConfig(preemptible=False),
            environment=create_environment(),
            max_retries_preemption=0,
        )
    )


def _differing(before: Mapping[int, Mapping[str, object]], after: Mapping[int, Mapping[str, object]]) -> list[int]:
    given = {number for number, answer in before.items() if answer["payload"] is not None}
    return [number for number in given if after.get(number, {}).get("payload") != before[number]["payload"]]


OWNER_SCENARIOS = (
    Scenario(
        "owner-killed",
        "kills a process that has a pool of its own, half-way through its requests, and begins the same work again",
        "nothing of the first pool is left; given answers are replayed, sampled answers too",
        _owner_killed,
        needs_recipe=True,
    ),
)
