"""A gate on what a policy wants: each run is judged by the records of its checkpoints, whoever evaluated them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from resources.errors import AssayError, EvaluationIncomplete, EvaluationInterrupted, GateRefused
from resources.storage import storage
from tasks.checkpoints.rules import eligible_steps
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.gates.conclude import judge_checkpoints
from tasks.gates.gate import Gate
from tasks.gates.verdict import JudgedCheckpoint
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import RunListing
from tasks.policies.snapshot import run_folder, take_snapshot
from tasks.prefect_server.progress import Judged, report
from tasks.records.record import find_records
from tasks.records.search import FoundRecord


def conclude_policy(gate: Gate, policy: Policy, error: AssayError | None) -> None:
    """Has a gate judge each run of a policy, as the records are now, and shows its verdicts.

    Args:
        gate: the gate; it may tolerate cells that failed or were withheld.
        policy: which checkpoints and evaluations are wanted.
        error: what the reconciliation before came to.

    Raises:
        AssayError: that error, unless it is about cells that the gate may tolerate.
        EvaluationInterrupted: cells of a checkpoint that is judged have no outcome yet, or machines were at fault.
        GateRefused: a run has NO-GO.
    """
    refused: list[GateRefused] = []
    unsettled: list[str] = []
    for listing in take_snapshot(policy):
        checkpoints = judged_of(gate, policy, listing)
        verdict = judge_checkpoints(gate, checkpoints, run=listing.name, evaluation_path=policy.evaluation_path)
        report(Judged(verdict))
        unsettled += [checkpoint.name for checkpoint in checkpoints if _is_unsettled(checkpoint)]
        try:
            verdict.raise_unless_go()
        except GateRefused as no_go:
            refused.append(no_go)
    if error is not None and not isinstance(error, EvaluationIncomplete):
        raise error
    if unsettled:
        raise EvaluationInterrupted(
            expected=f"an outcome of each cell of {', '.join(unsettled)}, for the gate {gate.name} to judge",
            found="cells that another run has, that wait, or that failed for want of machines",
            remedy="see which and why with `assay gaps`, and run it again",
        )
    if refused:
        raise refused[0]


def judged_of(gate: Gate, policy: Policy, listing: RunListing) -> list[JudgedCheckpoint]:
    """The wanted checkpoints of a run that a gate judges, each with the records that stand for its cells now.

    Raises:
        StorageError: records cannot be read.
    """
    steps = [checkpoint.step for checkpoint in listing.checkpoints if checkpoint.complete]
    wanted: dict[SeenCheckpoint, list[WantedEvaluation]] = defaultdict(list)
    for evaluation in listing.wanted:
        eligible = eligible_steps(evaluation.rules, steps, final_step=policy.final_step)
        for checkpoint in listing.checkpoints:
            served = checkpoint.kind == "huggingface" or evaluation.config.native
            if checkpoint.complete and served and checkpoint.step in eligible:
                wanted[checkpoint].append(evaluation)
    highest = max((checkpoint.step for checkpoint in wanted), default=None)
    chosen = [checkpoint for checkpoint in wanted if gate.checkpoints == "every" or checkpoint.step == highest]
    return [_judged(policy, listing, checkpoint, wanted[checkpoint]) for checkpoint in chosen]


def _judged(
    policy: Policy, listing: RunListing, checkpoint: SeenCheckpoint, wanted: Sequence[WantedEvaluation]
) -> JudgedCheckpoint:
    folder = storage.join(run_folder(policy, listing.name), f"step-{checkpoint.step}")
    by_hash: dict[str, list[FoundRecord]] = defaultdict(list)
    for found in find_records(folder):
        if _is_of(found, checkpoint):
            by_hash[found.record.evaluation_hash].append(found)
    standing: list[FoundRecord] = []
    for evaluation in wanted:
        ways = [*by_hash[evaluation.hash], *by_hash[evaluation.native_hash or ""]]
        standing += sorted(ways, key=lambda found: (found.record.succeeded, found.record.created))[-1:]
    return JudgedCheckpoint(
        checkpoint.name, checkpoint.step, tuple(standing), without_record=len(wanted) - len(standing)
    )


def _is_of(found: FoundRecord, checkpoint: SeenCheckpoint) -> bool:
    """Returns whether a record is of a checkpoint as it is now."""
    reference = found.record.checkpoint
    if reference.name != checkpoint.name:
        return False
    if checkpoint.digest is not None:
        return reference.digest == checkpoint.digest
    return reference.listing == checkpoint.listing


def _is_unsettled(checkpoint: JudgedCheckpoint) -> bool:
    """Returns whether running again may well settle all that is missing."""
    missing = [found.record.status for found in checkpoint.records if not found.record.succeeded]
    return set(missing) <= {"infra_failed"} and bool(missing or checkpoint.without_record)
