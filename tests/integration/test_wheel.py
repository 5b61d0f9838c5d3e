"""The wheel, installed away from the checkout: its commands find their programs, lists and deployments there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uv
import yaml

from resources.settings import process_environment

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("flows", "tasks", "pools", "resources")
DEPLOYMENTS = [f"deployments/{name}" for name in ("prefect.yaml", "regions.yaml", "work-pools")]
DEPLOYED = ("flows.series.evaluate_checkpoints", "flows.reconcile.reconcile_policy")
IMPORT_EVERYTHING = """
import importlib, pathlib, sys
home = pathlib.Path(sys.argv[1])
files = [path.relative_to(home) for name in sys.argv[2:] for path in home.joinpath(name).rglob("*.py")]
names = [".".join(file.with_suffix("").parts) for file in files if not {"programs", "bundled"} & set(file.parts)]
modules = [importlib.import_module(name.removesuffix(".__init__")) for name in names]
assert all(pathlib.Path(module.__file__).is_relative_to(home) for module in modules)
print(len(modules))
"""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel that also sees the libraries of this environment."""

    home: Path
    folder: Path

    @property
    def packages(self) -> Path:
        return next((self.home / "lib").glob("python*/site-packages"))

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the wheel in a folder without files of the checkout."""
        own = {"PREFECT_HOME": str(self.folder / "prefect"), **variables}
        return subprocess.run(
            [str(self.home / "bin" / command[0]), *command[1:]],
            cwd=self.folder,
            env=process_environment(own),
            capture_output=True,
            text=True,
            timeout=500,
        )

    def assay(self, *arguments: str, **variables: str) -> str:
        done = self.run("assay", *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    installed = Installed(folder / "environment", folder / "elsewhere")
    installed.folder.mkdir()
    for command in (
        ["build", "--wheel", "--out-dir", str(folder), str(ROOT)],
        ["venv", "--python", sys.executable, str(installed.home)],
    ):
        subprocess.run([uv.find_uv_bin(), *command, "--quiet"], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    install = ["pip", "install", "--quiet", "--no-deps", "--python", str(installed.home / "bin" / "python"), str(wheel)]
    subprocess.run([uv.find_uv_bin(), *install], check=True, capture_output=True)
    # A line of a .pth file adds a folder but does not process the .pth files in it: the checkout stays out.
    (installed.packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return installed


def test_wheel_holds_every_file_of_the_packages_and_they_import_from_there(installed: Installed):
    lists = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    committed = subprocess.run(
        [*lists, *PACKAGES, *DEPLOYMENTS], capture_output=True, text=True, check=True
    ).stdout.split()
    files = [name for name in committed if (ROOT / name).is_file()]
    places = [re.sub("^deployments/", "resources/deployments/", name) for name in files]
    assert files and [name for name in places if not (installed.packages / name).is_file()] == []
    done = installed.run("python", "-c", IMPORT_EVERYTHING, str(installed.packages), *PACKAGES)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(bool(re.search(r"^(?!.*/(programs|bundled)/).*\.py$", name)) for name in files)


def test_wheel_shows_the_machine_the_suites_and_the_regions(installed: Installed):
    done = installed.run("assay", "doctor", "--json", ASSAY_COMMIT="c0ffee")
    assert done.returncode in (0, 2), done.stderr  # 2 where this machine lacks something
    seen = {finding["seen"] for finding in json.loads(done.stdout)}
    assert {str(installed.packages / "resources/deployments/prefect.yaml"), f"{VERSION}, commit c0ffee"} <= seen
    assert {"demo", "key_evals"} <= {suite["name"] for suite in json.loads(installed.assay("suites", "--json"))}
    assert "train" in installed.assay("demo", "--help").lower()
    assert "us-east5.yaml" in installed.assay("cluster", "write"), "the regions file is there"


@pytest.fixture(scope="module")
def server(installed: Installed, prefect_api: str) -> dict[str, str]:
    variables = {"PREFECT_API_URL": prefect_api}
    # A region in which no other test has a work pool: the tests share the server.
    table = yaml.safe_load((installed.packages / "resources/deployments/regions.yaml").read_text())
    (installed.folder / "regions.yaml").write_text(yaml.safe_dump({**table, "regions": table["regions"][4:5]}))
    made = json.loads(installed.assay("work-pools", "apply", "--regions", "regions.yaml", "--json", **variables))
    assert "assay-local" in {change["work_pool"] for change in made}
    return variables


def test_wheel_deploys_its_flows_with_prefect(installed: Installed, server: dict[str, str], prefect_api: str):
    # Only two deployments: each takes Prefect a second, and other tests check the list without a server.
    content = yaml.safe_load((installed.packages / "resources/deployments/prefect.yaml").read_text())
    content["deployments"] = [
        deployment for deployment in content["deployments"] if deployment["entrypoint"] in DEPLOYED
    ]
    (installed.folder / "prefect.yaml").write_text(yaml.safe_dump(content))
    deploy = ["-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "prefect.yaml"]
    done = installed.run("python", *deploy, **server)
    assert done.returncode == 0, done.stdout + done.stderr
    local = {"deployments": {"name": {"any_": ["local"]}}, "limit": 200}
    deployed = httpx.post(f"{prefect_api}/deployments/filter", json=local).json()
    assert {deployment["entrypoint"] for deployment in deployed} == set(DEPLOYED)


def test_wheel_deploys_a_policy(installed: Installed, server: dict[str, str], tmp_path: Path):
    folders = {"runs": [str(tmp_path / "run")], "evaluation_path": str(tmp_path / "evaluations")}
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump({"name": "of-the-wheel", "suites": ["demo"], **folders}))
    changes = json.loads(installed.assay("policy", "deploy", str(file), "--json", **server))
    assert ("reconcile-policy/of-the-wheel", "create") in {(change["name"], change["action"]) for change in changes}
