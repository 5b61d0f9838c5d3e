"""Early decisions of a policy's own gate: cells that are still evaluated whole, and verdicts that settle cells.

    <evaluation_path>/<run>/gates/<hash of the gate>/early/step-<N>.<evaluation>.<listing>.<word>.json

File names hold everything that reconciliation needs, so it lists a single folder and reads no files. Each file is a
copy of the early verdict in the cell's folder, which a gate with other rules may replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from resources.errors import BadInput
from resources.storage import storage
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.evaluators.early import NOT_EARLY
from tasks.policies.policy import Policy, WantedEvaluation, own_gate
from tasks.records.verdicts import EarlyVerdict
from tasks.spec.evaluation import digest_of
from tasks.verdicts.alert_files import read_alerts
from tasks.verdicts.gate import Gate

NOT_WORSE = "not worse"
_SHOWN = {"not-worse": NOT_WORSE, "unlike": "cannot be compared", "worse": "worse", None: None}
_WHOLE_EVERY = 10
_GATES, _FOLDER = "gates", "early"
_NAME = re.compile(r"step-(\d+)\.(\S+)\.([0-9a-f]+)\.(not-worse|unlike|worse)\.json")


class EarlyKey(NamedTuple):
    """A cell, identified from a listing."""

    step: int
    evaluation_hash: str
    listing: str | None


@dataclass(frozen=True)
class EarlyDecisions:
    """Verdicts by cell of a gate that decides the cells of a run early, and the checkpoints with an open alert."""

    gate: Gate
    folder: str = ""
    words: Mapping[EarlyKey, str] = field(default_factory=dict)
    alerted: frozenset[str] = frozenset()

    def word(self, checkpoint: SeenCheckpoint, evaluation: WantedEvaluation) -> str | None:
        """Returns the early verdict on a cell in its current state: not worse, worse, or cannot be compared."""
        return _SHOWN.get(self.words.get(EarlyKey(checkpoint.step, evaluation.hash, checkpoint.listing)))

    def whole_because(self, checkpoint: SeenCheckpoint, evaluation: WantedEvaluation) -> str | None:
        """Returns the alarm that makes a cell be evaluated whole, as text; None without an alarm."""
        word = self.word(checkpoint, evaluation)
        if word not in (None, NOT_WORSE):
            return f"decided early: {word}; to be evaluated whole"
        return "an alert is open, to be evaluated whole" if checkpoint.name in self.alerted else None

    def whole_steps(self, steps: Iterable[int], evaluation_hash: str) -> set[int]:
        """Returns the steps at which an evaluation always runs whole: the first and every `whole_every`-th. `steps`:
        steps at which it is requested or was made; later, higher steps do not change the result. `evaluation_hash`: its
        steps with an early verdict count, even if their checkpoint was deleted."""
        decided = {key.step for key in self.words if key.evaluation_hash == evaluation_hash}
        return set(sorted({*steps, *decided})[:: self.gate.whole_every or _WHOLE_EVERY])

    def verdict(self, checkpoint: SeenCheckpoint, evaluation: WantedEvaluation) -> EarlyVerdict | None:
        key = EarlyKey(checkpoint.step, evaluation.hash, checkpoint.listing)
        if key not in self.words:
            return None
        return EarlyVerdict.model_validate_json(
            storage.read_bytes(storage.join(self.folder, _name(key, self.words[key])))
        )

    def keep(self, verdict: EarlyVerdict) -> None:
        """Stores a verdict unless it exists."""
        key = EarlyKey(verdict.checkpoint.step, verdict.evaluation_hash, verdict.checkpoint.listing)
        uri = storage.join(self.folder, _name(key, _word_of(verdict)))
        storage.create_bytes(uri, verdict.model_dump_json(indent=2).encode())


def gate_folder(run_folder: str, gate: Gate) -> str:
    """Returns the folder of a gate's verdicts on a run; a changed gate has another folder."""
    return storage.join(run_folder, _GATES, digest_of(gate.model_dump(mode="json")))


def early_decisions(policy: Policy, run_folder: str, evaluations: Sequence[WantedEvaluation]) -> EarlyDecisions | None:
    """Returns the early decisions on a run; None if the policy has no gate that decides early."""
    gate = own_gate(policy)
    if gate is None or gate.decide == "whole":
        return None
    if policy.dispatch == "work_pools":
        raise _refused(gate, "dispatch: work_pools", "a gate with `decide: whole`, or `dispatch: here`")
    for evaluation in evaluations:
        if reason := NOT_EARLY.get(evaluation.config.evaluator.name):
            problem = f"{evaluation.title} by {evaluation.config.evaluator.title}: {reason}"
            raise _refused(gate, problem, "a policy of its own for it, or a gate with `decide: whole`")
    folder = storage.join(gate_folder(run_folder, gate), _FOLDER)
    names = sorted(storage.basename(file.uri) for file in storage.list_files(folder) if file.regular)
    matched = [match for name in names if (match := _NAME.fullmatch(name))]  # of two verdicts the worse comes last
    words = {EarlyKey(int(match[1]), match[2], match[3]): match[4] for match in matched}
    known = (known for known in read_alerts(run_folder).values() if known.acknowledged is None)
    return EarlyDecisions(gate, folder, words, frozenset(each.alert.checkpoint for each in known))


def _refused(gate: Gate, problem: str, remedy: str) -> BadInput:
    return BadInput(
        expected=f"cells that can be decided early, as the policy's gate {gate.name} does", found=problem, remedy=remedy
    )


def _word_of(verdict: EarlyVerdict) -> str:
    if any(score.verdict == "worse" for score in verdict.scores):
        return "worse"
    return "unlike" if any(score.unlike for score in verdict.scores) else "not-worse"


def _name(key: EarlyKey, word: str) -> str:
    return f"step-{key.step}.{key.evaluation_hash}.{key.listing}.{word}.json"
