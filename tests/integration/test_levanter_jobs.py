"""Evaluations by Levanter as jobs of machines with another home and another cache; a single job for all checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import gcsfs
import pytest

from fakes.clients import GRACE_SECONDS
from fakes.gcs import fake_gcs
from fakes.iris_cluster import start_cluster
from fakes.kubernetes_cluster import client_of as client_of_kubernetes
from fakes.kubernetes_server import KubernetesServer
from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.ray_cluster import add_node, ray_cluster
from fakes.ray_cluster import client_of as client_of_ray
from fakes.slurm_cluster import require_slurm, shared_slurm
from fakes.tokenizers import write_byte_tokenizer
from resources.backends.current import set_current_client
from resources.jobs.jobs import Client, JobDetails, JobStatus
from resources.settings import settings
from tasks.checkpoints.discovery import find_checkpoints
from tasks.evaluators.native import OUTCOME_NAME
from tasks.records.record import Record
from tasks.running.attempt import Interruption, RunResources
from tasks.running.cells import Cell, plan_cells
from tasks.running.native_jobs import NativeJobs
from tasks.running.run_cell import run_cell
from tasks.running.warm import warm_programs
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]

STEPS = (1, 2)
SHORT, LONG = 40, 300
BENCHMARK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: [" even", " odd"]
doc_to_target: answer
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder shared by all machines, with a run of several checkpoints and benchmarks."""
    folder = tmp_path / "shared"
    for step in STEPS:
        write_byte_tokenizer(write_nano_llama(folder / "run" / "hf" / f"step-{step}", seed=step))
    (folder / "benchmarks").mkdir()
    for name, questions, beginning in (("sums", SHORT, ""), ("long", LONG, "Numbers, " * 12)):
        asked = [{"text": f"{beginning}{n} and {n} is", "answer": n % 2} for n in range(questions)]
        (folder / "benchmarks" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
        (folder / "benchmarks" / f"{name}.yaml").write_text(BENCHMARK.format(name=name))
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Creates the variables of a machine with its own home and the environments of an image."""
    built = str(settings().environments_dir)

    def make(name: str) -> dict[str, str]:
        home = tmp_path / name
        home.mkdir()
        places = {"HOME": str(home), "ASSAY_CACHE_DIR": str(home / "cache")}
        return {**places, "ASSAY_BUILT_ENVIRONMENTS": built}

    return make


def plan(shared: Path, *benchmarks: str, store: str | None = None) -> list[Cell]:
    place = store or str(shared)
    config = EvaluationConfig.model_validate(
        {
            "evaluator": {"name": "levanter_lm_evaluation_harness", "rows_per_device": 1},
            "model_path": f"{place}/run",
            "evaluation_path": f"{place}/evaluations",
            "benchmarks_path": str(shared / "benchmarks"),
            "evals": [{"name": name} for name in benchmarks or ("sums",)],
            "resource_config": {"cpu": 2},
        }
    )
    return plan_cells([config], find_checkpoints(config.model_path))


@contextmanager
def running(cells: list[Cell], client: Client) -> Iterator[list[Any]]:
    """Evaluates cells concurrently on a backend, as a run does; yields the futures of their records."""
    with ExitStack() as stack:
        stack.enter_context(set_current_client(client))
        warm, jobs = stack.enter_context(warm_programs()), stack.enter_context(NativeJobs())
        threads = stack.enter_context(ThreadPoolExecutor(len(cells)))
        interruption = Interruption()
        stack.callback(interruption.set)  # if a test fails meanwhile
        for position in range(len(cells)):
            jobs.expect(position)
        resources = RunResources(warm.harness_of, native_jobs=jobs, interruption=interruption, cells=len(cells))
        yield [
            threads.submit(copy_context().run, partial(run_cell.fn, cell, resources, position=position))
            for position, cell in enumerate(cells)
        ]


def assert_whole(records: Sequence[Record], *, questions: int = SHORT) -> None:
    """Asserts that every sample was answered and scored, by a different model for each record."""
    assert [record.status for record in records] == ["succeeded"] * len(STEPS)
    for record in records:
        assert record.counts is not None
        assert record.counts.requested == record.counts.answered == record.counts.scored == questions
        assert record.seconds["evaluate"] > 0 and record.versions.keys() >= {"levanter", "jax"}
    assert len({record.digests.samples for record in records}) == len(STEPS)


def jobs_of(client: Client) -> list[JobDetails]:
    return [job for job in client.jobs() if job.name.startswith("levanter-")]


def compiled(home: Path) -> bool:
    """Returns True if Levanter has compiled on the machine."""
    return any((home / "cache" / "jax").glob("*"))


@contextmanager
def iris(folder: Path, variables: dict[str, str]) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        cluster = start_cluster()
    client = cluster.client(grace_seconds=GRACE_SECONDS)
    try:
        yield client
    finally:
        client.shutdown()
        cluster.end()


@contextmanager
def slurm(folder: Path, variables: dict[str, str]) -> Iterator[Client]:
    """Returns a client of the shared Slurm cluster; the submitter's variables are passed to its jobs."""
    require_slurm()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        client = shared_slurm().client(folder / "slurm", grace_seconds=GRACE_SECONDS)
        yield client
        client.shutdown()


@pytest.mark.parametrize("backend", [iris, pytest.param(slurm, marks=pytest.mark.slurm)], ids=["iris", "slurm"])
def test_levanter_evaluates_checkpoints_in_a_single_job(
    backend: Callable[[Path, dict[str, str]], AbstractContextManager[Client]],
    shared: Path,
    tmp_path: Path,
    machine: Callable[[str], dict[str, str]],
) -> None:
    cells = plan(shared)
    with backend(tmp_path, machine("there")) as client:
        with running(cells, client) as futures:
            assert_whole([future.result() for future in futures])
        assert eventually(lambda: [job.status for job in jobs_of(client) if job.status.finished]) == [
            JobStatus.SUCCEEDED
        ]
        assert compiled(tmp_path / "there")


def test_levanter_on_kubernetes_reads_checkpoints_from_a_store_and_leaves_its_output_there(
    shared: Path, tmp_path: Path, machine: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_gcs("bucket") as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.address)
        gcsfs.GCSFileSystem.clear_instance_cache()
        for file in (shared / "run").rglob("*.*"):
            store.put("bucket", file.relative_to(shared).as_posix(), file.read_bytes())
        cells = plan(shared, store="gs://bucket")
        server = KubernetesServer(tmp_path / "kubernetes", variables={**machine("there"), **store.variables})
        client = client_of_kubernetes(server)
        try:
            with running(cells, client) as futures:
                assert_whole([future.result() for future in futures])
            assert len(jobs_of(client)) == 1 and compiled(tmp_path / "there")
        finally:
            client.shutdown()
            server.close()
            gcsfs.GCSFileSystem.clear_instance_cache()
        names = store.names("bucket")
        asked = [json.loads(store.content("bucket", name)) for name in names if name.endswith("/job.json")]
        assert len(asked) == len([name for name in names if name.endswith(f"/{OUTCOME_NAME}")]) == len(STEPS)
        assert str(shared) not in str(asked), "the job knows no folder of the machine that asked for it"
        assert not [name for name in names if "/journal/" in name], "scores of finished cells are not kept"


def test_levanter_on_ray_goes_on_within_a_checkpoint_when_its_machine_is_lost(
    shared: Path, tmp_path: Path, machine: Callable[[str], dict[str, str]]
) -> None:
    cells = plan(shared, "sums", "long")
    evaluations = shared / "evaluations"
    with ray_cluster(num_cpus=1, _system_config={"health_check_period_ms": 500}) as cluster:
        nodes = {name: add_node(cluster, num_cpus=4, env_vars=machine(name)) for name in ("one", "other")}
        client = client_of_ray(str(cluster.address))
        try:
            with running(cells, client) as futures:

                def kept() -> list[Path]:
                    # Scores of the second checkpoint, in either order, once its first benchmark is over.
                    assert not any(future.done() and future.exception() for future in futures)
                    done = {file.parents[1] for file in evaluations.glob(f"**/{OUTCOME_NAME}")}
                    scores = evaluations.glob("**/journal/*/*.json")
                    return [file for file in scores if done and file.parents[2] not in done]

                [scores, *_] = eventually(kept)
                lost, left = sorted(nodes, key=lambda name: not compiled(tmp_path / name))
                assert compiled(tmp_path / lost) and not compiled(tmp_path / left)
                cluster.remove_node(nodes[lost], allow_graceful=False)
                before = sum(len(row) for file in kept() for row in json.loads(file.read_text()).values())
                [first] = evaluations.glob(f"**/{OUTCOME_NAME}")
                written = first.stat().st_mtime_ns
                assert_whole([future.result() for future in futures], questions=SHORT + LONG)
            assert compiled(tmp_path / left)
            assert first.stat().st_mtime_ns == written, "the checkpoint with an outcome was not evaluated again"
            [facts] = scores.parents[2].glob("attempt-*/levanter.json")
            known = json.loads(facts.read_text())["requests_scored_before"]
            assert 2 * SHORT <= before <= known < 2 * (SHORT + LONG), "two requests for each question"
            assert not scores.exists(), "scores of finished cells are not kept"
            [job] = jobs_of(client)
            assert client.attach(job.job_id).details().preemptions == 1
        finally:
            client.shutdown()
