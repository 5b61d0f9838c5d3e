"""Environments built by a fake uv that records its arguments; a single environment is built by the real uv."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.polling import eventually
from resources.environments.environments import (
    ENVIRONMENTS,
    KEPT_LIST,
    AliasDistribution,
    Environment,
    EnvironmentSpec,
    ensure_environment,
    pinned_versions,
)
from resources.errors import BadInput, EnvironmentBuildFailed
from resources.settings import settings, with_pinned_lists

pytestmark = pytest.mark.timeout(60)

FAKE_UV = """\
import json, os, pathlib, sys
arguments = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([arguments, os.environ.get("UV_FIND_LINKS")]) + "\\n")
if arguments[0] == "venv":
    python = pathlib.Path(arguments[-1], "bin", "python")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    pathlib.Path(arguments[-1], "lib/python3.11/site-packages/fake_engine-1.2.3.dist-info").mkdir(parents=True)
    sys.exit()
source = "torch's CPU index" if "--torch-backend" in arguments else (
    "find-links" if os.environ.get("UV_FIND_LINKS") else "registry")
print(" + package==1", "Resolved from " + source, sep="\\n")
if source in {failing!r}:
    sys.exit("error: could not reach " + source)
"""


@dataclass
class Machine:
    """A machine with a fake uv, of which the `failing` sources cannot be reached, and a spec of an environment."""

    folder: Path
    spec: EnvironmentSpec
    failing: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)

    @property
    def uv(self) -> Path:
        program, uv = self.folder / "uv.py", self.folder / "uv"
        program.write_text(FAKE_UV.format(calls=str(self.folder / "calls"), failing=list(self.failing)))
        uv.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        uv.chmod(0o755)
        return uv

    def build(self, *links: str, place: str = "environments", uv: Path | None = None, **changes: Any) -> Environment:
        return ensure_environment(
            replace(self.spec, **changes),
            on_progress=self.lines.append,
            uv_binary=uv or self.uv,
            environments_dir=self.folder / place,
            find_links=links,
        )

    @property
    def installs(self) -> list[tuple[list[str], str | None]]:
        calls = [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        return [(arguments, links) for arguments, links in calls if arguments[0] == "pip"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    requirements = tmp_path / "engine.txt"
    requirements.write_text("torch==2.13.0\n")
    return Machine(tmp_path, EnvironmentSpec("engine", requirements, smoke_import="json", torch=True))


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / f"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_{os.uname().machine}.whl").touch()
    return str(folder)


@pytest.mark.parametrize(
    ("failing", "has_wheel", "sources"),
    [
        ((), True, ["find-links"]),
        (("find-links",), True, ["find-links", "index"]),
        (("find-links", "torch's CPU index"), True, ["find-links", "index", "registry"]),
        ((), False, ["index"]),
        (("torch's CPU index",), False, ["index", "registry"]),
    ],
)
def test_torch_is_looked_for_in_order_and_no_further_than_needed(
    failing: tuple[str, ...], has_wheel: bool, sources: list[str], machine: Machine, wheels: str
) -> None:
    machine.failing = failing
    machine.build(*([wheels] if has_wheel else []))
    used = [
        "index" if "--torch-backend" in arguments else "find-links" if links else "registry"
        for arguments, links in machine.installs
    ]
    assert used == sources


def test_every_source_failing_is_reported_with_last_lines_and_a_command_to_run(machine: Machine, wheels: str) -> None:
    machine.failing = ("find-links", "torch's CPU index", "registry")
    with pytest.raises(EnvironmentBuildFailed) as caught:
        machine.build(wheels)
    for source in machine.failing:
        assert f"could not reach {source}" in caught.value.found
    assert f"{machine.uv} pip install" in caught.value.remedy


def test_credentials_of_a_find_links_page_are_not_shown(machine: Machine) -> None:
    machine.failing = ("find-links",)
    with pytest.raises(EnvironmentBuildFailed) as caught:
        machine.build("https://user:secret@wheels.example/", torch=False)
    assert "UV_FIND_LINKS=https://***@wheels.example/" in caught.value.remedy
    assert "secret" not in str(caught.value)


def test_lists_and_overrides_are_installed_and_told_about(machine: Machine) -> None:
    overrides = machine.folder / "overrides.in"
    overrides.write_text("triton ; sys_platform == 'never'\n")
    environment = machine.build(overrides=overrides, torch=False)
    [(arguments, _)] = machine.installs
    assert arguments[arguments.index("--requirements") + 1] == str(machine.spec.requirements)
    assert arguments[arguments.index("--overrides") + 1] == str(overrides)
    assert arguments[arguments.index("--python") + 1] == str(environment.python)
    assert "engine: Resolved from registry" in machine.lines
    assert not any("package==1" in line for line in machine.lines)


def test_finished_environment_is_reused_and_a_changed_list_builds_another(machine: Machine) -> None:
    first = machine.build()
    assert machine.build() == first
    assert len(machine.installs) == 1
    machine.spec.requirements.write_text("torch==2.14.0\n")
    assert machine.build().directory != first.directory
    assert machine.build(python=sys.executable).directory != first.directory


def test_unfinished_environment_is_built_again_from_nothing(machine: Machine) -> None:
    environment = machine.build()
    (environment.directory / ".complete").unlink()
    (environment.directory / "left-over").touch()
    machine.build()
    assert not (environment.directory / "left-over").exists()
    assert (environment.directory / ".complete").is_file()


def test_packages_that_do_not_fit_are_found_by_the_smoke_import_and_not_taken_for_done(machine: Machine) -> None:
    for message in ("No module named 'no_such_module'", r"by hand.*import no_such_module"):
        with pytest.raises(EnvironmentBuildFailed, match=message):
            machine.build(smoke_import="no_such_module")
    assert len(machine.installs) == 2


def test_alias_distribution_is_found_under_its_second_name(machine: Machine) -> None:
    alias = AliasDistribution(alias="engine", distribution="fake-engine", local_version="cpu")
    environment = machine.build(alias_distribution=alias)
    [packages] = environment.directory.glob("lib/python*/site-packages")
    # In a separate process: other tests replace this process's lookup of distributions.
    look = "import sys, importlib.metadata as m; sys.path.insert(0, sys.argv[1]); print(m.version('engine'))"
    command = [sys.executable, "-I", "-c", look, str(packages)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "1.2.3+cpu"
    with pytest.raises(EnvironmentBuildFailed, match="the distribution other"):
        machine.build(alias_distribution=replace(alias, distribution="other"))


def test_environment_wanted_twice_at_once_is_built_once(machine: Machine) -> None:
    uv = machine.uv
    with ThreadPoolExecutor(4) as pool:
        environments = list(pool.map(lambda _: machine.build(uv=uv), range(4)))
    assert len(set(environments)) == 1
    assert len(machine.installs) == 1


def test_environment_built_ahead_is_taken_and_what_lacks_there_is_built_in_the_cache(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = machine.build(place="image")
    monkeypatch.setenv("ASSAY_BUILT_ENVIRONMENTS", str(ahead.directory.parent))
    settings.cache_clear()
    assert machine.build(place="cache") == ahead
    assert machine.build(place="cache", name="other").directory.is_relative_to(machine.folder / "cache")


def test_lock_of_a_killed_builder_is_held_until_its_uv_has_ended(machine: Machine, tmp_path: Path) -> None:
    uv, go = tmp_path / "uv", tmp_path / "go"
    uv.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nuntil [ -e {go} ]; do sleep 0.02; done\nexit 1\n")
    uv.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from resources.environments.environments import *; "
        "spec = EnvironmentSpec(name='engine', requirements=Path(sys.argv[1]), smoke_import=None); "
        "ensure_environment(spec, uv_binary=Path(sys.argv[2]), environments_dir=Path(sys.argv[3]), find_links=())"
    )
    folder = tmp_path / "environments"
    builder = subprocess.Popen([sys.executable, "-c", program, machine.spec.requirements, uv, folder])
    eventually((tmp_path / "started").exists)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(machine.build, uv=uv, torch=False, smoke_import=None)
        eventually(lambda: machine.lines)
        assert "another process is building it" in machine.lines[0]
        assert len((tmp_path / "started").read_text().splitlines()) == 1
        go.touch()
        with pytest.raises(EnvironmentBuildFailed):
            second.result(30)


def test_missing_interpreter_is_named(machine: Machine) -> None:
    spec = replace(machine.spec, python="9.9", torch=False)
    with pytest.raises(EnvironmentBuildFailed, match=r"no Python 9\.9"):
        ensure_environment(spec, environments_dir=machine.folder / "environments")


def test_named_environments_have_lists_that_exist() -> None:
    assert set(ENVIRONMENTS) == {"vllm-cpu", "vllm-cuda", "vllm-tpu"}
    for spec in ENVIRONMENTS.values():
        assert spec.requirements.is_file()
        assert spec.overrides is None or spec.overrides.is_file()


def test_real_uv_builds_an_environment_that_runs(tmp_path: Path) -> None:
    requirements = tmp_path / "empty.txt"
    requirements.write_text("# nothing\n")
    spec = EnvironmentSpec(name="empty", requirements=requirements, smoke_import="json")
    environment = ensure_environment(spec, environments_dir=tmp_path / "environments", find_links=())
    output = subprocess.run([environment.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
    assert output.stdout.strip() == str(environment.directory)


def test_list_named_in_the_settings_is_built_and_kept_separately(machine: Machine, tmp_path: Path) -> None:
    older = tmp_path / "engine-2.12.txt"
    older.write_text("# an older list\ntorch==2.12.0 ; python_version > '3'\n")
    own = machine.build()
    with with_pinned_lists({"engine": older, "another": tmp_path / "none"}):
        other = machine.build()
        versions = pinned_versions(machine.spec)
    assert own.directory != other.directory
    assert (other.directory / KEPT_LIST).read_text() == older.read_text()
    assert versions["torch"] == "2.12.0"
    assert versions["packages"] != pinned_versions(machine.spec)["packages"]
    assert pinned_versions(machine.spec)["torch"] == "2.13.0"
    missing = with_pinned_lists({"engine": tmp_path / "none.txt"})
    with missing, pytest.raises(BadInput, match=r"none\.txt is not there"):
        machine.build()


def test_digest_of_a_list_does_not_depend_on_its_comments_and_order(tmp_path: Path) -> None:
    lists = [tmp_path / "one.txt", tmp_path / "other.txt"]
    lists[0].write_text("a==1\nb[x]==2  # via a\n")
    lists[1].write_text("# header\nb[x]==2\na==1\n")

    first, second = (pinned_versions(EnvironmentSpec("engine", path, smoke_import=None)) for path in lists)

    assert first == second
