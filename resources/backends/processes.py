"""Start of a job's process, locally or on a node: interpreter, arguments, variables, folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from resources.config import CpuConfig, Device, GpuConfig, TpuConfig
from resources.environments.environments import EnvironmentSpec, ensure_environment
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs.jobs import Command, EnvironmentConfig
from resources.jobs.user_key import USER_KEY_VARIABLE
from resources.settings import process_environment, settings
from resources.storage.files import replace_text

PROGRAMS = Path(__file__).parent / "programs"
_LIBTPU_ARGUMENTS = {"v5p": "--xla_tpu_scoped_vmem_limit_kib=50000", "v6e": "--xla_tpu_scoped_vmem_limit_kib=98304"}
"""By TPU generation: limits of a kernel's fast memory found by Marin's trainings."""
_OURS = ("pydantic>=2", "pydantic-settings")  # needed by a call to announce, and to submit jobs itself


def existing_folder(path: Path) -> Path:
    """Returns the folder's absolute path; raises `BadInput` if it does not exist."""
    if not path.is_dir():
        raise BadInput(expected="a folder that exists", found=str(path), remedy="Correct the path, or create it.")
    return path.absolute()


def workspace_of(environment: EnvironmentConfig, *, backend: str) -> Path:
    """Returns the folder with a job's code; `backend` is the subject and verb of "… no containers" in the error."""
    if environment.workspace is None:
        raise UnsatisfiableResources(
            expected=f"an environment made of a workspace and packages; {backend} no containers",
            found=f"docker_image={environment.docker_image!r}",
            remedy="Give a workspace and pip_packages, or submit to a backend that runs containers.",
        )
    return existing_folder(environment.workspace)


def moved(path: Path, folder: Path, *, to: Path) -> Path:
    """Returns a path below a folder as a path below `to`; other paths are unchanged."""
    return to / path.relative_to(folder) if path.is_relative_to(folder) else path


def import_folders() -> list[str]:
    """Returns the entries of `sys.path` outside of the interpreter's own folders, as absolute paths."""
    interpreters = (Path(sys.prefix), Path(sys.base_prefix))
    folders = [Path(entry).absolute() for entry in sys.path]
    return [str(folder) for folder in folders if not any(folder.is_relative_to(root) for root in interpreters)]


def argv_of(entrypoint: Command | Path, *, python: Path, imports: Iterable[str]) -> list[str]:
    """Returns the command to execute: the given command, or a call of the pickle with `imports` as path."""
    match entrypoint:
        case Command(command=command, args=args):
            return [command, *args]
        case Path():
            return [str(python), str(PROGRAMS / "run_call.py"), str(entrypoint), *imports]


def start_supervisor(
    folder: Path, *marks: str, variables: Mapping[str, str], stdin: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Starts `supervise.py` on the specification in a folder, in a session of its own."""
    with (folder / "supervisor.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", str(PROGRAMS / "supervise.py"), str(folder), *marks],
            env=variables,
            cwd=folder,
            stdin=stdin,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def variables_of(
    environment: EnvironmentConfig, *, python: Path, defaults: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Returns the whole environment of a job's processes: inherited, from the request, and `given` by the backend.

    The request overrides `defaults`, such as the variables of the job's device.
    """
    own = {"PYTHONUNBUFFERED": "1", **defaults, **environment.env_vars, **given}
    variables = process_environment(own, inherited=environment.inherited)
    if USER_KEY_VARIABLE not in own:  # with it, a job could sign the results of other jobs
        variables.pop(USER_KEY_VARIABLE, None)
    return {**variables, "PATH": os.pathsep.join([str(python.parent), variables.get("PATH", os.defpath)])}


def device_variables(device: Device) -> dict[str, str]:
    """Returns default variables for programs that compute on a device; the job's own variables override them.

    JAX fails, instead of using the CPU, if a platform named in `JAX_PLATFORMS` is missing. Arguments of libtpu are set
    only if they suit every type that the slice may have.
    """
    match device:
        case CpuConfig():
            return {"JAX_PLATFORMS": "cpu"}
        case GpuConfig():
            return {"JAX_PLATFORMS": "cuda,cpu"}
        case TpuConfig(choices=choices):
            first, *others = {_LIBTPU_ARGUMENTS.get(tpu.slice.generation) for tpu in choices}
            return {"JAX_PLATFORMS": "tpu,cpu", **({"LIBTPU_INIT_ARGS": first} if first and not others else {})}


def interpreter_of(environment: EnvironmentConfig, *, workspace: Path) -> Path:
    """Returns the interpreter of the job's environment; if it requests packages, builds the environment first."""
    if environment.python is not None:
        if not environment.python.exists():
            raise BadInput(
                expected="the interpreter of a finished environment",
                found=f"{environment.python} does not exist",
                remedy="Correct its path; Assay rebuilds its own environments at the next run",
            )
        return environment.python.absolute()
    requirements = list(environment.pip_packages)
    if environment.extras:
        project = existing_folder(workspace) / "pyproject.toml"
        if not project.is_file():
            raise BadInput(
                expected=f"a project with extras {', '.join(environment.extras)} in {workspace}",
                found="no pyproject.toml there",
                remedy="Correct the workspace, or name the packages in pip_packages.",
            )
        requirements += [f"# project {hashlib.sha256(project.read_bytes()).hexdigest()}"]  # changes with the project
        requirements += [f"-e {workspace}[{','.join(environment.extras)}]"]
    if not requirements:
        return Path(sys.executable)
    return _build(requirements)


def _build(requirements: Sequence[str]) -> Path:
    ours = [f"cloudpickle=={version('cloudpickle')}", *_OURS]
    content = "\n".join([*requirements, *ours, ""])
    lists = settings().environments_dir / "lists"
    lists.mkdir(parents=True, exist_ok=True)
    path = lists / f"job-{hashlib.sha256(content.encode()).hexdigest()[:12]}.txt"
    replace_text(path, content)
    return ensure_environment(EnvironmentSpec(name="job", requirements=path, smoke_import="cloudpickle")).python
