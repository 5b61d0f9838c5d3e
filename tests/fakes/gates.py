"""A policy's own gate, as a pass of its reconciliation has it judge."""

from __future__ import annotations

from flows.reconcile import load_policy
from resources.errors import AssayError, GateRefused
from tasks.policies.gate import conclude_settled
from tasks.policies.policy import own_gate
from tasks.prefect_server.progress import Judged, Update, listening


def judged_in_a_pass(policy_file: str, error: AssayError | None = None) -> list[str]:
    """Words of the verdicts of one pass, by checkpoint, and `refused` where NO-GO is raised after that.

    Args:
        policy_file: the policy with the gate.
        error: what the reconciliation before came to.
    """
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
