"""Scans of training texts: they find the same n-grams as a plain search, in bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fakes.records import make_record
from resources.errors import BadInput
from resources.storage import storage
from tasks.contamination.matching import Overlap, QuestionIndex
from tasks.contamination.scan import ScanProgress, ScanSettings, scan, scan_part
from tasks.contamination.texts import ReadingCounts, TextSource, parts_of, texts_in
from tasks.records.questions.asked import AskedQuestion, asked_in, own_texts, questions_of, words_of
from tasks.records.samples import Sample

QUESTION = "which of the seven bridges of the old town was built before the river changed its bed"


def asked(*texts: str, answer: str = "") -> list[AskedQuestion]:
    return [AskedQuestion("b", str(number), text, answer, f"{number:016x}") for number, text in enumerate(texts)]


def found_in(texts: Sequence[str], questions: Sequence[AskedQuestion], *, n: int, shortest: int) -> dict[int, Overlap]:
    findings: dict[int, Overlap] = {}
    index = QuestionIndex(questions, n=n, shortest=shortest)
    index.search(texts, findings, places=[("f", 0, number) for number in range(1, len(texts) + 1)])
    return findings


ACCENTED = 'welche der fünf höheren flüsse läuft an der café-brücke vorbei & "affine" naïve 10 brücken'
COPIES = {
    "nfd": unicodedata.normalize("NFD", ACCENTED),
    "soft-hyphens": ACCENTED.replace("ü", "ü\u00ad").replace("a", "a\u00ad"),
    "zero-width": "\ufeff" + "\u200b".join(ACCENTED) + "\u200d\ufe0f",
    "ligatures": ACCENTED.replace("ffi", "\ufb03").replace("fl", "\ufb02"),
    "full-width": "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in ACCENTED.upper()),
    "entities": ACCENTED.replace("&", "&amp;").replace('"', "&quot;").replace("ü", "&uuml;").replace("é", "&#233;"),
    "escapes": json.dumps(ACCENTED + " \U0001f600")[1:-1].replace("a", "\\u0061"),
    "no-break-spaces": ACCENTED.replace(" ", "\u00a0"),
}


@pytest.mark.parametrize("copy", COPIES)
def test_search_verbatim_copy_in_another_encoding_is_found_whole(copy: str) -> None:
    index = QuestionIndex(asked(ACCENTED), n=13, shortest=8)
    findings = found_in([f"before {COPIES[copy]} after"], index.questions, n=13, shortest=8)
    assert findings[0].seen.bit_count() == index.grams(0)


def test_words_of_encoded_separators_and_half_surrogates_divide_no_text() -> None:
    words = words_of(["a &#1; \\u0001 \\ud800 b", "c &notin; &bogus; \\u12"])
    assert words.between(0, len(words.starts)).count(b"\x01") == 1


def plainly(text: str) -> list[str]:
    """Returns the words of a text of letters and digits, without code of Assay."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).split()


def brute_force(texts: Sequence[str], question: str, *, n: int, shortest: int) -> tuple[int, int]:
    """Returns the question's n-grams that occur in texts, as bits, and its longest run of words; by sets and loops."""
    own, size = plainly(question), min(n, len(plainly(question)))
    if len(own) < shortest:
        return 0, 0
    grams, longest = set(), 0
    for text in texts:
        searched = plainly(text)
        grams |= {tuple(searched[at : at + size]) for at in range(len(searched) - size + 1)}
        for first in range(len(own)):
            for at in range(len(searched)):
                length = 0
                while own[first + length : first + length + 1] == searched[at + length : at + length + 1] != []:
                    length += 1
                longest = max(longest, length)
    seen = sum(1 << at for at in range(len(own) - size + 1) if tuple(own[at : at + size]) in grams)
    return seen, longest if seen else 0


few_words = st.lists(st.sampled_from(["a", "b", "The", "long-word", "extraordinarily"]), max_size=24).map(" ".join)


@given(
    texts=st.lists(few_words, max_size=4),
    questions=st.lists(few_words, min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 6), st.integers(0, 5)),
)
@settings(deadline=None, max_examples=100)
def test_what_is_found_is_what_a_plain_search_for_n_grams_finds(
    texts: list[str], questions: list[str], sizes: tuple[int, int]
) -> None:
    shortest, n = sizes[0], sum(sizes)
    own = [" ".join(plainly(question)) for question in questions]
    findings = found_in(texts, asked(*own), n=n, shortest=shortest) if texts else {}
    for number, question in enumerate(own):
        finding = findings.get(number, Overlap())
        assert (finding.seen, finding.longest) == brute_force(texts, question, n=n, shortest=shortest)


def test_words_are_lower_case_without_punctuation_and_single_chinese_characters() -> None:
    words = words_of(["Don’t “STOP”, É\u00a0ÜBER 日本語、ok日…", "second"])
    decoded = [word.decode() for word in words.between(0, len(words.starts))]
    assert decoded == ["don", "t", "stop", "é", "über", "日", "本", "語", "ok", "日", "\x01", "second"]


def test_words_that_share_a_number_and_differ_as_text_flag_nothing() -> None:
    first, second = (f"{'a' * 16}{middle * 8}{'z' * 8}" for middle in "bc")
    hashes = words_of([f"{first} {second}"]).hashes
    assert hashes[0] == hashes[1], "not the collision that this test is about"
    assert found_in([f"{first} {first}"], asked(f"{second} {second}"), n=2, shortest=2) == {}


def test_text_across_two_documents_is_not_found() -> None:
    half = len(QUESTION) // 2
    assert found_in([QUESTION[:half], QUESTION[half:]], asked(QUESTION), n=13, shortest=13) == {}


@pytest.mark.parametrize(("after", "follows"), [("It was Eden Bridge.", True), ("It is unknown.", False)])
def test_answer_is_seen_where_it_follows_the_question_in_the_same_text(after: str, follows: bool) -> None:
    texts = [f"Q: {QUESTION}? {after}", "Eden Bridge"]
    [finding] = found_in(texts, asked(QUESTION, answer="eden bridge"), n=13, shortest=8).values()
    assert (finding.answer, finding.longest, finding.place) == (follows, 17, ("f", 0, 1))


EXAMPLES = "Question: {0}\nAnswer: {1}\n\n"
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida")


@pytest.mark.parametrize("shots", [2, None], ids=["number of examples known", "unknown"])
def test_own_text_of_a_question_is_without_instruction_examples_and_labels(shots: int | None) -> None:
    examples = "".join(EXAMPLES.format(f"Where is {name} now?", "here") for name in ("Xan", "Yul"))
    prompts = [f"Answer each.\n\n{examples}Question: Where does {name} live?\nAnswer:" for name in NAMES]
    assert own_texts(prompts, shots=shots) == [f" Where does {name} live?" for name in NAMES]


def test_own_text_of_a_conversation_is_the_last_turn_of_its_user() -> None:
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."},
             {"role": "user", "content": "Which town built it?"}]  # fmt: skip

    assert own_texts([json.dumps(turns)], shots=None) == ["Which town built it?"]


@pytest.mark.parametrize("shots", [0, 1, 5, None])
def test_own_text_of_a_conversation_as_lm_eval_logs_it_is_its_last_turn_whole(shots: int | None) -> None:
    asked = [f"Where does {name} live?\nA. here\nB. there\nAnswer:" for name in NAMES]
    turns = [[{"role": "user", "content": "Where is Xan?\nAnswer:"}, {"role": "assistant", "content": "here"},
              {"role": "user", "content": text}] for text in asked]  # fmt: skip
    logged = [str([json.dumps(conversation)]) for conversation in turns]
    last_turns = own_texts(logged, shots=shots)
    assert last_turns == own_texts([json.dumps(conversation) for conversation in turns], shots=shots)
    assert all(f"{name} live?" in text for name, text in zip(NAMES, last_turns, strict=True)), last_turns


def test_choices_by_letter_belong_to_a_question_only_below_a_short_stem() -> None:
    choices = "\nA. the first of them\nB. the second"
    assert own_texts([f"{QUESTION}?{choices}", f"Which is true?{choices}"], shots=0) == [
        f"{QUESTION}?",
        f"Which is true?{choices}",
    ]


def test_question_has_the_same_digest_behind_examples_and_no_letter_answer() -> None:
    def question(prompt: str, target: str) -> AskedQuestion:
        return questions_of("b", [Sample(benchmark="b", id="1", prompt=prompt, output="", target=target, scores={})],
                            shots=prompt.count("Example"))[0]  # fmt: skip

    plain, with_examples = question(QUESTION, "B."), question(f"Example 1.\n\nExample 2.\n\n{QUESTION}?", "Eden")
    assert plain.digest == with_examples.digest
    assert (plain.answer, with_examples.answer) == ("", "eden")


def read(uri: Path | str, name: str = "text") -> list[str]:
    return [text for part in parts_of([TextSource(str(uri), name)]) for text in texts_in(part, ReadingCounts())]


def lines(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_texts_are_read_from_every_form_and_store_that_holds_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["one", "two"]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(["three"])) + gzip.compress(lines(["four"])))
    with pyarrow.CompressedOutputStream(str(tmp_path / "c.jsonl.zst"), "zstd") as file:
        file.write(lines(["five"]))
    parquet.write_table(pyarrow.table({"text": ["six", None], "id": [1, 2]}), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text("seven")
    (tmp_path / "_SUCCESS").touch()
    storage.write_bytes("memory://texts/shard-000.jsonl", lines(["eight"]))
    chat = {"messages": [{"role": "user", "content": "nine"}, {"role": "assistant", "content": "ten"}]}
    storage.write_bytes("memory://texts/shard-001.jsonl", json.dumps(chat).encode())
    assert read(tmp_path) == ["one", "two", "three", "four", "five", "six", "seven"]
    assert read("memory://texts/shard-{000..000}.jsonl") == ["eight"]
    assert read("memory://texts/*1.jsonl", "messages") == ["nine\nten"]


def test_each_text_is_read_once_for_any_cut_of_a_file() -> None:
    texts = ["one", "zwölf", "", "a line\nof two", "日本"]
    content = lines(texts)
    storage.write_bytes("memory://cut.jsonl", content)
    [whole] = parts_of([TextSource("memory://cut.jsonl")])
    for cut in range(1, len(content)):
        parts = [replace(whole, start=0, end=cut), replace(whole, start=cut, end=len(content))]
        read = [text for part in parts for text in texts_in(part, ReadingCounts())]
        assert read == [text for text in texts if text], cut


def test_texts_in_another_field_are_refused_with_the_fields_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "text"}\n')
    with pytest.raises(BadInput, match=r"'text' of .*a.jsonl\n.*the fields content"):
        read(tmp_path / "a.jsonl")


def test_file_of_which_no_line_is_a_document_is_refused_and_makes_no_question_clean(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "four five six"}], indent=2))
    with pytest.raises(BadInput, match=r"each line of .*a.json\n.*none of which"):
        read(tmp_path / "a.json")


def test_numbers_in_braces_may_run_down(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"t{number}.jsonl").write_bytes(lines([f"text {number}"]))

    assert sorted(read(f"{tmp_path}/t{{2..1}}.jsonl")) == ["text 1", "text 2"]


def test_texts_that_are_no_parquet_are_refused_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(BadInput, match=r"Parquet in .*a\.parquet"):
        read(tmp_path / "a.parquet")


def test_examples_of_a_group_are_taken_off_the_questions_of_its_parts() -> None:
    record = make_record(evaluation={"evals": [{"name": "mmlu", "num_fewshot": 1}]})
    prompt = f"One {QUESTION}?\n\nTwo {QUESTION[::-1]}?"
    sample = Sample(benchmark="mmlu_anatomy", id="1", prompt=prompt, output="", target=None, scores={})
    [question] = asked_in(record, {"mmlu_anatomy": [sample]})
    assert question.raw == f"Two {QUESTION[::-1]}?"


def test_scan_says_what_it_read_and_a_question_too_short_is_not_called_clean(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["Nothing of it.", f"Once: {QUESTION.upper()}!"]) + b"no json\n")
    (tmp_path / "b.txt").write_text(" ".join(QUESTION.split()[:10]))
    questions = asked(QUESTION, f"why {QUESTION[::-1]}", "too short to tell")
    flags = scan(str(tmp_path), "s", [TextSource(str(tmp_path / "[ab].*"))], questions, settings=ScanSettings())
    search, by_id = flags.search, {key[1]: flag for key, flag in flags.questions.items()}
    assert (search.text_files, search.documents, search.words, search.unreadable) == (2, 3, 31, 1)
    assert (search.questions, search.flagged, search.too_short) == (2, 1, 1)
    assert {name: (flag.flagged, flag.score, flag.longest) for name, flag in by_id.items()} == {
        "0": (True, 1.0, 17),
        "1": (False, 0.0, 0),
    }
    evidence = by_id["0"].evidence
    assert evidence is not None and evidence.text == QUESTION
    assert evidence.place == f"{tmp_path / 'a.jsonl'}, document 2"


def test_scan_that_was_ended_does_not_read_again_what_it_had_read(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(lines([QUESTION]))
    second.write_text('{"content": "text"}\n')
    done: list[ScanProgress] = []

    def again() -> int:
        sources = [TextSource(str(first)), TextSource(str(second))]
        flags = scan(str(tmp_path), "s", sources, asked(QUESTION), settings=ScanSettings(), processes=1,
                     on_progress=done.append)  # fmt: skip
        return flags.search.flagged

    with pytest.raises(BadInput, match="the fields content"):
        again()
    assert [progress.parts for progress in done] == [1]
    times = first.stat()
    first.write_bytes(lines(["x" * len(QUESTION)]))
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    second.write_bytes(lines(["one"]))
    assert again() == 1, "the first file was read again, which now says something else"
    assert [file.uri for file in storage.list_files(str(tmp_path / "contamination"))] == [
        str(tmp_path / "contamination" / "s.jsonl.gz")
    ]


def test_memory_of_a_scan_goes_by_the_questions_and_not_by_the_texts(tmp_path: Path) -> None:
    texts = [" ".join(f"{word}-{number}" for word in QUESTION.split() * 40) for number in range(700)]
    peaks = []
    for times in (1, 6):
        (tmp_path / "a.jsonl").write_bytes(lines(texts) * times)
        [part] = parts_of([TextSource(str(tmp_path / "a.jsonl"))])
        index = QuestionIndex(asked(QUESTION), n=13, shortest=8)
        tracemalloc.start()
        result = scan_part(index, part)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert result.reading.documents == 700 * times

    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("wrong", [{"n": 4}, {"threshold": 0.0}, {"shortest": 14}])
def test_settings_that_can_find_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="--shortest"):
        ScanSettings(**wrong).check()  # pyright: ignore[reportArgumentType]
