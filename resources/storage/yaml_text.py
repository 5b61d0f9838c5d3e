"""Bounded parsing of untrusted YAML: alias bombs, long numbers and deep nesting raise a single kind of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

# With all aliases expanded; the largest benchmark file has 40,000.
_MOST_VALUES = 1_000_000


class YamlBeyondBounds(yaml.YAMLError):
    """YAML that would need too much memory, or too deep a stack."""


class BoundedLoader(yaml.SafeLoader):
    """Refuses documents with aliases that expand to more than a million values, or to themselves."""

    def compose_document(self) -> Any:
        document = super().compose_document()
        if _values_of(document, {}) > _MOST_VALUES:
            raise YamlBeyondBounds(f"aliases for more than {_MOST_VALUES:,} values, or an alias within its own value")
        return document


def load_yaml(text: bytes | str, loader: type[yaml.SafeLoader] = BoundedLoader) -> Any:
    """Returns the content of a YAML document."""
    with _as_yaml_errors():
        return yaml.load(text, loader)


def load_yaml_documents(text: bytes | str) -> list[Any]:
    """Returns the content of each document; raises as `load_yaml`."""
    with _as_yaml_errors():
        return list(yaml.load_all(text, BoundedLoader))


@contextmanager
def _as_yaml_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise YamlBeyondBounds("values nested too deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise YamlBeyondBounds("a whole number of more than 4,300 digits") from None
        raise yaml.YAMLError(str(error)) from error


def _values_of(node: yaml.Node | None, known: dict[int, int]) -> int:
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if (count := known.get(id(node))) is None:
        known[id(node)] = _MOST_VALUES + 1  # a value that contains itself would be infinite
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        count = known[id(node)] = 1 + sum(_values_of(part, known) for part in parts)
    return count
