"""The digest of benchmarks: every local file that requested benchmarks read changes it, in any folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from resources.errors import BadInput
from resources.storage import storage
from tasks.spec.benchmarks import benchmarks_digest
from tasks.spec.evaluation import EvaluationConfig

OWN = "task: mine\ndataset_path: json\n"


def digest(folder: Path | str, *, name: str = "mine", evaluator: str = "lm_eval", **task_kwargs: Any) -> str:
    content = {
        "model_path": "/runs/run-a",
        "evaluator": {"lm_eval": "lm_evaluation_harness"}.get(evaluator, evaluator),
        "evals": [{"name": name, "task_kwargs": task_kwargs}],
        "benchmarks_path": str(folder),
    }
    return benchmarks_digest(EvaluationConfig.model_validate(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "benchmarks"
    made.mkdir()
    (made / "mine.yaml").write_text(OWN)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("questions.jsonl", "deep/more.jsonl"):
        (tmp_path / "data" / name).write_text("{}")
    return made


def test_digest_follows_named_files_and_not_how_the_folder_is_written(folder: Path, tmp_path: Path) -> None:
    named = {"path": "mine.yaml", "deep": [{"data_files": str(tmp_path / "data/questions.jsonl")}]}
    first = digest(folder, **named)
    assert digest(f"{folder}/", **named) == digest(f"file://{folder}", **named) == first
    (tmp_path / "data/questions.jsonl").write_text("{} ")
    assert digest(folder, **named) != first


PLACES = [
    {"dataset_kwargs": {"data_files": {"test": "DATA/questions.jsonl"}}},
    {"dataset_kwargs": {"data_files": ["DATA/*.jsonl"]}},
    {"dataset_kwargs": {"data_files": "DATA/**"}},
    {"dataset_kwargs": {"data_files": "file://DATA/questions.jsonl"}},
    {"dataset_kwargs": {"data_files": "~/data/questions.jsonl"}},
    {"dataset_kwargs": {"data_files": "../data/questions.jsonl"}},
    {"dataset_kwargs": {"data_files": "zip://q.jsonl::DATA/questions.jsonl"}},
    {"dataset_kwargs": {"data_dir": "DATA"}},
    {"dataset_path": "DATA"},
    {"metric_list": [{"metric": "DATA"}]},
]
"""Ways to name a file of the folder `data`; DATA is replaced by its path."""


@pytest.mark.parametrize("named", PLACES, ids=json.dumps)
@pytest.mark.parametrize("where", ["task_kwargs", "file", "included file"])
def test_data_outside_the_folder_changes_the_digest_however_it_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], where: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    named = json.loads(json.dumps(named).replace("DATA", str(tmp_path / "data")))
    if where == "file":
        (folder / "mine.yaml").write_text(OWN + yaml.safe_dump(named))
    if where == "included file":
        (folder / "mine.yaml").write_text(OWN + "include: sub/_template\n")
        (folder / "sub").mkdir()
        (folder / "sub" / "_template").write_text(yaml.safe_dump(named))
    task_kwargs = named if where == "task_kwargs" else {}
    first = digest(folder, **task_kwargs)
    (tmp_path / "data" / "questions.jsonl").write_text("{} ")
    assert digest(folder, **task_kwargs) != first


def test_files_deep_below_a_named_folder_change_the_digest(folder: Path, tmp_path: Path) -> None:
    first = digest(folder, dataset_path=str(tmp_path / "data"))
    (tmp_path / "data" / "deep" / "more.jsonl").write_text("{} ")
    assert digest(folder, dataset_path=str(tmp_path / "data")) != first


def test_chain_of_included_files_and_functions_outside_the_folder_changes_the_digest(
    folder: Path, tmp_path: Path
) -> None:
    function = f"{tmp_path}/data/own/shuffled".replace("/", ".")
    (folder / "mine.yaml").write_text(OWN + f"include: ../first.yaml\nprocess_docs: !function {function}\n")
    chain = {
        "first.yaml": "include: [data/two.yaml]\n",
        "data/two.yaml": "doc_to_text: !function scoring.text\n",
        "data/own.py": "def shuffled(docs): return docs\n",
        "data/scoring.py": "def text(doc): return doc\n",
    }
    for name, content in chain.items():
        (tmp_path / name).write_text(content)
    seen = [digest(folder)]
    for name, content in chain.items():
        (tmp_path / name).write_text(content + "# changed\n")
        seen.append(digest(folder))
    assert len(set(seen)) == len(seen)


def test_include_loop_and_damaged_file_end(folder: Path) -> None:
    (folder / "mine.yaml").write_text(OWN + "include: other.yaml\n")
    (folder / "other.yaml").write_text("include: mine.yaml\n")
    (folder / "damaged.yaml").write_text("a: [1")
    assert digest(folder) == digest(folder)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_not_read(folder: Path) -> None:
    first = digest(folder)
    (folder / ".#mine.yaml").symlink_to("user@host.123:456")  # Emacs' lock
    (folder / "nothing.yaml").symlink_to("nothing")
    os.mkfifo(folder / "pipe.yaml")
    assert digest(folder) == first


@pytest.mark.timeout(20)
def test_included_pipe_and_data_that_is_the_root_are_not_read(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (folder / "other.yaml").write_text("include: [../pipe.yaml, /dev/zero]\ndataset_path: '//'\n")
    assert digest(folder) == digest(folder)


def test_aliases_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "other.yaml").write_text(f"data: &d ['{tmp_path}/data/questions.jsonl']\ndataset_path: *d\n")
    first = digest(folder)
    (tmp_path / "data" / "questions.jsonl").write_text("{} ")
    assert digest(folder) != first


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", ["a: &a {b: *a}\n", "a: &a [*a]\n", "BOMB", "a: " + "[" * 2000 + "]" * 2000])
def test_benchmark_beyond_bounds_is_refused_by_name(folder: Path, content: str) -> None:
    bomb = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20))]
    (folder / "other.yaml").write_text(content.replace("BOMB", "\n".join(bomb) + "\n"))
    with pytest.raises(BadInput, match=r"YAML in .*other\.yaml"):
        digest(folder)


def test_hidden_files_change_the_digest_only_if_named_or_benchmarks(folder: Path, tmp_path: Path) -> None:
    named = {"dataset_path": str(tmp_path / "data")}
    first = digest(folder, **named)
    for name in (".mine.yaml.swp", ".git/HEAD", "sub/.ipynb_checkpoints/mine.yaml", ".d/q.jsonl", "../data/.git/HEAD"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / ".venv").symlink_to(tmp_path)
    assert digest(folder, **named) == first
    (folder / ".own.yaml").write_text("task: mine\ndataset_kwargs: {data_files: [.d/q.jsonl, '.git/*']}\n")
    seen = [first, digest(folder, **named)]
    for name in (".d/q.jsonl", ".git/HEAD"):
        (folder / name).write_text("y")
        seen.append(digest(folder, **named))
    assert len(set(seen)) == 4


def test_texts_that_look_like_paths_are_no_data(folder: Path) -> None:
    texts = {"target_delimiter": "/", "fewshot_delimiter": "..", "doc_to_text": "~" + "x" * 5000, "until": ["/*", "\0"]}
    (folder / "mine.yaml").write_text(OWN + yaml.safe_dump(texts))
    assert digest(folder, **texts) == digest(folder, **texts)


def test_arguments_of_own_helm_entries_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "helm").mkdir()
    entry = {"run_entry": "custom_mcqa", "arguments": {"path": str(tmp_path / "data" / "questions.jsonl")}}
    (folder / "helm" / "mine.json").write_text(json.dumps(entry))
    first = digest(folder, evaluator="helm")
    (tmp_path / "data" / "questions.jsonl").write_text("{} ")
    assert digest(folder, evaluator="helm") != first


def test_link_to_a_folder_in_the_benchmarks_folder_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "data").symlink_to(tmp_path / "data")
    with pytest.raises(BadInput, match=r"sub/data, a link to .*/data"):
        digest(folder, dataset_kwargs={"data_files": "data/questions.jsonl"})


def test_link_out_of_the_benchmarks_folder_is_refused_by_name(folder: Path) -> None:
    (folder / "link.yaml").symlink_to("mine.yaml")
    digest(folder)
    (folder / "bad.yaml").symlink_to("../data/questions.jsonl")
    with pytest.raises(BadInput, match=r"bad\.yaml, a link to"):
        digest(folder)


@pytest.mark.parametrize("named", ["../data/questions.jsonl", "../link/../questions.jsonl", "NAME/../data/*.jsonl"])
@pytest.mark.parametrize("where", ["data", "include"])
def test_way_up_leads_out_of_the_folder_that_links_point_to(
    folder: Path, tmp_path: Path, named: str, where: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data" / "deep")
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "elsewhere" / "root"
    root.symlink_to(folder)
    named = named.replace("NAME", str(root))
    if where == "include":
        named = named.replace("*", "questions")
        (folder / "sub").mkdir()
        (folder / "sub" / "own.yaml").write_text("include: ../own.yaml\n")
        (folder / "own.yaml").write_text(f"include: {named}\n")
    data: dict[str, Any] = {"dataset_kwargs": {"data_files": named}} if where == "data" else {}
    first = digest(root, **data)
    (tmp_path / "data" / "questions.jsonl").write_text("{} ")
    assert digest(root, **data) != first


def test_data_that_cannot_be_read_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "link.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(BadInput, match=r"link\.jsonl"):
        digest(folder, dataset_path=str(tmp_path / "data"))


def test_benchmarks_and_data_in_a_store_are_followed(tmp_path: Path) -> None:
    root, data = (f"memory://{tmp_path.name}/{name}" for name in ("benchmarks", "data"))
    storage.write_bytes(f"{data}/q.jsonl", b"{}")
    storage.write_bytes(f"{root}/mine.yaml", (OWN + f"dataset_kwargs: {{data_files: '{data}/*.jsonl'}}").encode())
    storage.write_bytes(f"{root}/other.yaml", b"include: ../data/q.jsonl")
    first = digest(root)
    storage.write_bytes(f"{data}/q.jsonl", b"{} ")
    assert digest(root) != first
