"""The check of tensors before an engine starts: asked once for a config and shapes, and silent without an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakes.launcher import FakeLauncher
from fakes.models import PARAMETERS, write_checkpoint
from pools.config import InferencePoolConfig
from pools.engine.checks import require_fitting
from pools.engine.launch import Launch, Servable, ServedCheckpoint
from resources.backends.local.client import LocalClient
from resources.errors import ModelUnusable

_ANSWER = """
import json, pathlib, sys
order, answer, asked, why = sys.argv[1:]
with open(asked, "a") as file:
    file.write(f"{len(json.load(open(order))['shapes'])}\\n")
if why == "dies":
    sys.exit(1)
pathlib.Path(answer).write_text(json.dumps({"why": why or None}))
"""


@dataclass
class CheckingLauncher(FakeLauncher):
    why: str = ""

    def check(self, order: Path, answer: Path) -> Launch | None:
        asked = self.folder / "asked.txt"
        return Launch(sys.executable, ("-c", _ANSWER, str(order), str(answer), str(asked), self.why), {})

    @property
    def asked(self) -> list[str]:
        noted = self.folder / "asked.txt"
        return noted.read_text().split() if noted.is_file() else []


@pytest.fixture
def check(tmp_path: Path) -> Any:
    client = LocalClient(tmp_path / "jobs")

    def check(launcher: FakeLauncher, seed: int, **options: Any) -> None:
        folder = tmp_path / f"step-{seed}-{options.get('shards', 1)}"
        if not folder.is_dir():
            write_checkpoint(folder, seed=seed, parameters=options.get("parameters", PARAMETERS))
        digests = Servable.from_uri("m", str(folder)).digests
        model = {"name": "m", "engine_kwargs": options.get("engine_kwargs", {})}
        config = InferencePoolConfig.model_validate({"model": model})
        checkpoint = ServedCheckpoint.from_folder("step", folder, digests)
        require_fitting(checkpoint, config, launcher=launcher, client=client)

    yield check
    client.shutdown()


def test_answer_is_asked_once_for_the_same_config_and_shapes(tmp_path: Path, check: Callable[..., None]) -> None:
    launcher = CheckingLauncher(tmp_path, identity=str(tmp_path))
    for seed in (1, 2, 1):
        check(launcher, seed)
    assert launcher.asked == [str(len(PARAMETERS))]
    check(launcher, 3, parameters={**PARAMETERS, "new.weight": (2, 2)})
    assert launcher.asked == [str(len(PARAMETERS)), str(len(PARAMETERS) + 1)]


def test_difference_makes_the_checkpoint_unusable_each_time(tmp_path: Path, check: Callable[..., None]) -> None:
    launcher = CheckingLauncher(
        tmp_path, identity=str(tmp_path), why="a.weight has the shape [1], and its config makes [2]"
    )
    for seed in (1, 2):
        with pytest.raises(ModelUnusable, match=r"a\.weight has the shape \[1\]"):
            check(launcher, seed)
    assert len(launcher.asked) == 1


@pytest.mark.parametrize(
    ("why", "kwargs", "asked"),
    [("dies", {}, 1), ("wrong", {"hf_overrides": {"vocab_size": 3}}, 0), ("wrong", {"load_format": "dummy"}, 0)],
)
def test_engine_decides_without_an_answer(
    tmp_path: Path, check: Callable[..., None], why: str, kwargs: dict[str, Any], asked: int
) -> None:
    launcher = CheckingLauncher(tmp_path, identity=str(tmp_path), why=why)
    check(launcher, 1, engine_kwargs=kwargs)
    check(launcher, 1, engine_kwargs=kwargs)
    assert len(launcher.asked) == asked
    check(FakeLauncher(tmp_path), 2, engine_kwargs=kwargs)
