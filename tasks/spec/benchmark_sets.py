"""Named sets of benchmarks, and what benchmarks need. The names themselves are data: `suite_data/sets.yaml`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from resources.config import Config
from resources.errors import BadInput
from resources.storage.yaml_text import load_yaml
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvalTaskConfig

SUITE_DATA = Path(__file__).parent / "suite_data"


class BenchmarkSet(Config):
    """Benchmarks that are asked for together, under one name."""

    about: str
    """Its purpose."""
    evals: tuple[EvalTaskConfig, ...]
    """The benchmarks, in order, those of the sets it uses included."""
    note: str | None = None
    """A remark for readers who know it from elsewhere."""
    left_out: Mapping[str, str] = {}
    """Benchmarks that one would expect here, each with the reason why it is not."""


class BenchmarkNeeds(Config):
    """Needs of benchmarks, beyond an endpoint that answers."""

    fewshot: int = 0
    """The most worked examples in front of one question."""
    prompt_logprobs: bool | None = False
    """True if one of them asks for log-probabilities of the prompt; None where that is not known."""
    generates: bool | None = False
    """True if one of them lets the model write; None where that is not known."""
    runs_code: bool = False
    """True if programs that the model wrote are run."""
    access: tuple[str, ...] = ()
    """Keys and forms, in words."""


@cache
def _data() -> dict[str, Any]:
    return load_yaml((SUITE_DATA / "sets.yaml").read_text(encoding="utf-8"))


@cache
def benchmark_sets() -> dict[str, BenchmarkSet]:
    """Every set by its name."""
    return {name: _resolved(name) for name in _data()["sets"]}


def _resolved(name: str) -> BenchmarkSet:
    content: dict[str, Any] = _data()["sets"][name]
    evals = [
        *(task for used in content.get("uses", ()) for task in _resolved(used).evals),
        *(_entry(entry, content) for entry in content.get("evals", ())),
        *(task for used in content.get("then", ()) for task in _resolved(used).evals),
    ]
    return BenchmarkSet(
        about=content["about"],
        evals=tuple(evals),
        note=content.get("note"),
        left_out=content.get("left_out", {}),
    )


def _entry(entry: str | dict[str, Any], content: dict[str, Any]) -> EvalTaskConfig:
    given: dict[str, Any] = {"name": entry} if isinstance(entry, str) else entry
    name = content.get("name", "{}").format(given["name"])
    fewshot = given.get("num_fewshot", content.get("num_fewshot"))
    pattern = given.get("task_alias", content.get("task_alias"))
    alias = pattern.format(name=name, num_fewshot=fewshot) if pattern else None
    kwargs = given.get("task_kwargs", {})
    return EvalTaskConfig(name=name, num_fewshot=fewshot, task_alias=alias, task_kwargs=kwargs)


def expanded(evals: Any) -> Any:
    """Benchmarks as a suite writes them: a set's name, or a list of set names, benchmark names and benchmarks.

    A name in capitals is a set's. Anything that is none of these is left for pydantic to refuse.
    """
    if isinstance(evals, str):
        evals = [evals]
    if not isinstance(evals, (list, tuple)):
        return evals
    return tuple(part for entry in evals for part in _expanded_entry(entry))


def _expanded_entry(entry: Any) -> Iterable[Any]:
    if not isinstance(entry, str):
        return (entry,)
    if not entry.isupper():
        return ({"name": entry},)
    sets = benchmark_sets()
    if entry not in sets:
        near = difflib.get_close_matches(entry, sets, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there: {', '.join(sets)}"
        raise BadInput(
            expected="the name of a set of benchmarks, which is written in capitals",
            found=f"{entry}; {hint}",
            remedy="correct the name, or list the benchmarks; `assay suites --sets` shows the sets",
        )
    return sets[entry].evals


def needs_of(evals: Iterable[EvalTaskConfig]) -> BenchmarkNeeds:
    """Returns the needs of lm-eval's benchmarks, as far as they are known: of those in no set they are not."""
    evals = tuple(evals)
    facts = _data()["facts"]
    names = {task.name for task in evals}
    generates = names & {*facts["generates"], *facts["generates_and_compares"]}
    compares = (names & _known()) - set(facts["generates"])
    unknown = names - _known()
    return BenchmarkNeeds(
        fewshot=max((task.num_fewshot or 0 for task in evals), default=0),
        prompt_logprobs=True if compares else None if unknown else False,
        generates=True if generates else None if unknown else False,
        runs_code=bool(names & set(facts["runs_code"])),
        access=tuple(f"{name}: {how}" for name, how in facts["access"].items() if name in names),
    )


def split_by_kind(
    evals: Iterable[EvalTaskConfig],
) -> tuple[tuple[EvalTaskConfig, ...], tuple[EvalTaskConfig, ...]]:
    """Benchmarks that compare choices, which Levanter can do too, and those that need an engine.

    The latter let the model write, wholly or in part, or score texts longer than the model holds. One of which nothing
    is known is among the former.
    """
    facts = _data()["facts"]
    needing = {*facts["generates"], *facts["generates_and_compares"], *facts["scores_whole_texts"]}
    evals = tuple(evals)
    return tuple(task for task in evals if task.name not in needing), tuple(
        task for task in evals if task.name in needing
    )


@cache
def bundled_names() -> frozenset[str]:
    """Benchmarks of every evaluator whose data come with Assay, or with `assay stage` beside files that do."""
    files = (path for folder in (BUNDLED, SUITE_DATA) for path in folder.rglob("*"))
    return frozenset(path.stem for path in files if path.suffix in (".yaml", ".json"))


@cache
def _known() -> frozenset[str]:
    return frozenset(task.name for benchmark_set in benchmark_sets().values() for task in benchmark_set.evals)
