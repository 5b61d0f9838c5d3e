"""Gates on a policy: each run is judged by the records of its checkpoints, from any source.

A gate given to a command judges a run in its current state. A policy's own gate judges each checkpoint once it is
settled, in each reconciliation, and once for each state of its records. Its verdicts are stored:

    <evaluation_path>/<run>/gates/<hash of the gate>/step-<N>.<go or no-go>.<state of its records>.json

File names hold everything that a pass needs, so that it reads none of the files.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from resources.errors import AssayError, BadInput
from resources.storage import storage
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.errors import EvaluationIncomplete, EvaluationInterrupted, GateRefused
from tasks.policies.early import EarlyDecisions, gate_folder
from tasks.policies.events import emit_verdict
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import ON_ITS_WAY, RunListing, State, reconcile
from tasks.policies.snapshot import run_folder, take_snapshot
from tasks.prefect_server.progress import Judged, report, report_event
from tasks.records.details import CheckpointReference
from tasks.records.index import Evaluated
from tasks.records.record import FoundRecord, find_records, now
from tasks.records.usage import IndexedRecord
from tasks.records.verdicts import EarlyVerdict, Reason, Verdict
from tasks.running.cells import Cell
from tasks.running.conclude import judge_checkpoints
from tasks.running.early import decided_early
from tasks.spec.evaluation import digest_of
from tasks.spec.labels import latest_of
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint

_NAME = re.compile(r"(step-\d+|label-\S+)\.(go|no-go)\.([0-9a-f]{16})\.json")


def conclude_policy(gate: Gate, policy: Policy, error: AssayError | None) -> None:
    """Judges each run of a policy by its current records; `error` is that of the preceding reconciliation."""
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
            remedy="see which and why with `assay status --gaps`, and run it again",
        )
    if refused:
        raise refused[0]


def conclude_settled(gate: Gate, policy: Policy, error: AssayError | None) -> None:
    """Applies a policy's own gate to newly settled checkpoints; verdicts are stored, shown and sent as events. A
    checkpoint is settled once each of its requested cells has succeeded, failed by itself, or was decided early as not
    worse; worse cells are judged by the whole evaluation. Of concurrent runs, only the first to store a verdict sends
    it. NO-GO is raised once, so it takes precedence over `error`, that of the preceding reconciliation."""
    judged: list[Reason] = []
    for listing in take_snapshot(policy):
        judged += _judge_settled(gate, policy, listing)
    if judged:
        Verdict(gate.name, tuple(judged)).raise_unless_go()
    if error is not None and not (judged and isinstance(error, EvaluationIncomplete)):
        raise error


def with_early(early: EarlyDecisions, cells: Sequence[Cell], *, evaluations: int) -> list[Cell]:
    """Adds early decisions to cells; cells that cannot be decided early are evaluated whole, with a logged reason. The
    run's `evaluations` share the gate's error equally, as others of a checkpoint may be decided in another pass."""

    def tell(cell: Cell, error: BadInput) -> None:
        report_event(f"{cell.title}: evaluated whole, not decided early: {error.found}")

    gate = early.gate.model_copy(update={"alpha": early.gate.alpha / evaluations})
    decided: list[Cell] = []
    for hash_ in dict.fromkeys(cell.evaluation_hash for cell in cells):
        same = [cell for cell in cells if cell.evaluation_hash == hash_]
        decided += decided_early(gate, same, unfit=tell)
    return decided


def _judge_settled(gate: Gate, policy: Policy, listing: RunListing) -> list[Reason]:
    kept = _kept_verdicts(run_folder(policy, listing.name), gate)
    fresh = _not_judged(gate, policy, listing, kept)
    if not fresh:
        return []
    every = gate.model_copy(update={"checkpoints": "every"})
    checkpoints = [judged for _, judged, _ in fresh]
    verdict = judge_checkpoints(every, checkpoints, run=listing.name, evaluation_path=policy.evaluation_path)
    report(Judged(verdict))
    reasons: list[Reason] = []
    for checkpoint, judged, state in fresh:
        own = verdict.about(judged.name)
        if kept.keep(judged.folder, state, _as_kept(own, judged, run=listing.name, policy=policy.name)):
            emit_verdict(own, checkpoint, run=listing.name, policy=policy.name)
            reasons += own.reasons
    return reasons


def verdict_words(gate: Gate, policy: Policy, listing: RunListing) -> dict[str, str]:
    """Returns GO or NO-GO by checkpoint name, for checkpoints judged in their current state by a policy's own gate."""
    kept = _kept_verdicts(run_folder(policy, listing.name), gate)
    words = {
        checkpoint.name: kept.word(checkpoint.folder, _state(listing, checkpoint, evaluations))
        for checkpoint, evaluations in _wanted_of(policy, listing).items()
    }
    return {name: word for name, word in words.items() if word is not None}


def settled(gate: Gate, policy: Policy, listing: RunListing) -> list[SeenCheckpoint]:
    """Returns the checkpoints of a run that can be judged, by step: all or only the latest, as the gate sets. If a rule
    compares with earlier checkpoints of the run, all earlier cells must have finished first."""
    states: dict[str, set[State]] = defaultdict(set)
    reconciliation = reconcile([listing], policy, now=time.time())
    for cell in reconciliation.every:
        states[cell.checkpoint.uri].add(cell.state)
    ready: list[SeenCheckpoint] = []
    for checkpoint in sorted(_wanted_of(policy, listing), key=lambda checkpoint: checkpoint.order):
        open_states = states[checkpoint.uri]
        if open_states <= {"failed", "decided_early"}:
            ready.append(checkpoint)
        elif gate.looks_back and open_states & ON_ITS_WAY:
            break
    return _chosen(gate, ready)


def _chosen(gate: Gate, checkpoints: Iterable[SeenCheckpoint]) -> list[SeenCheckpoint]:
    every = list(checkpoints)
    latest = latest_of(checkpoint.order for checkpoint in every)
    return [each for each in every if gate.checkpoints == "every" or each.order == latest]


def _not_judged(
    gate: Gate, policy: Policy, listing: RunListing, kept: _KeptVerdicts
) -> list[tuple[SeenCheckpoint, JudgedCheckpoint, str]]:
    evaluations = _wanted_of(policy, listing)
    fresh = []
    for checkpoint in settled(gate, policy, listing):
        state = _state(listing, checkpoint, evaluations[checkpoint])
        if kept.word(checkpoint.folder, state) is not None:
            continue
        judged = _judged(policy, listing, checkpoint, evaluations[checkpoint])
        if judged.without_record:  # deleted since the index was built
            continue
        if (before := kept.same_records(judged.folder, _records_digest(judged))) is not None:
            kept.keep(judged.folder, state, before)
            continue
        fresh.append((checkpoint, judged, state))
    return fresh


def judged_of(gate: Gate, policy: Policy, listing: RunListing) -> list[JudgedCheckpoint]:
    """Returns the requested checkpoints of a run that a gate judges, with the current records of their cells."""
    evaluations = _wanted_of(policy, listing)
    chosen = _chosen(gate, evaluations)
    return [_judged(policy, listing, checkpoint, evaluations[checkpoint]) for checkpoint in chosen]


def _wanted_of(policy: Policy, listing: RunListing) -> dict[SeenCheckpoint, list[WantedEvaluation]]:
    evaluations: dict[SeenCheckpoint, list[WantedEvaluation]] = defaultdict(list)
    for evaluation in listing.evaluations:
        taken = listing.taken_by(evaluation.rules, final_step=policy.final_step)
        for checkpoint in listing.checkpoints:
            served = checkpoint.kind == "huggingface" or evaluation.config.native
            if checkpoint.complete and served and checkpoint.inputs in taken:
                evaluations[checkpoint].append(evaluation)
    return evaluations


def _judged(
    policy: Policy, listing: RunListing, checkpoint: SeenCheckpoint, evaluations: Sequence[WantedEvaluation]
) -> JudgedCheckpoint:
    folder = storage.join(run_folder(policy, listing.name), checkpoint.folder)
    by_hash: dict[str, list[FoundRecord]] = defaultdict(list)
    of_name = [item for item in find_records(folder) if item.record.checkpoint.name == checkpoint.name]
    digests = _known_digests(checkpoint, (item.record.checkpoint for item in of_name))
    for item in of_name:
        if item.record.checkpoint.digest in digests:
            by_hash[item.record.evaluation_hash].append(item)
    standing: list[FoundRecord] = []
    decided: list[EarlyVerdict] = []
    for evaluation in evaluations:
        ways = [*by_hash[evaluation.hash], *by_hash[evaluation.native_hash or ""]]
        newest = sorted(ways, key=lambda item: (item.record.succeeded, item.record.created))[-1:]
        early = listing.early.verdict(checkpoint, evaluation) if listing.early else None
        if early is not None and not (newest and newest[0].record.succeeded):
            decided.append(early)
        else:
            standing += newest
    return JudgedCheckpoint(
        checkpoint.name,
        checkpoint.step,
        tuple(standing),
        without_record=len(evaluations) - len(standing) - len(decided),
        early=tuple(decided),
        label=checkpoint.label,
    )


def _is_unsettled(checkpoint: JudgedCheckpoint) -> bool:
    missing = [item.record.status for item in checkpoint.records if not item.record.succeeded]
    return set(missing) <= {"infra_failed"} and bool(missing or checkpoint.without_record)


@dataclass(frozen=True)
class _KeptVerdicts:
    folder: str
    files: Mapping[tuple[str, str], str]

    def word(self, place: str, state: str) -> str | None:
        name = self.files.get((place, state))
        return None if name is None else "NO-GO" if ".no-go." in name else "GO"

    def same_records(self, place: str, records: str) -> bytes | None:
        for (of_place, _), name in self.files.items():
            if of_place == place:
                content = storage.read_bytes(storage.join(self.folder, name))
                if orjson.loads(content)["records"] == records:
                    return content
        return None

    def keep(self, place: str, state: str, content: bytes) -> bool:
        word = orjson.loads(content)["verdict"].lower()
        return storage.create_bytes(storage.join(self.folder, f"{place}.{word}.{state}.json"), content)


def _kept_verdicts(run_folder: str, gate: Gate) -> _KeptVerdicts:
    folder = gate_folder(run_folder, gate)
    names = [storage.basename(file.uri) for file in storage.list_files(folder) if file.regular]
    matched = [match for name in names if (match := _NAME.fullmatch(name))]
    return _KeptVerdicts(folder, {(match[1], match[3]): match[0] for match in matched})


def _known_digests(
    checkpoint: SeenCheckpoint, recorded: Iterable[CheckpointReference | Evaluated | IndexedRecord]
) -> set[str]:
    # Records with another listing and such a digest belong to it, too: its files were copied in between.
    if checkpoint.digest is not None:
        return {checkpoint.digest}
    return {item.digest for item in recorded if item.listing == checkpoint.listing}


def _state(listing: RunListing, checkpoint: SeenCheckpoint, evaluations: Sequence[WantedEvaluation]) -> str:
    # Records that are not requested change it too: see `_KeptVerdicts.same_records`.
    hashes = {hash_ for evaluation in evaluations for hash_ in (evaluation.hash, evaluation.native_hash) if hash_}
    states = listing.records.done.get(checkpoint.name, ())
    failures = [record for record in listing.records.others if record.checkpoint == checkpoint.name]
    digests = _known_digests(checkpoint, (*states, *failures))
    done = [(s.digest, s.newest, sorted(s.hashes & hashes)) for s in states if s.digest in digests]
    others = [
        (record.evaluation_hash, record.status, record.created)
        for record in failures
        if record.evaluation_hash in hashes and record.digest in digests
    ]
    words = [(each.hash, listing.early.word(checkpoint, each)) for each in evaluations] if listing.early else []
    early = [f"{hash_} {checkpoint.listing} {word}" for hash_, word in words if word]
    return digest_of([sorted(hashes), sorted(done), sorted(others), sorted(early)])


def _records_digest(judged: JudgedCheckpoint) -> str:
    records = [(r.evaluation_hash, r.attempt, r.status, r.created) for r in (item.record for item in judged.records)]
    early = [(v.evaluation_hash, v.attempt, "decided early", v.created) for v in judged.early]
    return digest_of(sorted((*first, created.isoformat()) for *first, created in (*records, *early)))


def _as_kept(verdict: Verdict, judged: JudgedCheckpoint, *, run: str, policy: str) -> bytes:
    about: dict[str, Any] = {
        "policy": policy,
        "run": run,
        "checkpoint": judged.name,
        "step": judged.step,
        "label": judged.label,
    }
    content = {**verdict.as_dict(), **about, "records": _records_digest(judged), "at": now().isoformat()}
    return orjson.dumps(content, option=orjson.OPT_INDENT_2)
