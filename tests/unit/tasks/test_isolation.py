"""Code written by a model: resources within its reach when a harness runs it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakes.attacked import attacked
from fakes.attacker import main as attacker
from fakes.endpoints import planned_model
from fakes.http_server import Answer, Request, http_server
from fakes.polling import eventually
from fakes.processes import commands
from resources.backends.local.client import LocalClient
from resources.settings import settings
from tasks.evaluators.harness import run_harness
from tasks.evaluators.isolation import Cage, ModelCode, isolated
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

ATTACKER = Path(attacker.__code__.co_filename)
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount", "true")
WITHOUT = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
"""A shell that can create no further user namespace after running `FORBID`."""
FORBID = "echo 0 > /proc/sys/user/max_user_namespaces"
CAN_ISOLATE = (
    shutil.which("unshare") is not None and subprocess.run(NAMESPACES, check=False, capture_output=True).returncode == 0
)
SECRET = "a-secret-of-the-user"
VARIABLES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_OWN_KEY", "https_proxy")
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not CAN_ISOLATE, reason="this machine allows no namespaces of users"),
]


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    def answer(request: Request) -> Answer:
        return 501, {}, b""

    with http_server(answer) as first, http_server(answer) as second:
        yield int(first.rpartition(":")[2]), int(second.rpartition(":")[2])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=1.0)
    yield client
    client.shutdown()


@dataclass(frozen=True)
class Target:
    """A machine with secrets, on which an attack is run."""

    folder: Path
    client: LocalClient
    ports: tuple[int, int]
    hidden: tuple[Path, ...]
    token: Path
    question: Path

    def attacked(self, *, isolated: bool, host: str = "127.0.0.1") -> dict[str, Any]:
        """Returns the result of each attempt of an attack."""
        files = (*self.hidden, self.token, self.question)
        code = ModelCode(
            endpoint=f"http://{host}:{self.ports[0]}/v1",
            prepare=(sys.executable, "-c", "import os; print('prepared with', len(os.environ['HF_TOKEN']))"),
            reads=(str(ATTACKER),),
            scratch=(str(self.question.parent),),
        )
        model = planned_model(base_url=code.endpoint)
        arguments = (host, *map(str, (*self.ports, os.getpid())), SECRET, *map(str, files))
        output = self.folder / "output"
        run_harness(
            attacked(attack=ATTACKER, arguments=arguments, code=code if isolated else None),
            model,
            EvaluationConfig(model_path="checkpoint", evals=(EvalTaskConfig(name="b"),), timeout_seconds=60),
            output=output,
            python=Path(sys.executable),
            client=self.client,
            poll_seconds=0.1,
        )
        left = f"6000{os.getpid()}".encode()
        eventually(lambda: not any(left in command for command in commands()))
        return json.loads((output / "attempts.json").read_text())


@pytest.fixture
def target(
    tmp_path: Path, client: LocalClient, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ASSAY_INHERIT", "MY_OWN_KEY")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    cache = tmp_path / "cache"
    hidden = (cache / "actor.key", cache / "journal" / "journal.sqlite", cache / "pools" / "mine.json")
    target = Target(tmp_path, client, ports, hidden, cache / "hub" / "token", tmp_path / "own" / "questions.jsonl")
    for path in (*hidden, target.token, target.question):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
    yield target
    settings.cache_clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_code_of_a_model_reaches_the_endpoint_and_neither_secret_nor_journal_nor_network(target: Target, host: str):
    reached = target.attacked(isolated=True, host=host)
    assert reached["endpoint"].startswith("HTTP/1.1 501")
    assert (reached["other port"], reached["network"], reached["signal"]) == (None, None, None)
    assert not set(VARIABLES) & set(reached["variables"]) and "OPENAI_API_KEY" in reached["variables"]
    assert not reached["secret in variables"]
    hidden = {str(path): None for path in target.hidden}
    assert reached["files"] == {**hidden, str(target.token): "", str(target.question): SECRET}
    assert all(path.read_text() == SECRET for path in (*target.hidden, target.token, target.question))
    assert reached["rights"] == [False, False, False]
    assert (reached["memory"], reached["file"]) == (None, None)
    assert f"prepared with {len(SECRET)}" in (target.folder / "output" / "harness.log").read_text()


def test_same_code_without_isolation_reaches_all_that_its_user_may(target: Target):
    reached = target.attacked(isolated=False)
    assert reached["other port"].startswith("HTTP/1.1 501")
    assert reached["signal"] == "sent" and reached["secret in variables"]
    assert set(reached["files"].values()) == {SECRET}
    assert target.hidden[0].read_text() == "overwritten"


@pytest.mark.parametrize("required", [True, False])
def test_machine_without_namespaces_refuses_or_says_that_it_isolates_nothing(tmp_path: Path, required: bool):
    code = ModelCode(endpoint="http://127.0.0.1:9/v1", prepare=("true",))
    setting = "required" if required else "where_possible"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_CODE_ISOLATION", setting)
        settings.cache_clear()
        argv = isolated(
            ("sh", "-c", "echo ran with a limit of $(ulimit -c)"),
            code,
            Cage(tmp_path / "cage", tmp_path),
            python=Path(sys.executable),
            refusal=tmp_path / "refused.json",
            seconds=60,
            variables={"HF_HOME": str(tmp_path / "hub")},
        )
    settings.cache_clear()
    ran = subprocess.run([*WITHOUT, f"{FORBID}; exec {shlex.join(argv)}"], capture_output=True, text=True, check=False)
    refusal = tmp_path / "refused.json"
    if required:
        assert ran.returncode != 0 and "ran with" not in ran.stdout
        assert "ASSAY_CODE_ISOLATION" in json.loads(refusal.read_text())["remedy"]
    else:
        assert ran.returncode == 0 and ran.stdout == "ran with a limit of 0\n"
        assert "NOT isolated" in ran.stderr and not refusal.exists()
