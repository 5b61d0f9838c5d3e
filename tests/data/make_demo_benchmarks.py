"""Writes the questions of the bundled benchmarks: `demo_facts.jsonl`, `demo_backwards.jsonl`, for AlpacaEval
`alpaca_eval/demo_instructions.json`, some of the same questions with a hedge to compare with, and for Inspect
`inspect_ai/demo_choices.jsonl`, the facts again.

The files are in the repository, so this documents their origin and need not run. Needs only Python:

    PYTHONPATH=flows/demo/programs python tests/data/make_demo_benchmarks.py --output tasks/spec/bundled
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from demo_world import FACTS, HEDGE, VALUES, Exchange, Fact, invented_word, is_held_out, rank, spelt_backwards

CHOICES = 4
BACKWARDS_QUESTIONS = 100
INSTRUCTIONS_PER_ATTRIBUTE = 4
SPELLING_INSTRUCTIONS = 8


def choices_of(fact: Fact) -> list[str]:
    """Returns the right value among others of the same attribute, in an order without a preferred position."""
    wrong = sorted(set(VALUES[fact.attribute]) - {fact.value}, key=lambda value: rank("wrong", fact.name, value))
    offered = [fact.value, *wrong[: CHOICES - 1]]
    return sorted(offered, key=lambda value: rank("order", fact.name, fact.attribute, value))


def examined_words() -> list[str]:
    """Returns the words of the benchmark, without duplicates."""
    source = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < BACKWARDS_QUESTIONS:
        word = invented_word(source)
        if is_held_out(word):
            words[word] = None
    return list(words)


def fact_rows() -> Iterable[dict[str, object]]:
    """Yields multiple-choice questions about the islanders; `answer` is the index of the right choice."""
    for fact in FACTS:
        choices = choices_of(fact)
        yield {
            "id": f"{fact.name.lower()}-{fact.attribute}",
            "question": fact.examined().question,
            "choices": choices,
            "answer": choices.index(fact.value),
        }


def backwards_rows() -> Iterable[dict[str, object]]:
    """Yields words to spell backwards; `answer` is the expected output."""
    for word in examined_words():
        exchange = spelt_backwards(word)
        yield {"id": word, "question": exchange.question, "answer": exchange.answer}


def instruction_rows() -> Iterable[dict[str, object]]:
    """Yields instructions with a mediocre reference output: it hedges, and is mostly wrong."""
    for attribute, values in VALUES.items():
        facts = sorted(
            (fact for fact in FACTS if fact.attribute == attribute), key=lambda fact: rank("asked", fact.name)
        )
        for fact in facts[:INSTRUCTIONS_PER_ATTRIBUTE]:
            guess = values[rank("guess", fact.name, attribute) % len(values)]
            yield instruction(fact.examined(), guess)
    for word in examined_words()[:SPELLING_INSTRUCTIONS]:
        yield instruction(spelt_backwards(word), word)


def instruction(exchange: Exchange, guess: str) -> dict[str, object]:
    """Returns an instruction in AlpacaEval's format; `output` is the reference for comparison."""
    return {"instruction": exchange.question, "output": HEDGE.format(answer=guess), "generator": "hedges"}


def write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Reads the command line and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write the files into")
    output: Path = parser.parse_args().output
    for evaluator in ("alpaca_eval", "inspect_ai"):
        (output / evaluator).mkdir(parents=True, exist_ok=True)
    for facts in ("demo_facts.jsonl", "inspect_ai/demo_choices.jsonl"):
        write(output / facts, fact_rows())
    write(output / "demo_backwards.jsonl", backwards_rows())
    instructions = json.dumps(list(instruction_rows()), indent=2)
    (output / "alpaca_eval" / "demo_instructions.json").write_text(instructions + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
