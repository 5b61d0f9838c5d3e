"""Suites: their benchmarks, their settings and their requirements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import invoke
from resources.config import GpuConfig
from resources.errors import BadInput
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.spec.benchmark_sets import benchmark_sets, needs_of, split_by_kind
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.suites import Suite, SuiteRequest, built_in_suites, load_suite

OWN = """
name: mine
description: A suite of the user.
extends: default_eval
engine_kwargs: {max_model_len: 512}
evaluations:
  - label: quick
    evals: [MMLU_0_SHOT, demo_facts, {name: demo_backwards, num_fewshot: 1, task_alias: backwards}]
    max_eval_instances: 5
"""


def asked(**given: Any) -> SuiteRequest:
    return SuiteRequest.model_validate({"model_path": "runs/a", **given})


def keys(config: EvaluationConfig) -> list[str]:
    return [task.metric_key for task in config.evals]


def write_suite(folder: Path, text: str = OWN) -> str:
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


@pytest.mark.parametrize("name", [name for name in built_in_suites() if name != "uncheatable"])
def test_built_in_suite_becomes_evaluations_that_can_be_made_together(name: str):
    suite = load_suite(name)
    configs = suite.evaluations_of(asked(max_eval_instances=7, wandb_tags=["mine"]))
    assert {key for config in configs for key in keys(config)} == {
        task.metric_key for evaluation in suite.evaluations for task in evaluation.evals
    }
    assert len({json.dumps(config.score_inputs(), sort_keys=True) for config in configs}) == len(configs)
    for config in configs:
        assert config.pool_config is not None and config.pool_config == configs[0].pool_config
        assert config.pool_config.model.engine_kwargs == suite.engine_kwargs
        if isinstance(config.evaluator, LmEvalOptions):
            assert config.evaluator.max_gen_toks == 4096
        assert config.max_eval_instances == 7
        assert config.wandb_tags == ("mine", f"suite={name}")


def test_engines_hold_4096_tokens_unless_a_suite_says_otherwise():
    others = {name for name, suite in built_in_suites().items() if suite.engine_kwargs != {"max_model_len": 4096}}
    assert others == {"demo"}


def test_mmlu_and_mmlu_pro_are_published_under_names_of_their_own():
    configs = load_suite("default_base_eval").evaluations_of(asked())
    assert [keys(config)[0] for config in configs[1:4]] == ["mmlu_0shot", "mmlu_5shot", "mmlu_pro_5shot"]


def test_what_levanter_cannot_ask_stays_on_the_engine_in_an_evaluation_of_its_own():
    configs = load_suite("lm_eval_harness").evaluations_of(asked(only=["language"]))
    assert [config.options(LmEvalOptions).without_prompt_logprobs for config in configs] == ["levanter", "refuse"]
    choices, others = split_by_kind(task for config in configs for task in config.evals)
    assert configs[0].evals == choices and configs[1].evals == others
    assert {"wikitext_0shot", "drop_0shot"} <= set(keys(configs[1]))
    assert load_suite("on_gpu").evaluations_of(asked())[1].levanter_fallback() is None


def test_request_wins_over_the_suite_and_engine_arguments_are_merged():
    pool = {"model": {"name": "a", "engine_kwargs": {"max_model_len": 512, "dtype": "float32"}}}
    [config] = load_suite("helm").evaluations_of(asked(pool_config=pool))
    assert config.max_eval_instances == 1000
    assert config.pool_config is not None
    assert config.pool_config.model.engine_kwargs == {"max_model_len": 512, "dtype": "float32"}
    [on_endpoint] = load_suite("helm").evaluations_of(asked(base_url="http://host/v1", served_model_name="m"))
    assert (on_endpoint.pool_config, on_endpoint.served_model_name) == (None, "m")
    for request in (asked(), asked(pool_config=pool)):
        on_gpu = load_suite("on_gpu").evaluations_of(request)[0].pool_config
        assert on_gpu is not None and isinstance(on_gpu.resource_config.device, GpuConfig)
    judge = {"pool_name": "judges", "model": "j"}
    [judged] = load_suite("alpaca_eval").evaluations_of(asked(judge=judge, apply_chat_template=False))
    assert judged.options(AlpacaEvalOptions).judge.pool_name == "judges"
    assert judged.asks_in_chat is False
    generation = load_suite("key_evals").evaluations_of(asked(allow_code_execution=["humaneval"]))[0]
    assert generation.options(LmEvalOptions).allow_code_execution == ("humaneval",)


def test_own_suite_extends_a_built_in_suite(tmp_path: Path):
    suite = load_suite(write_suite(tmp_path))
    assert [evaluation.label for evaluation in suite.evaluations] == ["core", "quick"]
    core, quick = suite.evaluations_of(asked())
    assert keys(quick) == ["mmlu_0shot", "demo_facts", "backwards"]
    assert quick.max_eval_instances == 5
    assert core.pool_config is not None and core.pool_config.model.engine_kwargs == {"max_model_len": 512}
    assert Suite.model_validate(suite.model_dump()) == suite


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (("MMLU_0_SHOT", "MMLU_0_SHOTS"), "did you mean MMLU_0_SHOT"),
        (("extends: default_eval", "extends: default_evals"), "did you mean default_eval"),
        (("label: quick", "lable: quick"), "did you mean label?"),
        (("label: quick", "label: core"), "found twice: core"),
        (("name: mine", "name: [mine"), "expected"),
        (("num_fewshot: 1", "num_fewshot: -1"), "num_fewshot"),
    ],
)
def test_mistake_in_a_suite_is_named_with_what_was_meant(tmp_path: Path, change: tuple[str, str], hint: str):
    with pytest.raises(BadInput, match="(?s)" + hint.replace("?", r"\?")):
        load_suite(write_suite(tmp_path, OWN.replace(*change)))


def test_mistake_in_a_request_is_named_with_what_was_meant():
    with pytest.raises(BadInput, match="key_evals"):
        load_suite("key_eval")
    with pytest.raises(BadInput, match="generation, multiple_choice"):
        load_suite("key_evals").evaluations_of(asked(only=["generations"]))
    with pytest.raises(BadInput, match="pool_name, base_url"):
        load_suite("key_evals").evaluations_of(asked(pool_name="warm", base_url="http://host/v1"))
    with pytest.raises(BadInput, match="ends in /v1"):
        load_suite("key_evals").evaluations_of(asked(base_url="http://host"))


def test_uncheatable_needs_its_texts_staged_or_a_copy_of_them(tmp_path: Path):
    with pytest.raises(BadInput, match="assay stage --suite uncheatable"):
        load_suite("uncheatable").evaluations_of(asked())
    [config] = load_suite("uncheatable").evaluations_of(asked(benchmarks_path=str(tmp_path)))
    assert config.benchmarks_path == str(tmp_path)
    assert len(config.evals) == 7


def test_needs_are_the_benchmarks_needs_and_unknown_for_own_benchmarks():
    sets = benchmark_sets()
    key = needs_of(sets["KEY_GENERATION_TASKS"].evals)
    assert (key.fewshot, key.prompt_logprobs, key.generates, key.runs_code) == (8, False, True, True)
    core = needs_of(sets["CORE_TASKS"].evals)
    assert (core.prompt_logprobs, core.generates, core.runs_code) == (True, False, False)
    assert "HF_TOKEN" in needs_of(sets["GPQA_0_SHOT"].evals).access[0]
    own = needs_of(load_suite("default_eval").evaluations[0].evals[:1] + sets["BELEBELE"].evals[:1])
    assert own.prompt_logprobs is True
    unknown = needs_of([task.model_copy(update={"name": "mine"}) for task in sets["MMLU_0_SHOT"].evals])
    assert (unknown.prompt_logprobs, unknown.generates) == (None, None)


def test_suites_command_lists_what_each_needs():
    listed = json.loads(invoke(["suites", "--json"]).stdout)
    by_name = {suite["name"]: suite for suite in listed}
    assert list(by_name) == list(built_in_suites())
    needs = {evaluation["label"]: evaluation["needs"] for evaluation in by_name["key_evals"]["evaluations"]}
    assert needs["generation"]["runs_code"] and not needs["generation"]["prompt_logprobs"]
    assert needs["multiple_choice"]["prompt_logprobs"]
    assert by_name["alpaca_eval"]["evaluations"][0]["needs"]["judge"]
    assert by_name["sft_model"]["evaluations"][0]["needs"]["chat_template"]
    shown = invoke(["suites", "key_evals"])
    assert "math_4shot" in shown.stdout
    sets = json.loads(invoke(["suites", "--sets", "--json"]).stdout)
    assert sets["INCLUDE_44"]["left_out"]
