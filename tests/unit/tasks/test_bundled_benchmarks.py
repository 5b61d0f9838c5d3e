"""The bundled benchmarks equal the output of their generator, and training never shows their questions."""

import json
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
BUNDLED = REPOSITORY / "tasks" / "spec" / "bundled"
PROGRAMS = REPOSITORY / "flows" / "demo" / "programs"
NAMES = ("demo_facts", "demo_backwards")
INSTRUCTIONS = Path("alpaca_eval") / "demo_instructions.json"


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    return runpy.run_path(str(PROGRAMS / "demo_world.py"))


@pytest.fixture(scope="module")
def training_texts(world: dict[str, Any]) -> list[str]:
    source = random.Random(0)
    return [world["training_text"](source).text for _ in range(20_000)]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BUNDLED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_bundled_questions_regenerated_are_byte_identical(tmp_path: Path) -> None:
    program = REPOSITORY / "tests" / "data" / "make_demo_benchmarks.py"
    command = [sys.executable, "-B", str(program), "--output", str(tmp_path)]
    subprocess.run(command, env={"PYTHONPATH": str(PROGRAMS)}, check=True, timeout=60)
    for name in (*NAMES, "inspect_ai/demo_choices"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (BUNDLED / f"{name}.jsonl").read_bytes()
    assert (tmp_path / INSTRUCTIONS).read_bytes() == (BUNDLED / INSTRUCTIONS).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_bundled_yaml_names_its_task_and_an_existing_data_file(name: str) -> None:
    benchmark = yaml.safe_load((BUNDLED / f"{name}.yaml").read_text(encoding="utf-8"))
    assert benchmark["task"] == name
    data_file = benchmark["dataset_kwargs"]["data_files"][benchmark["test_split"]]
    assert Path(data_file).name == data_file
    assert (BUNDLED / data_file).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_bundled_questions_each_occur_once(name: str) -> None:
    questions = rows(name)
    assert len({row["id"] for row in questions}) == len({row["question"] for row in questions}) == len(questions) >= 100


def test_demo_facts_offers_four_choices_and_favours_no_position() -> None:
    questions = rows("demo_facts")
    assert all(len(set(row["choices"])) == 4 and row["answer"] in range(4) for row in questions)
    for position in range(4):
        share = sum(row["answer"] == position for row in questions) / len(questions)
        assert 0.15 < share < 0.35


def test_demo_backwards_answers_are_the_reversed_word() -> None:
    for row in rows("demo_backwards"):
        assert row["answer"] == row["id"][::-1] != row["id"]
        assert row["id"] in row["question"].split()


@pytest.mark.parametrize("name", NAMES)
def test_training_texts_never_contain_a_benchmark_question(name: str, training_texts: list[str]) -> None:
    training = "\n".join(training_texts)
    assert not [row["question"] for row in rows(name) if row["question"] in training]


def test_training_texts_teach_every_fact_that_is_asked(world: dict[str, Any], training_texts: list[str]) -> None:
    seen = set(training_texts)
    for fact in world["FACTS"]:
        assert any(statement + world["END"] in seen for statement in fact.statements())
        assert any(exchange.as_text() in seen for exchange in fact.practised())


@pytest.mark.parametrize("name", NAMES)
def test_training_prompt_is_the_prompt_of_the_yaml(name: str, world: dict[str, Any]) -> None:
    template = yaml.safe_load((BUNDLED / f"{name}.yaml").read_text(encoding="utf-8"))["doc_to_text"]
    exchange = world["Exchange"]("Is a person there?", "no")
    assert template.replace("{{question}}", exchange.question) == exchange.prompt()


def test_training_judges_in_the_words_of_the_judges_configuration(world: dict[str, Any]) -> None:
    folder = BUNDLED / "alpaca_eval" / "annotators" / "demo_verdict"
    prompt = (folder / "prompt.txt").read_text(encoding="utf-8")
    asked = world["JUDGED"].format(question="{instruction}", first="{output_1}", second="{output_2}")
    assert prompt == f"<|im_start|>user\n{asked}\n<|im_end|>\n"
    parsed = yaml.safe_load((folder / "configs.yaml").read_text(encoding="utf-8"))["demo_verdict"]
    assert tuple(parsed["completion_parser_kwargs"]["outputs_to_match"].values()) == world["VERDICTS"]


def test_instructions_are_of_the_benchmarks_and_leave_room_for_two_outputs(world: dict[str, Any]) -> None:
    asked = json.loads((BUNDLED / INSTRUCTIONS).read_text(encoding="utf-8"))
    held_out = {row["question"] for name in NAMES for row in rows(name)}
    assert len({row["instruction"] for row in asked}) == len(asked) == 24
    assert {row["instruction"] for row in asked} <= held_out
    for row in asked:
        longest = "\N{REPLACEMENT CHARACTER}" * 24  # the most that 24 bytes can become
        prompt = world["JUDGED"].format(question=row["instruction"], first=row["output"], second=longest)
        assert len(prompt.encode()) < 480
