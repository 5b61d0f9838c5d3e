"""The documents match the code: links, paths, commands and examples are checked, reference tables generated.

    .venv/bin/python tests/unit/test_docs.py --write

rewrites the tables of docs/reference.md from field docstrings, the command line and the TPU table.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
import yaml
from pydantic import AwareDatetime, BaseModel, SecretStr
from pydantic.fields import FieldInfo

import tasks.errors  # noqa: F401 registers its classes
from flows.cli.app import COMMANDS, GROUPS, command_line, with_program_apart
from flows.staging import StagingRequest
from pools.config import InferencePoolConfig, ModelConfig
from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from resources.environments.environments import ENVIRONMENTS
from resources.errors import AssayError
from resources.regions.region_table import EgressPrice, Price, Prices, RayCluster, Region, Regions
from resources.regions.regions import load_regions
from resources.settings import Settings
from resources.tpu import TPU_TOPOLOGIES
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.eval_jobs.job_file import (
    ComputeConfig,
    HelmRun,
    JobFile,
    KubernetesConfig,
    MlflowArtifact,
    MlflowConfig,
    ModelSource,
    TrackingConfig,
)
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions, GenerationParams
from tasks.evaluators.evaluator import harness_environments
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.inspect_ai.options import InspectOptions
from tasks.evaluators.levanter.options import LevanterOptions
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.generation.config import GenerationConfig, PromptsConfig, SamplingConfig
from tasks.policies.policy import Policy, PolicySuite, RetryBudget
from tasks.records.cost import Cost, Predicted, Spent
from tasks.records.details import (
    Asking,
    BenchmarkDetails,
    CheckpointReference,
    Counts,
    Digests,
    LogLikelihood,
    MergedInput,
    MergeReference,
)
from tasks.records.record import Metric, Record, SinkState
from tasks.records.samples import Sample
from tasks.sinks.hugging_face import HuggingFaceSink
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.sinks.object_store import ObjectStoreSink
from tasks.sinks.publishing import sinks_in
from tasks.sinks.weights_and_biases import WeightsAndBiasesSink
from tasks.spec.evaluation import CheckpointSelection, EvalTaskConfig, EvaluationConfig, MergeOptions
from tasks.spec.evaluators import EVALUATORS, EvaluatorOptions, Judge, JudgeEndpoint, LevanterComputation, options_kind
from tasks.spec.loading import load_config
from tasks.spec.suites import Suite, SuiteEvaluation, SuiteRequest, load_suite
from tasks.spec.training import TrainAndEvaluateConfig, TrainLmOnPodConfig
from tasks.verdicts.gate import BaselineRule, BoundRule, Gate

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REFERENCE = ROOT / "docs" / "reference.md"
REGENERATE = ".venv/bin/python tests/unit/test_docs.py --write"
PACKAGES = ("flows", "tasks", "pools", "resources")
COMMAND = command_line()

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_COMMAND = re.compile(r"`(?:\.venv/bin/)?assay ([^`\n]+)`")
SHELL_COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?assay(?: |$)")
PROMISES = re.compile(
    r"\b(?:will|won't|planned|plans? to|coming|upcoming|roadmap|todo|fixme|tbd|in the future"
    r"|not yet (?:done|implemented)|to be (?:done|implemented|added))\b",
    re.IGNORECASE,
)
OUTSIDE = re.compile(
    r"(?:\.\./)*shared/|\bissues? #?\d|\bsessions? \d|https?://(?!127\.0\.0\.1|localhost)", re.IGNORECASE
)
PATH = re.compile(
    r"`((?:(?:flows|tasks|pools|resources|tests|docs|deployments)/(?:[\w.-]+/)*)?[\w-]+\.py|"
    r"(?:flows|tasks|pools|resources|tests|docs|deployments)/(?:[\w.-]+/)*[\w.-]*)`"
)
MADE_BY_READERS = re.compile(r"exact[-_]answers|/background")  # written by readers of a how-to
TREE = re.compile(r"<!-- tree -->\n+```\n(.*?)^```", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"(<!--generated:(?P<name>[\w-]+)-->\n)(?P<table>.*?)(<!--/generated-->)", re.DOTALL)

# Users need not fill these in.
WRITTEN_BY_US = (
    *(Record, CheckpointReference, Metric, Counts, BenchmarkDetails, Asking, LogLikelihood, Cost, Predicted, Spent),
    *(MergeReference, MergedInput, Digests, SinkState, Sample),
)
MODELS: tuple[type[BaseModel], ...] = (
    *(EvaluationConfig, EvalTaskConfig, CheckpointSelection, MergeOptions),
    *(LmEvalOptions, HelmOptions, AlpacaEvalOptions, Judge, GenerationParams, InspectOptions, JudgeEndpoint),
    *(LevanterComputation, LevanterOptions),
    *(Suite, SuiteEvaluation, SuiteRequest, StagingRequest),
    *(GenerationConfig, PromptsConfig, SamplingConfig),
    *(JobFile, ComputeConfig, HelmRun, ModelSource, MlflowArtifact, MlflowConfig, TrackingConfig, KubernetesConfig),
    *(Policy, PolicySuite, CheckpointRule, RetryBudget),
    *(Gate, BoundRule, BaselineRule),
    *(TrainAndEvaluateConfig, TrainLmOnPodConfig),
    *(Regions, Region, RayCluster, Prices, Price, EgressPrice),
    *(WeightsAndBiasesSink, MlflowSink, ObjectStoreSink, HuggingFaceSink),
    *(InferencePoolConfig, ModelConfig, ResourceConfig, CpuConfig, GpuConfig, TpuConfig),
    *WRITTEN_BY_US,
)
HAND_DOWN = (EvaluationConfig, SuiteRequest, Policy, PolicySuite)  # unset fields come from the model before
SINKS = (ObjectStoreSink, WeightsAndBiasesSink, MlflowSink, HuggingFaceSink)
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
DEFAULT_TEXTS = {
    ("Settings", "cache_dir"): "`$XDG_CACHE_HOME/assay`, else `~/.cache/assay`",
    ("Settings", "slurm_dir"): "`~/.assay/slurm`",
}


class Fence(NamedTuple):
    document: str
    language: str
    text: str


FENCES = [
    Fence(path.relative_to(ROOT).as_posix(), language, text)
    for path in DOCUMENTS
    for language, text in FENCE.findall(path.read_text())
]


# Generated parts of docs/reference.md


def entry(name: str, remark: str, meaning: str) -> str:
    return f"- `{name}`{f' ({remark})' if remark else ''}: {meaning}\n"


class Line(NamedTuple):
    name: str
    remark: str
    meaning: str


@cache
def lines_of(model: type[BaseModel]) -> list[Line]:
    documented = docstrings_of(model)
    return [
        Line(name, "", f"`{constant}`")
        if (constant := constant_of(field))
        else Line(name, field_text(model, name, field), documented.get(name, ""))
        for name, field in model.model_fields.items()
    ]


def field_text(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """Formats a field: its type, unless text or implied by the default; default, limits, and if it is required."""
    optional = [part for part in get_args(field.annotation) if part is not NoneType]
    kind = optional[0] if len(optional) == 1 and NoneType in get_args(field.annotation) else field.annotation
    default = DEFAULT_TEXTS.get((model.__name__, name)) or default_text(field)
    scalar = kind in (int, float, bool, Path) or get_origin(kind) is tuple
    shown = "" if kind in (str, SecretStr) or (default and scalar) else type_text(kind)
    if model in WRITTEN_BY_US:
        return shown
    limits = [
        f"{LIMITS[key]}{getattr(limit, key):g}" for limit in field.metadata for key in LIMITS if hasattr(limit, key)
    ]
    value = f"{shown} = {default}" if shown and default else shown or default
    return ", ".join([*([value] if value else []), *limits, *(["required"] if field.is_required() else [])])


def constant_of(field: FieldInfo) -> str:
    """Returns the only value that a field can have; empty if there are several."""
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return str(values[0]) if len(values) == 1 else ""


def fields_list(model: type[BaseModel]) -> str:
    """Lists the fields of a model; of fields that an earlier model has, only the names."""
    own, shared = [], dict[str, list[str]]()
    for line in lines_of(model):
        earlier = MODELS[: MODELS.index(model)] if model in MODELS else ()
        same = next((other for other in earlier if is_listed_in(line, other, owner=model)), None)
        if same is None:
            own.append(entry(*line))
        else:
            shared.setdefault(same.__name__, []).append(f"`{line.name}`")
    return "".join(own) + "".join(
        f"- As in [{name}](#{name.lower()}): {', '.join(names)}.\n" for name, names in shared.items()
    )


def is_listed_in(line: Line, other: type[BaseModel], *, owner: type[BaseModel]) -> bool:
    """Returns True if another model has the same field, or the same except for the default."""
    if len(line.meaning) > 24 and line in lines_of(other):
        return True
    alike = [each for each in lines_of(other) if each.name == line.name and {other, owner} <= set(HAND_DOWN)]
    return bool(alike) and "required" not in f"{line.remark} {alike[0].remark}"


def settings_list() -> str:
    return "".join(entry(f"ASSAY_{name.upper()}", remark, meaning) for name, remark, meaning in lines_of(Settings))


def docstrings_of(model: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring of each field of a class as a single line, inherited fields included."""
    inherited = [base for base in model.__mro__[::-1] if issubclass(base, BaseModel) and base is not BaseModel]
    return {name: text for base in inherited for name, text in _own_docstrings(base).items()}


def _own_docstrings(model: type[BaseModel]) -> dict[str, str]:
    if model.__module__.partition(".")[0] not in PACKAGES:
        return {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def type_text(annotation: Any) -> str:
    """Formats a type for writers of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, UnionType):
        kinds = [part for part in arguments if part is not NoneType]
        if set(kinds) == set(SINKS):
            return "[sinks](#sinks)"
        return " or ".join(type_text(part) for part in kinds)
    if origin is Literal:
        return f"`{'|'.join(str(value) for value in arguments)}`"
    if origin is tuple:
        inner = type_text(arguments[0])
        return "list" if inner == "text" else f"list of {inner}"
    if origin is dict:
        inner = type_text(arguments[1])
        return "mapping" if inner in ("text", "anything") else f"mapping to {inner}"
    if annotation is EvaluatorOptions:
        return ", ".join(["a name", *(type_text(options_kind(name)) for name in EVALUATORS)])
    if annotation in MODELS:
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {Any: "anything", AwareDatetime: "datetime", SecretStr: "secret", str: "text", Path: "path"}.get(
        annotation, getattr(annotation, "__name__", str(annotation))
    )


def default_text(field: FieldInfo) -> str:
    """Formats the default of a field as code; empty if it is missing or trivial."""
    default = field.default
    if field.default_factory_takes_validated_data:
        return "by device"
    if field.is_required() or default in (None, {}, (), ""):
        return ""
    if isinstance(default, BaseModel):
        changed = default.model_dump(mode="json", exclude_unset=True)
        return f"`{json.dumps(changed)}`" if changed else ""
    if isinstance(default, str) and default.isprintable():
        return f"`{default}`"
    return f"`{json.dumps(default, default=lambda value: value.model_dump(mode='json', exclude_defaults=True))}`"


def commands_list() -> str:
    """Lists the subcommands with what they do; `--help` has their options."""
    texts = {
        name: str(inspect.getdoc(each.default_command)).partition("\n\nArgs:")[0] for name, each in commands().items()
    }
    return "".join(entry(f"assay {name}", "", " ".join(text.split())) for name, text in texts.items())


def options_of(command: Any) -> list[Any]:
    """Returns the arguments and options of a command, without the groups of options."""
    return [option for option in command.assemble_argument_collection() if option.names != ("*",)]


def commands() -> dict[str, Any]:
    """Returns the subcommands of `assay` by name; names in a group are like `pool up`."""
    names = [name for panel in COMMANDS.values() for name in panel]
    return {name: reduce(lambda app, word: app[word], name.split(), COMMAND) for name in names}


def command_of(words: list[str]) -> tuple[str, list[str]]:
    """Splits words into the subcommand at their start, empty if there is none, and the words after it."""
    for length in (2, 1):
        if (name := " ".join(words[:length])) in commands():
            return name, words[length:]
    return "", words


def errors_list() -> str:
    groups: dict[tuple[int, str], list[str]] = {}
    for name, kind in sorted(AssayError.kinds.items()):
        if kind.__module__ in [f"{package}.errors" for package in PACKAGES]:
            groups.setdefault((kind.exit_code, kind.record_status), []).append(f"`{name}`")
    return "".join(
        f"- Exit code {code}, record `{status}`: {', '.join(names)}\n"
        for (code, status), names in sorted(groups.items())
    )


def environments_list() -> str:
    pythons: dict[str, list[str]] = {}
    for name, spec in (ENVIRONMENTS | harness_environments()).items():
        assert spec.requirements.name == f"{name}.txt"
        pythons.setdefault(f"Python {spec.python}" if spec.python else "the running Python", []).append(f"`{name}`")
    return "".join(f"- on {python}: {', '.join(names)}\n" for python, names in pythons.items())


def tpu_list() -> str:
    """Lists slices of each kind together: their sizes, and their numbers of chips and VMs."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for slice_ in TPU_TOPOLOGIES.values():
        generation, _, size = slice_.variant.partition("-")
        chips = "N chips" if slice_.chips == int(size) else f"N/{int(size) // slice_.chips} chips"
        assert slice_.chips == slice_.vms * slice_.chips_per_vm
        vms = "1 VM" if slice_.vms == 1 else f"a VM for {slice_.chips_per_vm} chips"
        kinds.setdefault((f"{generation}-N", f"{chips}, {vms}"), []).append(size)
    return "".join(entry(name, f"N = {', '.join(sizes)}", rest) for (name, rest), sizes in kinds.items())


def deployments_list() -> str:
    """Lists the deployments of `deployments/prefect.yaml`, grouped by equal flow parameters."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for deployment in yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]:
        module, _, function = deployment["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), function)
        fixed = ", ".join(f"`{name}={value}`" for name, value in (deployment.get("parameters") or {}).items())
        lines = groups.setdefault(tuple(f"`{name}`" for name in inspect.signature(flow.fn).parameters), [])
        lines.append(entry(f"{flow.name}/{deployment['name']}", fixed, deployment["description"]))
    return "\n".join(f"With {', '.join(names)}:\n\n{''.join(lines)}" for names, lines in groups.items())


TABLES: dict[str, Callable[[], str]] = {
    **{model.__name__: lambda model=model: fields_list(model) for model in MODELS},
    "settings": settings_list,
    "commands": commands_list,
    "errors": errors_list,
    "environments": environments_list,
    "tpu": tpu_list,
    "deployments": deployments_list,
}


def with_current_tables(text: str) -> str:
    return GENERATED.sub(lambda match: f"{match[1]}\n{TABLES[match['name']]()}\n{match[4]}", text)


# Checks


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_links_lead_to_files_and_headings_that_exist(path: Path):
    broken = []
    for target in LINK.findall(path.read_text()):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        if not page.exists() or (anchor and anchor not in anchors_of(page)):
            broken.append(target)
    assert not broken


def anchors_of(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def tree_paths(text: str) -> Iterator[str]:
    """Yields the paths of an indented tree, two spaces a level, each followed by its description."""
    parents: list[str] = []
    for line in text.splitlines():
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        parents[level:] = [name]
        yield "".join(parents)


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_file_tree_names_only_what_exists(name: str):
    [tree] = TREE.findall((ROOT / name).read_text())
    paths = list(tree_paths(tree))
    assert paths and not [path for path in paths if not (ROOT / path).exists()]


def test_module_map_in_architecture_names_every_room():
    [tree] = TREE.findall((ROOT / "docs" / "architecture.md").read_text())
    inits = [path for each in PACKAGES for path in (ROOT / each).rglob("__init__.py") if "programs" not in path.parts]
    rooms = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in inits}
    modules = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).glob("*.py")}
    assert rooms | {path for path in modules if not path.endswith("__init__.py")} <= set(tree_paths(tree))


def test_paths_in_backticks_lead_to_files_and_folders_that_exist():
    missing = {
        f"{path.relative_to(ROOT).as_posix()}: {named}"
        for path in DOCUMENTS
        for named in PATH.findall(GENERATED.sub("", FENCE.sub("", path.read_text())))
        if not MADE_BY_READERS.search(named) and not any(place.exists() for place in places_of(named))
    }
    assert not missing


def places_of(named: str) -> tuple[Path, ...]:
    """Returns possible paths of a name in backticks: below the root, or for a module's bare name in any package."""
    if "/" in named:
        return (ROOT / named,)
    return tuple(path for package in (*PACKAGES, "tests", "deployments") for path in (ROOT / package).rglob(named))


def shell_commands() -> Iterator[tuple[str, list[str]]]:
    """Yields every `assay …` line of every code block as arguments, without output and comments."""
    for fence in FENCES:
        joined = fence.text.replace("\\\n", " ")
        for line in joined.splitlines():
            if SHELL_COMMAND.match(line.strip()):
                words = shlex.split(line.partition(" > ")[0].strip(), comments=True)
                start = next(place for place, word in enumerate(words) if Path(word).name == "assay")
                yield fence.document, words[start + 1 :]


def test_assay_commands_in_code_blocks_parse_with_the_real_command_line():
    examples = list(shell_commands())
    assert examples
    for document, words in examples:
        name, arguments = command_of(
            [word for word in words if word not in ("--traceback", "--insecure")]
        )  # allowed anywhere
        assert name, f"{document}: assay {shlex.join(words)}"
        try:
            line = [*name.split(), *arguments]
            COMMAND.parse_args(with_program_apart(COMMAND, line), exit_on_error=False, print_error=False)
        except Exception as error:
            raise AssertionError(f"{document}: assay {shlex.join(words)}: {error}") from error


def test_assay_commands_in_sentences_name_options_that_exist():
    for path in DOCUMENTS:
        for text in INLINE_COMMAND.findall(path.read_text()):
            used = {word.partition("=")[0] for word in text.split() if word.startswith("--")}
            name, _ = command_of(text.split())
            named = [commands()[name]] if name else []
            assert named or text.startswith("--") or text in GROUPS, f"{path.name}: assay {text}"
            known = {"--help", "--traceback", "--insecure"}
            known |= {spelling for command in named for option in options_of(command) for spelling in option.names}
            assert used <= known, f"{path.name}: assay {text}"


def test_evaluation_examples_in_yaml_are_valid_configurations(tmp_path: Path):
    examples = [fence for fence in FENCES if fence.language == "yaml" and fence.text.startswith("# An evaluation")]
    assert examples
    for fence in examples:
        file = tmp_path / "evaluation.yaml"
        file.write_text(fence.text)
        load_config(str(file), EvaluationConfig)


def test_example_of_a_job_is_a_valid_job(tmp_path: Path):
    [fence] = [fence for fence in FENCES if fence.language == "yaml" and fence.text.startswith("# A job")]
    (tmp_path / "job.yaml").write_text(fence.text)
    load_config(str(tmp_path / "job.yaml"), JobFile)


def test_suite_examples_in_yaml_are_valid_suites(tmp_path: Path):
    examples = [fence for fence in FENCES if fence.language == "yaml" and fence.text.startswith("# A suite")]
    assert examples
    for fence in examples:
        file = tmp_path / "suite.yaml"
        file.write_text(fence.text)
        load_suite(str(file))


def test_policy_training_and_region_examples_in_yaml_are_valid(tmp_path: Path):
    readers: dict[str, Callable[[Path], Any]] = {
        "# A policy": lambda file: load_config(str(file), Policy),
        "# A training with evaluations": lambda file: load_config(str(file), TrainAndEvaluateConfig),
        "# Two regions": load_regions,
        "# A pool": lambda file: load_config(str(file), InferencePoolConfig),
    }
    for beginning, read in readers.items():
        [example] = [fence for fence in FENCES if fence.language == "yaml" and fence.text.startswith(beginning)]
        file = tmp_path / "example.yaml"
        file.write_text(example.text.replace("HERE", "/here"))
        read(file)


def test_sink_examples_in_yaml_are_valid_sinks(tmp_path: Path):
    contents = [(fence, yaml.safe_load(fence.text)) for fence in FENCES if fence.language == "yaml"]
    examples = [fence for fence, content in contents if "kind" in content or set(content) == {"sinks"}]
    assert examples
    for fence in examples:
        file = tmp_path / "sinks.yaml"
        file.write_text(fence.text)
        sinks_in(str(file), None)


def test_other_yaml_json_and_python_examples_can_be_read():
    for fence in FENCES:
        if fence.language == "python":
            ast.parse(fence.text)
        if fence.language == "yaml":
            assert isinstance(yaml.safe_load(fence.text), dict), fence
        if fence.language in ("json", "jsonl"):
            assert [json.loads(line) for line in fence.text.splitlines()], fence


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_describes_what_is_and_names_nothing_outside_the_repository(path: Path):
    text = GENERATED.sub("", path.read_text())
    assert not [match.group() for pattern in (PROMISES, OUTSIDE) for match in pattern.finditer(text)]


def test_every_document_is_linked_from_another():
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in DOCUMENTS
        for target in LINK.findall(path.read_text())
        if target.partition("#")[0]
    }
    assert not [path for path in DOCUMENTS if path not in linked and path != ROOT / "README.md"]


def test_reference_tables_are_what_the_code_says():
    text = REFERENCE.read_text()
    assert {match["name"] for match in GENERATED.finditer(text)} == set(TABLES)
    assert text == with_current_tables(text), f"docs/reference.md is stale: run {REGENERATE}"


def test_every_documented_field_has_a_docstring():
    bare = [
        f"{model.__name__}.{name}"
        for model in (*MODELS, Settings)
        for name in model.model_fields
        if not docstrings_of(model).get(name)
    ]
    assert not bare


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {REGENERATE}")
    REFERENCE.write_text(with_current_tables(REFERENCE.read_text()))
