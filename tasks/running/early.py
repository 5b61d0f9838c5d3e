"""Cells that are decided early: batches of earlier attempts, and the verdict of an attempt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from resources.errors import IrregularFile
from resources.storage import storage
from tasks.evaluators.early import WantedEarly, WantedScore, batches_in
from tasks.records.builds import Build, Qualification, build_of, is_qualified, read_qualifications
from tasks.records.early import ANSWERED_NAME, EarlyVerdict
from tasks.running.attempt import Attempt


def wanted_early(attempt: Attempt) -> WantedEarly | None:
    """Returns the requested decisions of a cell, with the batches of its early verdict, answered in the journal."""
    cell, before = attempt.cell, attempt.decided_before
    if before is None:
        return cell.early
    try:
        content = storage.read_bytes(storage.join(cell.uri, before.attempt, ANSWERED_NAME), within=cell.uri).decode()
        return replace(cell.early or WantedEarly(), batches=batches_in(content))
    except (FileNotFoundError, IrregularFile, ValueError):
        return cell.early


def early_verdict(attempt: Attempt) -> EarlyVerdict:
    """Returns the verdict of an attempt that was decided before all requests were sent."""
    cell, parsed, record = attempt.cell, attempt.parsed, attempt.record()
    assert parsed is not None and cell.early is not None, "decided early"
    build, qualifications = build_of(record), read_qualifications(cell.config.evaluation_path)
    return EarlyVerdict(
        cell=record.cell,
        checkpoint=record.checkpoint,
        evaluator=record.evaluator,
        benchmarks=record.benchmarks,
        evaluation_hash=record.evaluation_hash,
        wanted=cell.early.digest,
        gate=cell.early.gate,
        alpha=cell.early.alpha,
        scores=tuple(
            score.model_copy(update={"unlike": tuple(_unlike(planned, build, record.evaluator, qualifications))})
            for score, planned in zip(parsed.early, cell.early.scores, strict=True)
        ),
        asked=parsed.counts.answered,
        questions=parsed.counts.requested,
        requests=record.requests,
        seconds=record.seconds,
        cost=record.cost,
        chip_seconds=record.chip_seconds,
        build=build,
        flow_run=record.flow_run,
        attempt=attempt.name,
        created=record.created,
    )


def _unlike(
    planned: WantedScore, build: Build, evaluator: str, qualifications: Sequence[Qualification]
) -> Iterator[str]:
    for before in planned.builds:
        if not is_qualified(before, build, qualifications, evaluator=evaluator, benchmark=planned.benchmark):
            yield from before.changes(build)
