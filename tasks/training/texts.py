"""Training texts in a configuration of Levanter, for contamination scans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.contamination.texts import TextSource

_SECTIONS = ("training", "train_config")
_FIELDS = {
    "text": {"text_key": "text"},
    "chat": {"messages_field": "messages"},
    "supervised": {"input_key": "input", "target_key": "target"},
}
"""Options of Levanter's formats that name a field, with their defaults."""


def training_texts(uri: str) -> tuple[list[TextSource], list[str]]:
    """Returns the training texts, and the components without files, each with the reason.

    Components of weight 0 are only validated on, and left out.

    Args:
        uri: YAML with a TrainAndEvaluateConfig, a TrainLmOnPodConfig or Levanter's own configuration.
    """
    content = _read(uri)
    for name in _SECTIONS:
        within = content.get(name, content)
        content = _read(within) if isinstance(within, str) else within
    data = content.get("data")
    if not isinstance(data, Mapping):
        raise BadInput(
            expected=f"data of a training in {uri}", found=", ".join(map(str, content)), remedy="name its configuration"
        )
    sources: list[TextSource] = []
    not_read: list[str] = []
    for name, component in _components(data):
        source, fields = component.get("source") or {}, _fields(component)
        if source.get("train_urls") and fields:
            sources += [TextSource(str(url), field) for url in source["train_urls"] for field in fields]
        elif source.get("id"):
            not_read.append(f"{name}: data set {source['id']} of a hub; scan its files with --texts")
        else:
            not_read.append(f"{name}: no texts are named, only what was made of them")
    return sources, not_read


def _read(uri: str) -> dict[str, Any]:
    try:
        content = load_yaml(storage.read_bytes(uri, within="/"))
    except FileNotFoundError:
        raise BadInput(
            expected="a file with a training's configuration", found=f"{uri} is not there", remedy="check the path"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(expected=f"YAML in {uri}", found=str(error), remedy="correct it there") from error
    if not isinstance(content, dict):
        raise BadInput(expected=f"keys and values in {uri}", found=type(content).__name__, remedy="name another file")
    return content


def _components(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    weights = _weights(data.get("train_weights"))
    for name, component in (data.get("components") or {}).items():
        if weights is not None and not weights.get(name):
            continue
        children = component.get("children") if isinstance(component, Mapping) else None
        for part, child in (children or {"": component}).items():
            if isinstance(child, Mapping):
                yield f"{name}/{part}" if part else str(name), child


def _weights(given: Any) -> dict[str, float] | None:
    stages = [stage[1] for stage in given] if isinstance(given, list) else [given] if given else []
    if not stages:
        return None
    return {
        name: max(stage.get(name, 0.0) for stage in stages) for name in {name for stage in stages for name in stage}
    }


def _fields(component: Mapping[str, Any]) -> list[str]:
    kinds = [component.get("format"), (component.get("source") or {}).get("format")]
    given = next((kind for kind in kinds if isinstance(kind, Mapping)), {})
    defaults = _FIELDS.get(str(given.get("type", "text")), {})
    return [str(given.get(option, default)) for option, default in defaults.items()]
