"""Reads the file that W&B writes offline: protocol buffers in a LevelDB log, behind a header of 7 bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK_BYTES = 32768
_HEADER_BYTES = 7
_LAST_PART = (1, 4)


@dataclass
class OfflineRun:
    id: str = ""
    name: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    resumes: bool = False
    finished: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    alerts: dict[str, str] = field(default_factory=dict)


def read_offline_run(path: Path) -> OfflineRun:
    run = OfflineRun()
    for record in _records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                message = record.run
                run.id, run.name, run.project = message.run_id, message.display_name, message.project
                run.tags, run.resumes = list(message.tags), message.resume
                run.config |= _items(message.config.update)
            case "config":
                run.config |= _items(record.config.update)
            case "history":
                run.history.append(_items(record.history.item))
            case "summary":
                run.summary |= _items(record.summary.update)
            case "metric":
                message = record.metric
                run.step_metrics[message.name or message.glob_name] = message.step_metric
            case "artifact":
                run.artifacts[record.artifact.name] = record.artifact.type
            case "alert":
                run.alerts[record.alert.title] = record.alert.text
            case "exit":
                run.finished = True
    return run


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[Any]:
    assert content[:4] == b":W&B", "not a file of W&B's"
    position, whole = _HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(content):
        if _BLOCK_BYTES - position % _BLOCK_BYTES < _HEADER_BYTES:
            position += _BLOCK_BYTES - position % _BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + _HEADER_BYTES])
        if kind == 0:
            return
        start = position + _HEADER_BYTES
        whole += content[start : start + length]
        position = start + length
        if kind in _LAST_PART:
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(whole)
            yield record
            whole = b""
