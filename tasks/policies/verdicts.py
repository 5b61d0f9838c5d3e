"""Stored verdicts of a policy's own gate: a checkpoint is judged once for each state of its records.

    <evaluation_path>/<run>/gates/<hash of the gate>/step-<N>.<go or no-go>.<state of its records>.json

File names hold everything that a pass needs, so that it reads none of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from resources.storage import storage
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.early import gate_folder
from tasks.policies.policy import WantedEvaluation
from tasks.records.index import Evaluated, IndexedRecord, RunRecords
from tasks.records.record import CheckpointReference, now
from tasks.records.verdicts import Verdict
from tasks.spec.evaluation import digest_of
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint

_NAME = re.compile(r"step-(\d+)\.(go|no-go)\.([0-9a-f]{16})\.json")


@dataclass(frozen=True)
class KeptVerdicts:
    """The verdicts of a gate on a run: file names by step and state of the judged records."""

    folder: str
    files: Mapping[tuple[int, str], str]

    def word(self, step: int, state: str) -> str | None:
        """Returns GO or NO-GO; None if the checkpoint was not judged in this state."""
        name = self.files.get((step, state))
        return None if name is None else "NO-GO" if ".no-go." in name else "GO"

    def same_records(self, step: int, records: str) -> bytes | None:
        """Returns the stored verdict on a checkpoint with the same records, as file content."""
        for (of_step, _), name in self.files.items():
            if of_step == step:
                content = storage.read_bytes(storage.join(self.folder, name))
                if orjson.loads(content)["records"] == records:
                    return content
        return None

    def keep(self, step: int, state: str, content: bytes) -> bool:
        """Writes a verdict unless it exists; returns True if this call wrote it."""
        word = orjson.loads(content)["verdict"].lower()
        return storage.create_bytes(storage.join(self.folder, f"step-{step}.{word}.{state}.json"), content)


def kept_verdicts(run_folder: str, gate: Gate) -> KeptVerdicts:
    """Reads the verdicts of a gate on a run; a changed gate has other verdicts."""
    folder = gate_folder(run_folder, gate)
    names = [storage.basename(file.uri) for file in storage.list_files(folder) if file.regular]
    matched = [match for name in names if (match := _NAME.fullmatch(name))]
    return KeptVerdicts(folder, {(int(match[1]), match[3]): match[0] for match in matched})


def known_digests(
    checkpoint: SeenCheckpoint, recorded: Iterable[CheckpointReference | Evaluated | IndexedRecord]
) -> set[str]:
    """Returns the digests of a listed checkpoint: its own, or those of records with the same listing.

    Records with another listing and such a digest belong to it, too: its files were copied in between.
    """
    if checkpoint.digest is not None:
        return {checkpoint.digest}
    return {item.digest for item in recorded if item.listing == checkpoint.listing}


def state_of(
    checkpoint: SeenCheckpoint, evaluations: Iterable[WantedEvaluation], records: RunRecords, early: Iterable[str] = ()
) -> str:
    """Returns a digest of the indexed records of a checkpoint and of its early verdicts.

    Records that are not requested change it too: see `KeptVerdicts.same_records`.
    """
    hashes = {hash_ for evaluation in evaluations for hash_ in (evaluation.hash, evaluation.native_hash) if hash_}
    states = records.done.get(checkpoint.name, ())
    failures = [record for record in records.others if record.checkpoint == checkpoint.name]
    digests = known_digests(checkpoint, (*states, *failures))
    done = [(s.digest, s.newest, sorted(s.hashes & hashes)) for s in states if s.digest in digests]
    others = [
        (record.evaluation_hash, record.status, record.created)
        for record in failures
        if record.evaluation_hash in hashes and record.digest in digests
    ]
    return digest_of([sorted(hashes), sorted(done), sorted(others), sorted(early)])


def records_digest(judged: JudgedCheckpoint) -> str:
    """Returns a digest of exactly the records and early verdicts behind a verdict."""
    records = [(r.evaluation_hash, r.attempt, r.status, r.created) for r in (item.record for item in judged.records)]
    early = [(v.evaluation_hash, v.attempt, "decided early", v.created) for v in judged.early]
    return digest_of(sorted((*first, created.isoformat()) for *first, created in (*records, *early)))


def as_kept(verdict: Verdict, judged: JudgedCheckpoint, *, run: str, policy: str) -> bytes:
    """Returns the file content of a verdict."""
    about: dict[str, Any] = {"policy": policy, "run": run, "checkpoint": judged.name, "step": judged.step}
    content = {**verdict.as_dict(), **about, "records": records_digest(judged), "at": now().isoformat()}
    return orjson.dumps(content, option=orjson.OPT_INDENT_2)
