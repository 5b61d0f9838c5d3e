"""Named sets of benchmarks, and benchmarks' requirements. The names are data: `suite_data/sets.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from resources.config import Config
from resources.errors import unknown
from resources.storage.yaml_text import load_yaml
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvalTaskConfig

SUITE_DATA = Path(__file__).parent / "suite_data"


class BenchmarkSet(Config):
    """Benchmarks that are requested together under a name."""

    about: str
    """Its purpose."""
    evals: tuple[EvalTaskConfig, ...]
    """The benchmarks in order, including those of the sets it uses."""
    note: str | None = None
    """A remark on differences from similar sets, or from scores published elsewhere."""
    left_out: Mapping[str, str] = {}
    """Benchmarks that readers might expect in it, each with the reason for its absence."""


class BenchmarkNeeds(Config):
    """Requirements of benchmarks, beyond an endpoint."""

    fewshot: int = 0
    """Largest number of few-shot examples."""
    prompt_logprobs: bool | None = False
    """True if any benchmark requests log-probabilities of the prompt; None if unknown."""
    generates: bool | None = False
    """True if any benchmark requests generated text; None if unknown."""
    runs_code: bool = False
    """True if programs written by the model are run."""
    access: tuple[str, ...] = ()
    """Required keys and access forms, as text."""


@cache
def _data() -> dict[str, Any]:
    return load_yaml((SUITE_DATA / "sets.yaml").read_text(encoding="utf-8"))


@cache
def benchmark_sets() -> dict[str, BenchmarkSet]:
    """Returns every set by its name."""
    return {name: _resolved(name) for name in _data()["sets"]}


def _resolved(name: str) -> BenchmarkSet:
    content: dict[str, Any] = _data()["sets"][name]
    evals = [
        *(task for used in content.get("uses", ()) for task in _resolved(used).evals),
        *(_entry(entry, content) for entry in content.get("evals", ())),
        *(task for used in content.get("then", ()) for task in _resolved(used).evals),
    ]
    return BenchmarkSet(
        about=content["about"], evals=tuple(evals), note=content.get("note"), left_out=content.get("left_out", {})
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
    """Returns benchmarks from a set's name, or from a list of set names, benchmark names and benchmarks. Names in
    capitals are sets. Other values are passed through for pydantic to reject."""
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
        expected = "the name of a set of benchmarks, which is written in capitals"
        remedy = "correct the name, or list the benchmarks; `assay suites --sets` shows the sets"
        raise unknown(expected, entry, sets, remedy)
    return sets[entry].evals


def needs_of(evals: Iterable[EvalTaskConfig]) -> BenchmarkNeeds:
    """Returns the requirements of lm-eval's benchmarks; unknown for benchmarks that are in no set."""
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


def split_by_kind(evals: Iterable[EvalTaskConfig]) -> tuple[tuple[EvalTaskConfig, ...], tuple[EvalTaskConfig, ...]]:
    """Returns multiple-choice benchmarks, which Levanter supports too, and benchmarks that need an engine: they
    generate text at least partly, or score texts longer than the model's context. Unknown benchmarks are among the
    former."""
    facts = _data()["facts"]
    needing = {*facts["generates"], *facts["generates_and_compares"], *facts["scores_whole_texts"]}
    evals = tuple(evals)
    others = tuple(task for task in evals if task.name in needing)
    return tuple(task for task in evals if task.name not in needing), others


@cache
def bundled_names() -> frozenset[str]:
    """Returns the benchmarks of every evaluator that come with Assay as data, or as files for `assay stage`."""
    files = (path for folder in (BUNDLED, SUITE_DATA) for path in folder.rglob("*"))
    return frozenset(path.stem for path in files if path.suffix in (".yaml", ".json"))


@cache
def _known() -> frozenset[str]:
    return frozenset(task.name for benchmark_set in benchmark_sets().values() for task in benchmark_set.evals)
