"""Tiny benchmarks in place of a suite's, who answers them, and code that runs beside our programs."""

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
    """Output of a piece of code that runs in lm-eval's environment, beside our programs; it leaves little garbage."""
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
    """A tiny benchmark of that name, which asks for what the real one asks for."""
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
