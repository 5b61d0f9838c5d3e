"""Inspect itself, in its environment, against servers with scripted answers: choices, verdicts, tool calls."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.endpoints import KEY, served_model
from fakes.engine import FakeEngine
from fakes.judge import FakeJudge
from fakes.lm_eval import Harness
from fakes.proxy import CLIENT_KEY, running_proxy, state_of
from fakes.tokenizers import write_byte_tokenizer
from pools.endpoint import RunningModel
from resources.errors import AssayError, BadInput, EndpointUnusable
from resources.settings import process_environment
from tasks.errors import CountsDisagree
from tasks.evaluators.evaluator import Progress
from tasks.evaluators.harness import Parsed, verify_counts
from tasks.records.record import Counts
from tasks.records.samples import Sample, read_samples
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

WORDS = "This model's maximum context length is 512 tokens"
JUDGE_KEY = "sk-the-judges-key-that-nobody-may-see"
KINDS = Path(__file__).parents[1] / "data" / "inspect_ai"
ELSEWHERE = {"judge": {"base_url": "http://judge/v1", "model": "judge"}}
COMMAND_AND_LOGS = """
import contextlib, json, sys
from pathlib import Path
from inspect_ai._cli.main import main
from inspect_ai.log import read_eval_log
ours, folder = json.loads(sys.argv.pop(1)), Path(sys.argv[sys.argv.index("--log-dir") + 1])
with contextlib.suppress(SystemExit):
    main()
for paths in (ours, sorted(map(str, folder.glob("*.eval")))):
    logs = [read_eval_log(path) for path in paths]
    samples = [(log.eval.task, sample) for log in logs for sample in log.samples]
    print(json.dumps({
        f"{task} {sample.id}": [sample.output.completion, {name: score.value for name, score in sample.scores.items()}]
        for task, sample in samples
    }))
    print(" ".join(log.model_dump_json() for log in logs))
"""
"""Runs Inspect's own command, then prints answers, scores and all text of Assay's logs and of the command's log."""


@pytest.fixture
def harness(imported: Callable[[str], Harness]) -> Harness:
    return imported("inspect_ai")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "tokenizer")


def make_config(*names: str, options: dict[str, Any] | None = None, **changes: Any) -> EvaluationConfig:
    given = {
        "evaluator": {"name": "inspect_ai", **(options or {})},
        "model_path": "checkpoint",
        "base_url": "http://unused/v1",
        "benchmarks_path": None if names == ("demo_choices",) else str(KINDS),
        "evals": [{"name": name} for name in names],
    }
    return EvaluationConfig.model_validate({**given, **changes})


def make_model(url: str, tokenizer: Path, **changes: Any) -> RunningModel:
    return served_model(url, tokenizer, **{"apply_chat_template": True, **changes})


def letter_of(number: int, prompt: str) -> str:
    return f"ANSWER: {'ABCD'[zlib.crc32(prompt.encode()) % 4]}"


def grade_of(number: int, prompt: str) -> str:
    return f"GRADE: {'CI'[zlib.crc32(prompt.encode()) % 2]}"


def samples_in(output: Path) -> list[Sample]:
    return list(read_samples(str(output / "samples.jsonl.gz")))


async def test_scores_are_those_of_inspects_own_command_question_by_question_and_logs_hold_no_key(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    options = {**ELSEWHERE, "temperature": 0}
    async with FakeJudge(says=letter_of) as engine, FakeJudge(says=grade_of) as graders:
        chosen = await harness.evaluate(
            make_model(engine.url, tokenizer), make_config("demo_choices", max_eval_instances=24), tmp_path / "choices"
        )
        judge = make_model(graders.url, tokenizer, model="judge", api_key=JUDGE_KEY)
        seen: list[Progress] = []
        judged = await harness.evaluate(
            make_model(engine.url, tokenizer),
            make_config("judged", options=options),
            tmp_path / "judged",
            judge=judge,
            on_progress=seen.append,
        )
        assert engine.keys == {KEY} and graders.keys == {JUDGE_KEY}
        logs = {
            name: str(tmp_path / name / link)
            for name, parsed in (("choices", chosen), ("judged", judged))
            for link in parsed.links.values()
        }
        command = [
            *(str(harness.python), "-c", COMMAND_AND_LOGS, json.dumps(list(logs.values())), "eval"),
            *(f"{BUNDLED / 'inspect_ai' / 'demo.py'}@demo_choices", f"{KINDS / 'kinds.py'}@judged"),
            *("--model", "openai-api/bare/m", "--model-role", "grader=openai-api/judge/judge"),
            *("--log-dir", str(tmp_path / "theirs"), "--display", "none", "--limit", "24"),
        ]
        environment = process_environment(
            {
                **{"BARE_BASE_URL": engine.url, "BARE_API_KEY": KEY, "XDG_DATA_HOME": str(tmp_path / "data")},
                **{"JUDGE_BASE_URL": graders.url, "JUDGE_API_KEY": JUDGE_KEY},
            }
        )
        options = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True, "text": True}
        done = await asyncio.to_thread(subprocess.run, command, **options)
    for parsed in (chosen, judged):
        verify_counts(parsed)
    ours, our_text, theirs, _ = done.stdout.splitlines()[-4:]
    log_scores: dict[str, tuple[str, dict[str, Any]]] = json.loads(ours)
    assert log_scores == json.loads(theirs) and len(log_scores) == 24 + 8
    assert KEY not in our_text and JUDGE_KEY not in our_text
    for path in (path for name in logs for path in (tmp_path / name).rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes() and JUDGE_KEY.encode() not in path.read_bytes(), path

    published = {(metric.benchmark, metric.name): metric for metric in (*chosen.metrics, *judged.metrics)}
    samples = samples_in(tmp_path / "choices")
    right = {name: scores["choice"] == "C" for name, (_, scores) in log_scores.items() if "choice" in scores}
    number = published["demo_choices", "accuracy"]
    assert number.value == pytest.approx(sum(right.values()) / 24) and 0.1 < number.value < 0.5
    assert number.recomputed and number.stderr and number.low is not None and number.low < number.value
    assert {f"demo_choices {sample.id}": bool(sample.scores["accuracy"]) for sample in samples} == right
    assert {sample.cluster for sample in samples} == {sample.id.partition("-")[0] for sample in samples}
    assert samples[0].choices and samples[0].tokens == 1 and samples[0].finish == "stop" and not samples[0].context
    assert (published["judged", "accuracy"].n, judged.versions["judge"]) == (8, "judge")
    assert {sample.context for sample in samples_in(tmp_path / "judged")} == {"Be brief.\n\n"}
    assert seen[-1] == Progress("samples", 8, 8)


async def test_tool_is_called_and_its_result_answered_and_epochs_are_clusters(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    def says(number: int, prompt: str) -> str | dict[str, Any]:
        if (match := re.search(r"What is (\d) \+ 1", prompt)) is None:
            return f"It is {prompt}." if prompt.isdigit() else prompt * (number % 2 + 1)
        arguments = json.dumps({"x": int(match[1]), "y": 1})
        call = {"id": f"call-{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}

    async with FakeJudge(says=says) as engine:
        parsed = await harness.evaluate(
            make_model(engine.url, tokenizer), make_config("sums", "repeated"), tmp_path / "out"
        )
        assert all(body.get("tools") for body in engine.bodies if "What is" in body["messages"][0]["content"])
        assert [body.get("stop") for body in engine.bodies].count(["!"]) == 6  # an empty stop string is not sent
    verify_counts(parsed)
    assert parsed.counts == Counts(requested=9, answered=9, scored=9)
    numbers = {(metric.benchmark, metric.name): metric for metric in parsed.metrics}
    assert numbers["sums", "accuracy"].value == 1.0
    assert {"long_mean", "vowels_mean"} == {name for benchmark, name in numbers if benchmark == "repeated"}
    assert numbers["repeated", "long_mean"].recomputed and numbers["repeated", "long_mean"].low is not None
    assert numbers["sums", "accuracy"].higher_is_better and numbers["repeated", "long_mean"].higher_is_better is None
    samples = samples_in(tmp_path / "out")
    [first] = [sample for sample in samples if sample.id == "s1"]
    assert (first.prompt, first.output, first.tokens) == ("What is 1 + 1?", "It is 2.", 2)
    assert sorted(sample.id for sample in samples if sample.cluster == "two") == ["two/epoch 1", "two/epoch 2"]


@pytest.mark.parametrize(
    ("name", "options", "serving", "error", "message"),
    [
        ("shell", {}, {}, BadInput, "the sandbox local, the tool bash"),
        ("broken", {}, {}, BadInput, "OSError: no questions here"),
        ("sums", {}, {"base_url": None, "pool_config": {"model": {"name": "m"}}}, BadInput, "sums uses add"),
        ("nobody@sums", {}, {}, AssayError, "nobody"),
        ("judged", {"solver": "no_such_solver"}, {}, BadInput, "no_such_solver"),
    ],
)
async def test_task_that_cannot_be_asked_is_refused_before_any_request(
    harness: Harness, tokenizer: Path, tmp_path: Path, name: str, options: Any, serving: Any, error: Any, message: str
):
    async with FakeJudge(says=letter_of) as engine:
        with pytest.raises(error, match=message):
            await harness.evaluate(
                make_model(engine.url, tokenizer), make_config(name, options=options, **serving), tmp_path / "out"
            )
        assert not engine.prompts


async def test_engine_without_a_parser_of_tool_calls_is_named_with_the_arguments_it_lacks(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    refusal = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    async with FakeJudge(says=lambda number, prompt: {"error": {"message": refusal}}) as engine:
        with pytest.raises(EndpointUnusable, match="tool choice requires") as caught:
            await harness.evaluate(make_model(engine.url, tokenizer), make_config("sums"), tmp_path / "out")
    assert "enable_auto_tool_choice=true" in caught.value.expected


async def test_choices_that_a_task_shuffles_without_a_seed_are_asked_alike_in_every_process(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    asked, config = [], make_config("shuffled", options={"epochs": 2})
    for attempt in range(2):
        async with FakeJudge(says=letter_of) as engine:
            await harness.evaluate(make_model(engine.url, tokenizer), config, tmp_path / f"out-{attempt}")
            asked.append(sorted(engine.prompts))
    assert asked[0] == asked[1] and len(asked[0]) == 48 and len(set(asked[0])) == 24
    assert {letter for prompt in asked[0] for letter in re.findall(r"A\) \d+(.)", prompt)} == set("abcd")


async def test_endpoint_without_the_path_of_prompts_as_they_are_has_failed(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    async with FakeJudge(says=letter_of) as engine:
        model = make_model(engine.url, tokenizer, apply_chat_template=False)
        parsed = await harness.evaluate(model, make_config("demo_choices", max_eval_instances=3), tmp_path / "out")
    assert parsed.counts == Counts(requested=3, answered=0, scored=0)
    with pytest.raises(EndpointUnusable, match="NotFoundError 404"):
        verify_counts(parsed)


async def test_failed_answers_and_missing_scores_are_counted_separately_and_not_published(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    async def counts(name: str, answers: Any, grades: Any, folder: str, *, words: str = "") -> Counts:
        async with FakeJudge(says=answers) as engine, FakeJudge(says=grades) as graders:
            judge = make_model(graders.url, tokenizer, model="judge", api_key=JUDGE_KEY)
            config = make_config(name, options=ELSEWHERE)
            parsed = await harness.evaluate(make_model(engine.url, tokenizer), config, tmp_path / folder, judge=judge)
        with pytest.raises((CountsDisagree, EndpointUnusable)) as caught:
            verify_counts(parsed)
        assert not words or str(caught.value).count(words) == 1
        return parsed.counts

    too_long = {"error": {"message": WORDS, "code": "context_length_exceeded"}}
    # Inspect alone would treat such an error as an answer.
    refused = await counts("judged", lambda n, p: too_long if p == "Name 3." else "x", grade_of, "refused", words=WORDS)
    assert (refused.requested, refused.answered, refused.scored) == (8, 7, 7)
    unreadable = await counts("judged", letter_of, lambda n, p: "well" if "Name 3." in p else "GRADE: C", "unreadable")
    assert unreadable == Counts(requested=8, answered=8, scored=7, judge_errors=1)
    gone = await counts("judged", letter_of, lambda n, p: 404, "gone")
    assert gone == Counts(requested=8, answered=8, scored=0, judge_errors=8)
    failing = await counts("empty_handed", letter_of, grade_of, "failing")
    assert failing == Counts(requested=3, answered=3, scored=2)


async def test_second_attempt_through_the_proxy_asks_for_no_answer_twice_though_they_are_sampled(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    # Two attempts at a cell: the first has no judge, and the journal replays its answers in the second.
    config = make_config("judged", options={**ELSEWHERE, "temperature": 0.9, "max_tokens": 24, "epochs": 2})
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.fresh_samples = True
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            proxy.tell(state_of("m", engine))

            async def attempt(name: str, says: Any) -> Parsed:
                proxy.client.open_cell("cell-1", name, mirror=None)
                model = make_model(f"{proxy.url}/cells/cell-1/{name}/v1", tokenizer, api_key=CLIENT_KEY)
                async with FakeJudge(says=says) as graders:
                    judge = make_model(graders.url, tokenizer, model="judge", api_key=JUDGE_KEY)
                    return await harness.evaluate(model, config, tmp_path / name, judge=judge)

            first = await attempt("first", lambda number, prompt: 403)
            with pytest.raises(EndpointUnusable):
                verify_counts(first)
            verify_counts(await attempt("second", grade_of))
        assert engine.stats.requests == 16
    outputs = [{s.id: s.output for s in samples_in(tmp_path / name)} for name in ("first", "second")]
    assert sorted(outputs[0].values()) == sorted(outputs[1].values()) and len(set(outputs[0].values())) > 8


async def test_tool_of_a_sandbox_runs_isolated_where_its_task_is_allowed_to(
    harness: Harness, tokenizer: Path, tmp_path: Path
):
    secret = tmp_path / "secret"
    secret.write_text("of this machine")

    def says(number: int, prompt: str) -> str | dict[str, Any]:
        if "shell" not in prompt:
            return prompt
        arguments = json.dumps({"command": f"echo $((6 * 7)); cat {secret}"})
        function = {"name": "bash", "arguments": arguments}
        return {"content": None, "tool_calls": [{"id": "call", "type": "function", "function": function}]}

    async with FakeJudge(says=says) as engine:
        config = make_config("shell", options={"allow_code_execution": ["shell"]})
        parsed = await harness.evaluate(make_model(engine.url, tokenizer), config, tmp_path / "out")
    verify_counts(parsed)
    [sample] = samples_in(tmp_path / "out")
    assert sample.scores == {"accuracy": 1.0} and "of this machine" not in sample.output, sample.output
