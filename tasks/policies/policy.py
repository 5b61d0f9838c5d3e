"""Policies: which checkpoints of which runs are to be evaluated by which suites, as a file that can be reviewed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pools.config import InferencePoolConfig, check_name, is_address
from resources.config import Config, ResourceConfig
from tasks.checkpoints.rules import CheckpointRule
from tasks.gates.gate import Gate
from tasks.running.cells import as_served
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import Judge
from tasks.spec.loading import load_config
from tasks.spec.names import name_of
from tasks.spec.paths import check_deployed_paths
from tasks.spec.sinks import Sinks
from tasks.spec.suites import SuiteName, SuiteRequest, load_suite


class RetryBudget(Config):
    """Retries of cells that ended `infra_failed`, or whose run died. Failures of a model are not retried."""

    infra_failures: int = Field(default=6, ge=0)
    """Failures in a row that are followed by another try, of which a run makes two; then a cell waits for
    `assay retry`."""
    first_delay_seconds: float = Field(default=60, ge=0)
    """Pause after the first failure; it doubles with each further one."""
    longest_delay_seconds: float = Field(default=3600, ge=0)
    """Bound on that pause."""

    def delay_seconds(self, failures: int) -> float:
        """The pause after so many failures in a row."""
        return min(self.longest_delay_seconds, self.first_delay_seconds * 2.0 ** min(max(0, failures - 1), 60))


class PolicyServing(Config):
    """The engine or endpoint that answers, and its resources; in a suite of a policy it replaces the policy's own."""

    pool_config: InferencePoolConfig | None = None
    """The inference pool to start, in place of resource_config."""
    pool_name: str | None = None
    """A kept pool (`assay pool up`), by its name or by its address."""
    pool_key_block: str | None = None
    """Prefect secret block with the key of a pool at an address; ASSAY_POOL_KEY when unset."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint that serves the checkpoints; ends in /v1."""
    resource_config: ResourceConfig | None = None
    """Resources of engines, and of evaluators that load the checkpoint themselves."""

    def served(self, other: PolicyServing) -> dict[str, Any]:
        """The fields of a request, this one's before another's."""
        ways = ("pool_config", "pool_name", "base_url")
        first = self if any(getattr(self, name) is not None for name in ways) else other
        resources = self.resource_config if self.resource_config is not None else other.resource_config
        return {**{name: getattr(first, name) for name in (*ways, "pool_key_block")}, "resource_config": resources}


class PolicySuite(PolicyServing):
    """A suite of a policy."""

    suite: SuiteName
    """Name of a suite, or a YAML file with one."""
    only: tuple[str, ...] = ()
    """Labels of the evaluations that are wanted; all when empty."""
    checkpoints: tuple[CheckpointRule, ...] | None = None
    """Rules of its own; the policy's when unset."""
    priority: int = 0
    """Suites with a higher number come first."""
    max_eval_instances: int | None = Field(default=None, ge=1)
    """Questions per benchmark; as the suite says when unset."""
    max_truncated: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a benchmark's questions whose prompts may be cut to fit; as the suite says when unset."""
    max_at_limit: float | None = Field(default=None, ge=0, le=1)
    """Largest share of a benchmark's answers that may end at the length limit; as the suite says when unset."""
    apply_chat_template: bool | None = None
    """Ask through the model's chat template; as the suite says when unset."""
    benchmarks_path: str | None = None
    """Folder with benchmarks of one's own."""
    allow_code_execution: tuple[str, ...] = ()
    """Benchmarks that may run code written by the model."""
    judge: Judge | None = None
    """The judge that compares outputs; as the suite says when unset."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Wall clock of one cell."""


class Policy(PolicyServing):
    """The evaluations wanted of some training runs, now and as they go on."""

    name: str
    """Its name, in tags of records and in overrides."""
    runs: tuple[str, ...] = Field(min_length=1)
    """Runs, or patterns such as gs://bucket/runs/llama-*."""
    checkpoints: tuple[CheckpointRule, ...] = (CheckpointRule(which="all"),)
    """Rules; a checkpoint is wanted if any of them takes it."""
    final_step: int | None = Field(default=None, ge=0)
    """Last training step, for the rule `final`."""
    suites: tuple[PolicySuite, ...] = Field(min_length=1)
    """The suites; one that is added later is asked of earlier checkpoints too."""
    evaluation_path: str
    """Folder for records; local, gs:// or s3://."""
    retries: RetryBudget = RetryBudget()
    """Retries after failures of machines."""
    sinks: Sinks = ()
    """Places where results are announced."""
    tags: tuple[str, ...] = ()
    """Tags that go into every record, beside those of suite and policy."""
    native_reference: str | None = None
    """Config and tokenizer for checkpoints in Levanter's own layout; an export of the run when unset."""
    most_cells_at_once: int = Field(default=200, ge=1)
    """Cells that one reconciliation takes on; the others stay for the next."""
    dispatch: Literal["here", "work_pools"] = "here"
    """Evaluate cells where the policy is reconciled, or by flow runs at the work pool of the best region."""
    max_egress_usd: float = Field(default=0.0, ge=0)
    """Most that reading checkpoints from another region may cost each such flow run."""
    gate: Annotated[str, Field(title="file")] | Gate | None = None
    """Its own gate, or a YAML file with one: each reconciliation judges the checkpoints that are settled by then, once
    each with the same records."""
    max_usd: float | None = Field(default=None, ge=0)
    """Most that the cells of one reconciliation may be expected to cost; where they are expected to cost more, or
    nobody knows, none of them is begun, and the flow run fails. No bound when unset."""

    def __str__(self) -> str:
        """Its name, for the names of flow runs."""
        return self.name

    @field_validator("name")
    @classmethod
    def _name_is_usable(cls, name: str) -> str:
        return check_name(name)

    @field_validator("suites", mode="before")
    @classmethod
    def _suites_by_name(cls, suites: Any) -> Any:
        if not isinstance(suites, list | tuple):
            return suites
        return tuple({"suite": suite} if isinstance(suite, str) else suite for suite in suites)

    @field_validator("checkpoints", "runs", mode="before")
    @classmethod
    def _one_is_a_list(cls, values: Any) -> Any:
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
    """One evaluation of a run's checkpoints; `native_hash` is that of the same made by Levanter, where that may be."""

    suites: tuple[str, ...]
    priority: int
    rules: tuple[CheckpointRule, ...]
    config: EvaluationConfig
    hash: str
    native_hash: str | None

    @property
    def title(self) -> str:
        """Suite and benchmarks, for people."""
        keys = [task.metric_key for task in self.config.evals]
        return f"{self.suites[0]}: {', '.join(keys[:2])}" + (f" and {len(keys) - 2} more" if len(keys) > 2 else "")


def wanted_evaluations(policy: Policy, run: str) -> list[WantedEvaluation]:
    """Returns what a policy wants of one run, by priority; an evaluation that two suites have in common once."""
    found: dict[str, WantedEvaluation] = {}
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
            same = found.get(made.hash)
            found[made.hash] = made if same is None else _merged(same, made)
    return sorted(found.values(), key=lambda wanted: -wanted.priority)


def _merged(first: WantedEvaluation, second: WantedEvaluation) -> WantedEvaluation:
    return replace(
        first,
        suites=tuple(dict.fromkeys((*first.suites, *second.suites))),
        priority=max(first.priority, second.priority),
        rules=tuple(dict.fromkeys((*first.rules, *second.rules))),
    )


def _request(policy: Policy, suite: PolicySuite, run: str) -> SuiteRequest:
    asked = ("max_eval_instances", "max_truncated", "max_at_limit", "apply_chat_template", "benchmarks_path", "judge")
    return SuiteRequest.model_validate(
        {
            "model_path": run,
            "model_name": name_of(run)[0],
            "evaluation_path": policy.evaluation_path,
            "only": suite.only,
            "allow_code_execution": suite.allow_code_execution,
            "sinks": policy.sinks,
            "wandb_tags": (*policy.tags, f"policy={policy.name}"),
            **suite.served(policy),
            **{name: getattr(suite, name) for name in (*asked, "timeout_seconds")},
        }
    )


def own_gate(policy: Policy) -> Gate | None:
    """The gate of a policy itself, read where it is a file."""
    return load_config(policy.gate, Gate) if isinstance(policy.gate, str) else policy.gate


def check_policy_paths(policy: Policy) -> None:
    """Refuses relative paths, for a flow that a worker runs in a folder of its own."""
    paths = [*policy.runs, policy.evaluation_path, *filter(None, [suite.benchmarks_path for suite in policy.suites])]
    paths += [suite.suite for suite in policy.suites if suite.suite.endswith((".yaml", ".yml", ".json"))]
    paths += [policy.gate] if isinstance(policy.gate, str) else []
    check_deployed_paths(paths)
