"""An external sink: a module and an entry of the registry, nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fakes.cells import make_cell
from resources.errors import BadInput
from tasks.sinks.announcement import metric_values
from tasks.sinks.publishing import publish_record, publish_report
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import load_config
from tasks.spec.sinks import SINKS

MODULE = '''"""A file with a line for each record."""

import os
from typing import Literal

from tasks.sinks.announcement import metric_values
from tasks.spec.sinks import Access, SinkConfig


class NotebookSink(SinkConfig):
    """A file that gets a line for each record."""

    secret_variables = ("NOTEBOOK_KEY",)

    kind: Literal["notebook"] = "notebook"
    """Says that this sink is a notebook."""
    path: str
    """The file."""

    @property
    def name(self):
        """Its name in records."""
        return f"notebook:{self.path}"

    def access(self):
        """Return the key, a heading, and the folder of this module, which holds no other module of Assay."""
        variables = {"NOTEBOOK_KEY": "open sesame", "PYTHONPATH": os.path.dirname(__file__)}
        return Access(variables=variables, arguments={"heading": "scores of"})


CONFIG = NotebookSink


def send(announcement, sink, *, heading):
    """Writes a line."""
    if announcement.record is None:
        return None
    with open(sink.path, "a") as file:
        file.write(f"{heading} {announcement.place}: {len(metric_values(announcement.record))} {os.getpid()}\\n")
    return f"{sink.path} opened with {os.environ['NOTEBOOK_KEY']}"
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sink's module outside the repository, registered during a test."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "notebook_sink.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(SINKS, "notebook", "notebook_sink")
    yield
    sys.modules.pop("notebook_sink", None)


def config_with(tmp_path: Path, **sink: object) -> EvaluationConfig:
    content = {
        "model_path": str(tmp_path / "run-a"),
        "base_url": "http://127.0.0.1:9/v1",
        "evals": [{"name": "demo_facts"}],
        "sinks": [{"kind": "notebook", "path": str(tmp_path / "notes"), **sink}],
    }
    path = tmp_path / "evaluation.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_config(str(path), EvaluationConfig)


def test_sink_from_outside_is_read_and_offered_with_its_options(tmp_path: Path):
    [sink] = config_with(tmp_path, timeout_seconds=30).sinks
    path = str(tmp_path / "notes")
    assert sink.model_dump() == {"kind": "notebook", "path": path, "timeout_seconds": 30}
    with pytest.raises(BadInput, match="did you mean path"):
        config_with(tmp_path, paths="x")
    with pytest.raises(BadInput, match="the field api_key"):
        config_with(tmp_path, api_key="x")
    form = EvaluationConfig.model_json_schema()
    assert form["$defs"]["NotebookSink"]["properties"]["path"]["description"] == "The file."
    assert {"$ref": "#/$defs/NotebookSink"} in form["properties"]["sinks"]["items"]["anyOf"]


def test_record_is_announced_to_a_sink_from_outside_by_a_process_of_its_own(tmp_path: Path):
    record, cell = make_cell(tmp_path)
    [sink] = config_with(tmp_path).sinks
    [(name, state)] = publish_record(record, str(cell), (sink,)).items()
    assert state.reason is None
    assert (name, state.status) == (sink.name, "published")
    assert state.where == f"{tmp_path}/notes opened with ***"
    line, _, process = (tmp_path / "notes").read_text().rpartition(" ")
    assert line == f"scores of {cell.relative_to(tmp_path)}: {len(metric_values(record))}"
    assert int(process) != os.getpid()
    assert publish_report(record, str(cell), (sink,)) == {}
