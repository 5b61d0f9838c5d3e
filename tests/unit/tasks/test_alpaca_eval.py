"""The AlpacaEval evaluator: its command, its early refusals, and the reading of its program's results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.endpoints import KEY, planned_model
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.engines import engine_kwargs
from resources.errors import BadInput
from tasks.errors import CountsDisagree, HarnessOutputInvalid, UnknownBenchmark
from tasks.evaluators.alpaca_eval.evaluator import EVALUATOR
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.harness import Parsed, Progress, verify_counts
from tasks.records.record import Counts
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig
from tasks.spec.evaluators import Judge

PYTHON = Path("/environment/bin/python")
JUDGE_KEY = "sk-the-judges-key-that-nobody-may-see"
DEMO = EvalTaskConfig(name="demo_instructions")
REFERENCE_SAMPLING = {
    "temperature": 0.7,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "top_k": -1,
}


def make_config(*evals: EvalTaskConfig, options: dict[str, Any] | None = None, **changes: Any) -> EvaluationConfig:
    given: dict[str, Any] = {
        "evaluator": {"name": "alpaca_eval", **(options or {})},
        "model_path": "checkpoint",
        "evals": evals or (DEMO,),
    }
    return EvaluationConfig.model_validate({**given, **changes})


def job_of(config: EvaluationConfig, **changes: Any) -> dict[str, Any]:
    command = EVALUATOR.command(planned_model(**changes), config, Path("/out"), python=PYTHON)
    return json.loads(command.files["job.json"])


def write_set(path: Path, *rows: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return str(path)


def write_run(folder: Path, *, preferences: list[float | None], requested: int = 4, answered: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    asked = [f"Say {number}." for number in range(4)]
    outputs = [
        {"instruction": instruction, "output": instruction[4] if at < answered else None}
        for at, instruction in enumerate(asked)
    ]
    annotations = [
        {"instruction": instruction, "output_1": "?", "output_2": instruction[4], "preference": preference}
        for instruction, preference in zip(asked, preferences, strict=False)
    ]
    judged = [preference - 1 for preference in preferences if preference is not None]
    win_rate = sum(judged) / len(judged) if judged else None
    content: dict[str, Any] = {
        "plan.json": {"sets": {"demo_instructions": requested}},
        "model_outputs.json": outputs,
        "reference_outputs.json": [{"instruction": instruction, "output": "?"} for instruction in asked],
        "annotations.json": annotations,
        "results.json": {
            "metrics": {"demo_instructions": {"win_rate": win_rate, "win_rate_stderr": 0.1, "avg_length": 1.0}}
            if preferences
            else {},
            "versions": {"judge": "j"},
        },
    }
    for name, value in content.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def parse(folder: Path, **options: Any) -> Parsed:
    return EVALUATOR.read(folder, make_config(options=options))[0]


def test_sampling_is_the_references_then_the_models_then_the_options() -> None:
    assert job_of(make_config())["sampling"] == {**REFERENCE_SAMPLING, "max_new_tokens": 2048}
    pool_config = {"model": {"name": "m", "generation_params": {"temperature": 0.2, "stop_token_ids": [5], "top_k": 9}}}
    config = make_config(options={"generation_params": {"top_k": 4}}, pool_config=pool_config)
    expected = {**REFERENCE_SAMPLING, "temperature": 0.2, "stop_token_ids": [5], "top_k": 4}
    assert job_of(config, max_model_len=512)["sampling"] == {**expected, "max_new_tokens": 256}
    again = EvaluationConfig.model_validate_json(config.model_dump_json())
    assert job_of(again, max_model_len=512) == job_of(config, max_model_len=512)


def test_stop_token_ids_are_for_requests_and_no_default_of_the_engine() -> None:
    def defaults(params: dict[str, Any]) -> Any:
        pool = InferencePoolConfig.model_validate({"model": {"name": "m", "generation_params": params}})
        return engine_kwargs(pool).get("override_generation_config")

    assert defaults({"stop_token_ids": [5], "top_k": 9}) == {"top_k": 9}
    assert defaults({"stop_token_ids": [5]}) is None


def test_judge_elsewhere_has_a_key_of_its_own_and_a_judge_in_the_same_pool_has_not(tmp_path: Path) -> None:
    def variables(judge: RunningModel | None) -> dict[str, str]:
        command = EVALUATOR.command(planned_model(), make_config(), tmp_path, python=PYTHON, judge=judge)
        assert KEY not in command.files["job.json"] and JUDGE_KEY not in command.files["job.json"]
        return {name: value for name, value in command.variables.items() if name.endswith("KEY")}

    assert variables(None) == variables(planned_model(model="run-200")) == {"OPENAI_API_KEY": KEY}
    elsewhere = planned_model(base_url="http://127.0.0.1:10/v1", api_key=JUDGE_KEY)
    assert variables(elsewhere) == {"OPENAI_API_KEY": KEY, "ASSAY_JUDGE_API_KEY": JUDGE_KEY}


def test_score_inputs_follow_content_and_judge_and_not_paths(tmp_path: Path) -> None:
    def measured(**options: Any) -> dict[str, Any]:
        return AlpacaEvalOptions(**options).score_inputs()

    row = {"instruction": "Say a.", "output": "a"}
    first, second = (write_set(tmp_path / name, row) for name in ("first.json", "second.json"))
    assert measured(instructions_path=first) == measured(instructions_path=second) != measured()
    write_set(tmp_path / "second.json", {**row, "output": "b"})
    assert measured(instructions_path=first) != measured(instructions_path=second)
    assert measured(judge=Judge(annotator="short_verdict")) != measured()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["instructions_path", "reference_outputs_path", "length_control_path"])
def test_file_that_is_a_pipe_or_missing_is_refused_with_its_path_and_breaks_no_hash(name: str, tmp_path: Path) -> None:
    config = make_config(options={name: str(tmp_path / "nowhere.json")})
    assert config.score_inputs() != make_config().score_inputs()
    assert config.score_inputs() != make_config(options={name: str(tmp_path / "nothing.json")}).score_inputs()
    os.mkfifo(tmp_path / "pipe.json")
    for path in ("nowhere.json", "pipe.json"):
        with pytest.raises(BadInput, match=path):
            EVALUATOR.check(make_config(options={name: str(tmp_path / path)}), PYTHON)


@pytest.mark.parametrize(
    "options",
    [
        {"judge": {"base_url": "http://a/v1", "pool_name": "p", "model": "j"}},
        {"judge": {"pool_name": "p"}},
        {"judge": {"annotator": "../mine"}},
        {"judge": {"annotator": ".mine"}},
        {"judge": {"annotator": "/mine"}},
        {"judge": {"base_url": "http://a", "model": "j"}},
        {"prompt_template": "no place for it"},
        {"prompt_stops": ["a", "b", "c", "d", "e"]},
        {"max_judge_errors": 1.0},
        {"generation_params": {"temperature": -1}},
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AlpacaEvalOptions.model_validate(options)


def test_check_knows_bundled_own_and_official_sets_and_suggests_a_name(tmp_path: Path) -> None:
    write_set(tmp_path / "mine.json", {"instruction": "Say a.", "output": "a"})
    for config in (
        make_config(),
        make_config(EvalTaskConfig(name="alpaca_eval")),
        make_config(EvalTaskConfig(name="mine"), benchmarks_path=str(tmp_path)),
    ):
        EVALUATOR.check(config, PYTHON)
    with pytest.raises(UnknownBenchmark, match="did you mean demo_instructions"):
        EVALUATOR.check(make_config(EvalTaskConfig(name="demo_instruction")), PYTHON)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{not json", "line 1"),
        ('{"instruction": "a"}', "valid list"),
        ('[{"output": "a"}]', "0.instruction"),
        ("[]", "an empty list"),
        ('[{"instruction": "a", "output": "b"}, {"instruction": "c"}]', "none for 1 of 2"),
        (None, "no such file"),
    ],
)
def test_check_refuses_instructions_that_cannot_be_used(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match=problem) as refusal:
        EVALUATOR.check(make_config(options={"instructions_path": str(path)}), PYTHON)
    assert "mine.json" in str(refusal.value)


def test_check_takes_outputs_to_compare_with_from_a_file_of_their_own(tmp_path: Path) -> None:
    instructions = write_set(tmp_path / "asked.json", {"instruction": "Say a."}, {"instruction": "Say b."})
    both = write_set(tmp_path / "both.json", *({"instruction": f"Say {letter}.", "output": letter} for letter in "ba"))
    single = write_set(tmp_path / "one.json", {"instruction": "Say a.", "output": "a"})
    options = {"instructions_path": instructions, "reference_outputs_path": both}
    EVALUATOR.check(make_config(options=options), PYTHON)
    with pytest.raises(BadInput, match="none for 1 of 2"):
        EVALUATOR.check(make_config(options={**options, "reference_outputs_path": single}), PYTHON)


@pytest.mark.parametrize(
    ("evals", "options"),
    [
        ((EvalTaskConfig(name="demo_instructions", num_fewshot=2),), {}),
        ((EvalTaskConfig(name="demo_instructions", task_kwargs={"a": 1}),), {}),
        ((DEMO, EvalTaskConfig(name="more")), {"instructions_path": "mine.json"}),
        ((DEMO,), {"instructions_path": "gs://bucket/mine.json"}),
    ],
)
def test_check_refuses_what_would_be_ignored(evals: tuple[EvalTaskConfig, ...], options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        EVALUATOR.check(make_config(*evals, options=options), PYTHON)


def test_check_refuses_a_judges_configuration_that_is_nowhere(tmp_path: Path) -> None:
    theirs = tmp_path / "lib" / "python3.11" / "site-packages" / "alpaca_eval" / "evaluators_configs" / "theirs"
    theirs.mkdir(parents=True)
    (theirs / "configs.yaml").write_text("{}")
    for known in ("theirs", "short_verdict", "demo_verdict"):
        config = make_config(options={"judge": {"annotator": known}})
        EVALUATOR.check(config, tmp_path / "bin" / "python")
    with pytest.raises(BadInput, match="did you mean short_verdict"):
        config = make_config(options={"judge": {"annotator": "short_verdicts"}})
        EVALUATOR.check(config, tmp_path / "bin" / "python")


def test_parse_gives_shares_and_samples_of_each_instruction(tmp_path: Path) -> None:
    run = write_run(tmp_path, preferences=[1.0, 2.0, 1.25, 1.5])
    parsed = parse(run)
    verify_counts(parsed)
    numbers = {metric.name: (metric.value, metric.stderr, metric.n) for metric in parsed.metrics}
    assert numbers == {"win_rate": (0.4375, 0.1, 4), "avg_length": (1.0, None, 4)}
    samples = list(EVALUATOR.read(run, make_config())[1])
    assert [sample.scores["win_rate"] for sample in samples] == [0.0, 1.0, 0.25, 0.5]
    assert (samples[1].prompt, samples[1].output, samples[1].target) == ("Say 1.", "1", "?")
    assert len({sample.id for sample in samples}) == 4


@pytest.mark.parametrize(
    ("run", "tolerated", "counts"),
    [
        ({"preferences": [1.0, None, 2.0, 2.0]}, 0.0, Counts(requested=4, answered=4, scored=3, judge_errors=1)),
        ({"preferences": [1.0, None, 2.0, 2.0]}, 0.25, Counts(requested=3, answered=3, scored=3, judge_errors=1)),
        ({"preferences": [1.0, None, None, 2.0]}, 0.25, Counts(requested=4, answered=4, scored=2, judge_errors=2)),
        ({"preferences": [], "answered": 3}, 0.9, Counts(requested=4, answered=3, scored=0)),
        ({"preferences": [1.0] * 4, "requested": 5}, 0.9, Counts(requested=5, answered=4, scored=4)),
        ({"preferences": [1.0, 7.0, 2.0, 2.0]}, 0.0, Counts(requested=4, answered=4, scored=3, judge_errors=1)),
        ({"preferences": [1.0, 2.0, 2.0]}, 0.0, Counts(requested=4, answered=4, scored=3, judge_errors=1)),
    ],
)
def test_counts_tell_missing_outputs_from_missing_verdicts(
    tmp_path: Path, run: dict[str, Any], tolerated: float, counts: Counts
) -> None:
    parsed = parse(write_run(tmp_path, **run), max_judge_errors=tolerated)
    assert parsed.counts == counts
    if counts.requested != counts.scored:
        with pytest.raises(CountsDisagree):
            verify_counts(parsed)


@pytest.mark.parametrize("name", ["plan.json", "results.json"])
@pytest.mark.parametrize("content", [None, "", "[1]", '{"sets": {"other": 4}, "metrics": 1}'])
def test_damaged_results_are_invalid_and_no_score(tmp_path: Path, name: str, content: str | None) -> None:
    run = write_run(tmp_path, preferences=[1.0] * 4)
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    with pytest.raises(HarnessOutputInvalid):
        parse(run)


def test_whole_counts_without_a_win_rate_are_invalid(tmp_path: Path) -> None:
    run = write_run(tmp_path, preferences=[1.0] * 4)
    (run / "results.json").write_text(json.dumps({"metrics": {"demo_instructions": {"win_rate": None}}}))
    with pytest.raises(HarnessOutputInvalid, match="no usable win rate"):
        parse(run)


@pytest.mark.parametrize("name", ["model_outputs.json", "annotations.json", "reference_outputs.json"])
@pytest.mark.parametrize("content", ["", "{}", '[1, {"instruction": 2}, {"output": "a"}]', "[" * 5000])
def test_damaged_outputs_are_counted_as_missing(tmp_path: Path, name: str, content: str) -> None:
    run = write_run(tmp_path, preferences=[1.0] * 4)
    (run / name).write_text(content)
    counts = parse(run).counts
    assert counts.requested == 4
    assert (counts.answered == 0, counts.scored == 0) == (name == "model_outputs.json", "reference" not in name)


def test_answers_cut_or_with_open_reasoning_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, preferences=[1.0, 2.0, 1.5, 1.0])
    path = folder / "model_outputs.json"
    rows = json.loads(path.read_text())
    rows[0].update(finish_reason="length")
    rows[1].update(finish_reason="stop")
    rows[2].update(output="<think>a", finish_reason="length")
    path.write_text(json.dumps(rows))
    finishes = [sample.finish for sample in EVALUATOR.read(folder, make_config())[1]]
    assert finishes[:3] == ["length", "stop", "length"]
    [details] = parse(folder).details.values()
    assert (details.questions, details.unclosed) == (4, 1)


def test_instruction_that_occurs_twice_has_two_verdicts(tmp_path: Path) -> None:
    def judged(*preferences: float | None) -> list[float | None]:
        run = write_run(tmp_path, preferences=[1.0] * 4, requested=2)
        compared = {"instruction": "Say 0.", "output_2": "0"}
        files: dict[str, list[dict[str, Any]]] = {
            "model_outputs.json": [{"instruction": "Say 0.", "output": "0"}] * 2,
            "reference_outputs.json": [{"instruction": "Say 0.", "output": output} for output in "ab"],
            "annotations.json": [
                {**compared, "output_1": output, "preference": preference}
                for output, preference in zip("ab", preferences, strict=True)
            ],
        }
        for name, rows in files.items():
            write_set(run / name, *rows)
        samples = list(EVALUATOR.read(run, make_config())[1])
        assert [sample.target for sample in samples] == ["a", "b"]
        assert parse(run).counts.scored == sum(preference is not None for preference in preferences)
        return [sample.scores.get("win_rate") for sample in samples]

    assert judged(1.0, 2.0) == [0.0, 1.0]
    assert judged(None, 2.0) == [None, 1.0]


def test_progress_counts_outputs_then_verdicts() -> None:
    log = "demo, answers: 100%|###| 24/24 [00:01<00:00]\n"
    assert EVALUATOR.progress(log) == Progress("demo, answers", 24, 24)
    log += "Annotation chunk:   0%|  | 0/1 [00:00<?]\ndemo, verdicts:  50%|#  | 12/24 [00:00<00:00]"
    assert EVALUATOR.progress(log) == Progress("demo, verdicts", 12, 24)
    assert EVALUATOR.progress("INFO nothing yet") is None
