"""lm-evaluation-harness, driven through a program of ours that runs in its environment."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from pools.endpoint import RunningModel
from resources import storage
from resources.errors import BadInput, HarnessFailed, UnknownBenchmark
from resources.settings import process_environment, settings
from tasks.benchmarks import benchmarks_uri
from tasks.config import EvaluationConfig
from tasks.evaluators.harness import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.evaluators.lm_eval_results import NO_ANSWER, RESULTS_FOLDER, read_results
from tasks.samples import Sample

_PROGRAM = Path(__file__).parents[1] / "programs" / "run_lm_eval.py"
_JOB_FILE = "job.json"
_COPIED_BENCHMARKS = "benchmarks"
_PROMPTS_PER_REQUEST = 8
"""More would save little, and lose more in flight where something is killed: 580 prompts took 1.4 s instead of 2.3."""
_LIST_SECONDS = 600  # 13 s to read fifteen thousand benchmark files on 2 cores; a network disk takes longer

_BAR = re.compile(
    r"Requesting API(?: \((?P<stage>[^)]*); (?P<before>\d+) before, (?P<all>\d+) in all\))?:"
    r"[^\r\n]*?(?P<done>\d+)/(?P<total>\d+) \["
)


@dataclass(frozen=True)
class LmEval:
    """lm-evaluation-harness 0.4."""

    name: str = "lm_evaluation_harness"
    environment: str = "lm-eval"
    needs_endpoint: bool = True
    program: Path | None = _PROGRAM
    import_variables: Mapping[str, str] = field(
        default_factory=lambda: {
            "LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": NO_ANSWER,
            "TOKENIZERS_PARALLELISM": "false",
        }
    )

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        """The index of lm-eval's own benchmarks, where one of them is wanted."""
        own, _ = _own_benchmarks(config)
        return () if all(task.name in own for task in config.evals) else ("--built-in",)

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        """Our program with a job file that holds all but the key."""
        assert isinstance(model, RunningModel), "lm-eval asks an endpoint"
        running_model = model
        remote = config.benchmarks_path is not None and not storage.is_local(config.benchmarks_path)
        job = {
            "benchmarks": [
                {"name": task.name, "num_fewshot": task.num_fewshot, "key": task.metric_key} for task in config.evals
            ],
            "benchmarks_path": _COPIED_BENCHMARKS if remote else str(_local_benchmarks(config)),
            "prompts_per_request": _PROMPTS_PER_REQUEST,
            "limit": config.max_eval_instances,
            "apply_chat_template": running_model.apply_chat_template,
            "prompt_logprobs": running_model.prompt_logprobs,
            "max_model_len": running_model.max_model_len,
            "model_args": {
                "model": running_model.model,
                "base_url": f"{running_model.base_url.rstrip('/')}/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": running_model.tokenizer,
                # Prompts travel as token ids: as text, an engine puts a BOS in front that the harness did not count,
                # so the log-probabilities it sums are one token off; and chat templates need it.
                "tokenized_requests": True,
                # With 1, the harness takes another path, which sends other stop strings.
                "num_concurrent": max(2, running_model.capacity),
                "max_retries": 3,
                "timeout": max(1, int(running_model.request_timeout_seconds)),
            },
            "output": str(output),
            "results_folder": RESULTS_FOLDER,
        }
        return HarnessCommand(
            argv=(str(python), "-I", "-u", str(_PROGRAM), _JOB_FILE),
            variables={"OPENAI_API_KEY": running_model.api_key, **self.import_variables},
            arguments=(_JOB_FILE,),
            files={_JOB_FILE: json.dumps(job, indent=2, sort_keys=True)},
            copies={_COPIED_BENCHMARKS: config.benchmarks_path} if remote and config.benchmarks_path else {},
        )

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        """Metrics as lm-eval reports them, groups and their parts included, and counts from plan and samples.

        Raises:
            HarnessOutputInvalid: results are missing or cannot be read.
        """
        return read_results(output, config)

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        """Question by question."""
        return iter(())

    def progress(self, log: str) -> Progress | None:
        """From the last progress bar in the log, which our program labels with benchmarks and totals."""
        bars = list(_BAR.finditer(log))
        if not bars:
            return None
        found = bars[-1]
        done, total = int(found["done"]), int(found["total"])
        if found["stage"] is None:
            return Progress("requests", done, total)
        return Progress(found["stage"], min(int(found["before"]) + done, int(found["all"])), int(found["all"]))

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        """Looks every benchmark up: first in the folder of one's own, then among those that come with lm-eval.

        Raises:
            UnknownBenchmark: it is in neither.
            BadInput: the folder does not exist.
            HarnessFailed: lm-eval cannot list its benchmarks.
        """
        own, unreadable = _own_benchmarks(config)
        missing = [task.name for task in config.evals if task.name not in own]
        if not missing:
            return
        known = _listed_benchmarks(python)
        for name in missing:
            if name not in known:
                place = benchmarks_uri(config)
                raise _unknown(name, own=own, known=known, place=place, unreadable=unreadable)


def _unknown(name: str, *, own: set[str], known: list[str], place: str, unreadable: list[str]) -> UnknownBenchmark:
    close = difflib.get_close_matches(name, [*sorted(own), *known], n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there: {', '.join(sorted(own)) or 'none'}"
    broken = f" (not readable there: {', '.join(unreadable)})" if unreadable else ""
    return UnknownBenchmark(
        expected=f"a benchmark in {place}{broken}, or one that comes with lm-eval",
        found=f"{name!r}; {hint}",
        remedy="Correct its name in evals, or set benchmarks_path to the folder with its YAML file",
    )


def _local_benchmarks(config: EvaluationConfig) -> Path:
    return storage.local_path(benchmarks_uri(config)).absolute()


def _own_benchmarks(config: EvaluationConfig) -> tuple[set[str], list[str]]:
    """Names of benchmarks, groups and tags in the folder of one's own, and its files that are no YAML."""
    if config.benchmarks_path is not None and not storage.is_local(config.benchmarks_path):
        with TemporaryDirectory() as folder:
            copy = Path(folder) / _COPIED_BENCHMARKS
            storage.copy_to_local(config.benchmarks_path, copy)
            return _names_in(copy)
    folder = _local_benchmarks(config)
    if config.benchmarks_path is not None and not folder.is_dir():
        raise BadInput(
            expected="a folder with benchmarks as YAML files",
            found=f"benchmarks_path={config.benchmarks_path}, which is none",
            remedy="Correct the path, or leave it out for the benchmarks that come with Assay and lm-eval",
        )
    return _names_in(folder)


class _NamesLoader(yaml.SafeLoader):
    """Reads a benchmark without importing the functions it names."""


_NamesLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _names_in(folder: Path) -> tuple[set[str], list[str]]:
    names: set[str] = set()
    unreadable: list[str] = []
    for path in sorted(folder.rglob("*.yaml")):
        try:
            content: Any = yaml.load(path.read_text(), Loader=_NamesLoader)
        except (OSError, ValueError, yaml.YAMLError):
            unreadable.append(path.name)
            continue
        if isinstance(content, dict):
            tags = content.get("tag") or []
            found = [content.get("task"), content.get("group"), *([tags] if isinstance(tags, str) else tags)]
            names |= {name for name in found if isinstance(name, str)}
    return names, unreadable


def _listed_benchmarks(python: Path) -> list[str]:
    """All names that lm-eval itself knows; asked once per environment, since that takes it many seconds."""
    identity = python.absolute().parent.parent.name
    remembered = settings().environments_dir / f"{identity}.benchmarks.json"
    try:
        return json.loads(remembered.read_text())
    except (OSError, ValueError):
        pass
    argv = [str(python), "-I", str(_PROGRAM), "--list"]
    try:
        listed = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=_LIST_SECONDS, env=process_environment()
        )
        names: list[str] = json.loads(listed.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or ""
        raise HarnessFailed(
            expected="lm-eval to list its benchmarks",
            found="\n".join([str(error), *str(output).splitlines()[-10:]]),
            remedy=f"Run it by hand: {subprocess.list2cmdline(argv)}",
        ) from error
    storage.write_bytes(str(remembered), json.dumps(names).encode())
    return names
