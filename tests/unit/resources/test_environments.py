"""Environments built by a fake uv that records its arguments; a single environment is built by the real uv."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

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


@pytest.fixture(autouse=True)
def no_uv_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / f"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_{os.uname().machine}.whl").touch()
    return str(folder)


@pytest.fixture
def spec(tmp_path: Path) -> EnvironmentSpec:
    requirements = tmp_path / "engine.txt"
    requirements.write_text("torch==2.13.0\n")
    return EnvironmentSpec(name="engine", requirements=requirements, torch=True, smoke_import="json")


@pytest.fixture
def fake_uv(tmp_path: Path) -> Callable[..., Path]:
    def make(*failing: str) -> Path:
        program, uv = tmp_path / "uv.py", tmp_path / "uv"
        program.write_text(FAKE_UV.format(calls=str(tmp_path / "calls"), failing=list(failing)))
        uv.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        uv.chmod(0o755)
        return uv

    return make


def installs(tmp_path: Path) -> list[tuple[list[str], str | None]]:
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    return [(arguments, links) for arguments, links in calls if arguments[0] == "pip"]


def build(spec: EnvironmentSpec, tmp_path: Path, uv: Path, *links: str, lines: list[str] | None = None) -> Environment:
    tell = None if lines is None else lines.append
    folder = tmp_path / "environments"
    return ensure_environment(spec, on_progress=tell, uv_binary=uv, environments_dir=folder, find_links=links)


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
    failing: tuple[str, ...],
    has_wheel: bool,
    sources: list[str],
    spec: EnvironmentSpec,
    tmp_path: Path,
    fake_uv: Callable[..., Path],
    wheels: str,
) -> None:
    build(spec, tmp_path, fake_uv(*failing), *([wheels] if has_wheel else []))
    used = [
        "index" if "--torch-backend" in arguments else "find-links" if links else "registry"
        for arguments, links in installs(tmp_path)
    ]
    assert used == sources


def test_every_source_failing_is_reported_with_last_lines_and_a_command_to_run(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path], wheels: str
) -> None:
    uv = fake_uv("find-links", "torch's CPU index", "registry")
    with pytest.raises(EnvironmentBuildFailed) as caught:
        build(spec, tmp_path, uv, wheels)
    for source in ("find-links", "torch's CPU index", "registry"):
        assert f"could not reach {source}" in caught.value.found
    assert f"{uv} pip install" in caught.value.remedy


def test_credentials_of_a_find_links_page_are_not_shown(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    plain = replace(spec, torch=False)
    with pytest.raises(EnvironmentBuildFailed) as caught:
        build(plain, tmp_path, fake_uv("find-links"), "https://user:secret@wheels.example/")
    assert "UV_FIND_LINKS=https://***@wheels.example/" in caught.value.remedy
    assert "secret" not in str(caught.value)


def test_lists_and_overrides_are_installed_and_told_about(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    overrides = tmp_path / "overrides.in"
    overrides.write_text("triton ; sys_platform == 'never'\n")
    lines: list[str] = []
    environment = build(replace(spec, overrides=overrides, torch=False), tmp_path, fake_uv(), lines=lines)
    [(arguments, _)] = installs(tmp_path)
    assert arguments[arguments.index("--requirements") + 1] == str(spec.requirements)
    assert arguments[arguments.index("--overrides") + 1] == str(overrides)
    assert arguments[arguments.index("--python") + 1] == str(environment.python)
    assert "engine: Resolved from registry" in lines
    assert not any("package==1" in line for line in lines)


def test_finished_environment_is_reused_and_a_changed_list_builds_another(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    uv = fake_uv()
    first = build(spec, tmp_path, uv)
    assert build(spec, tmp_path, uv) == first
    assert len(installs(tmp_path)) == 1
    spec.requirements.write_text("torch==2.14.0\n")
    assert build(spec, tmp_path, uv).directory != first.directory
    assert build(replace(spec, python=sys.executable), tmp_path, uv).directory != first.directory


def test_unfinished_environment_is_built_again_from_nothing(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    uv = fake_uv()
    environment = build(spec, tmp_path, uv)
    (environment.directory / ".complete").unlink()
    (environment.directory / "left-over").touch()
    build(spec, tmp_path, uv)
    assert not (environment.directory / "left-over").exists()
    assert (environment.directory / ".complete").is_file()


def test_packages_that_do_not_fit_are_found_by_the_smoke_import_and_not_taken_for_done(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    unfit, uv = replace(spec, smoke_import="no_such_module"), fake_uv()
    with pytest.raises(EnvironmentBuildFailed, match="No module named 'no_such_module'"):
        build(unfit, tmp_path, uv)
    with pytest.raises(EnvironmentBuildFailed, match=r"by hand.*import no_such_module"):
        build(unfit, tmp_path, uv)
    assert len(installs(tmp_path)) == 2


def test_alias_distribution_is_found_under_its_second_name(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    alias = AliasDistribution(alias="engine", distribution="fake-engine", local_version="cpu")
    environment = build(replace(spec, alias_distribution=alias), tmp_path, fake_uv())
    [packages] = environment.directory.glob("lib/python*/site-packages")
    # In a separate process: other tests replace this process's lookup of distributions.
    look = "import sys, importlib.metadata as m; sys.path.insert(0, sys.argv[1]); print(m.version('engine'))"
    command = [sys.executable, "-I", "-c", look, str(packages)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "1.2.3+cpu"


def test_alias_of_a_distribution_that_is_not_there_is_an_error(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    alias = AliasDistribution(alias="engine", distribution="other", local_version="cpu")
    with pytest.raises(EnvironmentBuildFailed, match="other"):
        build(replace(spec, alias_distribution=alias), tmp_path, fake_uv())


def test_environment_wanted_twice_at_once_is_built_once(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    uv = fake_uv()
    with ThreadPoolExecutor(4) as pool:
        environments = list(pool.map(lambda _: build(spec, tmp_path, uv), range(4)))
    assert len(set(environments)) == 1
    assert len(installs(tmp_path)) == 1


def test_environment_built_ahead_is_taken_and_what_lacks_there_is_built_in_the_cache(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = build(spec, tmp_path / "image", fake_uv())
    monkeypatch.setenv("ASSAY_BUILT_ENVIRONMENTS", str(ahead.directory.parent))
    settings.cache_clear()
    uv = fake_uv()
    assert build(spec, tmp_path / "cache", uv) == ahead
    other = build(replace(spec, name="other"), tmp_path / "cache", uv)
    assert other.directory.is_relative_to(tmp_path / "cache")


def test_lock_of_a_killed_builder_is_held_until_its_uv_has_ended(spec: EnvironmentSpec, tmp_path: Path) -> None:
    uv, go = tmp_path / "uv", tmp_path / "go"
    uv.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nuntil [ -e {go} ]; do sleep 0.02; done\nexit 1\n")
    uv.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from resources.environments.environments import *; "
        "spec = EnvironmentSpec(name='engine', requirements=Path(sys.argv[1]), smoke_import=None); "
        "ensure_environment(spec, uv_binary=Path(sys.argv[2]), environments_dir=Path(sys.argv[3]), find_links=())"
    )
    folder = tmp_path / "environments"
    builder = subprocess.Popen([sys.executable, "-c", program, spec.requirements, uv, folder])
    eventually((tmp_path / "started").exists)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(build, replace(spec, torch=False, smoke_import=None), tmp_path, uv, lines=lines)
        eventually(lambda: lines)
        assert "another process is building it" in lines[0]
        assert len((tmp_path / "started").read_text().splitlines()) == 1
        go.touch()
        with pytest.raises(EnvironmentBuildFailed):
            second.result(30)


def test_missing_interpreter_is_named(spec: EnvironmentSpec, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildFailed, match=r"no Python 9\.9"):
        ensure_environment(replace(spec, python="9.9", torch=False), environments_dir=tmp_path / "environments")


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


def test_list_named_in_the_settings_is_built_and_kept_separately(
    spec: EnvironmentSpec, tmp_path: Path, fake_uv: Callable[..., Path]
) -> None:
    older = tmp_path / "engine-2.12.txt"
    older.write_text("# an older list\ntorch==2.12.0 ; python_version > '3'\n")
    own = build(spec, tmp_path, fake_uv())

    with with_pinned_lists({"engine": older, "another": tmp_path / "none"}):
        other = build(spec, tmp_path, fake_uv())
        versions = pinned_versions(spec)

    assert own.directory != other.directory
    assert (other.directory / KEPT_LIST).read_text() == older.read_text()
    assert versions["torch"] == "2.12.0"
    assert versions["packages"] != pinned_versions(spec)["packages"]
    assert pinned_versions(spec)["torch"] == "2.13.0"


def test_list_named_in_the_settings_that_is_not_there_is_refused(spec: EnvironmentSpec, tmp_path: Path) -> None:
    with with_pinned_lists({"engine": tmp_path / "none.txt"}), pytest.raises(BadInput, match=r"none\.txt is not there"):
        build(spec, tmp_path, tmp_path / "uv")


def test_digest_of_a_list_does_not_depend_on_its_comments_and_order(tmp_path: Path) -> None:
    lists = [tmp_path / "one.txt", tmp_path / "other.txt"]
    lists[0].write_text("a==1\nb[x]==2  # via a\n")
    lists[1].write_text("# header\nb[x]==2\na==1\n")

    first, second = (pinned_versions(EnvironmentSpec("engine", path, smoke_import=None)) for path in lists)

    assert first == second
