"""A policy as a team deploys it: a server with its services, a worker, lm-eval, and the deterministic engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fakes.endpoints import Endpoint, endpoint
from fakes.models import CONFIG, write_checkpoint
from fakes.policies import write_policy, write_suite
from fakes.prefect_field import Field, prefect_field
from fakes.prefect_server import used_here
from fakes.tokenizers import write_byte_tokenizer
from flows.deploy.policies import PolicyDeployment, deploy_policy
from flows.reconcile import load_policy
from resources.environments.environments import ensure_environment
from tasks.evaluators.environments import LM_EVAL
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template
from tasks.records.record import read_records
from tasks.running.claims.files import claims_folder, read_claims

STEPS = (1, 2, 3)


@dataclass
class Deployed:
    field: Field
    folder: Path
    engine: Endpoint

    @property
    def policy(self) -> str:
        return str(self.folder / "policy.yaml")

    def checkpoint(self, step: int) -> Path:
        folder = self.folder / "run" / "hf" / f"step-{step}"
        config = {**CONFIG, "num_attention_heads": 1}
        return write_byte_tokenizer(write_checkpoint(folder, seed=step, config=config))

    def succeeded(self, place: str = "out") -> set[str]:
        return {record.checkpoint.name for record in read_records(str(self.folder / place)) if record.succeeded}

    def apply(
        self,
        *,
        every: timedelta | None = timedelta(hours=1),
        on_event: bool = True,
        work_pool: str = LOCAL_WORK_POOL,
        silent_after: timedelta = timedelta(minutes=10),
        dry_run: bool = False,
    ) -> list[tuple[str, str]]:
        policy = load_policy(self.policy)
        deployment = PolicyDeployment(policy, self.policy, work_pool, every=every, on_event=on_event)
        return [
            (change.name, change.action)
            for change in deploy_policy(deployment, silent_after=silent_after, dry_run=dry_run)
        ]

    def begin(self) -> str:
        """Starts a flow run of the policy, as a person does; returns its id."""
        deployment = self.field.ask("/deployments/name/reconcile-policy/watched")
        return self.field.ask(f"/deployments/{deployment['id']}/create_flow_run", {})["id"]

    def progress_of(self, run: str) -> dict[str, Any]:
        query = {"artifacts": {"type": {"any_": ["progress"]}}, "flow_runs": {"id": {"any_": [run]}}}
        [artifact] = self.field.ask("/artifacts/filter", query)
        return artifact

    def live_claims(self, place: str = "out") -> list[str]:
        """Returns the keys of unreleased claims on records below a folder, by default the policy's."""
        claims = read_claims(claims_folder(str(self.folder / place), "run"))
        return [seen.claim.subject.key for seen in claims if not seen.claim.released]


@contextmanager
def deployed_policy(folder: Path, *, database: str | None) -> Iterator[Deployed]:
    """Starts a server and deploys a policy for a run without checkpoints; starts no worker."""
    ensure_environment(LM_EVAL)
    with (
        endpoint(folder, *(f"run-{step}" for step in STEPS)) as engine,
        prefect_field(folder, database=database) as field,
        used_here(field.url),
    ):
        deployed = Deployed(field, folder, engine)
        suite = write_suite(folder, "facts", "demo_facts", max_eval_instances=2)
        fields = {"name": "watched", "base_url": engine.base_url, "retries": {"first_delay_seconds": 0}}
        write_policy(folder, suite, **fields)
        apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))])
        yield deployed
