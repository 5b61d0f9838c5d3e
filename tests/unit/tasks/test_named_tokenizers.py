"""Runs with a tokenizer from elsewhere: their checkpoints, snapshots and waits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from pytest import CaptureFixture

from fakes.cli import invoke
from fakes.models import write_checkpoint
from flows.cli.app import command_line
from flows.cli.options.evaluations import EvaluationOptions, evaluation_from_options
from pools.weights.merges import with_options
from resources.storage import storage
from tasks.checkpoints.discovery import discover, find_checkpoints
from tasks.checkpoints.run_snapshot import expand_runs, listing_of, snapshot_run, with_digests
from tasks.errors import NoCheckpoints
from tasks.generation.config import GenerationConfig
from tasks.policies.policy import Policy
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.suites import SuiteRequest

PARTS = ("tokenizer.json", "tokenizer_config.json")
HOUR_AGO = time.time() - 3600


def write_bare_run(run: Path, *, tokenizer: Path | None, layout: str = "hf/step-{}") -> Path:
    """Writes steps 100 and 200 without a tokenizer, an hour ago, and the tokenizer into a folder, or nowhere."""
    for step in (100, 200):
        folder = write_checkpoint(run / layout.format(step), seed=step)
        for name in PARTS:
            if tokenizer is not None:
                tokenizer.mkdir(parents=True, exist_ok=True)
                (tokenizer / name).write_bytes((folder / name).read_bytes())
            (folder / name).unlink()
        for file in folder.iterdir():
            os.utime(file, (HOUR_AGO, HOUR_AGO))
    return run


def of_option(folder: Path) -> str:
    write_bare_run(folder / "my-run", tokenizer=folder / "tokenizers" / "t")
    return with_options(str(folder / "my-run"), tokenizer=str(folder / "tokenizers" / "t"))


def of_run(folder: Path) -> str:
    return str(write_bare_run(folder / "my-run", tokenizer=folder / "my-run"))


def above_the_listing(folder: Path) -> str:
    return str(write_bare_run(folder / "my-run", tokenizer=folder / "my-run") / "hf")


@pytest.mark.parametrize("written", [of_option, of_run, above_the_listing])
def test_run_with_a_tokenizer_elsewhere_is_listed_as_it_is_found(
    tmp_path: Path, written: Callable[[Path], str]
) -> None:
    uri = written(tmp_path)
    listed, seen = find_checkpoints(uri), snapshot_run(uri)
    assert [(each.name, each.step, each.problems) for each in listed] == [
        ("my-run-100", 100, ()),
        ("my-run-200", 200, ()),
    ]
    assert [(each.uri, listing_of(each)) for each in listed] == [(each.uri, each.listing) for each in seen]
    assert all(each.folder and len(each.folder.notes) == 1 for each in listed)
    before = with_digests(uri, seen, reference=None)
    assert snapshot_run(uri) == seen
    [tokenizer] = tmp_path.rglob("tokenizer.json")
    tokenizer.write_text("{}")
    after = with_digests(uri, snapshot_run(uri), reference=None)
    assert all(first.listing != second.listing for first, second in zip(before, after, strict=True))
    assert {each.digest for each in before}.isdisjoint({None, *(each.digest for each in after)})
    tokenizer.unlink()
    assert [each.problems[0][:12] for each in snapshot_run(uri)] == ["no tokenizer"] * 2


def test_run_of_several_steps_is_merged_with_the_tokenizer_of_its_name(tmp_path: Path) -> None:
    [merged] = find_checkpoints(with_options(f"mean({of_run(tmp_path)}@last:2)", tokenizer=str(tmp_path / "my-run")))
    assert (merged.name, merged.problems) == ("my-run-100-to-200-mean2", ())
    places = [storage.join(str(tmp_path), "my-run", "hf", f"step-{step}") for step in (100, 200)]
    assert merged.uri == f"mean({', '.join(f'with({place}, tokenizer={tmp_path}/my-run)' for place in places)})"


def test_run_without_a_tokenizer_is_not_waited_for_and_asks_for_a_name(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "my-run", tokenizer=None)
    selection = CheckpointSelection(wait_for_incomplete_seconds=600)
    with pytest.raises(NoCheckpoints, match="name a tokenizer with --tokenizer"):
        discover(str(run), selection, sleep=lambda seconds: pytest.fail("it waits"))
    (run / "hf" / "step-200" / "config.json").touch()  # written now: the tokenizer may come
    waited: list[float] = []

    def write_the_tokenizer(seconds: float) -> None:
        waited.append(seconds)
        for name in PARTS:
            (run / "hf" / "step-200" / name).write_text("{}")

    assert [each.step for each in discover(str(run), selection, sleep=write_the_tokenizer)] == [200]
    assert waited


@pytest.mark.parametrize(
    ("model", "parts", "name"),
    [
        ("/r/a", {"tokenizer": "t"}, "with(/r/a, tokenizer=t)"),
        ("/r/a", {"tokenizer": "o/n@v1", "base": "o/b"}, "with(/r/a, tokenizer=hf://o/n%40v1, base=hf://o/b)"),
        ("mean(/r/a@1+2)", {"chat_template": "c"}, "mean(with(/r/a, template=c)@1+2)"),
        ("with(/r/a, tokenizer=t)", {"chat_template": "c"}, "with(/r/a, tokenizer=t, template=c)"),
    ],
)
def test_parts_of_a_model_become_a_part_of_its_name(model: str, parts: dict[str, str], name: str) -> None:
    asked = {"model_path": model, **parts}
    config = EvaluationConfig.model_validate({**asked, "evals": [{"name": "demo_facts"}]})
    assert (config.model_path, config.tokenizer, config.run_name) == (name, None, "a")
    assert SuiteRequest.model_validate(asked).model_path == name
    generation = {**asked, "prompts": {"files": ["p"]}, "output_path": "o"}
    assert GenerationConfig.model_validate(generation).model_path == name
    policy = {"name": "p", "runs": model, "suites": ["default_eval"], "evaluation_path": "e", **parts}
    assert Policy.model_validate(policy).runs == (name,)
    options = EvaluationOptions(model=model, evals=("demo_facts",), **parts)  # pyright: ignore[reportArgumentType]
    assert evaluation_from_options(options).model_path == name
    assert EvaluationConfig.model_validate(config.model_dump()) == config


def test_parts_without_a_model_are_refused() -> None:
    with pytest.raises(ValidationError, match="expected model_path with tokenizer"):
        GenerationConfig.model_validate(
            {"pool_name": "kept", "tokenizer": "t", "prompts": {"files": ["p"]}, "output_path": "o"}
        )


def test_run_of_a_policy_with_a_tokenizer_keeps_it_behind_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-2").mkdir()
    pattern = with_options(f"{tmp_path}/a-*", tokenizer="t")
    assert [*expand_runs([pattern])] == [f"with({tmp_path}/a-{number}, tokenizer=t)" for number in (1, 2)]


def test_checkpoints_command_says_where_a_tokenizer_comes_from(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    run = write_bare_run(tmp_path / "my-run", tokenizer=tmp_path / "t")
    (command_line())(
        ["checkpoints", str(run), "--tokenizer", str(tmp_path / "t"), "--json"], result_action="return_value"
    )
    assert [each["notes"] for each in json.loads(capsys.readouterr().out)] == [
        [f"its tokenizer is that of {tmp_path}/t"]
    ] * 2


def test_tekken_alone_is_refused_early_for_a_harness_that_cannot_read_it(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "my-run", tokenizer=None)
    for folder in (run / "hf").iterdir():
        for name in ("tekken.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")
    done = invoke(["evaluate", "--model", run, "--eval", "demo_facts", "--output", tmp_path / "out", "--dry-run"])
    assert done.exit_code == 3 and "tekken.json alone" in str(done.exception) and "--tokenizer" in str(done.exception)
