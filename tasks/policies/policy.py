"""Policies: which checkpoints of which runs to evaluate with which suites, as a file that can be reviewed.

Users override cells of a policy, to retry or to stop them, by small files next to the records, which stay.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pools.config import Name, is_address
from pools.weights.merges import as_named
from resources.config import Config
from resources.process_marks import acting_user
from resources.storage import storage
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.running.cells import as_served
from tasks.running.claims.files import CLOCKS_DIFFER_SECONDS, Timestamp
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import SERVING_WAYS, EvaluationConfig, Serving, StepsFrom
from tasks.spec.loading import load_config
from tasks.spec.model_parts import ModelParts, with_parts_named
from tasks.spec.names import check_deployed_paths, name_of
from tasks.spec.sinks import Sinks
from tasks.spec.suites import SuiteChoice, SuiteName, SuiteRequest, load_suite
from tasks.verdicts.gate import Gate

_FOLDER = "marks"  # the name in existing stores, since the first version


class RetryBudget(Config):
    """Retries of cells that ended `infra_failed` or lost their run. Model failures are not retried."""

    infra_failures: int = Field(default=6, ge=0)
    """Failures in a row that are followed by another try; a run makes two tries each. Then a cell waits for `assay
    retry`."""
    first_delay_seconds: float = Field(default=60, ge=0)
    """Pause after the first failure; it doubles with each further failure."""
    longest_delay_seconds: float = Field(default=3600, ge=0)
    """Upper limit of the pause."""

    def delay_seconds(self, failures: int) -> float:
        return min(self.longest_delay_seconds, self.first_delay_seconds * 2.0 ** min(max(0, failures - 1), 60))


class PolicySuite(Serving, SuiteChoice):
    """A suite of a policy; its serving replaces the policy's own."""

    suite: SuiteName
    """Name of a suite, or a YAML file with its definition."""
    checkpoints: tuple[CheckpointRule, ...] | None = None
    """Checkpoint rules of this suite; the policy's when unset."""
    priority: int = 0
    """Suites with a higher number come first."""

    def served(self, policy: Policy) -> dict[str, Any]:
        """Returns the serving fields of a request, its own before those of the policy."""
        own = any(getattr(self, name) is not None for name in SERVING_WAYS)
        names = (*SERVING_WAYS, "pool_key_block")
        resources = self.resource_config if self.resource_config is not None else policy.resource_config
        serving = {name: getattr(self if own else policy, name) for name in names}
        return {**serving, "resource_config": resources, "protect": self.protect and policy.protect}


class Policy(ModelParts, Serving):
    """The evaluations of training runs, while they run and after."""

    name: Name
    """Name of the policy, in tags of records and in overrides."""
    runs: tuple[str, ...] = Field(min_length=1)
    """Runs, or patterns such as gs://bucket/runs/llama-*; on the hub as owner/name."""
    steps_from: StepsFrom | None = None
    """An expression for steps in the paths of checkpoints, as in a selection; the usual words when unset."""
    checkpoints: tuple[CheckpointRule, ...] = (CheckpointRule(which="all"),)
    """Rules; a checkpoint is evaluated if any rule selects it."""
    final_step: int | None = Field(default=None, ge=0)
    """Last training step, for the rule `final`."""
    suites: tuple[PolicySuite, ...] = Field(min_length=1)
    """The suites; suites added later apply to earlier checkpoints too."""
    evaluation_path: str
    """Folder for records; local, gs:// or s3://."""
    retries: RetryBudget = RetryBudget()
    """Retries after infrastructure failures."""
    sinks: Sinks = ()
    """Sinks that receive the results."""
    tags: tuple[str, ...] = ()
    """Tags of all records, in addition to those of suite and policy."""
    native_reference: str | None = None
    """Config and tokenizer for checkpoints in Levanter's own layout; an export of the run when unset."""
    most_cells_at_once: int = Field(default=200, ge=1)
    """Most cells evaluated by a reconciliation; the rest waits for the next."""
    dispatch: Literal["here", "work_pools"] = "here"
    """Evaluate cells where the policy is reconciled, or with flow runs at the work pool of the best region."""
    max_egress_usd: float = Field(default=0.0, ge=0)
    """Most that reading checkpoints from another region may cost for each flow run, in USD."""
    gate: Annotated[str, Field(title="file")] | Gate | None = None
    """The policy's own gate, or a YAML file with it: each reconciliation judges the newly settled checkpoints, once per
    state of their records."""
    max_usd: float | None = Field(default=None, ge=0)
    """Largest expected cost of the cells of a reconciliation in USD; if the expected cost is higher or unknown, no cell
    starts, and the flow run fails. No limit when unset."""

    def __str__(self) -> str:
        # for names of flow runs
        return self.name

    @field_validator("runs")
    @classmethod
    def _runs_on_the_hub_are_named(cls, runs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(as_named, runs))

    @field_validator("suites", mode="before")
    @classmethod
    def _suites_by_name(cls, suites: Any) -> Any:
        if not isinstance(suites, list | tuple):
            return suites
        return tuple({"suite": suite} if isinstance(suite, str) else suite for suite in suites)

    @model_validator(mode="before")
    @classmethod
    def _parts_named(cls, values: Any) -> Any:
        return with_parts_named(values, "runs")

    @field_validator("checkpoints", "runs", mode="before")
    @classmethod
    def _single_is_a_list(cls, values: Any) -> Any:
        return (values,) if isinstance(values, str | dict) else values

    @model_validator(mode="after")
    def _kept_pools_are_here(self) -> Policy:
        names = [pooled.pool_name for pooled in (self, *self.suites) if pooled.pool_name is not None]
        if self.dispatch == "work_pools" and not all(map(is_address, names)):
            raise ValueError(
                "pool_name is a name of this machine, which flow runs at work pools do not reach: give its address"
            )
        return self

    @model_validator(mode="after")
    def _final_is_known(self) -> Policy:
        rules = [*self.checkpoints, *(rule for suite in self.suites for rule in suite.checkpoints or ())]
        if self.final_step is None and any(rule.which == "final" for rule in rules):
            raise ValueError("the rule final needs final_step: nothing in a run says that it has ended")
        return self


@dataclass(frozen=True, eq=False)
class WantedEvaluation:
    """An evaluation of a run's checkpoints; `native_hash` is that of its Levanter fallback, if any."""

    suites: tuple[str, ...]
    priority: int
    rules: tuple[CheckpointRule, ...]
    config: EvaluationConfig
    hash: str
    native_hash: str | None

    @property
    def title(self) -> str:
        keys = [task.metric_key for task in self.config.evals]
        return f"{self.suites[0]}: {', '.join(keys[:2])}" + (f" and {len(keys) - 2} more" if len(keys) > 2 else "")


def wanted_evaluations(policy: Policy, run: str) -> list[WantedEvaluation]:
    """Returns the evaluations that a policy requests of a run, by priority; duplicates of several suites are merged."""
    evaluations: dict[str, WantedEvaluation] = {}
    for asked in policy.suites:
        suite = load_suite(asked.suite)
        for config in map(as_served, suite.evaluations_of(_request(policy, asked, run))):
            fallback = config.levanter_fallback()
            rules = asked.checkpoints if asked.checkpoints is not None else policy.checkpoints
            made = WantedEvaluation(
                (suite.name,),
                asked.priority,
                rules,
                config,
                evaluation_hash(config),
                fallback and evaluation_hash(fallback),
            )
            same = evaluations.get(made.hash)
            evaluations[made.hash] = made if same is None else _merged(same, made)
    return sorted(evaluations.values(), key=lambda evaluation: -evaluation.priority)


def _merged(first: WantedEvaluation, second: WantedEvaluation) -> WantedEvaluation:
    return replace(
        first,
        suites=tuple(dict.fromkeys((*first.suites, *second.suites))),
        priority=max(first.priority, second.priority),
        rules=tuple(dict.fromkeys((*first.rules, *second.rules))),
    )


def _request(policy: Policy, suite: PolicySuite, run: str) -> SuiteRequest:
    return SuiteRequest.model_validate(
        {
            "model_path": run,
            "model_name": name_of(run)[0],
            "evaluation_path": policy.evaluation_path,
            "sinks": policy.sinks,
            "wandb_tags": (*policy.tags, f"policy={policy.name}"),
            **suite.served(policy),
            **{name: getattr(suite, name) for name in SuiteChoice.model_fields},
        }
    )


def own_gate(policy: Policy) -> Gate | None:
    """Returns the policy's own gate, loaded if it is a file."""
    return load_config(policy.gate, Gate) if isinstance(policy.gate, str) else policy.gate


def check_policy_paths(policy: Policy) -> None:
    """Raises for relative paths, which a worker's flow would resolve in its own folder."""
    paths = [*policy.runs, policy.evaluation_path, *filter(None, [suite.benchmarks_path for suite in policy.suites])]
    paths += [suite.suite for suite in policy.suites if suite.suite.endswith((".yaml", ".yml", ".json"))]
    paths += [policy.gate] if isinstance(policy.gate, str) else []
    check_deployed_paths(paths)


class Override(Config):
    """A user's request about some cells of a run, or about all cells of a policy in it."""

    kind: Literal["retry", "stop"]
    """`retry` permits another try after any failure; `stop` blocks tries until the next `retry`."""
    policy: str
    """Name of the policy that was used."""
    cells: tuple[tuple[str, str], ...] | None
    """Checkpoint names with evaluation hashes; all cells of the policy, later cells included, when unset."""
    at: Timestamp
    """Time in seconds since the epoch; at most the store's modification time."""
    user: str
    """The user."""
    flow_run: str | None = None
    """Name of the cancelled flow run, if a cancellation caused it."""

    @property
    def by(self) -> str:
        return f"with the flow run {self.flow_run}" if self.flow_run else f"by {self.user}"


@dataclass(frozen=True)
class Overrides:
    """The newest override of each cell, and of each policy as a whole."""

    by_cell: Mapping[tuple[str, str], Override] = field(default_factory=dict)
    by_policy: Mapping[str, Override] = field(default_factory=dict)

    def newest(self, checkpoint: str, evaluation_hash: str, *, policy: str) -> Override | None:
        """Returns the newest override that applies to a cell."""
        overrides = (self.by_cell.get((checkpoint, evaluation_hash)), self.by_policy.get(policy))
        return max(filter(None, overrides), key=lambda override: override.at, default=None)


def read_overrides(run_folder: str) -> Overrides:
    """Reads the overrides of a run's cells."""
    overrides: list[Override] = []
    for file in filter(lambda file: file.regular, storage.list_files(storage.join(run_folder, _FOLDER))):
        with suppress(FileNotFoundError, ValidationError):
            override = Override.model_validate_json(storage.read_bytes(file.uri))
            latest = file.modified or time.time()  # bounded by the store's clock, since the writer's may be wrong
            ahead = override.at > latest + CLOCKS_DIFFER_SECONDS
            overrides.append(override.model_copy(update={"at": latest}) if ahead else override)
    overrides.sort(key=lambda override: override.at)
    by_cell = {cell: override for override in overrides for cell in override.cells or ()}
    return Overrides(by_cell, {override.policy: override for override in overrides if override.cells is None})


def write_override(
    run_folder: str,
    kind: Literal["retry", "stop"],
    cells: Sequence[tuple[str, str]] | None,
    *,
    policy: str,
    flow_run: str | None = None,
) -> Override:
    """Writes an override of cells, given as (checkpoint name, evaluation hash), or of a whole policy when None."""
    listed = tuple(cells) if cells is not None else None
    override = Override(kind=kind, policy=policy, cells=listed, at=time.time(), user=acting_user(), flow_run=flow_run)
    uri = storage.join(run_folder, _FOLDER, f"{int(override.at)}-{secrets.token_hex(4)}.json")
    storage.write_bytes(uri, override.model_dump_json(indent=2).encode())
    return override
