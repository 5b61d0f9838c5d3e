"""Processes that send a series to a sink, here a module outside of the repository: kept while they succeed and nothing
changes, ended with the series."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fakes.cells import make_cell
from fakes.polling import eventual_pid, eventually, is_alive
from fakes.processes import running_program
from resources.errors import BadInput
from tasks.records.record import SinkState
from tasks.sinks.announcement import Announcement
from tasks.sinks.publishing import publish_record, publish_report
from tasks.sinks.senders import Senders
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import build_config
from tasks.spec.sinks import SINKS, Sink

MODULE = '''"""A folder with a file for each announcement, which names its sender; its file `order` is obeyed first."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import ClassVar, Literal

from tasks.spec.sinks import Access, SinkConfig


class DiarySink(SinkConfig):
    """A folder."""

    secret_variables: ClassVar[tuple[str, ...]] = ("DIARY_KEY",)
    client_lasts: ClassVar[bool] = True

    kind: Literal["diary"] = "diary"
    """Says that this sink is a diary."""
    path: str
    """The folder."""
    tags: tuple[str, ...] = ()
    """Changes the configuration, not the name."""

    @property
    def name(self):
        """Its name in records."""
        return f"diary:{self.path}"

    def access(self):
        """Return the folder of this module, and a word that is a secret."""
        variables = {"PYTHONPATH": os.path.dirname(__file__)}
        return Access(variables=variables, arguments={"word": "open sesame"}, secrets=("open sesame",))


class OneLetterSink(DiarySink):
    """A folder with a client that cannot be used twice."""

    client_lasts: ClassVar[bool] = False


CONFIG = DiarySink


def send(announcement, sink, *, word):
    """Obeys, and writes a file."""
    folder = Path(sink.path)
    order = folder / "order"
    match order.read_text() if order.exists() else None:
        case "fail":
            raise RuntimeError("no ink")
        case "die":
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "meet":
            (folder / f"{announcement.series.evaluator}.here").touch()
            while len(list(folder.glob("*.here"))) < 2:
                time.sleep(0.02)
    child = subprocess.Popen(["sleep", "600"]).pid
    letter = {"process": os.getpid(), "child": child, "variables": dict(os.environ)}
    record = announcement.record
    name = f"{announcement.series.evaluator}-{record.checkpoint.step}" if record else "report"
    (folder / f"{name}.json").write_text(json.dumps(letter))
    return f"{name} {word}"
'''


@dataclass(frozen=True)
class Diary:
    sink: Sink
    folder: Path
    evaluations: Path

    def send(self, step: int, senders: Senders, *, sink: Sink | None = None, evaluator: str = "helm") -> SinkState:
        record, cell = make_cell(self.evaluations, step=step, evaluator=evaluator)
        (state,) = publish_record(record, str(cell), (sink or self.sink,), senders=senders).values()
        return state

    def letter(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def processes(self) -> list[int]:
        """Returns the processes that sent something, in the order of the names."""
        return [json.loads(path.read_text())["process"] for path in sorted(self.folder.glob("*.json"))]

    def order(self, command: str | None) -> None:
        """Sets the behavior for the next announcement."""
        (self.folder / "order").write_text(command or "")


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Diary]:
    outside, folder = tmp_path / "outside", tmp_path / "diary"
    outside.mkdir()
    folder.mkdir()
    (outside / "diary_sink.py").write_text(MODULE)
    monkeypatch.syspath_prepend(outside)
    monkeypatch.setitem(SINKS, "diary", "diary_sink")
    yield Diary(diary_sink()(path=str(folder)), folder, tmp_path / "evaluations")
    sys.modules.pop("diary_sink", None)


def diary_sink(name: str = "DiarySink") -> Any:
    """Returns a configuration class of the external module."""
    return getattr(import_module("diary_sink"), name)


def test_external_sink_is_read_with_its_options_and_offered_in_forms(diary: Diary, tmp_path: Path):
    content = {"model_path": str(tmp_path), "base_url": "http://127.0.0.1:9/v1", "evals": [{"name": "demo_facts"}]}
    sink = {"kind": "diary", "path": "diary", "timeout_seconds": 30}
    config = build_config({**content, "sinks": [sink]}, EvaluationConfig, source="a test")
    assert config.sinks[0].model_dump(exclude={"tags"}) == sink
    for wrong, about in (({"paths": "x"}, "did you mean path"), ({"api_key": "x"}, "the field api_key")):
        with pytest.raises(BadInput, match=about):
            build_config({**content, "sinks": [{**sink, **wrong}]}, EvaluationConfig, source="a test")
    form = EvaluationConfig.model_json_schema()
    assert form["$defs"]["DiarySink"]["properties"]["path"]["description"] == "The folder."
    assert {"$ref": "#/$defs/DiarySink"} in form["properties"]["sinks"]["items"]["anyOf"]


def test_series_is_sent_by_a_single_process_that_ends_with_it(diary: Diary):
    with Senders() as senders:
        record, cell = make_cell(diary.evaluations, step=300)
        (diary.evaluations / "run-a" / "report.html").touch()
        states = [diary.send(100, senders), diary.send(200, senders)]
        states += publish_report(Announcement.of(record, str(cell)), (diary.sink,), senders=senders).values()
        assert [(state.status, state.where) for state in states] == [
            ("published", "helm-100 ***"),
            ("published", "helm-200 ***"),
            ("published", "report ***"),
        ]
        assert len(set(diary.processes())) == 1 and is_alive(diary.processes()[0])
    letters = [diary.letter(name) for name in ("helm-100", "helm-200", "report")]
    assert letters[0]["variables"] == letters[1]["variables"]
    for letter in letters:
        assert not is_alive(letter["process"])
        eventually(lambda child=letter["child"]: not is_alive(child))


def test_other_keys_options_and_single_use_clients_get_their_own_process(diary: Diary, monkeypatch: pytest.MonkeyPatch):
    with Senders() as senders:
        diary.send(100, senders)
        monkeypatch.setenv("DIARY_KEY", "a new key")
        monkeypatch.setenv("PREFECT_API_KEY", "of another place")
        diary.send(200, senders)
        diary.send(300, senders, sink=diary.sink.model_copy(update={"tags": ("mine",)}))
        once = diary_sink("OneLetterSink")(path=str(diary.folder))
        for step in (400, 500):
            diary.send(step, senders, sink=once)
            assert not is_alive(diary.letter(f"helm-{step}")["process"])
        assert len(set(diary.processes())) == 5
    assert "DIARY_KEY" not in diary.letter("helm-100")["variables"]
    assert diary.letter("helm-200")["variables"]["DIARY_KEY"] == "a new key"
    assert "PREFECT_API_KEY" not in diary.letter("helm-200")["variables"]


@pytest.mark.parametrize(("order", "about"), [("fail", "no ink"), ("die", "exit code 3"), ("hang", "within 8 s")])
def test_process_that_fails_costs_its_announcement_and_no_other(diary: Diary, order: str, about: str):
    sink = diary.sink.model_copy(update={"timeout_seconds": 8.0})
    with Senders() as senders:
        assert diary.send(100, senders, sink=sink).status == "published"
        diary.order(order)
        failed = diary.send(200, senders, sink=sink)
        assert failed.status == "failed" and failed.reason is not None and about in failed.reason
        assert not is_alive(diary.letter("helm-100")["process"])
        diary.order(None)
        assert diary.send(300, senders, sink=sink).status == "published"


def test_announcements_at_the_same_time_have_a_process_each(diary: Diary):
    diary.order("meet")
    with Senders() as senders, ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(diary.send, 100, senders, evaluator=evaluator) for evaluator in ("helm", "alpaca_eval")]
        assert [future.result().status for future in sent] == ["published"] * 2
        assert len(set(diary.processes())) == 2


def test_idle_process_ends_when_its_owner_is_killed_with_all_it_started(diary: Diary, tmp_path: Path):
    _, cell = make_cell(diary.evaluations)
    done = tmp_path / "done"
    program = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(tmp_path / "outside")!r})
from tasks.records.record import Record
from tasks.sinks.publishing import publish_record
from tasks.sinks.senders import Senders
from tasks.spec.sinks import SINKS
SINKS["diary"] = "diary_sink"
from diary_sink import DiarySink
record = Record.model_validate_json(Path({str(cell / "record.json")!r}).read_bytes())
with Senders() as senders:
    publish_record(record, {str(cell)!r}, (DiarySink(path={str(diary.folder)!r}),), senders=senders)
    Path({str(done)!r}).write_text(str(os.getpid()))
    signal.pause()
"""
    with running_program("-c", program) as owner:
        assert eventual_pid(done) == owner.pid
        (path,) = diary.folder.glob("*.json")
        letter = json.loads(path.read_text())
        assert is_alive(letter["process"])
        owner.kill()
        eventually(lambda: not is_alive(letter["process"]) and not is_alive(letter["child"]))
