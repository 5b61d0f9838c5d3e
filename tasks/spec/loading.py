"""Reads configurations from YAML or JSON, with errors that give line, expectation and the likely intended key."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from resources.errors import BadInput, not_there
from resources.storage import storage
from resources.storage.yaml_text import load_yaml

_Model = TypeVar("_Model", bound=BaseModel)


def load_config(uri: str, kind: type[_Model]) -> _Model:
    """Reads a configuration file."""
    content, text = read_mapping(uri)
    return build_config(content, kind, source=uri, text=text)


def read_mapping(uri: str, *, kind: str = "a configuration file") -> tuple[dict[str, Any], bytes]:
    """Returns the keys and values in a YAML or JSON file, and its text; `kind` describes the file in errors."""
    try:
        text = storage.read_bytes(uri, within="/")
        content = load_yaml(text)
    except FileNotFoundError:
        raise not_there(kind, uri) from None
    except (yaml.YAMLError, ValueError) as error:
        remedy = "correct the line or the value that it names; a text that looks like a date needs quotes"
        raise BadInput(expected=f"YAML in {uri}", found=str(error), remedy=remedy) from error
    if not isinstance(content, dict):
        remedy = "start from the example in docs/quickstart.md"
        raise BadInput(expected=f"keys and values in {uri}", found=type(content).__name__, remedy=remedy)
    return content, text


def build_config(content: dict[str, Any], kind: type[_Model], *, source: str, text: bytes | None = None) -> _Model:
    """Validates a configuration from `source`; if `text` is given, errors include its line numbers."""
    try:
        return kind.model_validate(content)
    except RecursionError as error:
        raise BadInput(
            expected=f"a valid {kind.__name__} in {source}",
            found="values nested too deep, or an alias within the value that it refers to",
            remedy="correct them",
        ) from error
    except ValidationError as error:
        document = yaml.compose(text, Loader=yaml.SafeLoader) if text is not None else None
        problems = [
            f"{_line(problem['loc'], document)}{_described(problem, kind)}"
            for problem in error.errors()
            if problem["type"] != "default_factory_not_called"  # caused by another field, which is reported
        ]
        raise BadInput(
            expected=f"a valid {kind.__name__} in {source}",
            found="; ".join(problems),
            remedy="correct what is named; docs/reference.md lists every field",
        ) from error


def _line(location: tuple[int | str, ...], node: yaml.Node | None) -> str:
    line = None
    for part in location:
        match node:
            case yaml.MappingNode():
                entry = next((pair for pair in node.value if pair[0].value == str(part)), None)
            case yaml.SequenceNode() if isinstance(part, int) and part < len(node.value):
                entry = (node.value[part], node.value[part])
            case _:
                entry = None
        # Tags of a union (cpu, gpu, tpu) and missing fields have no line in the document.
        if entry is not None:
            line, node = entry[0].start_mark.line + 1, entry[1]
    return f"line {line}: " if line is not None else ""


def _described(problem: Any, kind: type[BaseModel]) -> str:
    classes = kind.model_json_schema().get("$defs", {})  # class names in a location are tags of a union
    place = ".".join(str(part) for part in problem["loc"] if part not in classes)
    if problem["type"] != "extra_forbidden":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{place}: {message}" if place else message
    known = sorted(_fields_at(problem["loc"][:-1], kind))
    near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"{place}: unknown key; {hint}"


def _fields_at(location: tuple[int | str, ...], kind: type[BaseModel]) -> set[str]:
    schema = kind.model_json_schema()
    node: dict[str, Any] = schema
    for part in location:
        node = _resolved(node, schema)
        if isinstance(part, int):
            node = node.get("items") or {}
        elif part in node.get("properties", {}):
            node = node["properties"][part]
        # Tags of a union (cpu, gpu, tpu) are part of the location, but not of the document.
        elif tagged := [each for each in _alternatives(node, schema) if part in _tags(each)]:
            node = tagged[0]
    return {name for alternative in _alternatives(node, schema) for name in alternative.get("properties", {})}


def _tags(node: dict[str, Any]) -> set[str]:
    constants = {str(field["const"]) for field in node.get("properties", {}).values() if "const" in field}
    return {*constants, str(node.get("title"))}


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    objects = [each for each in _alternatives(node, schema) if "properties" in each or "items" in each]
    return objects[0] if len(objects) == 1 else node


def _alternatives(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _alternatives(schema["$defs"][node["$ref"].rsplit("/", 1)[1]], schema)
    options = node.get("anyOf") or node.get("oneOf")
    return [alternative for option in options for alternative in _alternatives(option, schema)] if options else [node]
