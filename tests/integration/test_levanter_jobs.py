"""Evaluations by Levanter as jobs of machines with another home and another cache; one job for all checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from fakes.clients import GRACE_SECONDS
from fakes.iris_cluster import start_cluster
from fakes.kubernetes_cluster import client_of as client_of_kubernetes
from fakes.kubernetes_server import KubernetesServer
from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.ray_cluster import add_node, ray_cluster
from fakes.ray_cluster import client_of as client_of_ray
from fakes.tokenizers import write_byte_tokenizer
from resources.backends.current import set_current_client
from resources.jobs.jobs import Client, JobDetails, JobStatus
from resources.settings import settings
from tasks.checkpoints.discovery import find_checkpoints
from tasks.evaluators.native import OUTCOME_NAME
from tasks.records.record import Record
from tasks.running.cells import Cell, plan_cells
from tasks.running.native_jobs import NativeJobs
from tasks.running.run_cell import CellContext, run_cell
from tasks.running.warm import warm_programs
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]

STEPS = (1, 2, 3)
QUESTIONS = 300
SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" even", " odd"]
doc_to_target: answer
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all machines see, with a run of three checkpoints and benchmarks."""
    folder = tmp_path / "shared"
    for step in STEPS:
        write_byte_tokenizer(write_nano_llama(folder / "run" / "hf" / f"step-{step}", seed=step))
    (folder / "benchmarks").mkdir()
    lines = [json.dumps({"text": f"{number} and {number} is", "answer": number % 2}) for number in range(QUESTIONS)]
    (folder / "benchmarks" / "sums.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "benchmarks" / "sums.yaml").write_text(SUMS)
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Makes the variables of a machine with another home, which has environments as an image has them."""
    built = str(settings().environments_dir)

    def make(name: str) -> dict[str, str]:
        home = tmp_path / name
        home.mkdir()
        places = {"HOME": str(home), "ASSAY_CACHE_DIR": str(home / "cache")}
        return {**places, "ASSAY_BUILT_ENVIRONMENTS": built}

    return make


def plan(shared: Path) -> list[Cell]:
    """A cell for each checkpoint."""
    config = EvaluationConfig.model_validate(
        {
            "evaluator": "levanter_lm_evaluation_harness",
            "model_path": str(shared / "run"),
            "evaluation_path": str(shared / "evaluations"),
            "benchmarks_path": str(shared / "benchmarks"),
            "evals": [{"name": "sums"}],
            "resource_config": {"cpu": 2},
        }
    )
    return plan_cells([config], find_checkpoints(str(shared / "run")))


@contextmanager
def running(cells: list[Cell], client: Client) -> Iterator[list[Any]]:
    """Futures of the records of cells that are evaluated side by side on a backend, as a run does it."""
    with ExitStack() as stack:
        stack.enter_context(set_current_client(client))
        warm, jobs = stack.enter_context(warm_programs()), NativeJobs()
        threads = stack.enter_context(ThreadPoolExecutor(len(cells)))
        for position in range(len(cells)):
            jobs.expect(position)
        contexts = [CellContext(number, len(cells), warm.harness_of, jobs) for number in range(len(cells))]
        yield [
            threads.submit(copy_context().run, run_cell.fn, cell, None, context)
            for cell, context in zip(cells, contexts, strict=True)
        ]


def assert_whole(records: Sequence[Record]) -> None:
    """Every question was answered and scored, by a model of each record's own."""
    assert [record.status for record in records] == ["succeeded"] * len(STEPS)
    for record in records:
        assert record.counts is not None
        assert record.counts.requested == record.counts.answered == record.counts.scored == QUESTIONS
        assert record.seconds["evaluate"] > 0 and record.versions.keys() >= {"levanter", "jax"}
    assert len({record.digests.samples for record in records}) == len(STEPS)


def jobs_of(client: Client) -> list[JobDetails]:
    return [job for job in client.jobs() if job.name.startswith("levanter-")]


def outcomes_of(shared: Path) -> list[Path]:
    return list((shared / "evaluations").glob(f"**/{OUTCOME_NAME}"))


def compiled(home: Path) -> bool:
    """Tells if Levanter has computed on a machine."""
    return any((home / "cache" / "jax").glob("*"))


def test_levanter_on_iris_evaluates_checkpoints_in_one_job(
    shared: Path, tmp_path: Path, machine: Callable[[str], dict[str, str]]
) -> None:
    cells = plan(shared)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine("there").items():
            patch.setenv(name, value)
        cluster = start_cluster()
    client = cluster.client(grace_seconds=GRACE_SECONDS)
    try:
        with running(cells, client) as futures:
            assert_whole([future.result() for future in futures])
        assert eventually(lambda: [job.status for job in jobs_of(client) if job.status.finished]) == [
            JobStatus.SUCCEEDED
        ]
    finally:
        client.shutdown()
        cluster.end()


def test_levanter_on_kubernetes_evaluates_checkpoints_in_one_job(
    shared: Path, tmp_path: Path, machine: Callable[[str], dict[str, str]]
) -> None:
    cells = plan(shared)
    server = KubernetesServer(tmp_path / "kubernetes", variables=machine("there"))
    client = client_of_kubernetes(server)
    try:
        with running(cells, client) as futures:
            assert_whole([future.result() for future in futures])
        assert len(jobs_of(client)) == 1 and compiled(tmp_path / "there")
    finally:
        client.shutdown()
        server.close()


def test_levanter_on_ray_goes_on_on_another_machine_when_its_own_is_lost(
    shared: Path, tmp_path: Path, machine: Callable[[str], dict[str, str]]
) -> None:
    cells = plan(shared)
    with ray_cluster(num_cpus=1) as cluster:
        nodes = {name: add_node(cluster, num_cpus=4, env_vars=machine(name)) for name in ("one", "other")}
        client = client_of_ray(str(cluster.address))
        try:
            with running(cells, client) as futures:
                [first] = eventually(
                    lambda: outcomes_of(shared) or [f.result() for f in futures if f.done()], seconds=120
                )[:1]
                written = first.stat().st_mtime_ns
                lost, left = sorted(nodes, key=lambda name: not compiled(tmp_path / name))
                assert compiled(tmp_path / lost) and not compiled(tmp_path / left)
                cluster.remove_node(nodes[lost], allow_graceful=False)
                assert_whole([future.result() for future in futures])
            assert compiled(tmp_path / left)
            assert first.stat().st_mtime_ns == written, "what had its outcome was not evaluated again"
            [job] = jobs_of(client)
            assert client.attach(job.job_id).details().preemptions == 1
        finally:
            client.shutdown()
