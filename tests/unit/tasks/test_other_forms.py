"""Records in external formats: valid by their schema, readable by their client, and equal to the recorded data."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries
from jsonschema import Draft7Validator

from fakes.cli import invoke
from fakes.records import make_metric, make_record, publish
from resources.errors import BadInput
from tasks.errors import SinkFailed
from tasks.records.details import BenchmarkDetails, Counts, MergedInput, MergeReference
from tasks.records.record import Record
from tasks.records.samples import SAMPLES_NAME, Sample, question_of, write_samples
from tasks.records.search import RecordFilter
from tasks.sinks.announcement import Announcement
from tasks.sinks.forms.every_eval_ever import Publisher, evaluation_log, sample_rows
from tasks.sinks.hugging_face import HuggingFaceSink, Leaderboard, hub_entries, send
from tasks.verdicts.statistics.composition import with_interval
from tasks.verdicts.statistics.intervals import normal_interval

SCHEMAS = Path(__file__).parents[2] / "data" / "every_eval_ever"
GSM8K = Leaderboard(dataset="openai/gsm8k", task_id="gsm8k", metric="exact_match", factor=100)
COMMIT = "a" * 40
EVERYTHING = RecordFilter()


def weighed(number: int, *, right: bool, cluster: str | None = None) -> Sample:
    """Returns a question with a choice, an example before it, and the likeliest answer of the model."""
    return Sample(
        benchmark="facts",
        id=str(number),
        prompt=f"Question {number}?",
        context="An example? Yes.\n\n",
        output="Yes" if right else "No",
        target="Yes",
        scores={"acc": float(right), "bpb": 0.5 + number},
        log_likelihoods=(-1.0, -2.0),
        choices=("Yes", "No"),
        cluster=cluster,
    )


def facts(**fields: Any) -> Record:
    """Returns a record of a benchmark with its settings, with an interval over clusters computed by Assay."""
    noticed = BenchmarkDetails(questions=40, truncated=3, data=f"lab/facts@{COMMIT}", notes=("Asked in two parts.",))
    metric = make_metric("facts", 0.5, stderr=0.1, n=40).model_copy(update={"low": 0.3, "high": 0.7})
    smooth = make_metric("facts", 20.0, name="bpb", stderr=None, n=40, higher_is_better=False)
    given: dict[str, Any] = {
        "metrics": (metric, smooth.model_copy(update={"smooth": True})),
        "details": {"facts": noticed},
        "counts": Counts(requested=40, answered=40, scored=40),
    }
    return make_record(**given | fields)


def written(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Exports records; returns the evaluations and the sample lines, each validated against its schema."""
    output = folder.parent / "exported"
    line = [str(folder), "--format", "every-eval-ever", "--output", str(output), "--organization", "lab", *arguments]
    done = invoke(["records", *line], catch_exceptions=False)
    assert done.exit_code == 0
    whole, instance = (
        Draft7Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text()))
        for name in ("eval", "instance_level_eval")
    )
    logs = {path: json.loads(path.read_text()) for path in sorted(output.rglob("*.json"))}
    rows: list[dict[str, Any]] = []
    for path, log in logs.items():
        assert not [error.message for error in whole.iter_errors(log)]
        assert path.relative_to(output).parts[:3] == ("data", log["eval_library"]["name"], "lab")
        if details := log.get("detailed_evaluation_results"):
            lines = [json.loads(text) for text in (output / details["file_path"]).read_text().splitlines()]
            assert len(lines) == details["total_rows"] and details["file_path"].endswith(f"{path.stem}_samples.jsonl")
            assert not [error.message for row in lines for error in instance.iter_errors(row)]
            assert {row["evaluation_id"] for row in lines} == {log["evaluation_id"]}
            rows += lines
    assert len(list(output.rglob("*.jsonl"))) == len({row["evaluation_id"] for row in rows})
    return list(logs.values()), rows


def refused(folder: Path, *arguments: str) -> str:
    with pytest.raises(BadInput) as error:
        invoke(["records", str(folder), *arguments], catch_exceptions=False)
    return str(error.value)


def test_samples_of_an_export_give_the_scores_that_it_tells_and_say_what_was_asked(tmp_path: Path) -> None:
    samples = [weighed(number, right=number % 2 == 0) for number in range(40)]
    publish(tmp_path / "evaluations", facts(), samples)
    logs, rows = written(tmp_path / "evaluations", "--metric", "*")
    by_result: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_result[row["evaluation_result_id"]].append(row["evaluation"]["score"])
    [log] = logs
    scores = {result["evaluation_result_id"]: result["score_details"]["score"] for result in log["evaluation_results"]}
    assert scores == {name: pytest.approx(fmean(values)) for name, values in by_result.items()}
    first = next(row for row in rows if row["evaluation_result_id"] == "facts/acc")
    assert first["input"] == {
        "raw": "Question 0?",
        "formatted": "An example? Yes.\n\nQuestion 0?",
        "reference": ["Yes"],
        "choices": ["Yes", "No"],
    }
    assert (first["output"]["raw"], first["evaluation"]) == (["Yes"], {"score": 1.0, "is_correct": True})
    assert json.loads(first["metadata"]["log_likelihoods"]) == [-1.0, -2.0]
    other = next(row for row in rows if row["evaluation_result_id"] == "facts/bpb")
    assert not other["evaluation"]["is_correct"] and "not known" in other["metadata"]["is_correct"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *((name, True) for name in ("accuracy", "match_accuracy", "em", "exact", "pass@1", "exact_match@5")),
        *((name, True) for name in ("acc_mutual_info", "prompt_level_strict_acc", "exact_match,strict-match")),
        *((name, False) for name in ("f1", "exact_score", "accrued", "pass@10", "mean")),
    ],
)
def test_sample_line_says_that_an_answer_is_right_where_the_metric_can(name: str, known: bool) -> None:
    record = facts(metrics=(make_metric("facts", 1.0, name=name, n=1),))
    log = evaluation_log(record, {}, publisher=Publisher("lab", "lab"), filters=EVERYTHING)
    [row] = sample_rows(weighed(0, right=True).model_copy(update={"scores": {name: 1.0}}), log)
    assert (row["evaluation"]["is_correct"], "is_correct" not in row["metadata"]) == (known, known)
    assert "interaction_type" not in row["metadata"]


def test_sample_line_of_inspect_says_that_its_turns_are_not_known() -> None:
    record = facts(evaluator="inspect_ai")
    log = evaluation_log(record, {}, publisher=Publisher("lab", "lab"), filters=EVERYTHING)
    row = next(sample_rows(weighed(0, right=True), log))
    assert "call tools" in row["metadata"]["interaction_type"]


def test_size_of_the_data_set_is_stated_only_if_all_asked() -> None:
    def told(record: Record) -> int | None:
        log = evaluation_log(record, {}, publisher=Publisher("lab", "lab"), filters=EVERYTHING)
        return log["evaluation_results"][0]["source_data"].get("samples_number")

    assert told(facts()) == 40
    assert told(facts(evaluation=facts().evaluation | {"max_eval_instances": 20})) is None
    assert told(facts(counts=Counts(requested=40, answered=40, scored=40, skipped=2))) is None


def settings_in(benchmark: str, **fields: Any) -> dict[str, Any]:
    log = evaluation_log(facts(**fields), {}, publisher=Publisher("lab", "lab"), filters=EVERYTHING)
    return next(r["generation_config"] for r in log["evaluation_results"] if r["evaluation_name"] == benchmark)


def test_settings_of_a_part_are_its_own_or_omitted_if_unknown() -> None:
    def examples(benchmark: str, evals: list[dict[str, Any]]) -> str | None:
        group = make_metric("openllm").model_copy(update={"parts": {"arc_easy": 0.5, "piqa": 0.5}})
        inner = make_metric("easy_ones").model_copy(update={"parts": {"arc_easy": 1.0}})
        measured = (group, inner, *(make_metric(name) for name in ("arc_easy", "piqa", "gsm8k", "mine.cola", "sst2")))
        evaluation = facts().evaluation | {"evals": evals}
        return settings_in(benchmark, metrics=measured, evaluation=evaluation)["additional_details"].get("num_fewshot")

    tag = {"name": "glue", "num_fewshot": 25}
    several = [{"name": "openllm", "num_fewshot": 5}, {"name": "gsm8k"}, tag, tag | {"task_alias": "mine"}]
    assert examples("sst2", [tag]) == "25", "a single benchmark was asked, with this number of examples"
    assert [examples(name, several) for name in ("openllm", "easy_ones", "piqa", "mine.cola")] == ["5", "5", "5", "25"]
    assert examples("gsm8k", several) == "the benchmark's own"
    assert examples("sst2", several) is None


def test_sampling_stated_is_what_was_sent_after_all_overrides() -> None:
    def sampling(evaluator: dict[str, Any], task: dict[str, Any] | None = None) -> dict[str, Any]:
        model = {"name": "m", "generation_params": {"temperature": 0.6, "max_new_tokens": 256}}
        evals = [{"name": "facts", "task_kwargs": {"generation_kwargs": task or {}}}]
        evaluation = facts().evaluation | {
            "evals": evals, "evaluator": evaluator, "pool_config": {"model": model},
        }  # fmt: skip
        return settings_in("facts", evaluation=evaluation, evaluator=evaluator["name"])["generation_args"]

    lm_eval = {"name": "lm_evaluation_harness", "max_gen_toks": 4096}
    assert sampling(lm_eval) == {}, "its client sends a temperature of its own, and benchmarks their own length"
    assert sampling(lm_eval, {"max_gen_toks": 1024, "top_p": 0.9}) == {"max_tokens": 1024, "top_p": 0.9}
    assert sampling({"name": "inspect_ai", "temperature": 0.2, "max_tokens": 64, "top_p": None}) == {
        "temperature": 0.2,
        "max_tokens": 64,
    }
    alpaca = {"name": "alpaca_eval", "generation_params": {"temperature": None, "max_new_tokens": 512}}
    assert sampling(alpaca) == {"temperature": 0.6, "max_tokens": 512}


def test_settings_less_paths_and_keys_tell_the_rest() -> None:
    secret = {
        "data_files": "places.jsonl",
        "api_key": "abc",
        "hf_token": "abc",
        "Authorization": "Bearer abc",
        "extra_headers": {"X": "abc"},
        "questions": "private/abc.jsonl",
        "windows": "C:\\abc",
        "line": "serve --model /mnt/abc",
        "here": "../abc",
    }
    public = {"model": "lab/facts-7B", "max_tokens": 5, "description": "Say yes/no.", "tokenizer": "lab/tok@main"}
    evals = [{"name": "facts", "task_kwargs": {"inner": [secret | public]}}]
    arguments = settings_in("facts", evaluation=facts().evaluation | {"evals": evals})["additional_details"][
        "task_kwargs"
    ]
    assert json.loads(arguments) == {"inner": [public]}


def test_uncertainty_of_an_export_is_the_recorded_uncertainty_with_its_method(tmp_path: Path) -> None:
    def uncertainty(cell: str, samples: list[Sample], **fields: Any) -> dict[str, Any]:
        questions = {"facts": [question_of(sample) for sample in samples]}
        score = fmean(sample.scores["acc"] for sample in samples)
        metric = with_interval(make_metric("facts", score, stderr=None, n=len(samples)), questions, ())
        record = facts(metrics=(metric.model_copy(update=fields),), cell=cell)
        log = evaluation_log(record, questions, publisher=Publisher("lab", "lab"), filters=EVERYTHING)
        [result] = log["evaluation_results"]
        reported = result["score_details"]["uncertainty"]
        ends = reported["confidence_interval"]
        numbers = (reported["standard_error"]["value"], ends["lower"], ends["upper"])
        assert numbers == tuple(fields.get(name, getattr(metric, name)) for name in ("stderr", "low", "high"))
        assert (ends["confidence_level"], reported["num_samples"]) == (0.95, len(samples))
        return {**reported, "clusters": result["score_details"]["details"].get("clusters")}

    alone = [weighed(number, right=number % 3 == 0) for number in range(300)]
    together = [weighed(number, right=number % 3 == 0, cluster=str(number // 10)) for number in range(300)]
    plain, clustered = uncertainty("a", alone), uncertainty("b", together)
    assert (plain["confidence_interval"]["method"], plain["clusters"]) == ("Wilson", None)
    assert "effective number of questions" in clustered["confidence_interval"]["method"]
    assert clustered["clusters"] == "30" and plain["standard_error"]["method"] == "analytic"
    changed = uncertainty("c", alone, low=0.1, stderr=0.2)
    assert "method" not in changed["confidence_interval"]
    assert changed["standard_error"]["method"] == "the harness's own"

    def without_a_way(**fields: Any) -> str | None:
        metric = make_metric("facts", 0.9, name="total", stderr=0.01).model_copy(update=fields)
        questions = {"facts": [question_of(sample) for sample in alone]}
        log = evaluation_log(facts(metrics=(metric,)), questions, publisher=Publisher("lab", "lab"), filters=EVERYTHING)
        uncertainty = log["evaluation_results"][0]["score_details"]["uncertainty"]
        return uncertainty["confidence_interval"].get("method")

    bar = normal_interval(0.9, 0.01)
    assert without_a_way(low=bar.low, high=bar.high) == "normal, from the standard error"
    assert without_a_way(low=0.1, high=0.95) is None


def test_export_tells_settings_versions_and_recipe_and_no_place(tmp_path: Path) -> None:
    inputs = tuple(
        MergedInput(uri=f"secret/run-a/step-{step}", run="run-a", step=step, digest="d", weight=0.5) for step in (1, 2)
    )
    record = facts()
    evaluation = record.evaluation | {
        "evals": [{"name": "facts", "num_fewshot": 5, "task_kwargs": {"generation_kwargs": {"temperature": 0.7}}}],
        "evaluator": {"name": "lm_evaluation_harness", "long_prompts": "skip", "instructions_path": "secret/i"},
        "benchmarks_path": "secret/benchmarks",
    }
    merge = MergeReference(kind="mean", inputs=inputs)
    checkpoint = record.checkpoint.model_copy(update={"merge": merge, "name": 'mean of "1"/2', "uri": "secret/run-a"})
    served = record.served | {
        "engine": {
            **record.served["engine"],
            "arguments": {"tokenizer": "/places/tok", "url": "http://10.0.0.1", "n": 1},
        }
    }
    log = evaluation_log(
        record.model_copy(update={"evaluation": evaluation, "checkpoint": checkpoint, "served": served}),
        {},
        publisher=Publisher("lab", "maker"),
        filters=EVERYTHING,
    )
    text = json.dumps(log)
    assert not [place for place in ("secret", "10.0.0.1", "/places", "checkpoints/") if place in text]
    assert log["model_info"]["id"] == "maker/mean of _1__2" and log["model_info"]["name"] == 'mean of "1"/2'
    assert log["model_info"]["additional_details"]["merged_from"] == str(merge)
    assert log["model_info"]["inference_engine"] == {"name": "vllm", "version": "0.22.0"}
    assert log["eval_library"]["version"] == "0.4.9"
    assert log["source_metadata"]["evaluator_relationship"] == "third_party"
    [acc] = log["evaluation_results"]
    settings = acc["generation_config"]
    assert settings["generation_args"] == {"temperature": 0.7}
    assert (settings["additional_details"]["num_fewshot"], settings["additional_details"]["apply_chat_template"]) == (
        "5",
        "false",
    )
    assert json.loads(settings["additional_details"]["engine_arguments"]) == {"n": 1}
    source = acc["source_data"]
    assert (source["source_type"], source["hf_repo"]) == ("hf_dataset", "lab/facts")
    assert source["additional_details"]["revision"] == COMMIT
    assert acc["score_details"]["details"]["prompts_truncated"] == "3"
    uncertainty = acc["score_details"]["uncertainty"]
    assert uncertainty["standard_error"] == {"value": 0.1}, "without samples its method is unknown"
    assert "method" not in uncertainty["confidence_interval"]


def test_records_without_a_score_or_changed_since_are_not_exported_and_counted(tmp_path: Path) -> None:
    evaluations = tmp_path / "evaluations"
    samples = [weighed(number, right=number % 2 == 0) for number in range(40)]
    publish(evaluations, facts(step=100), samples)
    publish(evaluations, facts(step=200, status="withheld"))
    publish(evaluations, facts(step=300, status="failed"))
    changed = publish(evaluations, facts(step=400), samples)
    write_samples(Path(changed) / "attempt-1" / SAMPLES_NAME, [*samples[1:], weighed(0, right=False)])
    output = str(tmp_path / "once")
    line = [str(evaluations), "--format", "every-eval-ever", "--output", output, "--organization", "lab"]
    done = invoke(["records", *line], catch_exceptions=False)
    assert "1 record, 1 result, 40 sample lines" in done.output
    assert "1 withheld, 1 failed, 1 changed since it was written" in done.output
    logs, rows = written(evaluations)
    assert [log["model_info"]["name"] for log in logs] == ["run-a-100"] and len(rows) == 40


def test_export_twice_writes_the_same_files_and_without_samples_none_of_those(tmp_path: Path) -> None:
    publish(tmp_path / "evaluations", facts(), [weighed(n, right=n < 20) for n in range(40)])
    written(tmp_path / "evaluations")
    first = {path: path.read_bytes() for path in (tmp_path / "exported").rglob("*.json*")}
    written(tmp_path / "evaluations")
    assert first == {path: path.read_bytes() for path in (tmp_path / "exported").rglob("*.json*")} and len(first) == 2
    (tmp_path / "more").mkdir()
    publish(tmp_path / "more" / "evaluations", facts(), [weighed(n, right=n < 20) for n in range(40)])
    logs, rows = written(tmp_path / "more" / "evaluations", "--no-samples")
    assert logs and not rows


def test_export_without_an_organization_or_a_folder_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, facts())
    form = ("--format", "every-eval-ever")
    assert "--organization my-lab" in refused(tmp_path, *form, "--output", str(tmp_path / "out"))
    assert "name a folder" in refused(tmp_path, *form, "--organization", "lab")
    for name in ("unknown", "a/b", ""):
        assert "name of an organization" in refused(tmp_path, *form, "--output", "out", "--organization", name)


# The hub's leaderboards


def gsm8k(**fields: Any) -> Record:
    metric = make_metric("gsm8k", 0.4125, name="exact_match", stderr=0.0135, n=1319)
    metrics = (metric.model_copy(update={"low": 0.386, "high": 0.4393}), make_metric("mmlu", 0.3))
    details = {"gsm8k": BenchmarkDetails(questions=1319, at_limit=7, data=f"openai/gsm8k@{COMMIT}")}
    given: dict[str, Any] = {"metrics": metrics, "details": details, "created": datetime(2026, 3, 4, 5, tzinfo=UTC)}
    return make_record(**given | fields)


def test_leaderboard_entry_is_read_by_the_hubs_client_with_score_scale_revision_and_how_it_was_asked(
    tmp_path: Path,
) -> None:
    cell = publish(tmp_path / "evaluations", gsm8k())
    sink = HuggingFaceSink(path=str(tmp_path / "cards"), leaderboards={"gsm8k": GSM8K}, source_url="https://lab.test/r")
    card = send(Announcement.of(gsm8k(), cell), sink)
    assert card is not None
    [file] = (Path(card).parent / ".eval_results").iterdir()
    [entry] = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("openai/gsm8k", "gsm8k", COMMIT)
    assert entry.value == pytest.approx(41.25)
    assert datetime.fromisoformat(str(entry.date)) == datetime(2026, 3, 4, 5, tzinfo=UTC)
    assert (entry.source_url, entry.source_name) == ("https://lab.test/r", "Assay")
    for words in ("exact_match", "1,319 questions", "95 % interval 38.6 to 43.93", "7 answers ended", "lm_eval 0.4.9"):
        assert words in str(entry.notes)


def test_leaderboard_gets_a_merge_with_its_recipe_and_no_score_over_a_part_of_the_questions_or_withheld() -> None:
    boards = {"gsm8k": GSM8K, "hle": Leaderboard(dataset="cais/hle", task_id="default", metric="acc")}
    assert hub_entries(gsm8k(), boards).keys() == {"gsm8k"}
    limited = gsm8k().evaluation | {"max_eval_instances": 100}
    assert not hub_entries(gsm8k(evaluation=limited), boards)
    assert not hub_entries(gsm8k(status="withheld"), boards)
    inputs = tuple(MergedInput(uri=f"r/{step}", run="r", step=step, digest="d", weight=step / 4) for step in (1, 3))
    merge = MergeReference(kind="mean", parameter="1+3", inputs=inputs)
    merged = gsm8k().model_copy(update={"checkpoint": gsm8k().checkpoint.model_copy(update={"merge": merge})})
    assert "weights: mean of 2, 1+3: r 1, 3, weights 0.25, 0.75" in hub_entries(merged, boards)["gsm8k"]["notes"]
    of_a_tag = limited | {"max_eval_instances": None, "evals": [{"name": "maths"}, {"name": "mmlu"}]}
    assert "examples" in hub_entries(gsm8k(), boards)["gsm8k"]["notes"], "the benchmark's own number"
    assert "examples" not in hub_entries(gsm8k(evaluation=of_a_tag), boards)["gsm8k"]["notes"], (
        "their number is unknown"
    )
    with pytest.raises(SinkFailed, match="name one of these"):
        hub_entries(gsm8k(), {"gsm8k": GSM8K.model_copy(update={"metric": "acc"})})


def test_records_command_prints_leaderboard_entries_of_a_checkpoint(tmp_path: Path) -> None:
    evaluations, sink = tmp_path / "evaluations", tmp_path / "sink.yaml"
    publish(evaluations, gsm8k(step=100))
    publish(evaluations, gsm8k(step=200))
    sink.write_text(yaml.safe_dump({"kind": "hugging_face", "leaderboards": {"gsm8k": GSM8K.model_dump()}}))
    form = ("--format", "eval-results", "--sink", str(sink))
    done = invoke(["records", str(evaluations), "--steps", "200", *form], catch_exceptions=False)
    [entry] = parse_eval_result_entries(yaml.safe_load(done.stdout))
    assert entry.value == pytest.approx(41.25)
    assert "2 checkpoints" in refused(evaluations, *form)
    assert "max_eval_instances" in refused(evaluations, "--steps", "200", "--benchmark", "mmlu", *form)
    assert "leaderboards" in refused(evaluations, "--format", "eval-results")


def test_leaderboard_entries_for_the_same_task_or_of_a_changed_record_are_refused(tmp_path: Path) -> None:
    evaluations, sink = tmp_path / "evaluations", tmp_path / "sink.yaml"
    cells = [publish(evaluations, gsm8k(cell=f"gsm8k-{each}", evaluation_hash=each * 16)) for each in "ab"]
    sink.write_text(yaml.safe_dump({"kind": "hugging_face", "leaderboards": {"gsm8k": GSM8K.model_dump()}}))
    form = ("--format", "eval-results", "--sink", str(sink))
    text = refused(evaluations, *form)
    assert "a single score for task gsm8k of openai/gsm8k" in text and all(cell in text for cell in cells)
    done = invoke(["records", cells[0], *form], catch_exceptions=False)
    assert len(yaml.safe_load(done.stdout)) == 1
    record = Path(cells[0]) / "record.json"
    record.write_text(record.read_text().replace("0.4125", "0.9125"))
    assert f"changed: {cells[0]}" in refused(Path(cells[0]), *form)
