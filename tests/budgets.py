"""Holds each package to its budgets of lines and of unclear phrases; `make lint` runs it, `--lower` lowers budgets.

Budgets of phrases, in pyproject.toml, must equal the count, so that they only fall. Budgets of lines are upper bounds.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flows", "tasks", "pools", "resources")
PLACES = {
    **{package: (package,) for package in PACKAGES},
    "deployments": ("deployments",),
    "tests": ("tests",),
    "docs": ("docs", "README.md", "AGENTS.md", "CONTRIBUTING.md"),
}
UNCLEAR = re.compile(
    r"\b(who(m|se|ever)?|whatever|wherever|nobody|somebody|anybody|anew|afresh|beside|likewise)\b"
    r"|\b(is|was|are|were) (told|let|begun)\b"
    r"|\bones?\b(?! (of|second|at a time))"
    r"|(^|[;,] )what\b|\bthose that\b|\bof others\b|\bin words\b|\bstands?\b",
    re.IGNORECASE,
)
UNCLEAR_NAMES = ("found", "wanted", "there", "here")
UNCLEAR_TARGETS = ("said", "some", "told")
"""Unclear as the only target of an assignment or a loop."""
UNCLEAR_OPENING = re.compile(r"(How|Some|What|When|Where|Whether|Which|Who|Whoever)\b")
"""Words that open no docstring: it begins with a verb or with a noun."""
Hit = tuple[int, str]
"""A line number and the phrase with the text around it."""


def unclear_in(text: str, line: int) -> Iterator[Hit]:
    """Yields the unclear phrases of a text that begins in this line."""
    flow = " ".join(text.split())
    for match in UNCLEAR.finditer(flow):
        yield line, flow[max(0, match.start() - 30) : match.end() + 30]


def unclear_in_python(source: str) -> Iterator[Hit]:
    """Yields the unclear phrases of docstrings, comments, texts of several words, and names that the code gives."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = str(node.value.value)
            if opening := UNCLEAR_OPENING.match(text):
                yield node.lineno, text[: opening.end() + 30]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield from unclear_in(node.value, node.lineno)
        elif (name := _given_name(node)) and (name in UNCLEAR_NAMES or UNCLEAR.search(_words_of(name))):
            yield getattr(node, "lineno", 0), name
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.comprehension):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in UNCLEAR_TARGETS:
                yield target.lineno, target.id
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from unclear_in(token.string.lstrip("# "), token.start[0])


def unclear_in_markdown(text: str) -> Iterator[Hit]:
    """Yields the unclear phrases of a page, paragraph by paragraph."""
    line = 1
    for paragraph in text.split("\n\n"):
        yield from unclear_in(paragraph, line)
        line += paragraph.count("\n") + 2


def hits_of(place: str) -> dict[str, list[Hit]]:
    """Unclear phrases by file, of a package or of the pages."""
    hits: dict[str, list[Hit]] = {}
    for file in _files(place, ".md" if place == "docs" else ".py"):
        read = unclear_in_markdown if file.suffix == ".md" else unclear_in_python
        hits[str(file.relative_to(ROOT))] = list(read(file.read_text()))
    return hits


def lines_of(package: str) -> int:
    """Physical lines of Python."""
    return sum(len(file.read_text().splitlines()) for file in _files(package, ".py"))


def main(arguments: list[str]) -> int:
    """Compares counts with budgets; returns the exit code. Names of packages print their unclear phrases instead."""
    if places := [argument for argument in arguments if argument in PLACES]:
        for place in places:
            for file, hits in hits_of(place).items():
                for line, phrase in hits:
                    print(f"{file}:{line}: {phrase}")
        return 0
    project = ROOT / "pyproject.toml"
    text = project.read_text()
    budgets = tomllib.loads(text)["tool"]["budgets"]
    wrong = []
    for place, budget in budgets["phrases"].items():
        if (count := sum(len(hits) for hits in hits_of(place).values())) > budget:
            wrong.append(
                f"{place}: expected at most {budget} unclear phrases, found {count}. "
                f"List them with `python tests/budgets.py {place}` and write them plainly."
            )
        elif count < budget and "--lower" in arguments:
            text = re.sub(rf"(?m)^{place} = {budget}$", f"{place} = {count}", text, count=1)
        elif count < budget:
            wrong.append(f"{place}: expected {budget} unclear phrases, found {count}. Run `make budgets` to lower it.")
    for package, budget in budgets["lines"].items():
        if (lines := lines_of(package)) > budget:
            wrong.append(f"{package}: expected at most {budget} lines of Python, found {lines}. Delete as you add.")
    if "--lower" in arguments:  # a check must not touch the file: make rebuilds .venv after a change of it
        project.write_text(text)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


def _files(place: str, suffix: str) -> Iterator[Path]:
    for part in PLACES[place]:
        path = ROOT / part
        yield from [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))


def _given_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def _words_of(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
