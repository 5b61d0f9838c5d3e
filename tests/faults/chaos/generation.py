"""Kills the processes of a generation at random moments, and checks that each answer exists once.

    make chaos-generate                           20 kills, 5,000 prompts, 2 samples each
    make chaos-generate KILLS=7 PROMPTS=500 SEED=3

Prompts go to a kept pool of 2 replicas with engines that return another sample each time, and log their requests. Kills
hit workers, the queue of shards, proxy, agents, engines, the job that keeps the pool up, and the command itself; pool
and command are restarted. In the end there must be a row for each sample of each prompt, no file with answers may have
changed, no engine may have received a prompt after its answers were written, and prompts that are too long must be rows
with their error. Ends with 1 if anything differs, and keeps the folder.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from faults.chaos.roles import Tree
from faults.scenarios.processes import children, state_of
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import find, keep_up, take_down
from resources.errors import AssayError
from resources.settings import process_environment, settings
from tasks.generation.output import MANIFEST, decoded

_PR_SET_CHILD_SUBREAPER = 36
_ASSAY = Path(sys.executable).with_name("assay")
_POOL, _MODEL = "chaos", "run-1"
_IN_FLIGHT = 64
_LONGEST_SECONDS = 3600.0
_POLL_SECONDS = 0.05
_TOO_LONG = 5000
"""Bytes of a prompt that engines refuse."""
_PROMPTS_PER_TOO_LONG = 250
"""1 of so many prompts is too long."""
_SUPERVISOR = "programs/supervise.py"

ROLES: Mapping[str, Callable[[Tree], list[int]]] = {
    "worker": lambda tree: tree.executing("run_call.py", "jobs/worker-", without=(_SUPERVISOR,)),
    "queue": lambda tree: tree.executing("run_call.py", "jobs/actor-queue-", without=(_SUPERVISOR,)),
    "proxy": lambda tree: tree.executing("-m pools.proxy", without=(_SUPERVISOR,)),
    "agent": lambda tree: tree.executing("run_call.py", "jobs/replica-", without=(_SUPERVISOR,)),
    "engine": lambda tree: tree.executing("fakes/engine.py", without=(_SUPERVISOR,)),
    "pool": lambda tree: tree.executing("run_call.py", "jobs/pool-", without=(_SUPERVISOR,)),
    "command": lambda tree: tree.executing("bin/assay", "generate", without=(_SUPERVISOR,)),
}
"""Killed processes, by name."""


@dataclass(frozen=True)
class Job:
    """A generation of numbered prompts by some workers; `folder` holds all of its files."""

    folder: Path
    prompts: int = 5000
    per_shard: int = 100
    samples: int = 2
    workers: int = 2

    @property
    def too_long(self) -> int:
        """Number of prompts that engines refuse."""
        return self.prompts // _PROMPTS_PER_TOO_LONG

    @property
    def output(self) -> Path:
        """Folder with the answers of the checkpoint."""
        return self.folder / "generated" / _MODEL

    @property
    def asked_file(self) -> Path:
        """File with a line for each request that an engine received."""
        return self.folder / "asked.txt"

    def write_prompts(self) -> None:
        """Writes the prompts; those too long are spread among the others."""
        lines = (
            {
                "prompt": f"prompt {number} "
                + ("x" * _TOO_LONG if number % _PROMPTS_PER_TOO_LONG == _PROMPTS_PER_TOO_LONG - 1 else "")
            }
            for number in range(self.prompts)
        )
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start_pool(self) -> None:
        with suppress(AssayError):  # a pool that is ending: the next call starts it
            if find(_POOL) is None:
                config = InferencePoolConfig.model_validate(
                    {
                        "model": {"name": "run", "engine_kwargs": {"max_num_seqs": _IN_FLIGHT // 2}},
                        "resource_config": {"replicas": 2},
                        "lease_seconds": 3,
                        "max_replica_restarts": 50,
                    }
                )
                checkpoint = Servable.from_uri(_MODEL, str(self.folder / "step-1"))
                faults = {"fresh_samples": True, "delay_seconds": 0.05}
                launcher = FakeLauncher(self.folder, faults=faults, notes_requests=True)
                keep_up(_POOL, config, [checkpoint], idle_seconds=_LONGEST_SECONDS, launcher=launcher)

    def start(self) -> subprocess.Popen[bytes]:
        command = [_ASSAY, "generate", "--pool", _POOL, "--prompts", self.folder / "prompts.jsonl"]
        command += ["--output", self.output.parent, "--samples", str(self.samples), "--temperature", "1"]
        command += ["--max-tokens", "24", "--prompts-per-shard", str(self.per_shard), "--workers", str(self.workers)]
        inherited = {name: value for name, value in process_environment().items() if not name.startswith("PREFECT_")}
        environment = {**inherited, "PREFECT_HOME": str(self.folder / "prefect")}
        with (self.folder / "assay.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, cwd=self.folder, stdout=log, stderr=log)

    def parts(self) -> list[Path]:
        return sorted(self.output.glob("part-*.parquet"))

    def asked(self) -> int:
        return self.asked_file.read_bytes().count(b"\n") if self.asked_file.is_file() else 0


@dataclass
class Kills:
    happened: list[tuple[str, int]] = field(default_factory=list)
    """Process, and number of requests received by engines until then."""
    starts: int = 1
    """Starts of the command."""
    endings: Counter[str] = field(default_factory=Counter)
    digests: dict[str, str] = field(default_factory=dict)
    """Digest of each file with answers, when it was first seen."""
    wrong: list[str] = field(default_factory=list)

    def look_at(self, parts: Sequence[Path], *, again: bool = False) -> None:
        """Records the digests of new files; with `again`, compares those of all files."""
        for part in parts:
            if again or part.name not in self.digests:
                digest = hashlib.sha256(part.read_bytes()).hexdigest()
                if self.digests.setdefault(part.name, digest) != digest:
                    self.wrong.append(f"{part.name} is another file than when it was first seen")


def disturbed(job: Job, moments: Sequence[tuple[int, str]], source: random.Random) -> Kills:
    """Generates to the end; kills a process of a kind when engines have received so many requests."""
    kills, left, deadline = Kills(), list(moments), time.monotonic() + _LONGEST_SECONDS
    before = frozenset(Tree.below(os.getpid()).processes)
    ours: set[int] = set()

    def start_pool() -> None:
        children_before = set(children(os.getpid()))
        job.start_pool()
        ours.update(set(children(os.getpid())) - children_before)

    start_pool()
    command = job.start()
    ours.add(command.pid)
    while (code := command.poll()) != 0:
        if time.monotonic() > deadline:
            kills.wrong.append(f"it does not end within {_LONGEST_SECONDS:g} s")
            break
        if code is not None:
            kills.endings[f"exit code {code}"] += 1
            if code > 0:
                kills.wrong.append(f"the command gave up with {code}; see {job.folder / 'assay.log'}")
                break
            command = job.start()
            ours.add(command.pid)
            kills.starts += 1
        start_pool()
        kills.look_at(job.parts())
        if left and (asked := job.asked()) >= left[0][0]:
            tree = Tree.below(os.getpid())
            if pids := sorted(pid for pid in ROLES[left[0][1]](tree) if pid not in before):
                role = left.pop(0)[1]
                kills.look_at(job.parts(), again=True)
                with suppress(ProcessLookupError):
                    os.kill(source.choice(pids), signal.SIGKILL)
                    kills.happened.append((role, asked))
                    print(f"{len(kills.happened):4d} {role}, with {asked} requests asked", flush=True)
        _reap(ours)
        time.sleep(_POLL_SECONDS)
    kills.look_at(job.parts(), again=True)
    if left:
        kills.wrong.append(f"{len(left)} moments never came: {left}")
    return kills


def _reap(ours: Collection[int]) -> None:
    for pid in children(os.getpid()):
        if pid not in ours and state_of(pid) == "Z":
            os.waitpid(pid, 0)


def differences(job: Job, kills: Kills) -> list[str]:
    """Returns all differences from the expected end state."""
    wrong = list(kills.wrong)
    rows = [(part, row) for part in job.parts() for row in decoded(part.read_bytes(), "parquet")]
    written = Counter((row["prompt_index"], row["sample"]) for _, row in rows)
    planned = Counter((index, sample) for index in range(job.prompts) for sample in range(job.samples))
    if written != planned:
        wrong.append(
            f"{(planned - written).total()} answers are missing, {(written - planned).total()} are there too often"
        )
    manifest_file = job.output / MANIFEST
    if not manifest_file.is_file():
        return [*wrong, "there is no manifest"]
    manifest = json.loads(manifest_file.read_bytes())
    expected = {"rows": job.prompts * job.samples, "errors": job.too_long * job.samples}
    counted = {name: manifest["totals"][name] for name in expected}
    errors = sum(row["error"] is not None for _, row in rows)
    if counted != expected or errors != expected["errors"]:
        wrong.append(f"the manifest says {counted}, rows with errors are {errors}, expected {expected}")
    if {each["file"]: each["sha256"] for each in manifest["shards"]} != kills.digests:
        wrong.append("the manifest names other files than those seen")
    if empty := sum(row["error"] is None and not row["text"] for _, row in rows):
        wrong.append(f"{empty} answers are empty")
    texts = Counter((row["prompt_index"], row["text"]) for _, row in rows if row["error"] is None)
    if twice := sum(count > 1 for count in texts.values()):
        wrong.append(f"{twice} prompts have the same sample twice")
    return wrong + asked_again(job, {str(row["prompt"]): part for part, row in rows})


def asked_again(job: Job, part_of: Mapping[str, Path]) -> list[str]:
    """Returns requests that reached an engine after the file with their prompt's answers was written."""
    written = {part: part.stat().st_mtime_ns for part in set(part_of.values())}
    late: defaultdict[str, int] = defaultdict(int)
    for line in job.asked_file.read_bytes().splitlines():
        at, _, body = line.partition(b" ")
        with suppress(ValueError):  # a line of an engine killed while it wrote
            part = part_of.get(str(json.loads(body)["prompt"]))  # the pool's own requests are lists of tokens
            if part is not None and int(at) > written[part]:
                late[part.name] += 1
    return [f"{count} requests for {name} came after it was written" for name, count in sorted(late.items())]


def moments_of(job: Job, kills: int, source: random.Random) -> list[tuple[int, str]]:
    """Draws moments in the first 9 tenths of all requests, equally many for each kind of process."""
    total = job.prompts * job.samples
    roles: list[str] = []
    while len(roles) < kills:
        roles += source.sample(list(ROLES), len(ROLES))
    return list(zip(sorted(source.randint(1, total * 9 // 10) for _ in range(kills)), roles[:kills], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos-generate", description="Kills the processes of a generation.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; drawn, and printed, when left out")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # finds processes that outlive their parents
    job = Job(Path(tempfile.mkdtemp(prefix="chaos-")), prompts=given.prompts)
    os.environ["ASSAY_CACHE_DIR"] = str(job.folder / "cache")
    settings.cache_clear()
    print(f"seed {seed}, {given.kills} kills, in {job.folder}", flush=True)
    write_checkpoint(job.folder / "step-1", seed=1)
    job.write_prompts()
    source, began = random.Random(seed), time.monotonic()
    try:
        kills = disturbed(job, moments_of(job, given.kills, source), source)
    finally:
        with suppress(AssayError):
            take_down(_POOL)
    wrong = differences(job, kills)
    again = job.asked() - job.prompts * job.samples
    print(f"killed: {dict(Counter(role for role, _ in kills.happened))}; the command was started {kills.starts} times")
    print(f"{job.prompts * job.samples} answers, {again} more requests than answers that engines gave")
    for sentence in wrong:
        print(f"DIFFERS: {sentence}")
    print(f"{len(kills.happened)} kills in {time.monotonic() - began:.0f} s, {len(wrong)} differences; seed {seed}")
    if not wrong:
        shutil.rmtree(job.folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
