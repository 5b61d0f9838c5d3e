"""Policies: their files, their checkpoints and evaluations as values, and records of their cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fakes.records import make_record, renamed
from flows.reconcile import load_policy
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.policy import WantedEvaluation
from tasks.policies.snapshot import take_snapshot
from tasks.records.record import Record
from tasks.spec.evaluation import EvaluationConfig

NOWHERE = "http://127.0.0.1:9/v1"


def seen_checkpoint(step: int, *, run: str = "/runs/run", **changes: Any) -> SeenCheckpoint:
    name, listing = run.rpartition("/")[2], f"listing-{step}"
    seen = SeenCheckpoint(f"{run}/hf/step-{step}", name, f"{name}-{step}", step, "huggingface", listing, ())
    return replace(seen, **changes)


def wanted_evaluation(
    name: str = "a",
    *rules: CheckpointRule,
    hash_: str | None = None,
    priority: int = 0,
    native: bool = False,
    **serving: Any,
) -> WantedEvaluation:
    """Returns an evaluation with the hash `hash-<name>`, by default of every checkpoint."""
    own = {"evaluator": "levanter_lm_evaluation_harness"} if native else serving or {"base_url": NOWHERE}
    config = EvaluationConfig.model_validate({"model_path": "/runs/run", "evals": [{"name": "demo_facts"}], **own})
    chosen = rules or (CheckpointRule(which="all"),)
    return WantedEvaluation((name,), priority, chosen, config, hash_ or f"hash-{name}", None)


def write_suite(folder: Path, name: str, *benchmarks: str, **evaluation: Any) -> str:
    """Writes a suite with an evaluation of each benchmark; returns its path."""
    evaluations = [{"label": benchmark, "evals": [benchmark], **evaluation} for benchmark in benchmarks]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, "description": name, "evaluations": evaluations}))
    return str(path)


def write_policy(folder: Path, *suites: str | dict[str, Any], **fields: Any) -> Path:
    """Writes a policy about the runs `run*` of a folder, by default with the suite `facts`; returns its path."""
    content = {
        "name": "p",
        "runs": [str(folder / "run*")],
        "suites": list(suites) or [write_suite(folder, "facts", "demo_facts")],
        "evaluation_path": str(folder / "out"),
        "base_url": NOWHERE,
        **fields,
    }
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def record_for(policy: Path, step: int, *, suite: int = 0, **fields: Any) -> Record:
    """Returns a record of a checkpoint of a policy's only run, as the evaluation that it wants would write it."""
    [listing] = take_snapshot(load_policy(str(policy)))
    [seen] = [checkpoint for checkpoint in listing.checkpoints if checkpoint.step == step]
    record = make_record(step=step, run="run", evaluation_hash=listing.evaluations[suite].hash, **fields)
    digest = digest_model_folder(inspect_model_folder(seen.uri)).checkpoint
    reference = record.checkpoint.model_copy(update={"digest": digest, "listing": seen.listing})
    return renamed(record.model_copy(update={"checkpoint": reference}))
