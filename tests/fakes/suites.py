"""Tiny benchmarks in place of a suite's, an engine that answers them, and code run in lm-eval's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import engine as engine_program
from fakes.polling import eventually
from flows import suites as flows
from resources.settings import process_environment
from tasks.spec.benchmark_sets import needs_of
from tasks.spec.evaluation import EvalTaskConfig

PROGRAMS = Path(flows.__file__).parents[1] / "tasks" / "evaluators" / "lm_eval" / "programs"


def in_lm_eval(python: Path, code: str, *arguments: str, given: Any = None, **variables: str) -> str:
    """Runs code in lm-eval's environment with the repository's programs on its path; returns its output."""
    code = f"import gc, sys; gc.disable(); sys.path.append({str(PROGRAMS)!r})\n{code}"
    done = subprocess.run(
        [str(python), "-I", "-c", code, *arguments],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=process_environment(variables),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def endpoint(folder: Path, *models: str) -> Iterator[str]:
    address = folder / "engine.json"
    command = [sys.executable, str(engine_program.__file__), "--address-file", str(address), "--faults", "{}"]
    process = subprocess.Popen(command + [part for name in models for part in ("--model", name)])
    try:
        eventually(address.is_file)
        yield f"{json.loads(address.read_text())['url']}/v1"
    finally:
        process.kill()
        process.wait()


def write_benchmark(folder: Path, name: str) -> None:
    """Writes a tiny benchmark of that name with the same kind of requests as the real benchmark."""
    writes = needs_of([EvalTaskConfig(name=name)]).generates
    way = (
        {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        }
        if writes
        else {"output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": ["yes", "no"]}
    )
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{question}}",
        **way,
        "metric_list": [{"metric": "exact_match" if writes else "acc"}],
        "metadata": {"version": 1},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(content))
