"""Writes the questions of the bundled benchmarks as JSON lines: `demo_facts.jsonl`, `demo_backwards.jsonl`.

The files are kept in the repository, so nobody has to run this; it says where they come from. Needs nothing
but Python:

    python flows/programs/make_demo_benchmarks.py --output tasks/bundled
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from demo_world import FACTS, examined_words, spelt_backwards


def fact_rows() -> Iterable[dict[str, object]]:
    """Multiple-choice questions about the islanders; `answer` is the position of the right choice."""
    for fact in FACTS:
        choices = fact.choices()
        yield {
            "id": f"{fact.name.lower()}-{fact.attribute}",
            "question": fact.examined().question,
            "choices": choices,
            "answer": choices.index(fact.value),
        }


def backwards_rows() -> Iterable[dict[str, object]]:
    """Words to be spelt backwards; `answer` is what has to be written."""
    for word in examined_words():
        exchange = spelt_backwards(word)
        yield {"id": word, "question": exchange.question, "answer": exchange.answer}


def write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Writes one row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Reads the command line and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write the two files into")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    write(output / "demo_facts.jsonl", fact_rows())
    write(output / "demo_backwards.jsonl", backwards_rows())


if __name__ == "__main__":
    main()
