"""A policy's own gate, evaluated in a pass of its reconciliation."""

from __future__ import annotations

from flows.reconcile import load_policy
from resources.errors import AssayError
from tasks.errors import GateRefused
from tasks.policies.gate import conclude_settled
from tasks.policies.policy import own_gate
from tasks.prefect_server.progress import Judged, Update, listening


def judged_in_a_pass(policy_file: str, error: AssayError | None = None) -> list[str]:
    """Returns a pass's verdicts by checkpoint, then `refused` if NO-GO is raised; `error` occurs before the gate."""
    words: list[str] = []

    def take(update: Update) -> None:
        if isinstance(update, Judged):
            names = dict.fromkeys(reason.checkpoint for reason in update.verdict.reasons)
            words.extend(f"{name} {update.verdict.about(name).word}" for name in names)

    policy = load_policy(policy_file)
    gate = own_gate(policy)
    assert gate is not None
    with listening(take):
        try:
            conclude_settled(gate, policy, error)
        except GateRefused:
            words.append("refused")
    return words
