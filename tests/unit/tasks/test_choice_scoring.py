"""Choices scored through a prefix cache: the values of an echo for the cost of a single read, or none at all."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tasks
from fakes.cached_engine import VOCABULARY, CachedEngine

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(tasks.__path__[0]) / "evaluators" / "programs")
    planning: Any = importlib.import_module("choice_plan")
    scoring: Any = importlib.import_module("choice_scoring")
Choice, plan, in_order = planning.Choice, planning.plan, planning.in_order
Scorer, Trust, labelled_rows, prompt_rows = scoring.Scorer, scoring.Trust, scoring.labelled_rows, scoring.prompt_rows
LONGEST = 1000


def tokens(seed: object, count: int) -> tuple[int, ...]:
    generator = random.Random(f"{seed}")
    return tuple(generator.randrange(VOCABULARY) for _ in range(count))


def questions(count: int, *, lengths: Sequence[int] = (1, 1, 1, 1), shared: int = 160, own: int = 20) -> list[Any]:
    return [
        Choice(tokens("examples", shared) + tokens(number, own), tokens((number, place), length))
        for number in range(count)
        for place, length in enumerate(lengths)
    ]


def scorer(engine: CachedEngine, folder: Path | None = None, **options: Any) -> Any:
    async def echo(together: Sequence[Any]) -> list[Any]:
        engine.batches.append(len(together))
        for choice in together:
            engine.echoed.append(choice.continuation)
            engine.read(choice.context + choice.continuation, from_cache=False)
        return echoed(list(together), engine)

    async def ask(path: str, body: dict[str, Any], read: Any) -> Any:
        if engine.refuses:
            raise scoring.NotTakenError(f"status {engine.refuses}")
        return await engine.ask(path, body, read)

    job = {"engine": "e", "architecture": "a", "dtype": "float32", "trust_folder": str(folder) if folder else ""}
    given = {"most_requests": 8, "kv_cache_tokens": None, "longest_prompt": LONGEST, **options}
    return Scorer("m", ask, echo, trust=Trust.of(job), **given)


def weigh(choices: list[Any], engine: CachedEngine, folder: Path | None = None, **options: Any) -> tuple[Any, Any]:
    made = scorer(engine, folder, **options)
    return asyncio.run(made.weigh(choices)), made.outcome


def echoed(choices: list[Any], engine: CachedEngine) -> list[Any]:
    return [engine.rows(choice.context + choice.continuation, len(choice.context)) for choice in choices]


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    """A folder with the trust of an engine that has passed its first audits."""
    scorer(CachedEngine(), tmp_path).trust.remember(20, None)
    return tmp_path


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (8, 20, 1, 2), (3,), (1, 5, 9, 1, 1, 30)])
@pytest.mark.parametrize("own", [15, 16, 17, 32])
def test_scorer_gives_the_rows_of_an_echo_for_any_context_end(lengths: tuple[int, ...], own: int) -> None:
    engine = CachedEngine(block=16)
    choices = questions(30, lengths=lengths, own=own)
    weighed, outcome = weigh(choices, engine)
    assert [list(rows) for rows in weighed] == echoed(choices, engine)
    assert (outcome.way, outcome.audited, outcome.largest_difference) == ("prefix cache", 20, 0.0)


def test_scorer_reads_shared_examples_once_and_each_context_once(trusted: Path) -> None:
    engine = CachedEngine(block=16)
    choices = questions(60, shared=160, own=20)
    weigh(choices, engine, trusted)
    assert len([path for path, _ in engine.asked]) == 60
    echoed_for_audits = len(engine.echoed) * 181
    assert engine.computed - echoed_for_audits <= 180 + 59 * 20


def test_scorer_weighs_choices_that_share_their_beginning(trusted: Path) -> None:
    engine = CachedEngine(block=16)
    same = tokens("same", 40)
    context = tokens("context", 64)
    choices = [Choice(context, same + tokens(end, 3)) for end in range(3)] + [Choice(context, same)]
    weighed, outcome = weigh(choices, engine, trusted)
    assert [list(rows) for rows in weighed] == echoed(choices, engine)
    assert engine.echoed, "rows that the cache hides were asked again"
    assert outcome.way == "prefix cache"


@pytest.mark.parametrize("tells", [True, False])
def test_scorer_asks_again_without_the_cache_where_everything_was_read_before(trusted: Path, tells: bool) -> None:
    engine = CachedEngine(block=4, tells=tells)
    choices = questions(5, lengths=(9, 10))
    for choice in choices:
        engine.read(choice.context + choice.continuation)
    assert weigh(choices, engine, trusted)[0] == echoed(choices, engine)
    assert len(engine.echoed) >= len(choices)


def test_scorer_echoes_what_does_not_fit_or_has_no_context(trusted: Path) -> None:
    engine = CachedEngine()
    context = tokens("long", LONGEST)
    odd = [Choice((), tokens("a", 3)), Choice(context[1:], (1,)), Choice(context, (1, 2)), Choice(context, ())]
    fitting = [Choice(context, (7,)), Choice(context[:-2], (7, 8))]
    weighed, _ = weigh([*odd, *fitting], engine, trusted)
    assert [list(rows) for rows in weighed] == echoed([*odd, *fitting], engine)
    assert {choice.continuation for choice in (odd[0], odd[2], odd[3])} <= set(engine.echoed)
    assert (7,) not in engine.echoed


def test_scorer_echoes_choices_behind_short_contexts_several_in_a_request(trusted: Path) -> None:
    engine = CachedEngine()
    short = questions(6, lengths=(1, 3, 2), shared=0, own=scoring.LEAST_CONTEXT - 1)
    labels = [Choice(tokens(number, 5), (number,)) for number in range(4)]
    long = questions(2, lengths=(2, 3), shared=scoring.LEAST_CONTEXT, own=4)
    choices = [*short, *labels, *long]
    weighed, outcome = weigh(choices, engine, trusted, echoed_at_once=8)
    assert [list(rows) for rows in weighed] == echoed(choices, engine)
    assert outcome.way == "prefix cache"
    assert engine.batches[:3] == [8, 8, 2]
    assert {tuple(body["prompt"]) for _, body in engine.asked if "prompt" in body} == {
        choice.context for choice in (*labels, *long)
    }


def test_scorer_leaves_all_to_echoes_where_every_context_is_short(trusted: Path) -> None:
    engine = CachedEngine()
    choices = questions(6, lengths=(3, 2), shared=0, own=30)
    weighed, outcome = weigh(choices, engine, trusted, echoed_at_once=8)
    assert (weighed, engine.asked, engine.echoed) == (None, [], [])
    assert (outcome.way, outcome.reason) == ("echo", scoring.TOO_SHORT)

    weighed, outcome = weigh(choices, engine, trusted)
    assert weighed is not None and outcome.way == "prefix cache", "an echo in a request of its own saves nothing"


def test_scorer_answers_every_place_where_choices_are_the_same(trusted: Path) -> None:
    engine = CachedEngine()
    choices = questions(2, lengths=(4, 1)) * 3
    weighed: list[int] = []
    assert weigh(choices, engine, trusted, on_weighed=weighed.append)[0] == echoed(choices, engine)
    assert sum(weighed) == len(choices)


def test_scorer_names_more_labels_than_a_request_takes_in_several(trusted: Path) -> None:
    engine = CachedEngine()
    choices = [Choice(tokens("context", 70), (token,)) for token in range(300)]
    assert weigh(choices, engine, trusted)[0] == echoed(choices, engine)
    assert [len(body["logprob_token_ids"]) for _, body in engine.asked] == [128, 128, 44]


def test_audit_that_finds_a_difference_gives_nothing_and_is_remembered(tmp_path: Path) -> None:
    choices = questions(30, lengths=(5, 6))
    weighed, outcome = weigh(choices, CachedEngine(wrong=0.01), tmp_path)
    assert weighed is None
    assert (outcome.way, outcome.audited) == ("echo", 20)
    assert outcome.largest_difference == pytest.approx(0.01)
    assert "differed from an echo's by 0.01 nats, where 0.0001 is rounding in float32" in outcome.reason
    right = CachedEngine()
    weighed, later = weigh(choices, right, tmp_path)
    assert weighed is None
    assert not right.asked
    assert (later.way, later.reason) == ("echo", outcome.reason)


def test_audit_takes_twenty_contexts_first_and_every_hundredth_later(tmp_path: Path) -> None:
    choices = questions(400, lengths=(1,), shared=8)
    first, outcome = weigh(choices, CachedEngine(), tmp_path)
    _, later = weigh(choices, CachedEngine(), tmp_path)
    assert first is not None
    assert 20 <= outcome.audited <= 40
    assert 1 <= later.audited < 20
    assert scorer(CachedEngine(), tmp_path).trust.recall()["audited"] == outcome.audited + later.audited


def test_audit_goes_on_where_a_short_evaluation_left_off(tmp_path: Path) -> None:
    for _ in range(2):
        _, outcome = weigh(questions(8), CachedEngine(), tmp_path)
        assert outcome.audited == 8
    _, outcome = weigh(questions(8), CachedEngine(), tmp_path)
    assert outcome.audited >= 4


def test_audit_of_a_later_context_finds_what_began_after_the_first(trusted: Path) -> None:
    weighed, outcome = weigh(questions(400, lengths=(1,), shared=8), CachedEngine(wrong=0.5), trusted)
    assert weighed is None
    assert outcome.reason


def test_audit_without_digests_or_type_remembers_nothing_and_demands_equality(tmp_path: Path) -> None:
    job = {"engine": "", "architecture": "a", "dtype": "int3", "trust_folder": str(tmp_path)}
    unknown = Trust.of(job)
    unknown.remember(20, "no")
    assert unknown.recall() == {"audited": 0, "reason": None}
    assert unknown.bound == 0.0
    assert list(tmp_path.iterdir()) == []


def test_trust_takes_a_damaged_memory_for_none(trusted: Path) -> None:
    trust = scorer(CachedEngine(), trusted).trust
    assert trust.recall()["audited"] == 20
    for damaged in ("", "[]", "{", json.dumps({"audited": "x"})):
        trust.path.write_text(damaged)
        assert trust.recall() == {"audited": 0, "reason": None}


def test_scorer_gives_nothing_where_the_endpoint_does_not_take_it(tmp_path: Path) -> None:
    weighed, outcome = weigh(questions(3), CachedEngine(refuses=404), tmp_path)
    assert weighed is None
    assert outcome.reason.endswith("status 404")
    assert scorer(CachedEngine(), tmp_path).trust.recall() == {"audited": 0, "reason": None}


def test_plan_puts_a_context_behind_the_first_that_shares_most_with_it() -> None:
    top, left, right = tokens("top", 100), tokens("left", 100), tokens("right", 100)
    contexts = [top + side + tokens((side, number), 30) for side in (left, right) for number in range(3)]
    contexts += [tokens("alone", 50)]
    random.Random(1).shuffle(contexts)
    choices = [Choice(context, (1,)) for context in contexts]
    steps = plan(choices, range(len(choices)))
    waits = {step.context: steps[step.after].context if step.after is not None else None for step in steps}
    for side in (left, right):
        inside = [step.context for step in steps if step.context[100:200] == side]
        assert all(waits[context] == inside[0] for context in inside[1:])
    leaders = [context for context, before in waits.items() if before is None]
    assert sorted(map(len, leaders)) == [50, 230]
    assert sum(step.added for step in steps) == 50 + 230 + 130 + 4 * 30


def test_plan_reads_what_follows_a_context_before_other_contexts() -> None:
    choices = questions(3, lengths=(4, 4))
    steps = plan(choices, range(len(choices)))
    assert [bool(step.labels) for step in steps] == [True, False, False] * 3
    assert [step.after for step in steps] == [None, 0, 0, 0, 3, 3, 0, 6, 6]


def test_plan_does_not_wait_for_a_few_shared_tokens() -> None:
    choices = questions(5, shared=planning.LEAST_SHARED // 2, own=40)
    assert {step.after for step in plan(choices, range(len(choices)))} == {None}


async def test_in_order_bounds_requests_and_what_they_add_to_the_cache() -> None:
    choices = [Choice(tokens(number, 100), (1,)) for number in range(20)]
    steps = plan(choices, range(20))
    for most_requests, most_added, expected in ((4, None, 4), (16, 250, 2), (16, 10, 1)):
        running = most = 0

        async def ask(_: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

        await in_order(steps, ask, most_requests=most_requests, most_added=most_added)
        assert most == expected


async def test_in_order_ends_all_with_the_first_failure() -> None:
    choices = [Choice(tokens(number, 100), (1,)) for number in range(9)]
    ended: list[bool] = []

    async def ask(step: Any) -> None:
        if step.choices == (0,):
            raise OSError("gone")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    steps = sorted(plan(choices, range(9)), key=lambda step: step.choices != (0,))
    with pytest.raises(OSError, match="gone"):
        await in_order(steps, ask, most_requests=3, most_added=None)
    assert len(ended) <= 2


def test_labelled_rows_refuses_a_label_that_is_missing_or_no_log_probability() -> None:
    def answer(**top: Any) -> dict[str, Any]:
        named = {name.replace("t", "token_id:"): value for name, value in top.items()}
        return {"choices": [{"logprobs": {"top_logprobs": [named]}}]}

    assert labelled_rows(answer(t7=-2.0, t9=-1.0), [7]) == {7: (-2.0, -1.0)}
    for broken in (answer(t9=-1.0), answer(t7=0.5), answer(t7=None), answer(t7=-1.0, t9=float("nan")), {}, None, []):
        with pytest.raises(scoring.Malformed):
            labelled_rows(broken, [7])


def test_prompt_rows_takes_no_row_of_another_token_or_of_the_cache() -> None:
    rows = [{str(token): {"logprob": -1.0 * token}, "399": {"logprob": -0.5}} for token in (2, 3, 4)]
    asked = (1, 2, 3, 4)

    def answer(rows: Any, cached: Any = None) -> dict[str, Any]:
        return {"prompt_logprobs": rows, "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}

    assert prompt_rows(answer([None, *rows]), asked, 2) == [(-3.0, -0.5), (-4.0, -0.5)]
    assert prompt_rows(answer([None, *rows[1:]], 1), asked, 2) == [(-3.0, -0.5), (-4.0, -0.5)]
    assert prompt_rows(answer([None, *rows], 2), asked, 2) is None, "memory that was never written"
    assert prompt_rows(answer([None, *rows[2:]]), asked, 2) is None
    assert prompt_rows(answer([None, *rows[:2]]), asked, 2) is None, "rows of other places"
    assert prompt_rows(answer([None, rows[0], rows[1], {"4": {"logprob": 0.5}}]), asked, 2) is None
    assert prompt_rows(answer(None), asked, 2) is None
    with pytest.raises(scoring.Malformed):
        prompt_rows(answer([None, *rows, *rows]), asked, 2)
