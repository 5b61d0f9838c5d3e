"""Untrusted YAML: text that would use all memory, or is unreadable, is an error with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from resources.errors import BadInput
from resources.storage.yaml_text import load_yaml, load_yaml_documents
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import load_config

LAUGHS = "a: &a0 [x]\n" + "".join(f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "a: &a0 {x: 1}\n" + "".join(f"b{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
BAD = {
    "aliases": (LAUGHS, "aliases"),
    "merges": (MERGES, "aliases"),
    "alias-of-itself": ("a: &a [*a]\n", "within its own value"),
    "digits": (f"seed: {'9' * 5000}\n", "4,300 digits"),
    "nested": ("[" * 100_000, "nested"),
    "date": ("when: 2024-99-99\n", "month"),
    "latin-1": ("name: \xe9\n".encode("latin-1"), "continuation byte"),
}


@pytest.mark.parametrize("case", BAD)
def test_load_yaml_beyond_a_bound_raises_its_reason(case: str, tmp_path: Path) -> None:
    text, reason = BAD[case]
    for load in (load_yaml, load_yaml_documents):
        with pytest.raises(yaml.YAMLError, match=reason):
            load(text)
    file = tmp_path / "evaluation.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=reason):
        load_config(str(file), EvaluationConfig)


def test_load_yaml_with_few_aliases_is_read() -> None:
    assert load_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": {"x": 1, "y": 2},
    }
    assert load_yaml_documents("1\n---\n2\n") == [1, 2]
