"""Runs written by real trainers, evaluated as the page on checkpoints says, against transformers in float32."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from fakes.polling import eventually
from fakes.prefect_field import prefect_field
from fakes.prefect_server import used_here
from fakes.tokenizers import write_byte_tokenizer
from fakes.trainers import run_trainer
from pools.engine.launch import free_port
from resources.settings import process_environment
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template
from tasks.records.record import find_records

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(600)]

TRAININGS = Path(__file__).parents[1] / "fakes" / "trainings.py"
WRITERS = Path(__file__).parents[1] / "fakes" / "torch_writers.py"
ENGINE = ("--engine", "dtype=float32", "--engine", "kv_cache_memory_bytes=64M")
NEAR = 2e-3
"""Nats between the engine and transformers, of answers of up to ten tokens."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def assay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("assay")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=process_environment(), check=False)


def evaluated(run: Path, output: Path, *options: str | Path) -> dict[str, dict[tuple[str, str], float]]:
    """Evaluates a run as the page says; returns what `weighed_in` does."""
    done = assay(
        "evaluate", "--model", run, "--eval", "demo_facts", "--limit", "3", "--output", output, *ENGINE, *options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return weighed_in(output)


def weighed_in(output: Path) -> dict[str, dict[tuple[str, str], float]]:
    """Returns the log-likelihood of each answer after its question, by checkpoint, from the records in a folder."""
    weighed: dict[str, dict[tuple[str, str], float]] = {}
    for record in find_records(str(output)):
        assert record.record.succeeded
        [samples] = Path(record.cell_uri).rglob("samples_demo_facts_*.jsonl")
        asked = weighed.setdefault(record.record.checkpoint.name, {})
        for row in map(json.loads, samples.read_text().splitlines()):
            for number, [[weight, _]] in enumerate(row["resps"]):
                asked[tuple(row["arguments"][f"gen_args_{number}"].values())] = float(weight)
    return weighed


def assert_near_transformers(
    weighed: Mapping[str, Mapping[tuple[str, str], float]], folders: Mapping[str, Path], tokenizer: Path, scratch: Path
) -> None:
    assert weighed.keys() == folders.keys()
    pairs = list(next(iter(weighed.values())))
    (scratch / "pairs.json").write_text(json.dumps(pairs))
    done = run_trainer(TRAININGS, "weigh", tokenizer, scratch / "pairs.json", *folders.values())
    truth = json.loads(done.stdout)
    for name, folder in folders.items():
        assert [weighed[name][pair] for pair in pairs] == pytest.approx(truth[folder.name], abs=NEAR), name
    assert len({tuple(each.values()) for each in weighed.values()}) == len(weighed), "checkpoints differ"


@pytest.mark.parametrize("kind", ["saved-at-the-end", "without-tokenizer", "sft"])
def test_run_of_a_trainer_is_evaluated_as_transformers_weighs_it(kind: str, tmp_path: Path, tokenizer: Path) -> None:
    run = tmp_path / "my-run"
    run_trainer(TRAININGS, "train", kind, tokenizer, run)
    options = ["--tokenizer", tokenizer] if kind == "without-tokenizer" else []
    weighed = evaluated(run, tmp_path / "out", *options)
    steps = {f"my-run-{step}": run / f"checkpoint-{step}" for step in (2, 4, 6)}
    assert_near_transformers(weighed, steps, tokenizer, tmp_path)


def test_weights_that_are_made_while_staged_are_evaluated_as_transformers_weighs_them(
    tmp_path: Path, tokenizer: Path
) -> None:
    run, whole = tmp_path / "my-run", tmp_path / "whole"
    run_trainer(WRITERS, tokenizer, run, whole, str(free_port()))
    steps = (2, 3, 5, 7)
    scores = evaluated(run, tmp_path / "out", *(option for step in steps for option in ("--step", str(step))))
    assert_near_transformers(
        scores, {f"my-run-{step}": whole / f"checkpoint-{step}" for step in steps}, tokenizer, tmp_path
    )


def is_kept(checkpoint: Path) -> bool:
    """Returns True if a process keeps a checkpoint's weights open; its files of small numbers are open for a moment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # processes end, and files are closed, meanwhile
            for file in (process / "fd").iterdir():
                if int(file.name) > 1000 and file.readlink() == checkpoint / "model.safetensors":
                    return True
    return False


def by_command(run: Path, output: Path) -> None:
    evaluated(run, output)


def by_flow(run: Path, output: Path) -> None:
    """Calls a flow as a flow run of a deployment does: no command has planned it."""
    engine = {"dtype": "float32", "kv_cache_memory_bytes": "64M"}
    config = {
        "model_path": str(run),
        "evaluation_path": str(output),
        "evals": [{"name": "demo_facts"}],
        "max_eval_instances": 3,
        "pool_config": {"model": {"name": run.name, "engine_kwargs": engine}},
    }
    program = (
        "import json, sys; from flows.series import evaluate_checkpoints\n"
        "from tasks.spec.evaluation import EvaluationConfig\n"
        "evaluate_checkpoints(EvaluationConfig.model_validate_json(sys.argv[1]))"
    )
    with prefect_field(output.parent) as prefect:
        command = [sys.executable, "-c", program, json.dumps(config)]
        done = subprocess.run(command, capture_output=True, text=True, env=prefect.environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def by_policy(run: Path, output: Path) -> None:
    """Has a worker of this machine run the deployment of a policy, with a suite of three questions."""
    evaluations = [{"label": "facts", "evals": ["demo_facts"], "max_eval_instances": 3}]
    engine = {"dtype": "float32", "kv_cache_memory_bytes": "64M"}
    suite = output.parent / "few.yaml"
    content = {"name": "few", "description": "few", "engine_kwargs": engine, "evaluations": evaluations}
    suite.write_text(yaml.safe_dump(content))
    policy = output.parent / "policy.yaml"
    content = {"name": "p", "runs": [str(run)], "suites": [str(suite)], "evaluation_path": str(output)}
    policy.write_text(yaml.safe_dump({**content, "resource_config": {"cpu": 2}}))
    with prefect_field(output.parent) as prefect, used_here(prefect.url):
        apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))])
        prefect.assay("policy", "deploy", str(policy))
        with prefect.worker(LOCAL_WORK_POOL):
            [deployment] = prefect.ask("/deployments/filter", {})
            prefect.ask(f"/deployments/{deployment['id']}/create_flow_run", {})
            eventually(lambda: prefect.runs("Completed", "Failed", "Crashed"))
        [flow_run] = prefect.runs("Completed", "Failed", "Crashed")
        assert flow_run["state"]["name"] == "Completed", (output.parent / "worker.log").read_text()


@pytest.mark.parametrize("evaluate", [by_command, by_flow, by_policy])
def test_checkpoint_that_its_trainer_removes_while_it_is_evaluated_is_evaluated(
    tmp_path: Path, tokenizer: Path, evaluate: Callable[[Path, Path], None]
) -> None:
    run, output, kept = tmp_path / "my-run", tmp_path / "out", tmp_path / "kept" / "checkpoint-2"
    with ThreadPoolExecutor(2) as threads:
        training = threads.submit(run_trainer, TRAININGS, "train", "rotating", tokenizer, run)
        first = run / "checkpoint-2"
        eventually(lambda: (first / "trainer_state.json").is_file() or training.done())
        shutil.copytree(first, kept)
        evaluation = threads.submit(evaluate, run, output)
        eventually(lambda: is_kept(first) or (evaluation.done() and evaluation.result()))
        (tmp_path / "go").touch()
        training.result()
        assert [folder.name for folder in run.iterdir() if folder.is_dir()] == ["checkpoint-6"]
        assert not evaluation.done()
        evaluation.result()
    weighed = weighed_in(output)
    assert_near_transformers({"my-run-2": weighed["my-run-2"]}, {"my-run-2": kept}, tokenizer, tmp_path)
