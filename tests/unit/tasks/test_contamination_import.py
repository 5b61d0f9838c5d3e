"""Imports of flags: reports of allenai/decon, attributes of Marin's datakit, plain lists; and errors in them."""

from __future__ import annotations

import gzip
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from resources.errors import BadInput, StorageError
from resources.storage import storage
from tasks.contamination.imported import import_flags
from tasks.records.questions.asked import AskedQuestion, questions_of
from tasks.records.questions.flags import Evidence, Flags, Tool, read_flags, status_of
from tasks.records.samples import Sample

FIELD = "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q."
BRIDGE = "Which of the seven bridges of the old town was built before the river changed its bed?"
OTHER = "Which is the name of the islander that keeps a pony and plays the flute by night?"

REPORT: dict[str, Any] = {
    "training_file": "data/shard-7.jsonl",
    "training_line": 51,
    "eval_dataset": "mmlu",
    "eval_key": "mmlu",
    "eval_line": 1766765,
    "eval_instance_index": 0,
    "ngram_match_cnt": 12,
    "eval_unique_ngrams": 13,
    "contamination_score": 0.93,
    "length_adjusted_question_threshold": 0.9,
    "method": "simple",
    "idf_overlap": 0.93,
    "training_overlap_text": "... find the degree for the **given field** extension q sqrt 2",
    "eval_question_text": "find the degree for the given field extension q sqrt 2 sqrt 3 sqrt 18 over q",
    "eval_answer_text": "4",
    "answer_overlap_ratio": 1.0,
    "fingerprint": "32957242b0602972",
    "is_correct": True,
    "split": "test",
}
"""A line of a decon report, with the fields that decon writes."""


def asked() -> list[AskedQuestion]:
    def sample(number: int, text: str) -> Sample:
        return Sample(benchmark="", id=f"{number}-{number:012x}", prompt=f"Question: {text}\nA. 0\nB. 4\nAnswer:",
                      output="", target="4", scores={})  # fmt: skip

    algebra = questions_of("mmlu_abstract_algebra", [sample(0, FIELD), sample(1, OTHER)], shots=0)
    return [*algebra, *questions_of("towns", [sample(0, BRIDGE)], shots=0)]


def imported(tmp_path: Path, content: str, *, file: str = "flags.jsonl", tool: Tool = "list", **options: Any) -> Flags:
    (tmp_path / file).write_text(content)
    return import_flags(str(tmp_path), "i", [str(tmp_path / file)], asked(), tool=tool, **options)


def flagged(flags: Flags) -> dict[tuple[str, str], bool]:
    return {(benchmark, name.partition("-")[0]): flag.flagged for (benchmark, name), flag in flags.by_name.items()}


def test_decon_report_flags_the_question_with_these_words_in_the_subject_that_asks_it(tmp_path: Path) -> None:
    other = {**REPORT, "eval_key": "gsm8k", "eval_question_text": "a question of no benchmark"}
    flags = imported(tmp_path, f"{json.dumps(REPORT)}\n{json.dumps(other)}\n", tool="decon")
    [flag] = flags.questions.values()
    assert (flag.benchmark, flag.id, flag.flagged) == ("mmlu_abstract_algebra", "0-000000000000", True)
    assert (flag.score, flag.answer) == (0.93, True)
    assert flag.evidence == Evidence(place="data/shard-7.jsonl, line 51", text=REPORT["training_overlap_text"])
    assert (flags.search.tool, flags.search.flagged, flags.search.unknown) == ("decon", 1, 1)
    assert [status_of(question, [flags]) for question in asked()] == ["flagged", "not scanned", "not scanned"]


def test_decon_report_without_texts_goes_by_the_number_of_the_instance(tmp_path: Path) -> None:
    line = {name: value for name, value in REPORT.items() if name != "eval_question_text"}
    flags = imported(tmp_path, json.dumps({**line, "eval_key": "towns"}), tool="decon")
    assert flagged(flags) == {("towns", "0"): True}


def test_rest_of_a_benchmark_is_clean_only_where_the_tool_covered_it(tmp_path: Path) -> None:
    flags = imported(tmp_path, json.dumps(REPORT), tool="decon", covers=["mmlu"])
    assert [status_of(question, [flags]) for question in asked()] == ["flagged", "clean", "not scanned"]


def marin(text: str) -> list[int]:
    """Returns the hashes of a text's 13-grams of words, as Marin's datakit computes them."""
    words = text.split()
    grams = [" ".join(words[at : at + 13]) for at in range(len(words) - 12)]
    return [int.from_bytes(blake2b(gram.encode(), digest_size=8).digest(), "big") for gram in grams]


def write_marin(folder: Path, *, matched: list[int], contaminated: bool = True) -> None:
    (folder / "outputs" / "main").mkdir(parents=True)
    (folder / "_bloom").mkdir()
    index = [(number, "mmlu-test-decontamination-0") for text in (FIELD, OTHER) for number in marin(text)]
    table = {"hash": pyarrow.array([number for number, _ in index], pyarrow.uint64()), "eval_id": [e for _, e in index]}
    parquet.write_table(pyarrow.table(table), folder / "_bloom" / "eval_hash_index.parquet")
    attributes = {
        "id": ["doc-1", "doc-2"],
        "partition_id": [0, 0],
        "contaminated": [contaminated, False],
        "max_overlap": [0.8, 0.0],
        "matched_hashes": pyarrow.array([matched, []], pyarrow.list_(pyarrow.uint64())),
    }
    parquet.write_table(pyarrow.table(attributes), folder / "outputs" / "main" / "part-00000-of-00001.parquet")


@pytest.mark.parametrize(("words", "is_flagged"), [(99, True), (13, False)])
def test_datakit_attributes_flag_questions_by_the_hashes_of_their_own_words(
    tmp_path: Path, words: int, is_flagged: bool
) -> None:
    write_marin(tmp_path, matched=marin(" ".join(OTHER.split()[:words])))
    flags = import_flags(str(tmp_path), "m", [str(tmp_path)], asked(), tool="marin")
    shares = {question.benchmark: question.score for question in flags.questions.values() if question.score}
    assert flagged(flags)["mmlu_abstract_algebra", "1"] is is_flagged
    assert shares == {"mmlu_abstract_algebra": pytest.approx(1.0 if is_flagged else 1 / 5, abs=1e-4)}
    assert ("towns", "0") not in flagged(flags), "its hashes were not in the index, so it was not searched"
    evidence = flags.by_name["mmlu_abstract_algebra", "1-000000000001"].evidence
    assert evidence is not None and evidence.place.endswith("part-00000-of-00001.parquet, document doc-1")


def test_datakit_documents_that_are_not_contaminated_flag_nothing(tmp_path: Path) -> None:
    write_marin(tmp_path, matched=marin(OTHER), contaminated=False)
    flags = import_flags(str(tmp_path), "m", [str(tmp_path)], asked(), tool="marin")
    assert (flags.search.flagged, flags.search.questions) == (0, 2)


def test_datakit_output_without_its_index_is_refused(tmp_path: Path) -> None:
    write_marin(tmp_path, matched=[])
    (tmp_path / "_bloom" / "eval_hash_index.parquet").unlink()
    with pytest.raises(BadInput, match=r"eval_hash_index\.parquet"):
        import_flags(str(tmp_path), "m", [str(tmp_path)], asked(), tool="marin")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("ids.txt", "0\n1-000000000001\n"),
        ("ids.csv", "0\n1,true,0.75\n"),
        ("ids.csv", "id,contaminated\n0,1\n1,yes\n"),
        ("ids.jsonl", '{"id": 0}\n{"id": "1", "flagged": true, "score": 0.75, "benchmark": "mmlu_abstract_algebra"}\n'),
    ],
)
def test_list_of_ids_flags_them_in_every_form(tmp_path: Path, file: str, content: str) -> None:
    flags = imported(tmp_path, content, file=file, benchmark="mmlu_*")
    assert flagged(flags) == {("mmlu_abstract_algebra", "0"): True, ("mmlu_abstract_algebra", "1"): True}


def test_list_says_what_is_clean_and_counts_unasked_questions(tmp_path: Path) -> None:
    flags = imported(tmp_path, "0,false,0.1\n1,true,0.9\n77,true\n", file="a.csv", benchmark="mmlu")
    assert flagged(flags) == {("mmlu_abstract_algebra", "0"): False, ("mmlu_abstract_algebra", "1"): True}
    assert flags.search.unknown == 1


@pytest.mark.parametrize(
    ("tool", "file", "content", "problem"),
    [
        ("list", "a.csv", "1,true\n1,perhaps\n", r"true or false in .*a.csv, line 2\n.*perhaps"),
        ("list", "a.csv", "1,true,1.5\n", r"a score from 0 to 1 in .*a.csv, line 1\n.*1.5"),
        ("list", "a.csv", "0,true,1,9\n", r"at most 3 columns .*line 1"),
        ("list", "a.jsonl", '{"id": 1}\n{"id": \n', r"a line of JSON in .*a.jsonl, line 2"),
        ("list", "a.jsonl", '{"name": 1}\n', r"the id of a question in .*line 1"),
        ("list", "a.txt", "0\n", r"a question of a single benchmark .*line 1\n.*mmlu_abstract_algebra, towns"),
        ("decon", "a.jsonl", '{"eval_key": "mmlu"}\n', r"training_file of a report of decon in .*line 1"),
        ("decon", "a.jsonl", "[]\n", r"an object in .*line 1"),
        ("marin", "a.parquet", "no parquet", r"Parquet in .*a.parquet"),
    ],
)
def test_wrong_line_is_named_with_its_file(tmp_path: Path, tool: Tool, file: str, content: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        imported(tmp_path, content, file=file, tool=tool)

    assert read_flags(str(tmp_path)) == ()


def test_written_flags_are_read_again_and_damaged_flags_are_refused(tmp_path: Path) -> None:
    written = imported(tmp_path, '{"id": 0, "evidence": "a\\u2028b\\ud800"}', benchmark="towns")
    [read] = read_flags(str(tmp_path))
    assert (read.search, read.questions, read.digest) == (written.search, written.questions, written.digest)
    packed, endless = gzip.compress(b"{}\n" * 500), gzip.compress(b" " * (65 << 20))
    for damaged in (b"no gzip", packed[:14] + bytes([packed[14] ^ 0xFF]) + packed[15:], packed, packed[:-9], endless):
        storage.write_bytes(read.uri, damaged)
        with pytest.raises(StorageError, match="flags of questions") as caught:
            read_flags(str(tmp_path))
    assert "a line of more than" in caught.value.found


def test_question_under_another_name_is_known_by_its_words_and_a_place_in_changed_data_is_not(tmp_path: Path) -> None:
    [town] = [question for question in asked() if question.benchmark == "towns"]
    flags = imported(tmp_path, "0", file="a.txt", benchmark="towns")
    helm = town._replace(benchmark="helm_towns", id="id9")
    assert status_of(helm, [flags]) == "flagged"
    (tmp_path / "b.txt").write_text("id9")
    placed = import_flags(str(tmp_path), "h", [str(tmp_path / "b.txt")], [helm], tool="list")
    assert status_of(helm, [placed]) == "flagged"
    assert status_of(helm._replace(digest="0" * 16), [placed]) == "not scanned"


def test_question_that_was_asked_in_two_templates_is_looked_for_in_both(tmp_path: Path) -> None:
    [question] = [each for each in asked() if each.benchmark == "towns"]
    other = question._replace(digest="f" * 16)
    (tmp_path / "a.csv").write_text(f"{question.id},true\n")
    flags = import_flags(str(tmp_path), "t", [str(tmp_path / "a.csv")], [question, other], tool="list")
    assert (flags.search.questions, len(read_flags(str(tmp_path))[0].questions)) == (2, 2)
    assert {status_of(each, [flags]) for each in (question, other)} == {"flagged"}
