"""AlpacaEval itself, in its environment, against the deterministic engine and judges with scripted verdicts."""

from __future__ import annotations

import asyncio
import csv
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
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
from tasks.evaluators.alpaca_eval.evaluator import BUNDLED_SETS, EVALUATOR
from tasks.evaluators.harness import Parsed, Progress, verify_counts, warmed
from tasks.records.record import Counts
from tasks.records.samples import read_samples
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

JUDGE_KEY = "sk-the-judges-key-that-nobody-may-see"
DEMO = "demo_instructions"
GREEDY = {"temperature": 0, "max_new_tokens": 24}
OURS = {"judge": {"annotator": "demo_verdict", "constrained": True}, "generation_params": GREEDY}
ELSEWHERE = {"base_url": "http://judge/v1", "model": "judge", "annotator": "demo_verdict"}


@pytest.fixture
def harness(imported: Callable[[str], Harness]) -> Harness:
    return imported("alpaca_eval")


@pytest.fixture
def python(harness: Harness) -> Path:
    return harness.python


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "tokenizer")


def make_config(options: dict[str, Any] = OURS, **changes: Any) -> EvaluationConfig:
    given = {
        "evaluator": {"name": "alpaca_eval", **options},
        "model_path": "checkpoint",
        "base_url": "http://unused/v1",
        "evals": (EvalTaskConfig(name=DEMO),),
    }
    return EvaluationConfig(**{**given, **changes})


def make_model(url: str, tokenizer: Path, **changes: Any) -> RunningModel:
    return served_model(url, tokenizer, **{"apply_chat_template": True, **changes})


class Runner:
    """Runs the evaluator in a fork of the warm process, into a single folder."""

    def __init__(self, harness: Harness, tmp_path: Path) -> None:
        self._harness = harness
        self.output = tmp_path / "output"

    async def __call__(self, model: RunningModel, config: EvaluationConfig, **options: Any) -> Parsed:
        return await self._harness.evaluate(model, config, options.pop("output", self.output), **options)

    def read(self, name: str) -> Any:
        return json.loads((self.output / name).read_text())


@pytest.fixture
def run(harness: Harness, tmp_path: Path) -> Runner:
    return Runner(harness, tmp_path)


def asked(engine: FakeEngine) -> list[dict[str, Any]]:
    """Returns the requests for outputs, without the requests for verdicts."""
    bodies = [json.loads(body) for body in engine.bodies]
    return [body for body in bodies if "structured_outputs" not in body]


async def test_own_pool_judges_and_leaves_win_rate_counts_samples_and_alpacaevals_files(run: Runner, tokenizer: Path):
    seen: list[Progress] = []
    async with FakeEngine(models=("m",)) as engine:
        parsed = await run(make_model(f"{engine.url}/v1", tokenizer), make_config(), on_progress=seen.append)
        assert engine.stats.max_in_flight <= 8
    verify_counts(parsed)
    assert parsed.counts == Counts(requested=24, answered=24, scored=24)
    numbers = {metric.name: metric for metric in parsed.metrics}
    samples = list(read_samples(str(run.output / "samples.jsonl.gz")))
    assert numbers["win_rate"].n == 24 and 0 < (numbers["win_rate"].stderr or 0) < 0.2
    assert numbers["win_rate"].value == pytest.approx(sum(sample.scores["win_rate"] for sample in samples) / 24)
    assert numbers["avg_length"].value == pytest.approx(sum(len(sample.output) for sample in samples) / 24)
    assert parsed.versions["alpaca_eval"] == "0.6.6"
    assert "not reported" in parsed.versions[f"length_controlled_winrate of {DEMO}"]
    assert (parsed.versions["judge"], parsed.versions["annotator"]) == ("m", "demo_verdict")
    assert len({sample.id for sample in samples}) == 24
    bundled = json.loads((BUNDLED_SETS / f"{DEMO}.json").read_text())
    assert [(sample.prompt, sample.target) for sample in samples] == [
        (row["instruction"], row["output"]) for row in bundled
    ]
    assert len(run.read("model_outputs.json")) == len(run.read("annotations.json")) == 24
    [row] = csv.DictReader((run.output / "leaderboard.csv").open())
    assert float(row["win_rate"]) == pytest.approx(100 * numbers["win_rate"].value)
    assert seen[-1] == Progress(f"{DEMO}, verdicts", 24, 24)
    for path in (path for path in run.output.rglob("*") if path.is_file()):
        assert KEY not in path.read_text(errors="replace"), path


async def test_every_sampling_parameter_of_the_model_reaches_the_engine_and_options_go_before_it(
    run: Runner, tokenizer: Path
):
    of_the_model = {
        "temperature": 0.4,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "stop_token_ids": [7, 8],
        "max_new_tokens": 12,
    }
    pool_config = {"model": {"name": "m", "generation_params": of_the_model}}
    options = {**OURS, "generation_params": {"top_k": 3}}
    config = make_config(options, base_url=None, pool_config=pool_config, max_eval_instances=2)
    async with FakeEngine(models=("m",)) as engine:
        await run(make_model(f"{engine.url}/v1", tokenizer), config)
        bodies = asked(engine)
    assert len(bodies) == 2
    expected = {**of_the_model, "top_k": 3, "max_tokens": of_the_model["max_new_tokens"]}
    del expected["max_new_tokens"]
    for body in bodies:
        assert [message["role"] for message in body.pop("messages")] == ["user"]
        assert body == {"model": "m", **expected}


async def test_model_without_chat_is_asked_through_the_prompt_template(run: Runner, tokenizer: Path):
    options = {**OURS, "prompt_template": "Q: {instruction}\nA:", "prompt_stops": ("Q:",), "engine_parameters": False}
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(f"{engine.url}/v1", tokenizer, apply_chat_template=False)
        verify_counts(await run(model, make_config(options, max_eval_instances=3)))
        bodies = asked(engine)
    first = json.loads((BUNDLED_SETS / f"{DEMO}.json").read_text())[0]["instruction"]
    assert f"Q: {first}\nA:" in {body["prompt"] for body in bodies}
    sample = next(read_samples(str(run.output / "samples.jsonl.gz")))
    assert (sample.context, sample.prompt) == ("Q: ", f"{first}\nA:") and sample.tokens and sample.tokens > 0
    assert bodies[0]["stop"] == ["Q:"]
    assert not {"top_k", "repetition_penalty"} & set(bodies[0])  # services other than vLLM refuse these fields


async def test_chat_asked_of_a_model_without_a_template_is_refused_before_any_request(run: Runner, tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    async with FakeEngine(models=("m",)) as engine:
        with pytest.raises(BadInput, match="chat asked of a model without a template"):
            await run(make_model(f"{engine.url}/v1", tmp_path), make_config())
        assert engine.stats.requests == 0


@pytest.mark.parametrize(
    ("faults", "requests", "error", "words"),
    [
        # A request and both of its retries: capacity 1 sends no other meanwhile.
        ({"status_count": 3}, 6, EndpointUnusable, "1 request had no answer, the first for: InternalServerError 500"),
        ({"status": 400, "status_count": 1}, 4, CountsDisagree, "the endpoint refused 1 request, the first for: a fau"),
    ],
)
async def test_output_that_fails_or_is_refused_is_counted_and_no_empty_text_is_judged(
    run: Runner, tokenizer: Path, faults: dict[str, int], requests: int, error: type[AssayError], words: str
):
    async with FakeEngine(models=("m",)) as engine:
        for name, value in faults.items():
            setattr(engine.faults, name, value)
        parsed = await run(make_model(f"{engine.url}/v1", tokenizer, capacity=1), make_config(max_eval_instances=4))
        assert len(asked(engine)) == len(engine.bodies) == requests
    assert parsed.counts == Counts(requested=4, answered=3, scored=0)
    assert [row["output"] is None for row in run.read("model_outputs.json")] == [True, False, False, False]
    with pytest.raises(error, match=words):
        verify_counts(parsed)


async def test_malformed_outputs_and_verdicts_are_asked_for_again(run: Runner, tokenizer: Path):
    options = {"judge": {**ELSEWHERE, "constrained": True}, "generation_params": GREEDY}
    async with FakeEngine(models=("m",)) as engine, FakeEngine(models=("judge",)) as judge_engine:
        engine.faults.aborted, judge_engine.faults.aborted = 2, 1
        judge = make_model(f"{judge_engine.url}/v1", tokenizer, model="judge", api_key=JUDGE_KEY)
        config = make_config(options, max_eval_instances=4)
        verify_counts(await run(make_model(f"{engine.url}/v1", tokenizer), config, judge=judge))
        assert (engine.stats.requests, judge_engine.stats.requests) == (4 + 2, 1 + 1 + 4)


async def test_halves_of_surrogate_pairs_are_replaced_counted_and_judged(run: Runner, tokenizer: Path):
    options = {"judge": {**ELSEWHERE, "constrained": True}, "generation_params": GREEDY}
    answers = ("half \ud83d", "whole \U0001f600")
    async with FakeJudge(lambda number, _: answers[number % 2]) as own, FakeEngine(models=("judge",)) as judge_engine:
        judge = make_model(f"{judge_engine.url}/v1", tokenizer, model="judge", api_key=JUDGE_KEY)
        parsed = await run(make_model(own.url, tokenizer), make_config(options, max_eval_instances=4), judge=judge)
    verify_counts(parsed)
    assert "2 of the endpoint's answers" in parsed.asking.notes[-1]
    assert {row["output"] for row in run.read("model_outputs.json")} == {"half \ufffd", "whole \U0001f600"}


async def test_judge_elsewhere_is_asked_with_its_own_key_which_lies_in_no_file(run: Runner, tokenizer: Path):
    async with FakeEngine(models=("m",)) as engine, FakeJudge(says=lambda number, prompt: "1") as fake_judge:
        model = make_model(f"{engine.url}/v1", tokenizer)
        judge = make_model(fake_judge.url, tokenizer, model="judge", api_key=JUDGE_KEY)
        config = make_config({"judge": ELSEWHERE, "generation_params": GREEDY})
        parsed = await run(model, config, judge=judge)
    verify_counts(parsed)
    assert fake_judge.keys == {JUDGE_KEY} and len(fake_judge.prompts) == 24 + 1
    assert engine.stats.requests == 24
    assert {body["model"] for body in fake_judge.bodies} == {"judge"}
    assert 0 < parsed.metrics[0].value < 1  # the same position always wins, and an output may be in either position
    for path in (path for path in run.output.rglob("*") if path.is_file()):
        text = path.read_text(errors="replace")
        assert KEY not in text and JUDGE_KEY not in text, path


@pytest.mark.parametrize(
    ("says", "changes", "problem", "generated"),
    [
        (lambda number, prompt: "1", {"base_url": "http://127.0.0.1:9/v1"}, "gave no answer", False),
        (lambda number, prompt: 401, {}, "gave no answer", False),
        (lambda number, prompt: "m", {"annotator": "weighted_alpaca_eval_gpt4_turbo"}, "no log-probabilities", False),
        # The probe and the first request are answered; the first verdict may arrive after lost requests.
        (lambda number, prompt: 403 if number > 1 else "1", {}, "stopped answering", True),
    ],
    ids=["unreachable", "refuses", "no log-probabilities", "stops"],
)
async def test_judge_that_cannot_judge_is_no_loss_and_refused_at_once(
    run: Runner,
    tokenizer: Path,
    says: Callable[[int, str], str | int],
    changes: dict[str, str],
    problem: str,
    generated: bool,
):
    async with FakeEngine(models=("m",)) as engine, FakeJudge(says=says) as fake_judge:
        judge = make_model(changes.get("base_url", fake_judge.url), tokenizer, model="judge", api_key=JUDGE_KEY)
        config = make_config({"judge": {**ELSEWHERE, **changes}, "generation_params": GREEDY})
        with pytest.raises(EndpointUnusable, match=problem):
            await run(make_model(f"{engine.url}/v1", tokenizer), config, judge=judge)
        assert (engine.stats.requests > 0) is generated


@pytest.mark.parametrize(
    ("tolerated", "nonsense_every", "counts", "passes"),
    [
        (0.0, 1, Counts(requested=24, answered=24, scored=0, judge_errors=24), False),
        (0.0, 6, Counts(requested=24, answered=24, scored=20, judge_errors=4), False),
        (0.2, 6, Counts(requested=20, answered=20, scored=20, judge_errors=4), True),
        (0.1, 6, Counts(requested=24, answered=24, scored=20, judge_errors=4), False),
    ],
)
async def test_verdicts_that_cannot_be_read_are_no_scores(
    run: Runner, tokenizer: Path, tolerated: float, nonsense_every: int, counts: Counts, passes: bool
):
    def says(number: int, prompt: str) -> str:
        return "well, well" if number % nonsense_every == 0 else "2"

    options = {"judge": ELSEWHERE, "generation_params": GREEDY, "max_judge_errors": tolerated}
    async with FakeEngine(models=("m",)) as engine, FakeJudge(says=says) as fake_judge:
        judge = make_model(fake_judge.url, tokenizer, model="judge", api_key=JUDGE_KEY)
        parsed = await run(make_model(f"{engine.url}/v1", tokenizer), make_config(options), judge=judge)
    assert parsed.counts == counts
    if not passes:
        with pytest.raises(CountsDisagree):
            verify_counts(parsed)
        return
    verify_counts(parsed)
    assert next(metric.n for metric in parsed.metrics if metric.name == "win_rate") == counts.scored


async def test_outputs_and_preferences_are_those_of_the_bare_harness(
    run: Runner, tokenizer: Path, python: Path, tmp_path: Path
):
    # Assay's run goes through the proxy; the harness's decoder and then its command go straight to the engine.
    judge_config = tmp_path / "evaluators" / "bare" / "configs.yaml"
    judge_config.parent.mkdir(parents=True)
    bundled = BUNDLED_SETS / "annotators" / "demo_verdict"
    (judge_config.parent / "prompt.txt").write_text((bundled / "prompt.txt").read_text())
    judge_config.write_text(
        (bundled / "configs.yaml")
        .read_text()
        .replace("demo_verdict", "bare")
        .replace(
            "    max_tokens: 1",
            "    max_tokens: 1\n    model_name: m\n    requires_chatml: true\n"
            '    extra_body: {"structured_outputs": {"choice": ["1", "2"]}}',
        )
    )
    instructions = BUNDLED_SETS / f"{DEMO}.json"
    bare = (
        "import gc, json, sys; gc.disable(); from alpaca_eval.decoders.openai import openai_completions\n"
        "rows = json.load(open(sys.argv.pop(1)))\n"
        "prompts = ['<|im_start|>user\\n' + row['instruction'] + '\\n<|im_end|>' for row in rows]\n"
        "texts = openai_completions(prompts, 'm', max_tokens=24, temperature=0, requires_chatml=True)['completions']\n"
        "rows = [{**row, 'output': text.strip(), 'generator': 'm'} for row, text in zip(rows, texts)]\n"
        "json.dump(rows, open('theirs.json', 'w'))\n"
        "from alpaca_eval.main import main; main()\n"  # the same call as its command
    )
    async with FakeEngine(models=("m",)) as engine:
        with running_proxy(tmp_path) as proxy:
            proxy.tell(state_of("m", engine))
            verify_counts(await run(make_model(f"{proxy.url}/v1", tokenizer, api_key=CLIENT_KEY), make_config()))
        clients = tmp_path / "clients.yaml"
        clients.write_text(json.dumps({"default": [{"api_key": KEY, "base_url": f"{engine.url}/v1"}]}))
        environment = process_environment({"OPENAI_CLIENT_CONFIG_PATH": str(clients)})
        command = [
            *(str(python), "-c", bare, str(instructions), "--model_outputs", "theirs.json"),
            *("--reference_outputs", str(instructions), "--annotators_config", str(judge_config)),
            *("--output_path", "theirs", "--fn_metric", "get_winrate", "--sort_by", "win_rate"),
            *("--precomputed_leaderboard", "None", "--caching_path", "None"),
        ]
        await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    theirs = {row["instruction"]: row for row in json.loads((tmp_path / "theirs" / "annotations.json").read_text())}
    ours = {row["instruction"]: row for row in run.read("annotations.json")}
    assert len(ours) == 24
    for instruction, row in ours.items():
        for name in ("output_1", "output_2", "preference"):
            assert row[name] == theirs[instruction][name]


def stage(data_set: Path) -> None:
    """Writes the files that a download of the data set leaves in the hub's cache, with fewer instructions."""
    (data_set / "refs").mkdir(parents=True)
    (data_set / "refs" / "main").write_text("a" * 40)
    snapshot = data_set / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    rows = json.loads((BUNDLED_SETS / f"{DEMO}.json").read_text())
    (snapshot / "alpaca_eval_gpt4_baseline.json").write_text(json.dumps(rows))
    write_length_control(snapshot / "df_gamed.csv", len(rows))


def write_length_control(path: Path, instructions: int) -> None:
    """Writes verdicts on a model with longer and a model with shorter outputs, in AlpacaEval's columns."""
    lines = ["index,model,std_delta_len,preference,instruction_difficulty,not_gamed_baseline"]
    for name, sign in (("longer", 1), ("shorter", -1)):
        lines += [f"{index},{name},{sign},{0.5 + sign / 8},{index / 24},False" for index in range(instructions)]
    path.write_text("\n".join(lines) + "\n")


async def test_official_instructions_are_read_from_the_staged_files_and_length_control_with_them(
    harness: Harness, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    staged = tmp_path / "hub" / "hub" / "datasets--tatsu-lab--alpaca_eval"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = make_config(evals=(EvalTaskConfig(name="alpaca_eval"),))
    async with FakeEngine(models=("m",)) as engine:
        given = {"python": harness.python, "client": harness.client}
        with warmed(EVALUATOR, [config], **given) as server:  # the server has read these variables
            run = Runner(replace(harness, server=server), tmp_path)
            model = make_model(f"{engine.url}/v1", tokenizer)
            with pytest.raises(BadInput, match="assay stage"):
                await run(model, config, output=tmp_path / "unstaged")
            stage(staged)
            parsed = await run(model, config)
    verify_counts(parsed)
    numbers = {metric.name: metric for metric in parsed.metrics}
    assert 0 < numbers["length_controlled_winrate"].value < 1
    assert numbers["length_controlled_winrate"].stderr is not None
    [row] = csv.DictReader((run.output / "leaderboard.csv").open())
    assert float(row["length_controlled_winrate"]) == pytest.approx(100 * numbers["length_controlled_winrate"].value)


async def test_several_sets_with_own_judge_configurations_get_separate_scores(
    run: Runner, tokenizer: Path, tmp_path: Path
):
    own = tmp_path / "own"
    shutil.copytree(BUNDLED_SETS / "annotators" / "short_verdict", own / "mine")
    (own / "mine" / "configs.yaml").write_text(
        (own / "mine" / "configs.yaml").read_text().replace("short_verdict", "mine")
    )
    rows = json.loads((BUNDLED_SETS / f"{DEMO}.json").read_text())
    (own / "first.json").write_text(json.dumps(rows[:6]))
    (own / "second.json").write_text(json.dumps(rows[6:]))
    gamed = tmp_path / "df_gamed.csv"
    write_length_control(gamed, 18)
    judge = {"annotator": "mine", "constrained": True}
    config = make_config(
        {"judge": judge, "generation_params": GREEDY, "length_control_path": str(gamed)},
        evals=(EvalTaskConfig(name="first"), EvalTaskConfig(name="second", task_alias="other")),
        benchmarks_path=str(own),
        max_eval_instances=8,
    )
    EVALUATOR.check(config, Path("/environment/bin/python"))
    async with FakeEngine(models=("m",)) as engine:
        parsed = await run(make_model(f"{engine.url}/v1", tokenizer), config)
        asked_to_judge = [json.loads(body) for body in engine.bodies if b"structured_outputs" in body]
    verify_counts(parsed)
    numbers = {(metric.benchmark, metric.name): metric.n for metric in parsed.metrics}
    assert (numbers["first", "win_rate"], numbers["other", "win_rate"]) == (6, 8)
    assert numbers["other", "length_controlled_winrate"] == 8  # not of the official set, but its data was given
    assert {tuple(body["structured_outputs"]["choice"]) for body in asked_to_judge} == {("A", "B")}
    assert (run.output / "first" / "leaderboard.csv").is_file() and (
        run.output / "other" / "annotations.json"
    ).is_file()


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"annotator": "claude"}, "anthropic_completions"),
        ({"annotator": "alpaca_eval_gpt4", "constrained": True}, "verdicts are free text"),
        ({"annotator": "nobody_has_this"}, "nobody_has_this"),
    ],
)
async def test_judges_configuration_that_cannot_be_used_is_refused_before_any_request(
    run: Runner, tokenizer: Path, judge: dict[str, Any], message: str
):
    async with FakeEngine(models=("m",)) as engine:
        with pytest.raises(BadInput, match=message):
            await run(make_model(f"{engine.url}/v1", tokenizer), make_config({"judge": judge}))
        assert engine.stats.requests == 0


async def test_evaluation_that_goes_on_through_the_proxy_asks_for_no_output_twice_though_they_are_sampled(
    run: Runner, tokenizer: Path, tmp_path: Path
):
    # Two attempts at a cell: the judge ends the first, and the journal replays its answers in the second.
    options = {"judge": ELSEWHERE, "generation_params": {"temperature": 0.9, "max_new_tokens": 24}}
    journal = tmp_path / "journal.sqlite"
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.fresh_samples = True
        with running_proxy(tmp_path, journal=journal) as proxy:
            proxy.tell(state_of("m", engine))

            async def attempt(name: str, verdict: str | int) -> Parsed:
                proxy.client.open_cell("cell-1", name, mirror=None)
                url = f"{proxy.url}/cells/cell-1/{name}/v1"
                async with FakeJudge(says=lambda number, prompt: verdict if number else "1") as fake_judge:
                    judge = make_model(fake_judge.url, tokenizer, model="judge", api_key=JUDGE_KEY)
                    model = make_model(url, tokenizer, api_key=CLIENT_KEY)
                    return await run(model, make_config(options), judge=judge, output=tmp_path / name)

            with pytest.raises(EndpointUnusable, match="stopped answering"):
                await attempt("first", 403)
            verify_counts(await attempt("second", "1"))
        assert engine.stats.requests == 24
    first, second = (json.loads((tmp_path / name / "model_outputs.json").read_text()) for name in ("first", "second"))
    assert [row["output"] for row in first] == [row["output"] for row in second]
