"""An external evaluator: the folder that the how-to describes and an entry of the registry, nothing else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from fakes.cells import cell_uri
from fakes.endpoints import Endpoint, endpoint
from fakes.models import write_run
from pools.engine.launch import Servable
from pools.weights.model_files import digest_model_folder
from resources.errors import BadInput
from tasks.checkpoints.discovery import find_checkpoints
from tasks.evaluators.evaluator import evaluator_of, harness_environments
from tasks.records.details import CheckpointReference
from tasks.records.record import read_record
from tasks.records.samples import read_samples
from tasks.running.attempt import RunResources
from tasks.running.cells import Cell
from tasks.running.run_cell import run_cell
from tasks.running.serving import EndpointServing
from tasks.running.warm import Harness
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import EVALUATORS, evaluator_title, short_evaluator_names
from tasks.spec.loading import load_config

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "add-an-evaluator.md"
FILE = re.compile(r"^`tasks/evaluators/(exact_answers/[\w/]+\.py)`(?:(?!```).)*```python\n(.*?)^```", re.M | re.S)
PROMPTS = ("Question: Where does Ada live?\nAnswer:", "Question: Where does Bob live?\nAnswer:")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The evaluator's folder outside the repository, registered during a test."""
    folder = tmp_path / "outside" / "exact_answers"
    (folder / "programs").mkdir(parents=True)
    (folder / "requirements").mkdir()
    (folder / "requirements" / "exact-answers.txt").write_text("httpx==0.28.1\n")
    (folder / "__init__.py").touch()
    for name, code in FILE.findall(HOW_TO.read_text()):
        (folder.parent / name).write_text(code.replace("tasks.evaluators.exact_answers", "exact_answers"))
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setitem(EVALUATORS, "exact_answers", "exact_answers")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "exact_answers"]:
        del sys.modules[name]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Endpoint]:
    with endpoint(tmp_path, "run-a-100") as running:
        yield running


def written(tmp_path: Path, **changes: object) -> str:
    content = {
        "evaluator": {"name": "exact_answers", "ignore_case": True},
        "model_path": str(tmp_path / "run-a"),
        "evaluation_path": str(tmp_path / "out"),
        "benchmarks_path": str(tmp_path / "questions"),
        "base_url": "http://127.0.0.1:9/v1",
        "evals": [{"name": "people"}],
        **changes,
    }
    path = tmp_path / "evaluation.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def cell_of(config: EvaluationConfig, run: str) -> Cell:
    [checkpoint] = find_checkpoints(run)
    assert checkpoint.folder is not None
    digests = digest_model_folder(checkpoint.folder)
    reference = CheckpointReference(
        uri=checkpoint.uri,
        run="run-a",
        name=checkpoint.name,
        step=100,
        digest=digests.checkpoint,
        weights_digest=digests.weights,
    )
    return Cell(
        config, checkpoint.folder, digests, reference, evaluation_hash(config), cell_uri(config, reference), None
    )


def test_how_to_has_every_file_of_the_folder(folder: Path):
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert files == {"__init__.py", "options.py", "evaluator.py", "programs/run_exact_answers.py"}


def test_evaluator_from_outside_is_read_offered_and_hashed_with_its_options(folder: Path, tmp_path: Path):
    config = load_config(written(tmp_path), EvaluationConfig)
    assert config.evaluator.model_dump() == {"name": "exact_answers", "ignore_case": True}
    assert config.evaluator.score_inputs() == {"ignore_case": True}
    with pytest.raises(BadInput, match="did you mean ignore_case"):
        load_config(written(tmp_path, evaluator={"name": "exact_answers", "ignore_cases": True}), EvaluationConfig)
    form = EvaluationConfig.model_json_schema()
    assert form["$defs"]["ExactAnswersOptions"]["properties"]["ignore_case"]["type"] == "boolean"
    assert {"$ref": "#/$defs/ExactAnswersOptions"} in form["properties"]["evaluator"]["anyOf"]
    assert evaluator_title("exact_answers") == "Exact answers"
    assert short_evaluator_names()["exact-answers"] == "exact_answers"
    assert harness_environments()["exact-answers"].requirements == folder / "requirements" / "exact-answers.txt"


def test_evaluator_from_outside_asks_an_endpoint_and_has_a_record(folder: Path, tmp_path: Path, engine: Endpoint):
    run = write_run(tmp_path / "run-a", [100])
    right = httpx.post(
        f"{engine.base_url}/completions",
        json={"model": "run-a-100", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0, "stop": ["\n"]},
    ).json()["choices"][0]["text"]
    questions = [{"prompt": PROMPTS[0], "target": right.strip()}, {"prompt": PROMPTS[1], "target": "nowhere at all"}]
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "people.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    config = load_config(written(tmp_path, base_url=engine.base_url), EvaluationConfig)
    harness = Harness(evaluator_of(config), Path(sys.executable), None)
    cell = cell_of(config, str(run))
    served = Servable.from_uri("run-a-100", cell.folder.uri)
    serving = EndpointServing(engine.base_url, {"run-a-100": served})
    run_cell.fn(cell, RunResources(lambda _: harness, serving))
    record = read_record(cell.uri)
    assert record is not None and record.succeeded and record.evaluator == "exact_answers"
    assert record.counts is not None and (record.counts.requested, record.counts.scored) == (2, 2)
    [metric] = record.metrics
    assert (metric.benchmark, metric.name, metric.value, metric.n) == ("people", "exact_match", 0.5, 2)
    samples = list(read_samples(str(Path(cell.uri) / record.attempt / "samples.jsonl.gz")))
    assert [(sample.prompt, sample.scores["exact_match"]) for sample in samples] == [
        (PROMPTS[0], 1.0),
        (PROMPTS[1], 0.0),
    ]
