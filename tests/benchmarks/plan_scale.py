"""Planning a large run: 10,000 checkpoints and 20 suites, every cell recorded but those of the newest checkpoints.

    python tests/benchmarks/plan_scale.py [--checkpoints 10000] [--suites 20] [--naive 200]

Measures, on local disk: the first plan of a machine on which only the index beside the records is known, a plan when
nothing changed, one with the index lost, and one before anything was evaluated. The naive way, a look into each
checkpoint and a read of the record of each cell, is measured on fewer checkpoints, and both by the cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import Comparison

from fakes.records import make_record
from pools.model_files import digest_model_folder
from resources.settings import settings
from tasks.checkpoint_rules import CheckpointRule
from tasks.checkpoints import find_checkpoints
from tasks.config import EvaluationConfig, digest_of
from tasks.policies import Policy, WantedEvaluation
from tasks.policy_looking import look
from tasks.reconciliation import Reconciliation, reconcile
from tasks.records import read_record
from tasks.run_listing import look_at_run


class Spent(NamedTuple):
    """Seconds by the clock, and of this process on a processor: on a busy machine only these compare."""

    wall: float
    cpu: float


NEWEST = 10
"""Checkpoints without records, as a run has them that trains on."""


def write_checkpoints(run: Path, number: int) -> None:
    """Complete ones, with a tensor each."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    files = {
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
        "tokenizer_config.json": b"{}",
        "tokenizer.json": b"{}",
    }
    for step in range(number):
        folder = run / "hf" / f"step-{step}"
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        weights = struct.pack("<Q", len(header)) + header + struct.pack("<f", step)
        (folder / "model.safetensors").write_bytes(weights)


def write_records(run: Path, out: Path, evaluations: Sequence[WantedEvaluation]) -> None:
    """A success of each evaluation for all checkpoints but the newest."""
    seen = look_at_run(str(run))
    content = json.loads(make_record(run="run").model_dump_json())
    for checkpoint in seen[:-NEWEST]:
        reference = {"uri": checkpoint.uri, "run": "run", "name": checkpoint.name, "step": checkpoint.step}
        reference |= {"digest": digest_of(checkpoint.uri), "weights_digest": "w", "listing": checkpoint.listing}
        for wanted in evaluations:
            folder = cell_folder(out, checkpoint.step, wanted)
            folder.mkdir(parents=True)
            record = {**content, "checkpoint": reference, "evaluation_hash": wanted.hash, "cell": folder.name}
            (folder / "record.json").write_text(json.dumps(record))


def cell_folder(out: Path, step: int, wanted: WantedEvaluation) -> Path:
    """Where the record of a cell lies."""
    return out / "run" / f"step-{step}" / "lm_evaluation_harness" / f"demo_facts-{wanted.hash[-10:]}"


def evaluations(run: Path, number: int) -> list[WantedEvaluation]:
    """As many suites of one evaluation each."""
    content = {"model_path": str(run), "evals": [{"name": "demo_facts"}], "base_url": "http://127.0.0.1:9/v1"}
    config = EvaluationConfig.model_validate(content)
    rules = (CheckpointRule(which="all"),)
    return [
        WantedEvaluation((f"suite-{one}",), 0, rules, config, digest_of(f"evaluation-{one}"), None)
        for one in range(number)
    ]


def timed(what: Callable[[], Any]) -> tuple[Spent, Any]:
    """What it took, and what it returned."""
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    outcome = what()
    return Spent(round(time.perf_counter() - began, 3), round(time.process_time() - used, 3)), outcome


def naively(run: Path, out: Path, wanted: Sequence[WantedEvaluation]) -> int:
    """Cells to do, by a look at each checkpoint and a read for each cell."""
    open_cells = 0
    for checkpoint in find_checkpoints(str(run)):
        if checkpoint.folder is not None and checkpoint.complete:
            digest_model_folder(checkpoint.folder)
            for one in wanted:
                record = read_record(str(cell_folder(out, checkpoint.step, one)))
                open_cells += record is None or not record.succeeded
    return open_cells


def main() -> None:
    """Makes the run, plans it in each way, prints the figures and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--suites", type=int, default=20)
    parser.add_argument("--naive", type=int, default=200, help="checkpoints of the naive way")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        root = Path(scratch)
        patch.setenv("ASSAY_CACHE_DIR", str(root / "cache"))
        settings.cache_clear()
        measure(root, options.checkpoints, options.suites, naive=options.naive)
    settings.cache_clear()


def measure(root: Path, checkpoints: int, suites: int, *, naive: int) -> None:
    """All figures, for a run of that size below a folder."""
    run, out = root / "run", root / "out"
    write_checkpoints(run, checkpoints)
    wanted = evaluations(run, suites)
    content = {"name": "scale", "runs": [str(run)], "suites": ["demo"], "evaluation_path": str(out)}
    policy = Policy.model_validate(content)

    def plan(*, afresh: bool = False) -> Reconciliation:
        return reconcile(look(policy, afresh=afresh, evaluations_of=lambda _, __: wanted), policy, now=time.time())

    figures: dict[str, Spent] = {}
    figures["nothing_recorded_cold"], found = timed(plan)
    assert len(found.work) == checkpoints * suites
    write_records(run, out, wanted)
    figures["index_lost"], found = timed(plan)
    assert len(found.work) == NEWEST * suites
    shutil.rmtree(root / "cache")
    figures["cold"], found = timed(plan)
    figures["compared"], found = timed(lambda: plan(afresh=True))
    figures["unchanged"] = min(timed(plan)[0] for _ in range(3))
    assert (found.done_count, len(found.work)) == ((checkpoints - NEWEST) * suites, NEWEST * suites)

    few = root / "few" / "run"
    write_checkpoints(few, naive)
    write_records(few, root / "few-out", wanted)
    took, left = timed(lambda: naively(few, root / "few-out", wanted))
    assert left == NEWEST * suites
    for name, spent in figures.items():
        print(f"{name:>24}: {spent.wall:8.3f} s, on a processor {spent.cpu:8.3f} s")
    ours, theirs = figures["cold"].cpu / (checkpoints * suites), took.cpu / (naive * suites)
    facts = {name: spent._asdict() for name, spent in figures.items()}
    facts |= {"checkpoints": checkpoints, "suites": suites, "naive": took._asdict(), "naive_checkpoints": naive}
    what = "microseconds on a processor for a cell"
    print(Comparison("plan_scale", what, ours * 1e6, theirs * 1e6, better="less", facts=facts).as_json())


if __name__ == "__main__":
    main()
