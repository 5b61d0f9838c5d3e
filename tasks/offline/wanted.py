"""Data of suites to stage for machines without a network, and the part that a manifest lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.helm.evaluator import read_entries_file
from tasks.evaluators.helm.options import HelmOptions
from tasks.spec.benchmark_sets import bundled_names
from tasks.spec.evaluation import digest_of
from tasks.spec.evaluators import LmEvalBenchmarkOptions
from tasks.spec.suites import Suite, SuiteEvaluation

PARTS = ("benchmarks", "datasets", "tokenizers", "texts", "files_of_datasets", "helm", "scenarios")
"""Parts of a manifest: the requested data and its components, each by name."""
_ALPACA_EVAL = ("tatsu-lab/alpaca_eval", ("alpaca_eval_gpt4_baseline.json", "df_gamed.csv"))
_DIGITS = 10


@dataclass(frozen=True)
class Wanted:
    """Required data: benchmarks by name, tokenizers as `owner/name` or `owner/name@revision`, texts."""

    benchmarks: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    files_of_datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Single files of data sets on the hub."""
    helm: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """HELM's run entries as input of its program, by a name derived from their content."""

    @property
    def names(self) -> list[str]:
        return [*self.benchmarks, *self.tokenizers, *self.texts, *self.files_of_datasets, *self.helm]


def wanted_by(suites: Sequence[Suite], *, tokenizers: Sequence[str] = ()) -> Wanted:
    """Returns the data that suites need on a machine without a network."""
    evaluations = [evaluation for suite in suites for evaluation in suite.evaluations]
    lm_eval = [evaluation for evaluation in evaluations if isinstance(evaluation.evaluator, LmEvalBenchmarkOptions)]
    official = any(_asks_official_set(evaluation) for evaluation in evaluations)
    return Wanted(
        benchmarks=tuple(
            dict.fromkeys(task.name for evaluation in lm_eval if evaluation.texts is None for task in evaluation.evals)
        ),
        tokenizers=tuple(tokenizers),
        texts=tuple(dict.fromkeys(evaluation.texts for evaluation in lm_eval if evaluation.texts is not None)),
        files_of_datasets=dict([_ALPACA_EVAL]) if official else {},
        helm=dict(
            _run_entries(evaluation, evaluation.evaluator)
            for evaluation in evaluations
            if isinstance(evaluation.evaluator, HelmOptions)
            and not bundled_names().issuperset(task.name for task in evaluation.evals)
        ),
    )


def missing_of(required: Wanted, staged: dict[str, Any], *, refresh: bool) -> Wanted:
    """Returns the wanted data that is not staged, including tokenizers of another revision."""
    if refresh:
        return required

    def is_lacking(part: str, name: str) -> bool:
        name, _, revision = name.partition("@") if part == "tokenizers" else (name, "", "")
        entry = staged.get(part, {}).get(name)
        return entry is None or revision not in ("", entry.get("asked"), entry.get("revision"))

    def lacking(part: str) -> Any:
        content = getattr(required, part)
        names = [name for name in content if is_lacking(part, name)]
        return {name: content[name] for name in names} if isinstance(content, Mapping) else tuple(names)

    return Wanted(**{part.name: lacking(part.name) for part in fields(Wanted)})


def chosen_of(copy: dict[str, Any], required: Wanted) -> dict[str, dict[str, Any]]:
    """Returns the entries in each part of a manifest that are wanted, or components of wanted data."""
    entries = [copy.get("helm", {}).get(name, {}) for name in required.helm]
    used = [copy.get("benchmarks", {}).get(name, {}) for name in required.benchmarks]
    names = {
        "benchmarks": set(required.benchmarks),
        "datasets": {
            path for datasets in (*used, *(entry.get("datasets", {}) for entry in entries)) for path in datasets
        },
        "tokenizers": {asked.partition("@")[0] for asked in required.tokenizers},
        "texts": set(required.texts),
        "files_of_datasets": set(required.files_of_datasets),
        "helm": set(required.helm),
        "scenarios": {name for entry in entries for name in entry.get("scenarios", ())},
    }
    return {part: {name: entry for name, entry in copy.get(part, {}).items() if name in names[part]} for part in PARTS}


def _asks_official_set(evaluation: SuiteEvaluation) -> bool:
    options = evaluation.evaluator
    if not isinstance(options, AlpacaEvalOptions) or options.instructions_path is not None:
        return False
    return any(task.name == "alpaca_eval" for task in evaluation.evals)


def _run_entries(evaluation: SuiteEvaluation, options: HelmOptions) -> tuple[str, dict[str, Any]]:
    path = options.run_specs_path
    content = {
        "benchmarks": [
            {"name": task.name, "key": task.metric_key, "num_fewshot": task.num_fewshot, "arguments": task.task_kwargs}
            for task in evaluation.evals
        ],
        "run_specs": read_entries_file(path).decode() if path is not None else None,
        "priority": options.priority,
        "groups": list(options.groups),
    }
    return f"{evaluation.label}-{digest_of(content)[:_DIGITS]}", content
