"""The page of questions and answers in Chromium: clicks, keys, links, filters, hostile texts, many questions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import orjson
import pytest
from scipy.stats import binomtest

from fakes.browser import Page, browser
from fakes.view_server import ViewServer, view_server
from fakes.viewing import HOSTILE, made_files
from tasks.reports.viewer.columns import NO_SCORE, Index, Questions, Scale, Score, ViewedBenchmark, ViewedCheckpoint
from tasks.reports.viewer.page import single_file
from tasks.verdicts.statistics.paired import mcnemar

pytestmark = pytest.mark.chromium

CHOICES, ANSWERS = "lm-eval-made-choices-5f0c2a7b", "helm-made-answers-5f0c2a7b"
QUESTIONS, CHECKPOINTS = 120, 12
STATUS = "document.getElementById('status').textContent"
DRAWN = "performance.getEntriesByName('first picture').length && !document.getElementById('picture').hidden"
OPEN = "document.querySelector('.question h2')?.textContent"


@pytest.fixture(scope="module")
def server() -> Iterator[ViewServer]:
    with view_server() as running:
        running.sites["made"] = made_files(questions=QUESTIONS, checkpoints=CHECKPOINTS)
        running.sites["hostile"] = made_files(questions=10, checkpoints=4, hostile=True)
        running.sites["large"] = large_files(questions=14_000, checkpoints=200)
        yield running


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser"), width=1280, height=800) as opened:
        yield opened


@pytest.fixture
def page(tab: Page, server: ViewServer) -> Page:
    """An empty tab of desktop width."""
    tab.go("about:blank")
    sized(tab, 1280)
    server.answers.clear()
    return tab


def sized(page: Page, width: int, *, scheme: str = "light") -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def show(page: Page, server: ViewServer, site: str = "made", **selection: str) -> None:
    page.go(f"{server.url}/{site}/#{urlencode(selection)}")
    page.until(f"document.readyState === 'complete' && {DRAWN}")


def scores_of(files: Mapping[str, bytes], key: str, metric: int = 0) -> np.ndarray:
    return np.frombuffer(files[f"{key}/scores/{metric}.bin"], np.uint8).reshape(CHECKPOINTS, -1)


def large_files(*, questions: int, checkpoints: int) -> dict[str, bytes]:
    """Returns scores of many questions at many checkpoints, without texts."""
    known = np.random.default_rng(1)
    learned = known.integers(0, int(checkpoints * 1.2), questions)
    right = (np.arange(checkpoints)[:, None] >= learned) ^ (known.random((checkpoints, questions)) < 0.05)
    shown = [
        ViewedCheckpoint("run", f"step-{step}", step, None, "succeeded", None, True, {"acc": Score(0.5, 0.4, 0.6)})
        for step in range(checkpoints)
    ]
    ids = [f"question-{number}" for number in range(questions)]
    return {
        "index.json": orjson.dumps(
            Index("Large", True, [ViewedBenchmark("large", "lm-eval", "large", "", "00", ["acc"], shown)])
        ),
        "large/questions.json": orjson.dumps(Questions(ids, [], [], [], [Scale("acc", True, 0.0, 1.0)], 1)),
        "large/scores/0.bin": (right * np.uint8(254)).tobytes(),
        "large/flags.bin": bytes(right.size),
    }


def rows_in_table(page: Page) -> list[str]:
    """Returns the questions in the order of the grid's table."""
    return page.value("[...document.querySelectorAll('#table tbody th')].map((cell) => cell.textContent)")


def paths(scores: np.ndarray) -> list[tuple[int, int, int]]:
    """Returns where each question was learned and lost (-1 for never) and its flips, computed row by row."""
    changes = []
    for row in scores.T:
        seen = [(place, score >= 127) for place, score in enumerate(row) if score != NO_SCORE]
        if not seen:
            changes.append((-1, -1, 0))
            continue
        flips = [place for (_, before), (place, after) in pairwise(seen) if before != after]
        since = flips[-1] if flips else seen[0][0]
        learned = since if seen[-1][1] else -1
        lost = since if not seen[-1][1] and flips else -1
        changes.append((learned, lost, len(flips)))
    return changes


def test_grid_has_the_colour_of_each_score_and_its_table_the_order_in_which_questions_were_learned(
    page: Page, server: ViewServer
) -> None:
    scores = scores_of(server.sites["made"], CHOICES)
    show(page, server, b=CHOICES)
    assert page.value(STATUS) == f"{QUESTIONS} questions × {CHECKPOINTS} checkpoints"
    expected = paths(scores)
    sums = np.where(scores == NO_SCORE, 0, scores).astype(int).sum(axis=0)
    order = sorted(range(QUESTIONS), key=lambda q: (expected[q][0] % 10**6, -sums[q], q))

    page.click("document.getElementById('as-table')")
    rows = page.until("document.querySelectorAll('#table tbody tr').length") and rows_in_table(page)

    assert [name.rsplit("-", 1)[1] for name in rows] == [str(question) for question in order[:50]]
    page.click("document.getElementById('as-table')")
    page.until(DRAWN)
    drawn_rows = (0, QUESTIONS // 2, QUESTIONS - 1)
    colours = page.until(
        "(() => { const picture = document.getElementById('canvas').getContext('2d');"
        " const { clientWidth, clientHeight } = document.getElementById('scroller');"
        " const at = (row, place) => [...picture.getImageData(50 + (place + 0.5) * (clientWidth - 50) / 12,"
        f" (row + 0.5) * clientHeight / {QUESTIONS}, 1, 1).data];"
        f" const found = {list(drawn_rows)}.map((row) => [1, 5, 9].map((place) => at(row, place)));"
        " return found.flat().every(([red, , blue]) => red !== blue) && found; })()"
    )
    for row, drawn in zip(drawn_rows, colours, strict=True):
        right = [bool(scores[place, order[row]] == 254) for place in (1, 5, 9)]
        assert [blue > red for red, _, blue, _ in drawn] == right, "blue is right, amber is wrong"


def test_questions_are_sorted_by_when_they_were_learned_or_lost_within_a_run_by_flips_by_mean_and_by_id(
    page: Page, server: ViewServer
) -> None:
    known = np.random.default_rng(2)
    scores = known.choice([0, 120, 134, 254, NO_SCORE], p=[0.3, 0.1, 0.1, 0.4, 0.1], size=(8, 60)).astype(np.uint8)
    runs = ["first"] * 4 + ["second"] * 4
    show(page, server)
    summary, orders = page.value(
        "Promise.all([import('./model.js'), import('./table.js')]).then(([model, { ScoreTable }]) => {"
        f" const scores = Uint8Array.from({scores.ravel().tolist()});"
        " const ids = [...Array(60).keys()].map((id) => `q${id}`);"
        " const scale = { higher_is_better: true, low: 0, high: 1 };"
        f" const table = new ScoreTable({{ scores, flags: new Uint8Array({scores.size}), scale, runs: {runs} }});"
        " const found = model.summarize(table, [...Array(8).keys()]);"
        " const orders = ['learned', '-learned', 'lost', 'flips', 'mean', 'id'].map((sort) => [sort,"
        " [...model.sortRows(found, sort, ids)]]);"
        " return [Object.fromEntries(['learned', 'lost', 'flips'].map((name) => [name, [...found[name]]])),"
        " Object.fromEntries(orders)]; })"
    )

    halves = [paths(scores[:4]), paths(scores[4:])]
    first_of = [
        [next((at + offset for at, offset in ((pair[0][k], 0), (pair[1][k], 4)) if at >= 0), 0xFFFF) for k in (0, 1)]
        for pair in zip(*halves, strict=True)
    ]
    learned, lost = zip(*first_of, strict=True)
    flips = [before[2] + after[2] for before, after in zip(*halves, strict=True)]
    assert summary == {"learned": list(learned), "lost": list(lost), "flips": flips}
    sums = np.where(scores == NO_SCORE, 0, scores).astype(int).sum(axis=0)
    means = sums / np.maximum(1, (scores != NO_SCORE).sum(axis=0))
    keys = {
        "learned": lambda q: (learned[q], -sums[q], q),
        "lost": lambda q: (lost[q] if lost[q] < 0xFFFF else 0xFFFF + learned[q], -sums[q], q),
        "flips": lambda q: (-flips[q], -sums[q], q),
        "mean": lambda q: (means[q], q),
        "id": lambda q: q,
    }
    expected = {name: sorted(range(60), key=key) for name, key in keys.items()}
    assert orders == {**expected, "-learned": expected["learned"][::-1]}


@pytest.mark.parametrize(("key", "metric"), [(CHOICES, "acc"), (CHOICES, "bpb"), (ANSWERS, "f1")])
def test_filters_keep_the_questions_that_the_scores_say(page: Page, server: ViewServer, key: str, metric: str) -> None:
    scores = scores_of(server.sites["made"], key, ["acc", "bpb"].index(metric) if key == CHOICES else 0).astype(int)
    flags = np.frombuffer(server.sites["made"][f"{key}/flags.bin"], np.uint8).reshape(CHECKPOINTS, -1)
    scored = scores != NO_SCORE
    right = scored & (scores < 127 if metric == "bpb" else scores >= 127)
    better = (scores[11] - scores[0]) * (-1 if metric == "bpb" else 1)
    asked = scored[0] & scored[11]
    expected = {
        "right": (right == scored).all(axis=0),
        "wrong": ~right.any(axis=0),
        "cut": (flags & 1).any(axis=0),
        "withheld": (flags & 2).any(axis=0),
        "flipped": asked & (better != 0),
        "won": asked & (better > 0),
        "lost": asked & (better < 0),
        "both": asked & (better == 0) & right[11],
        "neither": asked & (better == 0) & ~right[11],
    }
    show(page, server, b=key, m=metric)

    for name, kept in expected.items():
        page.value(
            f"(() => {{ const list = document.getElementById('filter'); list.value = '{name}';"
            " list.dispatchEvent(new Event('change')); })()"
        )
        number = int(kept.sum())
        page.until(f"location.hash.includes('filter={name}')")
        if number == 0:
            page.until("document.getElementById('empty').textContent.startsWith('No question is left')")
            continue
        of = f"{QUESTIONS} questions × {CHECKPOINTS} checkpoints"
        count = of if number == QUESTIONS else f"{number} of {of}"
        assert page.until(f"{STATUS} === {json.dumps(count)} && !document.getElementById('picture').hidden"), name
    assert 0 < expected["won"].sum() < QUESTIONS


def test_keys_move_a_cursor_that_is_read_out_open_its_question_and_walk_on_from_there(
    page: Page, server: ViewServer
) -> None:
    show(page, server, b=CHOICES, sort="id")
    page.value("document.getElementById('scroller').focus()")

    for key, code in (("ArrowDown", 40), ("ArrowDown", 40), ("ArrowRight", 39)):
        page.press(key, code)
    page.until("document.getElementById('cursor-said').textContent.includes('run-a-2000')")
    assert "question-2" in page.value("document.getElementById('cursor-said').textContent")
    page.press("Enter", 13)
    assert page.until(OPEN) == "made_one question-2"
    assert page.value("[document.getElementById('a').value, document.getElementById('c').value]") == [
        "run-a/run-a-1000",
        "run-a/run-a-2000",
    ], "the cell's checkpoint is B"
    page.press("j", 74)
    page.until(f"{OPEN} === 'made_one question-3'")
    page.press("k", 75)
    page.press("k", 75)
    page.until(f"{OPEN} === 'made_one question-1'")
    page.press("]", 221)
    page.until("document.getElementById('c').value === 'run-a/run-a-3000'")
    page.press("Escape", 27)
    page.until("document.body.dataset.view === 'pair' && document.activeElement.id === 'scroller'")
    page.press("ArrowLeft", 37)
    page.press("Enter", 13)
    page.until(OPEN)
    assert page.value("document.getElementById('c').value") == "run-a/run-a-3000", "the cell is of A, so B stays"


def test_address_restores_the_selection_elsewhere_and_the_back_button_undoes_it(page: Page, server: ViewServer) -> None:
    show(page, server, b=CHOICES)
    page.click("document.getElementById('tab-question')")
    page.click("document.getElementById('as-table')")
    page.click("document.querySelectorAll('#table tbody button')[4]")
    name = page.until(OPEN)
    page.click("[...document.querySelectorAll('.walk button')].find((button) => button.textContent === 'Next')")
    page.until(f"{OPEN} !== {json.dumps(name)}")
    shared, shown = page.value("location.href"), page.value("document.querySelector('.question').innerText")

    page.go("about:blank")
    page.go(shared)
    page.until(OPEN)
    assert page.value("document.querySelector('.question').innerText") == shown

    show(page, server, b=CHOICES)
    page.value(
        "(() => { const list = document.getElementById('filter'); list.value = 'won';"
        " list.dispatchEvent(new Event('change')); })()"
    )
    page.until(f"{STATUS}.includes(' of ')")
    page.value("history.back()")
    page.until(f"{STATUS} === '{QUESTIONS} questions × {CHECKPOINTS} checkpoints'")


def test_question_of_choices_has_its_words_as_asked_and_a_curve_and_number_for_each_choice(
    page: Page, server: ViewServer
) -> None:
    show(page, server, b=CHOICES, q="made_one question-5", a="run-a/run-a-2000", c="run-a/run-a-3000")
    page.until(OPEN)
    part = orjson.loads(server.sites["made"][f"{CHOICES}/part/0.json"])["questions"][5]

    shown = page.value(
        "({context: document.querySelector('.question details').open,"
        " prompt: document.querySelector('[aria-label=Prompt]').textContent,"
        " target: document.querySelector('.target dd').textContent,"
        " rows: [...document.querySelectorAll('.choices tbody tr')].map((row) => [...row.querySelectorAll('.text, td')]"
        ".map((cell) => cell.textContent)), right: document.querySelector('tr.right .text').textContent,"
        " curves: document.querySelectorAll('.chart .choice').length,"
        " cells: document.querySelectorAll('.strip button').length})"
    )

    assert (shown["context"], shown["prompt"], shown["target"]) == (False, part["prompt"], part["target"])
    assert shown["cells"] == CHECKPOINTS and shown["right"] == part["target"]
    assert shown["curves"] == 2 * 4, "each is broken at the checkpoint that has no samples"
    for place, (text, before, after) in enumerate(shown["rows"]):
        likely = [part["answers"][checkpoint][0]["log_likelihoods"] for checkpoint in (1, 2)]
        assert text == part["choices"][place]
        for cell, values in zip((before, after), likely, strict=True):
            assert cell.replace("−", "-").startswith(f"{values[place]:.2f}")
            assert cell.endswith("likeliest") == (values[place] == max(values))


def test_answers_are_side_by_side_with_differing_words_marked(page: Page, server: ViewServer) -> None:
    flags = np.frombuffer(server.sites["made"][f"{ANSWERS}/flags.bin"], np.uint8).reshape(CHECKPOINTS, -1)
    cut = next(question for question in range(QUESTIONS) if flags[2, question] == 1 and flags[0, question] == 0)
    number, place = divmod(cut, 8)
    asked = orjson.loads(server.sites["made"][f"{ANSWERS}/part/{number}.json"])["questions"][place]
    show(page, server, b=ANSWERS, q=f"question-{cut}", a="run-a/run-a-1000", c="run-a/run-a-3000")
    page.until(OPEN)

    first, second = page.value(
        "[...document.querySelectorAll('.answer')].map((answer) => ({text: answer.querySelector('pre').textContent,"
        " facts: answer.querySelector('.facts').textContent,"
        " marked: [...answer.querySelectorAll('ins, del')].map((part) => part.textContent).join('')}))"
    )
    assert [first["text"], second["text"]] == [asked["answers"][checkpoint][0]["output"] for checkpoint in (0, 2)]
    assert first["marked"] and second["marked"] and first["marked"] != first["text"]
    tokens = asked["answers"][2][0]["tokens"]
    assert "finish reason stop" in first["facts"]
    assert "cut at the length limit" in second["facts"] and f"{tokens} tokens" in second["facts"]


def test_differing_words_leave_two_texts_alike_and_every_word_of_them_in_place(page: Page, server: ViewServer) -> None:
    source = random.Random(5)
    texts = [" ".join(source.choices(["a", "bb", "c!", "dé", "\n"], k=source.randrange(40))) for _ in range(120)]
    show(page, server)

    pairs = page.value(
        f"import('./diff.js').then(({{compareTexts}}) => {json.dumps(list(zip(texts[::2], texts[1::2], strict=True)))}"
        ".map(([before, after]) => compareTexts(before, after)))"
    )

    for before, after, (first, second) in zip(texts[::2], texts[1::2], pairs, strict=True):
        assert ("".join(text for text, _ in first), "".join(text for text, _ in second)) == (before, after)
        kept = ["".join(text for text, changed in side if not changed) for side in (first, second)]
        assert kept[0] == kept[1]
    unlike = "import('./diff.js').then(({compareTexts}) => compareTexts('a '.repeat(3000), 'b '.repeat(3000)))"
    assert page.value(unlike) is None


def test_two_checkpoints_have_numbers_that_lead_to_their_questions(page: Page, server: ViewServer) -> None:
    files = server.sites["made"]
    pair = orjson.loads(files[f"{CHOICES}/pairs/0-0-11.json"])
    show(page, server, b=CHOICES)
    page.until("!!document.querySelector('.kinds')")

    numbers = page.value(
        "Object.fromEntries([...document.querySelectorAll('.kind')].map((kind) =>"
        " [kind.querySelector('.name').textContent, Number(kind.querySelector('strong').textContent)]))"
    )
    assert numbers == {kind: len(pair[kind]) for kind in ("both", "lost", "won", "neither")}
    text = page.value("document.querySelector('.pair').innerText")
    assert f"+{pair['difference']:.3f}" in text and "0.030" in text and "McNemar" in text
    page.click("document.querySelector('.kind.lost')")
    page.until(f"{STATUS}.startsWith('{len(pair['lost'])} of')")
    listed = page.until("[...document.querySelectorAll('.question-list button')].map((button) => button.textContent)")
    assert {int(name.rsplit("-", 1)[1]) for name in listed} == set(pair["lost"])
    page.click("document.querySelector('.question-list button')")
    assert page.until(OPEN) == listed[0]


@pytest.mark.parametrize("embedded", [False, True], ids=["served", "one-file"])
def test_hostile_names_and_texts_are_shown_as_they_are_and_do_nothing(
    page: Page, server: ViewServer, tmp_path: Path, *, embedded: bool
) -> None:
    files = server.sites["hostile"]
    file = tmp_path / "view.html"
    file.write_bytes(single_file(files))
    at = file.as_uri() if embedded else f"{server.url}/hostile/"
    for key, prefix in ((CHOICES, "made_one "), (ANSWERS, "")):
        page.go("about:blank")
        page.go(f"{at}#{urlencode({'b': key})}")
        page.until(DRAWN)
        for number, name in enumerate(orjson.loads(files[f"{key}/questions.json"])["ids"][: len(HOSTILE)]):
            page.value(f"location.hash = {json.dumps(urlencode({'b': key, 'q': prefix + name}))}")
            page.until(f"{OPEN} === {json.dumps(prefix + name)}")
            part = orjson.loads(files[f"{key}/part/0.json"])["questions"][number]
            shown = page.value(
                "({prompt: document.querySelector('[aria-label=Prompt]').textContent,"
                " answers: [...document.querySelectorAll('.answer pre')].map((answer) => answer.textContent),"
                " made: document.querySelectorAll('body script:not([type]), img, [onload], [onerror]').length})"
            )
            assert shown["prompt"] == part["prompt"] and shown["made"] == 0
            assert shown["answers"] == [part["answers"][checkpoint][0]["output"] for checkpoint in (0, 3)]
        page.click("document.getElementById('as-table')")
        page.until("document.querySelectorAll('#table tbody tr').length")
        page.click("document.getElementById('tab-pair')")
        page.until("!!document.querySelector('.pair')")
        assert page.value("document.title").endswith("Made questions")


def test_single_file_without_a_server_shows_questions_and_supports_search(
    page: Page, server: ViewServer, tmp_path: Path
) -> None:
    file = tmp_path / "view.html"
    files = made_files(questions=30, checkpoints=4)
    file.write_bytes(single_file(files))
    page.go(f"{file.as_uri()}#{urlencode({'b': CHOICES})}")
    page.until(DRAWN)

    page.fill("document.getElementById('text')", "NUMBER 7 OF")

    page.until(f"{STATUS}.startsWith('1 of 30')")
    page.click("document.getElementById('as-table')")
    page.until("document.querySelectorAll('#table tbody tr').length === 1")
    assert rows_in_table(page) == ["made_one question-7"]
    page.fill("document.getElementById('text')", "no such words")
    page.until("document.getElementById('empty').textContent.startsWith('No question is left')")
    page.click("document.querySelector('#empty button')")
    page.until(f"{STATUS} === '30 questions × 4 checkpoints'")
    page.value(f"location.hash = '{urlencode({'b': CHOICES, 'a': 'run-a/run-a-2000', 'c': 'run-a/run-a-1000'})}'")
    page.until("document.querySelector('.pair h2').textContent === 'run-a-2000 → run-a-1000'")
    pair = orjson.loads(files[f"{CHOICES}/pairs/0-0-1.json"])
    text = page.value("document.querySelector('.pair').textContent").replace("−", "-")
    assert f"{-pair['difference']:+.3f}" in text and f"{-pair['high']:+.3f} to {-pair['low']:+.3f}" in text


def test_single_file_has_mcnemars_test_of_every_pair_of_independent_questions(
    page: Page, server: ViewServer, tmp_path: Path
) -> None:
    files = large_files(questions=60, checkpoints=4)
    before, after = np.frombuffer(files["large/scores/0.bin"], np.uint8).reshape(4, -1)[[0, 2]] > 0
    finding = mcnemar(before, after)
    file = tmp_path / "view.html"
    file.write_bytes(single_file(files))
    page.go(f"{file.as_uri()}#{urlencode({'a': 'run/step-0', 'c': 'run/step-2'})}")

    text = page.until("document.querySelector('.pair .facts')?.innerText && document.querySelector('.pair').innerText")

    assert finding.low is not None and finding.high is not None and finding.p is not None
    assert f"{finding.difference:+.3f}" in text and f"{finding.low:+.3f} to {finding.high:+.3f}" in text.replace(
        "−", "-"
    )
    assert f"{finding.p:.4f}" in text or f"{finding.p:.3f}" in text or (finding.p < 0.0001 and "below 0.0001" in text)
    assert "does not say if more than the weights differs" in page.value("document.querySelector('.pair').innerText")

    index = orjson.loads(files["index.json"])
    index["benchmarks"][0]["checkpoints"][2]["scores"] = {}
    file.write_bytes(single_file({**files, "index.json": orjson.dumps(index)}))
    page.go("about:blank")
    page.go(f"{file.as_uri()}#{urlencode({'a': 'run/step-0', 'c': 'run/step-2'})}")
    page.until("document.querySelector('.pair')?.innerText.includes('Not tested: it has no published value.')")
    assert page.value("document.querySelector('.pair .difference')") is None


def test_mcnemars_test_of_the_page_is_that_of_the_comparison(page: Page, server: ViewServer) -> None:
    counts = [(0, 0, 2), (3, 3, 9), (1, 0, 5), (12, 4, 40), (90, 140, 14_000), (1500, 1420, 14_000), (40, 2, 43)]
    show(page, server)
    own = page.value(
        f"import('./mcnemar.js').then(({{mcnemar}}) => {json.dumps(counts)}.map((count) => mcnemar(...count)))"
    )
    for (won, lost, questions), test in zip(counts, own, strict=True):
        first = np.array([*[False] * won, *[True] * (questions - won)])
        second = np.array([*[True] * won, *[False] * lost, *[True] * (questions - won - lost)])
        finding = mcnemar(first, second)
        exact = binomtest(won, won + lost, 0.5).pvalue if won + lost else 1.0
        expected = [finding.difference, finding.low, finding.high, finding.p, exact]
        assert [test[name] for name in ("difference", "low", "high", "p", "exact_p")] == pytest.approx(expected, 1e-9)


def test_address_that_names_what_is_not_there_says_so(page: Page, server: ViewServer) -> None:
    show(page, server, b="another-benchmark", c="run-b/step-7", q="question-x")

    problem = page.until("!document.getElementById('problem').hidden && document.getElementById('problem').textContent")

    assert "run-b/step-7" in problem and "another-benchmark" in problem and "To do: " in problem
    assert page.until("document.getElementById('question-pane').textContent.includes('question-x')")


def test_search_uses_the_server_and_reports_a_slow_or_broken_server(page: Page, server: ViewServer) -> None:
    show(page, server, "large", b="large")
    server.answers["large/search.json"] = [(200, b'{"in_questions": [3, 4], "in_answers": [9], "complete": false}')]
    page.fill("document.getElementById('text')", "blue & <b>")
    page.until(f"{STATUS} === '3 of 14,000 questions × 200 checkpoints, the search stopped early'")
    assert [asked for asked in server.asked if "search" in asked] == [
        "/large/large/search.json?text=blue%20%26%20%3Cb%3E"
    ]
    page.go("about:blank")
    server.answers["large/questions.json"] = [(202, b'{"read": 3, "of": 200}')] * 2
    page.go(f"{server.url}/large/")
    page.until("document.getElementById('empty').textContent.includes('3 of 200 files')")
    page.until(DRAWN)

    server.answers["large/questions.json"] = [
        (200, orjson.dumps(Questions([], [], [], [], [], 1, {"0": "no such file"})))
    ]
    page.go("about:blank")
    page.go(f"{server.url}/large/")
    page.until("document.getElementById('empty').textContent.includes('no such file')")
    assert page.value("document.querySelectorAll('#curve .score').length") == 1
    assert page.value("document.getElementById('problem').hidden")

    server.answers["large/part/0.json"] = [(500, b'{"error": "samples of step-0 are damaged"}')]
    page.go("about:blank")
    page.go(f"{server.url}/large/#{urlencode({'q': 'question-0'})}")
    problem = page.until("!document.getElementById('problem').hidden && document.getElementById('problem').textContent")
    assert [line.split(":")[0] for line in problem.splitlines()] == ["Expected", "Found", "To do"]
    assert "samples of step-0 are damaged" in problem and "{" not in problem


def test_grid_of_what_is_read_so_far_grows_under_what_was_chosen(page: Page, server: ViewServer) -> None:
    files = server.sites["large"]
    whole = orjson.loads(files["large/questions.json"])
    scores = np.frombuffer(files["large/scores/0.bin"], np.uint8).reshape(200, -1).copy()
    scores[:150] = NO_SCORE
    partly = [(200, orjson.dumps({**whole, "unread": list(range(150))}))] * 2
    server.answers["large/questions.json"] = [*partly, (202, b'{"read": 199, "of": 200}')]
    server.answers["large/scores/0.bin"] = [(200, scores.tobytes())] * 2
    page.go(f"{server.url}/large/#{urlencode({'q': 'question-7', 'c': 'run/step-180'})}")
    page.until(f"{STATUS}.trim() === '14,000 questions × 200 checkpoints, over the 50 read so far'")
    assert "/large/large/scores/0.bin?unread=150" in server.asked
    assert page.value("document.querySelector('#status progress').value") == 50
    assert page.value("document.querySelector('#filter optgroup').label") == "Over the checkpoints read so far"
    assert page.value("document.getElementById('a').value") == "run/step-150", "the first that is read"
    page.click("document.getElementById('larger')")
    page.until("document.getElementById('scroller').scrollHeight > 20_000")
    page.value("document.getElementById('scroller').scrollTop = 9000")
    page.value("document.getElementById('scroller').focus()")

    page.until(f"{STATUS} === '14,000 questions × 200 checkpoints'")

    kept = "[document.getElementById('scroller').scrollTop, document.activeElement.id]"
    assert page.value(kept) == [9000, "scroller"]
    assert page.value("[document.getElementById('a').value, document.getElementById('c').value]") == [
        "run/step-0",
        "run/step-180",
    ]
    assert "q=question-7" in page.value("location.hash")


def test_checkpoints_with_a_label_are_last_on_the_axis_and_on_no_line(page: Page, server: ViewServer) -> None:
    files = large_files(questions=20, checkpoints=6)
    index = orjson.loads(files["index.json"])
    for checkpoint, label in zip(index["benchmarks"][0]["checkpoints"][4:], ("best", "final"), strict=True):
        checkpoint |= {"step": 0, "label": label, "name": f"run-{label}"}
    server.sites["labels"] = {**files, "index.json": orjson.dumps(index)}
    show(page, server, "labels")
    texts = "[...document.querySelectorAll('svg text.tick')].map((tick) => tick.textContent)"
    assert page.value(texts) == ["0", "1", "2", "3", "best", "final"]
    lines = "[...document.querySelectorAll('path.score')].map((path) => path.getAttribute('d').split('L').length)"
    assert page.value(lines) == [4, 1, 1]


def test_14000_questions_at_200_checkpoints_are_drawn_in_a_page_of_few_elements_and_single_cells_can_be_hit(
    page: Page, server: ViewServer
) -> None:
    show(page, server, "large", b="large")
    assert page.value(STATUS) == "14,000 questions × 200 checkpoints"

    box = page.value("JSON.stringify(document.getElementById('scroller').getBoundingClientRect())")
    frame = json.loads(box)
    point = {"x": frame["left"] + 300, "y": frame["top"] + 200, "button": "left", "clickCount": 1}
    for _ in range(2):  # the first makes rows as tall as a finger, the second opens the question
        for kind in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=kind, **point)
        page.value("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    page.until("location.hash.includes('q=question-')")
    page.until("document.getElementById('scroller').scrollHeight === 14000 * 14")
    page.value("document.getElementById('scroller').scrollTop = 100000")
    page.value("document.getElementById('scroller').focus()")
    page.press("End", 35)
    page.until("document.getElementById('scroller').scrollTop > 14000 * 14 - 1000")

    page.click("document.getElementById('fit')")
    sizes = "[picture.clientWidth, picture.clientHeight, document.getElementById('spacer').clientHeight]"
    box = page.value(f"(() => {{ const picture = document.getElementById('canvas'); return {sizes}; }})()")
    assert box == [
        page.value(f"document.getElementById('frame').client{side}") for side in ("Width", "Height", "Height")
    ]
    assert page.value("document.getElementsByTagName('*').length") < 2500
    page.call("HeapProfiler.collectGarbage")
    page.call("Performance.enable")
    metrics = {metric["name"]: metric["value"] for metric in page.call("Performance.getMetrics")["metrics"]}
    assert metrics["JSHeapUsedSize"] < 60e6


@pytest.mark.parametrize("view", ["grid", "question", "pair"])
def test_view_on_a_phone_and_on_wide_screens_in_light_and_dark_scrolls_nothing_sideways(
    page: Page, server: ViewServer, view: str
) -> None:
    page.go(f"{server.url}/made/#{urlencode({'b': CHOICES, 'view': view, 'q': 'made_one question-5'})}")
    page.until({"grid": DRAWN, "question": OPEN, "pair": "!!document.querySelector('.kinds')"}[view])
    for width in (390, 1280, 2560):
        for scheme in ("light", "dark"):
            sized(page, width, scheme=scheme)
            layout = page.value(
                "new Promise((laid) => requestAnimationFrame(() => requestAnimationFrame(laid))).then(() => ({"
                "wide: document.scrollingElement.scrollWidth, tall: document.scrollingElement.scrollHeight,"
                " page: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color,"
                " grid: document.getElementById('grid-pane').offsetWidth > 0,"
                " side: document.querySelector('.side').offsetWidth > 0}))"
            )
            assert layout["wide"] <= width and layout["tall"] <= 800
            assert (layout["grid"], layout["side"]) == (width > 390 or view == "grid", width > 390 or view != "grid")
            assert (brightness(layout["page"]) < 60) == (brightness(layout["text"]) > 200) == (scheme == "dark")


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour))) / 3
