"""Views of a policy: reasons are printed as written, with any content."""

from __future__ import annotations

import io

from rich.console import Console

from tasks.checkpoints.rules import CheckpointRule
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.policy import WantedEvaluation
from tasks.policies.reconciliation import OpenCell, Reconciliation
from tasks.policies.views import gaps_table
from tasks.spec.evaluation import EvaluationConfig

CONFIG = EvaluationConfig.model_validate(
    {"model_path": "run", "evals": [{"name": "demo_facts"}], "base_url": "http://127.0.0.1:9/v1"}
)


def test_gaps_show_a_reason_with_brackets_as_it_is():
    seen = SeenCheckpoint("run/hf/step-1", "run-1", 1, "huggingface", "listing", ())
    evaluation = WantedEvaluation(("facts",), 0, (CheckpointRule(which="all"),), CONFIG, "hash", None)
    cell = OpenCell("run", seen, evaluation, "failed", "no such file: [/data/x], [bold]")
    shown = io.StringIO()
    Console(file=shown, width=200).print(gaps_table(Reconciliation({}, [], [cell], 0)))
    assert "no such file: [/data/x], [bold]" in shown.getvalue()


def test_gaps_on_a_narrow_terminal_show_whole_names_and_all_of_the_reason():
    seen = SeenCheckpoint("run/hf/step-120000", "llama-1b-120000", 120000, "huggingface", "listing", ())
    evaluation = WantedEvaluation(("facts",), 0, (CheckpointRule(which="all"),), CONFIG, "hash", None)
    cell = OpenCell("run", seen, evaluation, "waiting", "tokenizer_config_of_the_run.json is missing")
    shown = io.StringIO()
    Console(file=shown, width=80).print(gaps_table(Reconciliation({}, [], [cell], 0)))
    assert "llama-1b-120000" in shown.getvalue()
    assert "…" not in shown.getvalue()
