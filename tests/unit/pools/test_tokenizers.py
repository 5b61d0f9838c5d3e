"""Tokenizers from elsewhere: named by an option, or in the run's folder, and copies that engines and harnesses read."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.models import CONFIG, write_checkpoint
from fakes.stores import folder_store
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import with_options
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from pools.weights.own_code import require_code_allowed
from pools.weights.staging import Staging
from resources.errors import BadInput, CheckpointChanged

PARTS = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> Iterator[None]:
    with folder_store(tmp_path / "reads"):
        yield


def write_bare(folder: Path, *, tokenizer: Path | None, seed: int = 1) -> Path:
    """Writes a checkpoint, and moves its tokenizer to a folder, or removes it."""
    write_checkpoint(folder, seed=seed)
    for name in PARTS:
        if tokenizer is None:
            (folder / name).unlink()
        else:
            tokenizer.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(tokenizer / name)
    return folder


@pytest.mark.parametrize(("weights", "tokenizer"), list(itertools.product(("", "store:/"), repeat=2)))
def test_checkpoint_with_a_tokenizer_from_elsewhere_is_served_as_if_whole(
    tmp_path: Path, weights: str, tokenizer: str
) -> None:
    whole = write_checkpoint(tmp_path / "whole" / "step-1", seed=1)
    bare = write_bare(tmp_path / "bare" / "step-1", tokenizer=tmp_path / "tokenizers" / "t")
    (tmp_path / "tokenizers" / "t" / "model.safetensors").write_bytes(b"of another model")
    (tmp_path / "tokenizers" / "t" / "config.json").write_text("{}")
    uri = with_options(f"{weights}{bare}", tokenizer=f"{tokenizer}{tmp_path}/tokenizers/t")
    folder = inspect_checkpoint(uri)
    digests = digest_model_folder(folder)
    assert digests == digest_model_folder(inspect_model_folder(f"{weights}{whole}"))
    assert folder.notes == (f"its tokenizer is that of {tokenizer}{tmp_path}/tokenizers/t",)
    with Staging(tmp_path / "staged", max_bytes=10**6) as staging:
        for place in (staging.stage_small_files(uri, digests), staging.stage(uri, digests).path):
            assert all((place / name).read_bytes() == (whole / name).read_bytes() for name in PARTS)
        average = f"mean({uri}, {with_options(str(whole), tokenizer=f'{tokenizer}{tmp_path}/tokenizers/t')})"
        with staging.stage(average, digest_model_folder(inspect_checkpoint(average))) as merged:
            assert (merged.path / PARTS[0]).read_bytes() == (whole / PARTS[0]).read_bytes()


def test_checkpoint_with_another_tokenizer_and_template_has_neither_of_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    for name in ("merges.txt", "chat_template.jinja", "tokenization_own.py", "modeling_own.py"):
        (folder / name).write_text("own")
    other = write_checkpoint(tmp_path / "other", template="other")
    template = tmp_path / "my templates" / "short.jinja"
    template.parent.mkdir()
    template.write_text("{{ short }}")
    own = digest_model_folder(inspect_checkpoint(str(folder)))
    uri = with_options(str(folder), tokenizer=str(other), template=str(template))
    named = inspect_checkpoint(uri)
    digests = digest_model_folder(named)
    assert {*named.files} == {*PARTS, "chat_template.jinja", "config.json", "model.safetensors", "modeling_own.py"}
    assert (digests.weights, digests.config) == (own.weights, own.config)
    assert digests.tokenizer != own.tokenizer
    with Staging(tmp_path / "staged", max_bytes=10**6) as staging:
        with staging.stage(uri, digests) as staged:
            assert (staged.path / "chat_template.jinja").read_text() == "{{ short }}"
        template.write_text("{{ longer }}")
        with pytest.raises(CheckpointChanged, match="tokenizer"):
            staging.stage(uri, digests)


@pytest.mark.parametrize(
    ("checkpoint", "tokenizer"),
    [
        ("step-100", "."),
        ("checkpoint-100", "tokenizer"),
        ("hf/step-100", "."),
        ("checkpoints/100", "."),
        ("step_100/policy/weights/model/consolidated", "step_100/policy/tokenizer"),
        ("step_100/policy/weights/model/consolidated", "."),
        ("global_step_10/actor/merged_hf", "global_step_10/actor"),
        ("final", "."),
        ("step-100", "step-100/tokenizer"),
    ],
)
def test_checkpoint_without_a_tokenizer_takes_that_of_its_run_and_says_so(
    tmp_path: Path, checkpoint: str, tokenizer: str
) -> None:
    run = tmp_path / "my-run"
    folder = write_bare(run / checkpoint, tokenizer=run / tokenizer)
    inspected = inspect_checkpoint(str(folder))
    place = os.path.normpath(run / tokenizer)
    assert (inspected.problems, inspected.notes) == (
        (),
        (f"it has no tokenizer, so it takes that of its run, in {place}",),
    )
    stored = digest_model_folder(inspect_checkpoint(f"store:/{folder}"))
    assert stored.tokenizer == digest_model_folder(inspected).tokenizer


def test_checkpoint_without_a_tokenizer_takes_none_from_beyond_its_run_and_asks_for_a_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tokenizers")
    for name in PARTS:
        shutil.copy(tmp_path / "tokenizers" / name, tmp_path)
    folder = write_bare(tmp_path / "my-run" / "step-100", tokenizer=None)
    for name in PARTS:  # a link that leads out of the run
        (tmp_path / "my-run" / name).symlink_to(tmp_path / "tokenizers" / name)
    (tmp_path / "my-run" / PARTS[0]).unlink()
    [problem] = inspect_checkpoint(str(folder)).problems
    assert problem.startswith("no tokenizer: none of tokenizer.json, ")
    assert problem.endswith("name a folder that has it with --tokenizer")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["tokenizer.model"], None),
        (["tiktoken.model"], None),
        (["tekken.json"], None),
        (["vocab.json", "merges.txt"], None),
        (["vocab.json", "tokenization_own.py"], None),
        (["vocab.json"], "vocab.json without merges.txt"),
        ([], "no tokenizer"),
    ],
)
def test_tokenizer_of_every_form_counts_if_programs_can_read_it(
    tmp_path: Path, files: list[str], problem: str | None
) -> None:
    folder = write_checkpoint(tmp_path / "run" / "step-1")
    (folder / "tokenizer.json").unlink()
    for name in files:
        (folder / name).write_text("{}")
    problems = inspect_checkpoint(str(folder)).problems
    assert [each for each in problems if not problem or not each.startswith(problem)] == []
    assert bool(problems) == bool(problem)


@pytest.mark.parametrize("option", ["tokenizer", "template"])
def test_option_that_names_nothing_is_a_problem_of_the_checkpoint(tmp_path: Path, option: str) -> None:
    folder = write_checkpoint(tmp_path / "step-1")
    [problem] = inspect_checkpoint(with_options(str(folder), **{option: str(tmp_path / "gone")})).problems
    assert f"in {tmp_path / 'gone'}" in problem


@pytest.mark.parametrize(
    ("architecture", "maps", "tokenizer", "needed"),
    [
        ("LlamaForCausalLM", {}, {}, None),
        ("Phi3ForCausalLM", {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "m.M"}, {}, None),
        ("OwnForCausalLM", {"AutoConfig": "c.C", "AutoModelForCausalLM": "modeling_own.Own"}, {}, "modeling_own.Own"),
        ("InternLM2ForCausalLM", {"AutoConfig": "configuration_own.Own"}, {}, "configuration_own.Own"),
        ("LlamaForCausalLM", {}, {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenization_own"),
        ("LlamaForCausalLM", {}, {"AutoTokenizer": ["tokenization_own.Another", None]}, None),
        ("InternLM2ForCausalLM", {"AutoConfig": "owner/name--c.C"}, {}, "owner/name--c.C, code of that repository"),
        ("OwnForCausalLM", {"AutoModelForCausalLM": "owner/name--m.M"}, {}, "owner/name--m.M, code of that repository"),
        ("LlamaForCausalLM", {"AutoConfig": "owner/name--c.C", "AutoModelForCausalLM": "owner/name--m.M"}, {}, None),
        ("LlamaForCausalLM", {}, {"AutoTokenizer": ["owner/name--t.OwnTokenizer", None]}, "owner/name--t.OwnTok"),
    ],
)
def test_code_that_a_checkpoint_needs_is_refused_before_an_engine_starts(
    tmp_path: Path, architecture: str, maps: dict[str, str], tokenizer: dict[str, list[str]], needed: str | None
) -> None:
    config = {**CONFIG, "architectures": [architecture], "auto_map": maps}
    if architecture == "InternLM2ForCausalLM":
        config["model_type"] = "internlm2"
    folder = write_checkpoint(tmp_path / "step-1", config=config)
    (folder / "tokenization_own.py").write_text("raise SystemExit")
    (folder / PARTS[1]).write_text(json.dumps({"auto_map": tokenizer, "tokenizer_class": "OwnTokenizerFast"}))
    inspected = inspect_checkpoint(str(folder))
    assert inspected.complete
    require_code_allowed([inspected], allowed=True)
    if needed is None:
        require_code_allowed([inspected], allowed=False)
        return
    with pytest.raises(BadInput, match=needed) as refused:
        require_code_allowed([inspected], allowed=False)
    assert "--engine trust_remote_code=true" in refused.value.remedy
    if not tokenizer:
        require_code_allowed([inspected], allowed=False, engine=False)
        return
    with pytest.raises(BadInput, match=needed) as refused:  # the harness alone reads the tokenizer
        require_code_allowed([inspected], allowed=False, engine=False)
    assert "--tokenizer" in refused.value.remedy
