"""An upgrade of transformers in lm-eval's environment, requalified with both, against the deterministic engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import invoke
from fakes.endpoints import Endpoint, endpoint
from fakes.models import CONFIG, write_checkpoint
from fakes.tokenizers import write_byte_tokenizer
from flows.series import evaluate_checkpoints
from resources.environments.environments import ensure_environment
from resources.settings import with_pinned_lists
from tasks.evaluators.environments import LM_EVAL
from tasks.records.builds import build_of, is_qualified, read_qualifications
from tasks.records.record import read_records
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900), pytest.mark.usefixtures("prefect_api")]

QUESTIONS = 6
OLDER = "5.22.2"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assay's requirements list for lm-eval with an older transformers; its environment is built."""
    path = tmp_path_factory.mktemp("lists") / "lm-eval-older.txt"
    pinned = LM_EVAL.requirements.read_text()
    path.write_text(re.sub(r"(?m)^transformers==.*$", f"transformers=={OLDER}", pinned))
    with with_pinned_lists({"lm-eval": path}):
        ensure_environment(LM_EVAL)
    ensure_environment(LM_EVAL)
    return path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Endpoint]:
    folder = write_checkpoint(tmp_path / "run" / "hf" / "step-1", config={**CONFIG, "num_attention_heads": 1})
    write_byte_tokenizer(folder)
    with endpoint(tmp_path, "run-1") as running:
        yield running


def evaluate(folder: Path, served: Endpoint) -> None:
    content = {
        "model_path": str(folder / "run"),
        "evaluation_path": str(folder / "evaluations"),
        "base_url": served.base_url,
        "evals": [{"name": "demo_facts"}, {"name": "demo_backwards"}],
        "max_eval_instances": QUESTIONS,
    }
    evaluate_checkpoints(EvaluationConfig.model_validate(content))


def requalify(folder: Path, *arguments: str) -> dict[str, Any]:
    done = invoke(
        ["requalify", "run@1", "--path", str(folder / "evaluations"), "--json", *arguments], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_records_of_an_older_version_are_requalified_with_the_present_version(
    tmp_path: Path, older: Path, served: Endpoint
) -> None:
    with with_pinned_lists({"lm-eval": older}):
        evaluate(tmp_path, served)
    asked = served.requests

    requalified = requalify(tmp_path)

    assert served.requests == 2 * asked
    assert {part["benchmark"]: (part["verdict"], part["questions"]) for part in requalified["benchmarks"]} == {
        "demo_facts": ("identical", QUESTIONS),
        "demo_backwards": ("identical", QUESTIONS),
    }
    [record] = read_records(str(tmp_path / "evaluations"))
    before = build_of(record, "demo_facts")
    assert before.harness["transformers"] == OLDER
    [known] = read_qualifications(str(tmp_path / "evaluations"))
    after = known.benchmarks[0].after
    [change] = before.changes(after)
    assert change.startswith(f"harness transformers {OLDER} → ")
    assert is_qualified(after, before, [known], evaluator=record.evaluator, benchmark="demo_facts")

    evaluate(tmp_path, served)  # with the current version, which keeps records of an older version
    assert read_records(str(tmp_path / "evaluations")) == [record]


def test_two_versions_are_both_asked_and_leave_no_record_among_those_of_the_run(
    tmp_path: Path, older: Path, served: Endpoint
) -> None:
    evaluate(tmp_path, served)
    before = read_records(str(tmp_path / "evaluations"))
    asked = served.requests

    requalified = requalify(tmp_path, "--from", str(older), "--to", "present")

    assert served.requests == 3 * asked
    assert requalified["compared"] == [str(older), "present"]
    assert requalified["benchmarks"][0]["before"]["harness"]["transformers"] == OLDER
    assert read_records(str(tmp_path / "evaluations")) == before
