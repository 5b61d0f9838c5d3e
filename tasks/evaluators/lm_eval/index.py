"""Benchmarks that lm-eval can run: those in a user's own folder, and lm-eval's own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from pydantic import BaseModel, ValidationError

from resources.errors import EnvironmentBuildFailed, not_there
from resources.jobs import inheritance
from resources.settings import process_environment, settings
from resources.storage import storage
from resources.storage.regular_files import read_cached
from tasks.errors import HarnessFailed
from tasks.spec.benchmarks import benchmarks_uri, read_benchmark
from tasks.spec.evaluation import EvaluationConfig

PROGRAM = Path(__file__).parent / "programs" / "run_lm_eval.py"
_LIST_SECONDS = 600  # 13 s to read fifteen thousand benchmark files on 2 cores; a network disk takes longer


@dataclass
class OwnBenchmarks:
    """Benchmarks in a user's own folder."""

    names: set[str] = field(default_factory=set)  # benchmarks, groups and tags
    unreadable: list[str] = field(default_factory=list)  # files that are not YAML
    run_code: set[str] = field(default_factory=set)
    """Benchmarks marked in their own file as running model-written code."""


class Listing(BaseModel):
    """Benchmarks that come with lm-eval."""

    benchmarks: list[str]  # benchmarks, groups and tags
    run_code: list[str]  # names that run model-written code, or have a part that does


def listed_benchmarks(python: Path) -> list[str]:
    """Returns all names that come with lm-eval; cached per environment, since listing takes many seconds."""
    return listing(python).benchmarks


def listing(python: Path) -> Listing:
    """Lists the benchmarks that come with the lm-eval of an environment; see `listed_benchmarks`."""
    environment = python.absolute().parent.parent
    remembered = settings().environments_dir / f"{environment.name}.index.json"
    try:
        return Listing.model_validate_json(read_cached(remembered))
    except (OSError, ValidationError):
        pass
    argv = [str(python), "-I", str(PROGRAM), "--list"]
    try:
        variables = process_environment(inherited=inheritance.HARNESS)
        listed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_LIST_SECONDS, env=variables)
        benchmarks = Listing.model_validate_json(listed.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or "")
        reason = "\n".join([str(error), *output.splitlines()[-10:]])
        if isinstance(error, OSError) or "ImportError" in output or "ModuleNotFoundError" in output:
            raise EnvironmentBuildFailed(
                expected=f"an environment with lm-eval in {environment}",
                found=reason,
                remedy=f"Delete the folder {environment} and run again: it is built again",
            ) from error
        raise HarnessFailed(
            expected="lm-eval to list its benchmarks",
            found=reason,
            remedy=f"Run it by hand: {subprocess.list2cmdline(argv)}",
        ) from error
    storage.write_bytes(str(remembered), json.dumps(benchmarks.model_dump()).encode())
    return benchmarks


def local_benchmarks(config: EvaluationConfig) -> Path:
    """Returns the path of the user's folder of benchmarks if it lies on this machine."""
    return storage.local_path(benchmarks_uri(config)).absolute()


def own_benchmarks(config: EvaluationConfig) -> OwnBenchmarks:
    """Reads the user's folder of benchmarks, local or in a store."""
    if config.benchmarks_path is not None and not storage.is_local(config.benchmarks_path):
        with TemporaryDirectory() as folder:
            copy = Path(folder) / "benchmarks"
            storage.copy_to_local(config.benchmarks_path, copy)
            return _found_in(copy)
    folder = local_benchmarks(config)
    if config.benchmarks_path is not None and not folder.is_dir():
        remedy = "Correct the path, or leave it out for the benchmarks that come with Assay and lm-eval"
        raise not_there("a folder with benchmarks as YAML files", f"benchmarks_path={config.benchmarks_path}", remedy)
    return _found_in(folder)


def _found_in(folder: Path) -> OwnBenchmarks:
    benchmarks = OwnBenchmarks()
    for path in sorted(folder.rglob("*.yaml")):
        try:
            content = read_benchmark(path.read_bytes()) if path.is_file() else None
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            benchmarks.unreadable.append(path.name)
            continue
        if isinstance(content, dict):
            tags = content.get("tag") or []
            named = [content.get("task"), content.get("group"), *([tags] if isinstance(tags, str) else tags)]
            names = {name for name in named if isinstance(name, str)}
            benchmarks.names |= names
            if content.get("unsafe_code", False) is not False:
                benchmarks.run_code |= names
    return benchmarks
