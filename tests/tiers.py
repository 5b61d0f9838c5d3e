"""The test modules that `make test` leaves to `make test-all`, and the changes that bring each of them back.

A module that is not in `REST` is always part of `make test`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_JOBS = ("resources/jobs", "resources/backends/programs", "tests/fakes/clients.py")
_IRIS = ("resources/backends/iris", "tests/fakes/iris", *_JOBS)
_KUBERNETES = ("resources/backends/kubernetes", "tests/fakes/kubernetes", *_JOBS)
_RAY = ("resources/backends/ray", "tests/fakes/ray", *_JOBS)
_SLURM = ("resources/backends/slurm", "tests/fakes/slurm", *_JOBS)
_LM_EVAL = ("tasks/evaluators/lm_eval", "tasks/evaluators/programs")
_HELM = ("tasks/evaluators/helm", "tasks/evaluators/programs")
_LEVANTER = ("tasks/evaluators/levanter", "tasks/evaluators/programs")
_ENGINE = ("pools/engine", "pools/replica", "resources/warm")
_POLICIES = ("tasks/policies", "flows/deploy")

REST: Mapping[str, tuple[str, ...]] = {
    "contract[iris]": (*_IRIS, "resources/actors"),
    "contract[kubernetes]": (*_KUBERNETES, "resources/actors"),
    "contract[slurm]": (*_SLURM, "resources/actors"),
    "e2e/test_eval_job.py": ("tasks/eval_jobs",),
    "e2e/test_policy_acceptance.py": _POLICIES,
    "e2e/test_train_and_evaluate.py": ("tasks/training", "flows/training.py"),
    "faults/test_chaos.py": ("tests/faults/chaos",),
    "integration/test_architectures.py": ("pools/engine/programs", "pools/architectures", "resources/environments"),
    "integration/test_alerts.py": ("tasks/verdicts/alert", "deployments/alerts"),
    "integration/test_dispatch.py": (*_POLICIES, "flows/reconcile.py"),
    "integration/test_engine_guards.py": _ENGINE,
    "integration/test_eval_job_cluster.py": ("tasks/eval_jobs", *_KUBERNETES),
    "integration/test_gang.py": _ENGINE,
    "integration/test_gang_on_ray.py": (*_ENGINE, *_RAY),
    "integration/test_gcs_sink.py": ("tasks/sinks", "resources/storage", "tests/fakes/gcs"),
    "integration/test_helm_choices.py": (*_HELM, *_ENGINE),
    "integration/test_hub_evaluation.py": ("resources/storage", "tests/fakes/hub"),
    "integration/test_iris_jobs.py": (*_IRIS, "resources/regions"),
    "integration/test_kept_pools_on_ray.py": (*_RAY, "pools/pool"),
    "integration/test_kubernetes_jobs.py": _KUBERNETES,
    "integration/test_levanter_jobs.py": (*_LEVANTER, *_SLURM),
    "integration/test_levanter_real.py": _LEVANTER,
    "integration/test_lm_eval_hf.py": (*_LM_EVAL, *_ENGINE),
    "integration/test_lm_eval_refusals.py": _LM_EVAL,
    "integration/test_made_weights.py": ("pools/weights", "tests/fakes/torch_writers.py"),
    "integration/test_merges_of_torch.py": ("pools/weights",),
    "integration/test_adapters_real.py": ("pools/weights",),
    "integration/test_mlflow_checkpoints.py": ("tasks/checkpoints", "resources/storage"),
    "integration/test_mlflow_sink.py": ("tasks/sinks", "tests/fakes/mlflow"),
    "integration/test_opened_files.py": (*_ENGINE, "pools/weights"),
    "integration/test_planning_in_a_store.py": ("tasks/policies", "tasks/checkpoints", "resources/storage"),
    "integration/test_policy_deployments.py": _POLICIES,
    "integration/test_pool_on_ray.py": (*_RAY, "pools/pool"),
    "integration/test_pool_on_slices.py": (*_RAY, "pools/pool", "resources/tpu"),
    "integration/test_prefect_blocks.py": ("tasks/sinks", "pools/pool"),
    "integration/test_program_types.py": (
        *_LM_EVAL,
        *_HELM,
        *_LEVANTER,
        "tasks/offline",
        "tasks/training",
        "pools/engine",
    ),
    "integration/test_ray_tpu.py": (*_RAY, "resources/tpu"),
    "integration/test_report_page.py": ("tasks/reports",),
    "integration/test_requalification_real.py": ("tasks/verdicts", "flows/cli/reports.py"),
    "integration/test_slurm_accounting.py": _SLURM,
    "integration/test_slurm_jobs.py": _SLURM,
    "integration/test_staging_real.py": ("tasks/offline", "flows/staging.py"),
    "integration/test_suites_real.py": ("tasks/spec/suite_data", "tasks/spec/suites.py", "tasks/offline"),
    "integration/test_tokenizers_real.py": (
        "pools/weights/tokenizers",
        "pools/weights/overrides",
        "tasks/evaluators/lm_eval/requirements",
        "tasks/evaluators/helm/requirements",
        "tasks/evaluators/programs/refusals",
    ),
    "integration/test_trainers_real.py": ("pools/weights", "tasks/checkpoints", "tests/fakes/trainings.py"),
    "integration/test_training_hooks.py": ("deployments/hooks", "tasks/training"),
    "integration/test_training_real.py": ("tasks/training", *_IRIS),
    "integration/test_ui_forms.py": ("flows/deploy", "deployments/prefect.yaml"),
    "integration/test_view_command.py": ("tasks/reports/viewer",),
    "integration/test_view_page.py": ("tasks/reports/viewer",),
    "integration/test_wandb_sink.py": ("tasks/sinks", "tests/fakes/wandb"),
    "integration/test_warm_engine.py": _ENGINE,
    "integration/test_warm_lm_eval.py": (*_LM_EVAL, "resources/warm"),
    "zoo/test_zoo.py": (*_ENGINE, "tests/zoo"),
}
"""For each module outside of `make test`, the beginnings of the paths that it belongs to.

`contract[iris]` is the tests of a folder with that parameter.
"""

_NODE = re.compile(r"tests/(?P<file>(?P<folder>\w+)/[^:]*)(?:::\w+(?:\[(?P<parameter>[a-z]+))?)?")


def entry_of(nodeid: str) -> str | None:
    """Returns the entry of `REST` that a test or a module belongs to; None if it is part of `make test`."""
    if (node := _NODE.match(nodeid)) is None:
        return None
    entries = (node["file"], f"{node['folder']}[{node['parameter']}]")
    return next((entry for entry in entries if entry in REST), None)


def brought_back(changed: Iterable[str]) -> dict[str, str]:
    """Returns the entries of `REST` that belong to changed files, each with the first such file.

    Args:
        changed: paths from the root of the repository.
    """
    reasons: dict[str, str] = {}
    for path in sorted(changed):
        for entry, beginnings in REST.items():
            if path.startswith((f"tests/{entry}", *beginnings)):
                reasons.setdefault(entry, path)
    return reasons


def changed_since(commit: str | None, root: Path = ROOT) -> list[str]:
    """Returns paths that differ from a commit or are untracked; empty outside of a git checkout.

    Args:
        commit: by default the common ancestor with the upstream branch, or the parent if nothing was committed
            since.
    Raises:
        ValueError: git has no such commit.
    """

    def git(*arguments: str) -> list[str] | None:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.splitlines() if done.returncode == 0 else None

    try:
        if (head := git("rev-parse", "HEAD")) is None:
            return []
    except FileNotFoundError:  # no git
        return []
    if commit is None:
        ancestor = git("merge-base", "HEAD", "@{upstream}")
        commit = ancestor[0] if ancestor and ancestor != head else "HEAD~1"
        known = git("rev-parse", "--verify", "--quiet", commit) is not None
        commit = commit if known else "HEAD"  # the first commit, or all that a shallow clone has
    if (differing := git("diff", "--name-only", "--no-renames", commit)) is None:
        raise ValueError(f"Expected: a commit to compare with. Found: {commit}. Name another: make test SINCE=HEAD~1")
    return sorted({*differing, *(git("ls-files", "--others", "--exclude-standard") or ())})
