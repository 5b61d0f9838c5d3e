"""Checkpoints on the hub, found, digested and staged by the real client from a fake hub."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.hub import FakeHub, forget_hub, running_hub, use_hub
from fakes.models import write_nano_llama
from fakes.policies import write_policy
from fakes.tokenizers import write_byte_tokenizer
from flows.reconcile import load_policy
from pools.weights.merges import as_named
from pools.weights.model_files import digest_model_folder
from pools.weights.staging import Staging
from resources.errors import StorageError
from resources.settings import settings
from tasks.checkpoints.discovery import Checkpoint, find_checkpoints, with_pinned_model
from tasks.checkpoints.run_snapshot import snapshot_run, with_digests
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import name_of

SERIES = "models/acme/series"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def model(folder: Path, seed: int) -> dict[str, bytes]:
    return files_of(write_byte_tokenizer(write_nano_llama(folder / str(seed), seed=seed, shards=2)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    first, second, other = (model(tmp_path / "made", seed) for seed in (1, 2, 3))
    branches = {
        "main": second,
        "stage1-step1000-tokens4B": first,
        "stage1-step2000-tokens8B": second,
        "refs/tags/stage2-step1000-tokens1B": other,
        "fix-readme": first,
    }
    with running_hub({"models/acme/alone": first}, {SERIES: branches}) as hub:
        hub.retry_after = 0
        use_hub(hub, monkeypatch, home=tmp_path / "hf")
        yield hub
    settings.cache_clear()


def only(uri: str) -> Checkpoint:
    (checkpoint,) = find_checkpoints(uri)
    return checkpoint


def test_branches_and_tags_with_steps_are_series_of_a_run_and_are_planned_without_their_weights(hub: FakeHub):
    checkpoints = find_checkpoints("acme/series")
    assert [(each.name, each.uri.partition("@")[2]) for each in checkpoints] == [
        ("series-stage1-1000", "stage1-step1000-tokens4B"),
        ("series-stage2-1000", "stage2-step1000-tokens1B"),
        ("series-stage1-2000", "stage1-step2000-tokens8B"),  # and main, which has the same content
    ]
    assert all(each.complete for each in checkpoints)
    seen = with_digests("hf://acme/series", snapshot_run("hf://acme/series"), reference=None)
    assert sorted(each.name for each in seen) == sorted(each.name for each in checkpoints)
    digests = {digest_model_folder(each.folder).checkpoint for each in checkpoints if each.folder}
    assert {each.digest for each in seen} == digests and len(digests) == 3
    assert hub.large_bytes < len(hub.revisions[SERIES]["main"]["model-00001-of-00002.safetensors"]) / 2  # headers


def test_a_run_that_has_not_changed_costs_a_request_and_a_new_branch_is_seen(hub: FakeHub):
    before = snapshot_run("hf://acme/series")
    forget_hub()  # as in the next process
    hub.requests.clear()
    assert snapshot_run("hf://acme/series") == before and len(hub.requests) == 1
    forget_hub()
    hub.revisions[SERIES]["stage1-step3000-tokens12B"] = hub.revisions[SERIES]["fix-readme"]
    assert "series-stage1-3000" in [each.name for each in snapshot_run("hf://acme/series")]


def test_a_single_stage_has_the_name_that_its_revisions_have_when_they_are_named_directly(hub: FakeHub):
    branches = hub.revisions[SERIES]
    first = "stage1-step1000-tokens4B"
    hub.revisions[SERIES] = {name: files for name, files in branches.items() if "stage2" not in name}
    hub.revisions[SERIES]["main"] = branches["refs/tags/stage2-step1000-tokens1B"]  # other content than the last step's
    series = find_checkpoints("acme/series")
    assert {each.run for each in series} == {"series-stage1"} and {each.series for each in series} == {"stage1"}
    assert [each.name for each in series] == ["series-stage1-1000", "series-stage1-2000", "series-stage1-final"]
    assert only(f"acme/series@{first}").name == "series-stage1-1000"
    seen = with_digests("hf://acme/series", snapshot_run("hf://acme/series"), reference=None)
    assert {each.name for each in seen} == {each.name for each in series}
    named = {}
    for model, given in (
        ("acme/series", None),
        (f"acme/series@{first}", None),
        ("acme/series", "mine"),
        ("acme/alone", None),
    ):
        config = {"model_path": model, "model_name": given, "evals": [{"name": "demo_facts"}]}
        named[model, given] = with_pinned_model(EvaluationConfig.model_validate(config)).run_name
    assert [*named.values()] == ["series-stage1", "series-stage1", "mine", "alone"]
    hub.revisions[SERIES] = branches
    forget_hub()
    assert (
        with_pinned_model(EvaluationConfig.model_validate(config | {"model_path": "acme/series"})).run_name == "series"
    )


def test_a_copy_goes_on_where_it_was_broken_off_and_has_the_planned_digest(hub: FakeHub, tmp_path: Path):
    checkpoint = only("acme/alone")
    assert checkpoint.folder is not None
    digests = digest_model_folder(checkpoint.folder)
    before = hub.large_bytes

    def break_off(here_bytes: int, total_bytes: int) -> None:
        if here_bytes > total_bytes / 2:
            raise InterruptedError("the connection is lost")

    with Staging(tmp_path / "staged", max_bytes=10**9, range_bytes=4_000) as staging:
        with pytest.raises(StorageError, match="run again: what arrived is kept"):
            staging.stage(checkpoint.uri, digests, on_progress=break_off)
        with staging.stage(checkpoint.uri, digests) as staged:
            copied = files_of(staged.path)
    weights = [name for name in copied if name.endswith(".safetensors")]
    assert copied == {name: hub.repositories["models/acme/alone"][name] for name in copied} and len(weights) == 2
    assert hub.large_bytes - before <= sum(len(copied[name]) for name in weights)  # each byte once


def test_a_file_that_was_cut_off_before_its_upload_is_named(hub: FakeHub):
    files = hub.repositories["models/acme/alone"]
    shard = next(name for name in files if name.endswith(".safetensors"))
    files[shard] = files[shard][:-8]
    assert shard in only("acme/alone").problems[0]


def test_policy_plans_a_run_of_the_hub_without_its_weights_and_sees_a_new_branch(hub: FakeHub, tmp_path: Path):
    policy = load_policy(str(write_policy(tmp_path, runs=["acme/series"])))

    def planned() -> dict[str, list[str]]:
        plan = reconcile(take_snapshot(policy), policy, now=time.time())
        return {state: sorted(cell.checkpoint.name for cell in cells) for state, cells in plan.by_state().items()}

    names = ["series-stage1-1000", "series-stage1-2000", "series-stage2-1000"]
    assert planned() == {"work": names}
    hub.revisions[SERIES]["stage2-step3000-tokens3B"] = hub.repositories["models/acme/alone"]
    forget_hub()
    assert planned() == {"work": [*names, "series-stage2-3000"]}
    assert hub.large_bytes < len(hub.revisions[SERIES]["main"]["model-00001-of-00002.safetensors"])  # headers


@pytest.mark.parametrize(
    ("named", "location"),
    [
        ("mean(acme/series@1000..2000)", "mean(hf://acme/series@1000..2000)"),
        ("with(acme/alone, tokenizer=acme/tok@v1)", "with(hf://acme/alone, tokenizer=hf://acme/tok%40v1)"),
        ("acme/series@stage1-step1000-tokens4B", "hf://acme/series@stage1-step1000-tokens4B"),
    ],
)
def test_repositories_are_named_as_such_in_configurations_policies_and_merges(named: str, location: str):
    config = {"model_path": named, "evals": [{"name": "demo_facts"}]}
    assert EvaluationConfig.model_validate(config).model_path == location == as_named(location)
    assert EvaluationConfig.model_validate(config).run_name == name_of(location)[0]
    policy = {"name": "p", "runs": named, "suites": ["demo"], "evaluation_path": "gs://bucket/evaluations"}
    assert Policy.model_validate(policy).runs == (location,)
