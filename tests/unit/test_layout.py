"""The rules that keep four top-level packages of a single application safe, each as a test."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from prefect import Flow
from pydantic import create_model

from flows.hooks import leave_nothing
from tasks.spec.suites import built_in_suites

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "pools", "resources")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROGRAMS = sorted(path for package in PACKAGES for path in (ROOT / package).glob("**/programs"))
LIST_FOLDERS = sorted(path for package in PACKAGES for path in (ROOT / package).glob("**/requirements"))
LISTS = sorted(path for folder in LIST_FOLDERS for path in folder.glob("*.txt"))
LIST_INPUTS = sorted(path for folder in LIST_FOLDERS for path in folder.glob("*.in"))
DEPLOYMENTS: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
ENTRYPOINTS = [deployment["entrypoint"] for deployment in DEPLOYMENTS["deployments"]]

LONGEST_MODULE_LINES = 400
MOST_MODULES_OF_A_FOLDER = 16
FORBIDDEN_NAMES = {"utils", "common", "helpers", "core"}
HEAVY = (
    *(
        "alpaca_eval",
        "datasets",
        "helm",
        "huggingface_hub",
        "inspect_ai",
        "jax",
        "levanter",
        "lm_eval",
        "mlflow",
        "prefect_gcp",
    ),
    *("ray", "torch", "transformers", "vllm", "wandb"),
)
IN_HARNESS_ENVIRONMENTS = {
    *("accelerate", "alpaca_eval", "datasets", "dill", "draccus", "equinox", "evaluate", "fire", "haliax", "helm"),
    *("huggingface_hub", "jax", "jsonlines", "levanter", "lm_eval", "mlflow", "more_itertools", "multiprocess"),
    *("nltk", "numexpr", "numpy", "pandas", "peft", "pyarrow", "ray", "rouge_score", "sacrebleu", "safetensors"),
    *("scipy", "sklearn", "spacy", "sqlitedict", "tenacity", "tokenizers", "torch", "tqdm", "transformers", "vllm"),
    *("wandb", "word2number", "xxhash"),
}
PINNED = re.compile(r"^[A-Za-z0-9._-]+(\[[A-Za-z0-9._,-]+\])?==[A-Za-z0-9.!]+( *;.+)?$")
ABSOLUTE_PATH = re.compile(r"(?<![\w.~>}])/(?:home|Users|root|work)/[\w.]")
REGISTRY = re.compile(
    r"(?:files\.pythonhosted|pypi|registry\.npmjs|download\.pytorch)\.org|/[Aa]rtifactory/|/simple/?(?:\s|[\"']|$)"
    r"|(?:index-url|find-links|index_url|find_links)[ =:]+[\"']?(?:https?|file):",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def committed() -> dict[Path, str]:
    """Returns every text file in the repository, committed or not, unless ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    texts = {}
    for path in (ROOT / name for name in names if name):
        if path.is_file() and path.suffix != ".png":
            content = path.read_bytes()
            assert b"\0" not in content, f"{path} is no text: the memory of a program that crashed?"
            texts[path.relative_to(ROOT)] = content.decode(errors="replace")
    return texts


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_an_init_file(package: str):
    assert (ROOT / package / "__init__.py").is_file()


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_deployment_entrypoint_is_a_module_path_that_imports_to_a_flow(entrypoint: str):
    assert re.fullmatch(r"flows(\.\w+)+", entrypoint)
    module, _, name = entrypoint.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), Flow)


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_deployed_flow_cleans_up_after_it_was_cancelled_and_after_it_crashed(entrypoint: str):
    module, _, name = entrypoint.rpartition(".")
    deployed = getattr(importlib.import_module(module), name)
    assert [deployed.on_cancellation_hooks, deployed.on_crashed_hooks] == [[leave_nothing], [leave_nothing]]


@pytest.mark.parametrize("deployment", DEPLOYMENTS["deployments"], ids=lambda deployment: deployment["entrypoint"])
def test_parameters_of_a_deployment_are_those_of_its_flow_which_is_named_after_its_entrypoint(
    deployment: dict[str, Any],
):
    module, _, name = deployment["entrypoint"].rpartition(".")
    deployed = getattr(importlib.import_module(module), name)
    assert deployed.name == name.replace("_", "-")
    parameters = inspect.signature(deployed.fn, eval_str=True).parameters
    fields: dict[str, Any] = {field: (parameters[field].annotation, ...) for field in deployment["parameters"]}
    create_model("Parameters", **fields).model_validate(deployment["parameters"])
    if "suite" in deployment["parameters"]:
        assert deployment["parameters"]["suite"] in built_in_suites()


def test_deployments_pull_nothing_anywhere():
    assert [place["pull"] for place in (DEPLOYMENTS, *DEPLOYMENTS["deployments"])] == [[]] * (len(ENTRYPOINTS) + 1)


@cache
def installed_packages() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@pytest.mark.parametrize("folder", [ROOT / "flows", *PROGRAMS], ids=lambda folder: str(folder.relative_to(ROOT)))
def test_folder_that_can_be_first_on_the_path_shadows_no_library(folder: Path):
    installed = {name for name in installed_packages() if name not in PACKAGES}
    stems = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert not stems & (installed | IN_HARNESS_ENVIRONMENTS | sys.stdlib_module_names)


def test_pytest_imports_test_files_by_path():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "--import-mode=importlib" in options["addopts"]


def test_application_cannot_be_uploaded():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "Private :: Do Not Upload" in project["classifiers"]


def test_module_names_say_what_is_inside():
    assert not [path for path in MODULES if {path.stem, *path.relative_to(ROOT).parts[:-1]} & FORBIDDEN_NAMES]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_requirement_list_pins_every_line_to_a_public_version_and_names_no_address(path: Path):
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert lines and not [line for line in lines if not PINNED.match(line) or "://" in line]


@pytest.mark.parametrize("path", LIST_INPUTS, ids=lambda path: path.name)
def test_requirement_input_names_no_address_and_no_local_version(path: Path):
    lines = [line.partition("#")[0] for line in path.read_text().splitlines()]
    options = [line for line in lines if line.startswith("-") and not re.fullmatch(r"-[cr] [\w.-]+\s*", line)]
    assert not options and not [line for line in lines if "://" in line or re.search(r"=\S*\+", line)]


def test_environment_is_read_in_settings_and_programs_only():
    allowed = {ROOT / "resources" / "settings.py", *(path for folder in PROGRAMS for path in folder.glob("*.py"))}
    assert not [path for path in MODULES if path not in allowed and reads_environment(ast.parse(path.read_text()))]


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", None) == "os":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            return True
    return False


def test_importing_flows_and_the_command_pulls_in_no_engine_harness_or_vendor_sdk():
    modules = "flows.evaluation, flows.suites, flows.staging, flows.cli.app"
    code = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(done.stdout.split()) & set(HEAVY)


def test_importing_the_command_does_not_import_prefect():
    code = "import sys, flows.cli.app; print('prefect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("folder", PROGRAMS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_programs_are_scripts_not_a_package(folder: Path):
    assert not (folder / "__init__.py").exists()


def test_committed_files_name_no_registry(committed: dict[Path, str]):
    configured = addresses_of_this_machines_registries()
    registries = {
        path: match.group()
        for path, text in committed.items()
        if (match := REGISTRY.search(text)) or (match := next(iter(hits(text, configured)), None))
    }
    assert not registries


def hits(text: str, addresses: set[str]) -> list[re.Match[str]]:
    return [match for address in addresses if (match := re.search(re.escape(address), text))]


def addresses_of_this_machines_registries() -> set[str]:
    """Returns hosts (with port) from this machine's configuration of pip and uv, except loopback without a port."""
    values = [value for name, value in os.environ.items() if re.match(r"(PIP|UV)_.*(INDEX|LINKS)", name)]
    parser = configparser.RawConfigParser()
    parser.read([Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"])
    values += [value for section in parser.sections() for key, value in parser.items(section) if "index" in key]
    hosts = {urlsplit(part).netloc.rpartition("@")[2] for value in values for part in value.split()}
    return {host for host in hosts if host and host not in {"localhost", "127.0.0.1"}}


def test_committed_files_name_no_home_or_work_directory(committed: dict[Path, str]):
    folders = [re.escape(str(folder)) for folder in (ROOT, Path.home()) if folder != Path("/")]
    own_folders = re.compile(rf"(?:{'|'.join(folders)})(?=[/\s\"'`])")
    matches = {
        path: match.group()
        for path, text in committed.items()
        if (match := ABSOLUTE_PATH.search(text)) or (match := own_folders.search(text))
    }
    assert not matches


def test_modules_are_short_enough_to_read():
    assert not [path for path in MODULES if len(path.read_text().splitlines()) >= LONGEST_MODULE_LINES]


def test_folders_hold_as_many_modules_as_a_reader_takes_in():
    held = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in held.items() if count > MOST_MODULES_OF_A_FOLDER}


def test_tasks_have_few_rooms_on_few_floors():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [floors] = [contract["layers"] for contract in contracts if contract.get("containers") == ["tasks"]]
    named = {room.strip() for floor in floors for room in floor.split("|")}
    rooms = {path.parent.name for path in (ROOT / "tasks").glob("*/__init__.py")}
    assert named == {*rooms, "errors"} and len(rooms) <= 15 and len(floors) <= 8
