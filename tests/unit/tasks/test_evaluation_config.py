"""Evaluation and pool configurations: accepted content, refusals, and their messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pools.config import InferencePoolConfig, ModelConfig
from resources.errors import BadInput
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.running.cells import as_served
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig, digest_of
from tasks.spec.loading import load_config

MINIMAL = {"model_path": "/runs/run-a", "evals": [{"name": "demo_facts"}]}


def test_minimal_evaluation_gets_a_pool_named_after_the_run() -> None:
    config = EvaluationConfig.model_validate(MINIMAL)
    assert config.pool_config is not None
    assert (config.run_name, config.pool_config.model.name, config.pool_config.device) == ("run-a", "run-a", "cpu")


def test_pool_accepts_model_and_model_config() -> None:
    model = {"name": "m", "engine_kwargs": {"max-model-len": 2048}}
    pool = InferencePoolConfig.model_validate({"model": model})
    assert pool == InferencePoolConfig.model_validate({"model_config": model})
    assert pool == InferencePoolConfig(model_config=ModelConfig.model_validate(model))  # pyright: ignore[reportCallIssue]
    assert pool.model.engine_kwargs == {"max_model_len": 2048}


def test_example_of_the_seed_documents_is_accepted() -> None:
    config = EvaluationConfig.model_validate(
        {
            "evaluator": "lm_evaluation_harness",
            "pool_config": {
                "resource_config": {
                    "cpu": 16,
                    "ram": "128g",
                    "disk": "200g",
                    "device": {"kind": "tpu", "type": "v5e-16", "count": 16},
                    "replicas": 1,
                    "regions": ["eu-west4"],
                },
                "model_config": {"name": "model-name", "path": "gs://bucket/model", "device": "tpu"},
            },
            "model_name": "model-name",
            "model_path": "gs://bucket/model",
            "evaluation_path": "gs://bucket/output",
            "evals": [{"name": "mmlu", "num_fewshot": 5}],
            "discover_latest_checkpoint": True,
            "wandb_tags": ["tag1", "tag2"],
        }
    )
    assert config.pool_config is not None
    assert config.pool_config.device == "tpu"


def test_two_benchmarks_with_the_same_metric_key_are_refused() -> None:
    evals = [{"name": "hellaswag", "num_fewshot": 0}, {"name": "hellaswag", "num_fewshot": 10}]
    with pytest.raises(ValidationError, match="publish their metrics as hellaswag: give one of them a task_alias"):
        EvaluationConfig.model_validate({**MINIMAL, "evals": evals})
    evals[1]["task_alias"] = "hellaswag_10shot"
    assert len(EvaluationConfig.model_validate({**MINIMAL, "evals": evals}).evals) == 2


def pool_with(**model: Any) -> dict[str, Any]:
    return {"pool_config": {"model": {"name": "m", **model}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_url": "http://x/v1", **pool_with()}, "found pool_config, base_url: remove others"),
        ({"base_url": "http://x/v1", "pool_name": "warm"}, "found pool_name, base_url: remove others"),
        (pool_with(path="/elsewhere"), "leave the latter out"),
        (pool_with(device="tpu"), r"model\.device is 'tpu' but the resources are for 'cpu'"),
        (pool_with(engine_kwargs={"chat_template": "x"}), "would replace the model's own template"),
        (pool_with(engine_kwargs={"port": 1}), "port is set by the pool"),
        (pool_with(generation_params={"temperature": 0.7, "stop_words": ["x"]}), "found stop_words"),
        ({"pool_config": {"model": {"name": "m"}, "engine_timeout_seconds": 2000}}, "time-outs must grow outwards"),
        ({"lm_eval": {"max_gen_toks": 9}}, "Extra inputs are not permitted"),
        ({"evaluator": "helm", "helm": {"priority": 2}}, "Extra inputs are not permitted"),
    ],
)
def test_content_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EvaluationConfig.model_validate({**MINIMAL, **change})


@pytest.mark.parametrize("served", [{"pool_name": "warm"}, {"base_url": "http://x/v1"}])
def test_evaluation_that_is_served_elsewhere_gets_no_pool(served: dict[str, str]) -> None:
    assert EvaluationConfig.model_validate({**MINIMAL, **served}).pool_config is None


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "with space", "a\n", "a\0", "a\x1b", "\n"])
def test_names_that_would_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="expected a name"):
        EvaluationConfig.model_validate({**MINIMAL, "model_name": name})
    with pytest.raises(ValidationError, match="expected a name"):
        EvaluationConfig.model_validate({**MINIMAL, "evals": [{"name": name}]})


def test_evaluation_hash_changes_with_what_can_change_a_score_only() -> None:
    def hash_of(**changes: object) -> str:
        return digest_of(EvaluationConfig.model_validate({**MINIMAL, **changes}).score_inputs())

    base = hash_of()
    assert base == hash_of(evaluation_path="/elsewhere", timeout_seconds=5, wandb_tags=["x"])
    pool = {"model": {"name": "run-a"}}
    assert base == hash_of(pool_config={**pool, "startup_timeout_seconds": 3, "resource_config": {"replicas": 2}})
    changed = [
        hash_of(max_eval_instances=5),
        hash_of(evals=[{"name": "demo_facts", "num_fewshot": 1}]),
        hash_of(pool_config={"model": {"name": "run-a", "engine_kwargs": {"dtype": "float32"}}}),
        hash_of(pool_config={"model": {"name": "run-a", "generation_params": {"temperature": 1}}}),
        hash_of(pool_config={"model": {"name": "run-a", "apply_chat_template": True}}),
    ]
    assert len({base, *changed}) == 6


def write_yaml(folder: Path, content: object) -> str:
    path = folder / "evaluation.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_pth": "x"}, "model_pth: unknown key; did you mean model_path?"),
        ({"evals": [{"name": "x", "num_fewshots": 1}]}, "evals.0.num_fewshots: unknown key; did you mean num_fewshot?"),
        ({"pool_config": {"model": {"name": "m"}, "resource_config": {"replcas": 2}}}, "did you mean replicas?"),
        (
            {"pool_config": {"model": {"name": "m"}, "resource_config": {"device": {"kind": "gpu", "cout": 2}}}},
            "did you mean count?",
        ),
        ({"zzz": 1}, "zzz: unknown key; known keys: apply_chat_template"),
        ({"evals": []}, "at least 1 item"),
        ({"evaluator": "helmet"}, "Input tag 'helmet' found using 'name' does not match any of the expected tags"),
        ({"evaluator": {"name": "helm", "run_spec_path": "x"}}, "unknown key; did you mean run_specs_path?"),
        ({"evaluator": {"name": "helm", "max_gen_toks": 9}}, "evaluator.helm.max_gen_toks: unknown key"),
        (
            {
                "pool_config": {
                    "model": {"name": "m"},
                    "resource_config": {"device": {"kind": "tpu", "type": "v4-8", "count": 8}},
                }
            },
            "v4-8 has 4 chips",
        ),
    ],
)
def test_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_config(write_yaml(tmp_path, {**MINIMAL, **change}), EvaluationConfig)
    assert words in caught.value.found


def test_file_loads_and_broken_files_are_refused(tmp_path: Path) -> None:
    assert load_config(write_yaml(tmp_path, MINIMAL), EvaluationConfig).model_path == "/runs/run-a"
    with pytest.raises(BadInput, match="is not there"):
        load_config(str(tmp_path / "none.yaml"), EvaluationConfig)
    with pytest.raises(BadInput, match="Expected: YAML in"):
        load_config(write_yaml(tmp_path, "a: [1"), EvaluationConfig)
    with pytest.raises(BadInput, match="Expected: keys and values in"):
        load_config(write_yaml(tmp_path, "- 1"), EvaluationConfig)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: 2024-13-45", "month must be in"),
        ("a: " + "9" * 5000, "4,300 digits"),
        ("a: " + "[" * 3000, "nested too deep"),
        ("&a {model_path: /r, evals: [{name: arc_easy, task_kwargs: *a}]}", "an alias within its own"),
    ],
    ids=["date", "number", "nesting", "alias"],
)
def test_file_that_breaks_its_reader_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        load_config(write_yaml(tmp_path, content), EvaluationConfig)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{1: x, b: c}", "found 1 in a: put it in quotes"),
        ("{b: [x, 2024-01-01]}", "datetime.date(2024, 1, 1) (date) as a.b.1: put a text that"),
        ("!!set {x, y}", "(set) as a"),
        ("!!binary aGk=", "(bytes) as a"),
        (".nan", "(float) as a"),
    ],
)
@pytest.mark.parametrize("place", ["evals.0.task_kwargs", "pool_config.model.engine_kwargs"])
def test_arguments_are_what_json_can_say(tmp_path: Path, value: str, words: str, place: str) -> None:
    arguments = f"{{a: {value}}}"
    if place == "evals.0.task_kwargs":
        text = f"{{model_path: /r, evals: [{{name: mine, task_kwargs: {arguments}}}]}}"
    else:
        model = f"{{name: m, engine_kwargs: {arguments}}}"
        text = f"{{model_path: /r, evals: [{{name: mine}}], pool_config: {{model: {model}}}}}"
    with pytest.raises(BadInput) as caught:
        load_config(write_yaml(tmp_path, text), EvaluationConfig)
    assert place in caught.value.found
    assert words in caught.value.found


def test_evaluator_is_written_as_its_name_or_as_its_options() -> None:
    bare, whole = (
        EvaluationConfig.model_validate({**MINIMAL, "evaluator": evaluator}) for evaluator in ("helm", {"name": "helm"})
    )
    assert bare == whole
    assert bare.options(HelmOptions) == HelmOptions()
    default = EvaluationConfig.model_validate(MINIMAL)
    assert default == EvaluationConfig.model_validate({**MINIMAL, "evaluator": "lm_evaluation_harness"})
    unnamed = EvaluationConfig.model_validate({**MINIMAL, "evaluator": {"max_gen_toks": 9}})
    assert unnamed.options(LmEvalOptions).max_gen_toks == 9
    for config in (default, unnamed, whole):
        assert EvaluationConfig.model_validate_json(config.model_dump_json()) == config


def test_variables_that_reach_the_engine_are_part_of_the_evaluation_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = as_served(EvaluationConfig.model_validate(MINIMAL))
    assert digest_of(plain.score_inputs()) == digest_of(EvaluationConfig.model_validate(MINIMAL).score_inputs())
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert as_served(EvaluationConfig.model_validate(MINIMAL)) == plain
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with_variable = as_served(EvaluationConfig.model_validate(MINIMAL))
    assert evaluation_hash(with_variable) != evaluation_hash(plain)
    assert as_served(plain) == plain, "a configuration planned elsewhere keeps its plan"
