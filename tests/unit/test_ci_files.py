"""The workflows a team copies: valid by the published schema, scripts by the shell, commands by the CLI."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.app import command_line
from tasks.spec.loading import load_config
from tasks.verdicts.gate import BaselineRule, BoundRule, Gate

CI = Path(__file__).parents[2] / "deployments" / "ci"
WORKFLOWS: dict[str, dict[str, Any]] = {path.name: yaml.safe_load(path.read_text()) for path in CI.glob("*.yml")}
SCRIPTS = {
    f"{job}: {step['name']}": step["run"]
    for workflow in WORKFLOWS.values()
    for job, content in workflow["jobs"].items()
    for step in content["steps"]
    if "run" in step
}


def test_workflows_are_valid_by_the_published_schema_and_a_mistake_is_not(tmp_path: Path):
    check = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*check, *map(str, CI.glob("*.yml"))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "evaluate.yml"
    wrong.write_text((CI / "evaluate.yml").read_text().replace("runs-on:", "run-on:", 1))
    assert subprocess.run([*check, str(wrong)], capture_output=True, timeout=60).returncode == 1


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_script_of_a_step_is_valid_for_the_shell(script: str):
    assert "${{" not in script, "values go through the environment: a path from outside must not become code"
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_workflow_are_those_of_this_version():
    [line] = re.findall(r"\.venv/bin/assay (.+)", SCRIPTS["here: Evaluate"].replace("\\\n", " "))
    name, *options = shlex.split(line)
    known = {option for each in command_line()[name].assemble_argument_collection() for option in each.names}
    assert {option for option in options if option.startswith("--")} <= known
    assert f"prefect=={metadata.version('prefect')}" in SCRIPTS["deployed: Install"]
    deployments = yaml.safe_load((CI.parent / "prefect.yaml").read_text())["deployments"]
    assert "flows.suites.evaluate_suite" in {
        deployment["entrypoint"] for deployment in deployments if deployment["name"] == "local"
    }


def test_workflow_of_images_reads_the_version_and_the_host_to_log_in_to(tmp_path: Path):
    root, output = CI.parents[1], tmp_path / "output"
    script = SCRIPTS["image: Read version and registry"]
    variables = {"PATH": "/usr/bin:/bin", "GITHUB_OUTPUT": str(output), "REGISTRY": "a-host.dev/project/images"}
    subprocess.run(["bash", "-e", "-c", script], cwd=root, env=variables, check=True, timeout=20)
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert output.read_text() == f"version={version}\nregistry=a-host.dev\n"
    [names] = [job["strategy"]["matrix"]["name"] for job in WORKFLOWS["images.yml"]["jobs"].values()]
    assert set(names) == {path.stem for path in root.glob("deployments/images/*.Dockerfile")}


def test_example_of_a_gate_is_valid():
    assert {type(rule) for rule in load_config(str(CI / "gate.yaml"), Gate).rules} == {BoundRule, BaselineRule}


def test_path_from_outside_is_a_single_value_of_the_request(tmp_path: Path):
    path = 'gs://runs/a", "evaluation_path": "/elsewhere'
    (tmp_path / "gate.yaml").write_text((CI / "gate.yaml").read_text())
    fake_prefect = tmp_path / "prefect"
    fake_prefect.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake_prefect.chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", SCRIPTS["deployed: Evaluate, and wait"]],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **{"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "GATE": str(tmp_path / "gate.yaml")},
            **{"MODEL_PATH": path, "RECORDS": "gs://b/records", "SUITE": '{"a": 1}', "DEPLOYMENT": "d/local"},
        },
    )
    assert done.returncode == 0, done.stderr
    arguments = json.loads(done.stdout)
    sent = json.loads(arguments[arguments.index("--params") + 1])
    assert sent["request"] == {"model_path": path, "evaluation_path": "gs://b/records"}
    assert sent["suite"] == '{"a": 1}' and "rules" in sent["gate"]
