"""Staging: texts at a single revision, shared copies, and missing data; without a harness."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.hub import running_hub
from resources.errors import BadInput, StorageError
from resources.settings import settings
from tasks.offline.shared_copy import MANIFEST, Tree, fill, read_manifest, share
from tasks.offline.stage import TextSource, fill_from, stage_texts, text_source
from tasks.offline.wanted import Wanted, wanted_by
from tasks.spec.suites import load_suite, texts_folder

TEXTS = json.dumps(["A first text.", " ", {"text": "Another text."}]).encode()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def source_of(base: str, **changes: Any) -> TextSource:
    """Returns the built-in source at another address, with small texts."""
    blob = hashlib.sha1(b"blob %d\0" % len(TEXTS) + TEXTS).hexdigest()
    files = {name: {"path": f"{name}.json", "blob": blob} for name in text_source("uncheatable").files}
    given = {"name": "uncheatable", "revision": "r1", "base": base, "files": files}
    return TextSource.model_validate({**given, **changes})


def write_texts(folder: Path, content: bytes = TEXTS) -> Path:
    folder.mkdir(exist_ok=True)
    for name in text_source("uncheatable").files:
        (folder / f"{name}.json").write_bytes(content)
    return folder


def make_tree(folder: Path) -> Tree:
    return Tree({"hub": folder / "hub", "datasets": folder / "datasets"}, notes=folder / "notes")


def fill_tree(tree: Tree) -> None:
    blobs, snapshot = tree.local("hub/datasets--a--b/blobs"), tree.local("hub/datasets--a--b/snapshots/1")
    for place in (blobs, snapshot, tree.local("datasets/a___b"), tree.local("datasets/other")):
        place.mkdir(parents=True)
    (blobs / "x").write_bytes(b"questions")
    (blobs / "x.incomplete").write_bytes(b"half")
    (snapshot / "test.jsonl").symlink_to("../../blobs/x")
    tree.local("datasets/a___b/t.arrow").write_bytes(b"prepared")
    tree.local("datasets/other/t.arrow").write_bytes(b"somebody else's")


def of_a_b(relative: str) -> bool:
    return relative.startswith(("hub/datasets--a--b/", "datasets/a___b/"))


def test_texts_are_written_next_to_their_benchmarks_once_per_revision(tmp_path: Path):
    originals = write_texts(tmp_path / "originals")
    folder = tmp_path / "uncheatable"
    staged = stage_texts(source_of(str(originals)), folder, on_event=lambda line: None)
    assert staged["revision"] == "r1"
    assert staged["files"]["bbc_news"]["documents"] == 2
    lines = [json.loads(line) for line in (folder / "bbc_news.jsonl").read_text().splitlines()]
    assert lines == [{"id": 0, "text": "A first text."}, {"id": 2, "text": "Another text."}]
    assert "bbc_news.jsonl" in (folder / "fresh_bbc_news.yaml").read_text()
    assert (folder / "_texts.yaml").is_file()
    shutil.rmtree(originals)
    assert stage_texts(source_of(str(originals)), folder, on_event=lambda line: None) == staged
    with pytest.raises(BadInput, match="nothing there"):
        stage_texts(source_of(str(originals), revision="r2"), folder, on_event=lambda line: None)
    assert (folder / "bbc_news.jsonl").is_file()


def test_texts_that_are_not_those_of_the_revision_are_refused(tmp_path: Path):
    originals = write_texts(tmp_path / "originals", TEXTS.replace(b"first", b"other"))
    with pytest.raises(BadInput, match="Git's id"):
        stage_texts(source_of(str(originals)), tmp_path / "uncheatable", on_event=lambda line: None)
    assert not (tmp_path / "uncheatable").exists()


def test_texts_from_a_server_that_asks_to_wait_are_waited_for(tmp_path: Path):
    files = {f"{name}.json": TEXTS for name in text_source("uncheatable").files}
    with running_hub({"datasets/texts": files}) as hub:
        hub.limited = 1
        source = source_of(f"{hub.url}/datasets/texts/resolve/main")
        stage_texts(source, tmp_path / "uncheatable", on_event=lambda line: None)
        assert len(hub.requests) == 1 + len(files)


def test_shared_copy_fills_another_machine_with_what_is_wanted_links_included(tmp_path: Path):
    first, second, shared = make_tree(tmp_path / "here"), make_tree(tmp_path / "there"), str(tmp_path / "shared")
    fill_tree(first)
    assert share(first, shared, {"datasets": {"a/b": {"revision": "1"}}}, is_included=of_a_b) == 17
    assert share(first, shared, {}, is_included=of_a_b) == 0
    assert fill(second, shared, is_included=of_a_b) == 17
    assert second.local("hub/datasets--a--b/snapshots/1/test.jsonl").read_bytes() == b"questions"
    assert not second.local("datasets/other").exists()
    assert not second.local("hub/datasets--a--b/blobs/x.incomplete").exists()
    assert fill(second, shared, is_included=of_a_b) == 0
    assert (read_manifest(shared) or {})["datasets"] == {"a/b": {"revision": "1"}}


def test_damaged_or_hostile_shared_copy_is_refused(tmp_path: Path):
    first, second, shared = make_tree(tmp_path / "here"), make_tree(tmp_path / "there"), tmp_path / "shared"
    fill_tree(first)
    with pytest.raises(BadInput, match=r"no staged\.json"):
        fill(second, str(shared), is_included=of_a_b)
    share(first, str(shared), {}, is_included=of_a_b)
    (shared / "datasets/a___b/t.arrow").write_bytes(b"spoilt!!")
    with pytest.raises(StorageError, match="another content"):
        fill(second, str(shared), is_included=of_a_b)
    assert not second.local("datasets/a___b/t.arrow").exists()
    manifest = json.loads((shared / MANIFEST).read_text())
    for part, entry in (("files", {"hub/../../x": {"bytes": 1, "sha256": ""}}), ("links", {"hub/x": "/etc/passwd"})):
        (shared / MANIFEST).write_text(json.dumps({**manifest, part: entry}))
        with pytest.raises(StorageError, match="trust no copy"):
            fill(second, str(shared), is_included=lambda relative: True)


def test_filling_a_machine_names_what_the_shared_copy_lacks_and_reads_nothing_twice(own_cache: Path, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    staged = {"benchmarks": {"quiz": {}}, "texts": {"uncheatable": {"revision": "r1", "files": {}}}}
    name = "benchmarks/uncheatable/fresh.yaml"
    (shared / name).parent.mkdir(parents=True)
    (shared / name).write_bytes(b"task: fresh")
    file = {"bytes": 11, "sha256": hashlib.sha256(b"task: fresh").hexdigest()}
    (shared / MANIFEST).write_text(json.dumps({**staged, "files": {name: file}, "links": {}}))
    with pytest.raises(BadInput, match="not there: mmlu"):
        fill_from(str(shared), Wanted(benchmarks=("quiz", "mmlu")))
    entries, number = fill_from(str(shared))
    assert (number, entries["texts"]) == (11, staged["texts"])
    assert (Path(texts_folder("uncheatable")) / "fresh.yaml").read_bytes() == b"task: fresh"
    shutil.rmtree(shared / "benchmarks")
    assert fill_from(str(shared))[1] == 0


def test_needs_of_suites_are_listed_once_for_all_harnesses():
    names = ("key_evals", "default_base_eval", "uncheatable", "helm", "alpaca_eval", "demo")
    needs = wanted_by([load_suite(name) for name in names], tokenizers=["owner/name"])
    assert len(needs.benchmarks) == len(set(needs.benchmarks))
    assert {"mmlu", "gsm8k_cot", "humaneval"} <= set(needs.benchmarks)
    assert (needs.texts, needs.tokenizers) == (("uncheatable",), ("owner/name",))
    assert "tatsu-lab/alpaca_eval" in needs.files_of_datasets
    [(name, entries)] = needs.helm.items()  # those of the demo come with Assay
    assert name.startswith("mmlu-") and len(set(re.findall("mmlu:subject=([a-z_]+),", entries["run_specs"]))) == 57
