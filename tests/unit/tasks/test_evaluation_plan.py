"""Refusals once checkpoints and output are known, the endpoint that serves a checkpoint, and options."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from fakes.cells import of_cell
from fakes.engine import FakeEngine
from fakes.models import CONFIG, write_checkpoint, write_run
from fakes.records import make_record
from flows.cli.options.evaluations import EvaluationOptions, evaluation_from_file, evaluation_from_options
from flows.cli.options.pools import PoolOptions
from pools.endpoint import RunningModel
from pools.engine.launch import Servable
from resources.errors import BadInput, EndpointUnusable, UnsatisfiableResources
from resources.process_marks import ProcessMark
from tasks.checkpoints.checkpoint import select
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import NoCheckpoints
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.levanter.options import LevanterOptions
from tasks.records.record import begin_scope, now, record_uri, write_record
from tasks.running.cells import Cell, plan_cells
from tasks.running.claimed_cells import ClaimedCells, put_away, subject_of
from tasks.running.claims.files import claims_folder, read_claims
from tasks.running.claims.leases import Claims
from tasks.running.provisioning import judge_of
from tasks.running.serving import EndpointServing, ServedCell
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.evaluators import Judge


def started_at(pid: int) -> str:
    """Returns the start time of a process, in the kernel's ticks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def config(path: Path | str, output: Path | str, **changes: Any) -> EvaluationConfig:
    given = {"model_path": str(path), "evaluation_path": str(output), "evals": [{"name": "demo_facts"}], **changes}
    return EvaluationConfig.model_validate(given)


def test_two_checkpoints_with_the_same_name_are_refused_with_their_places(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [100])
    write_checkpoint(run / "step-100", seed=5)
    with pytest.raises(BadInput, match="run-a-100 at") as caught:
        plan_cells.fn([config(run, tmp_path / "out")], find_checkpoints(str(run)))
    assert str(run / "hf" / "step-100") in caught.value.found
    expression = caught.value.remedy.partition("--steps-from '")[2].partition("'")[0]
    [taken] = find_checkpoints(str(run), steps_from=expression)
    assert taken.uri in caught.value.remedy and taken.name == "run-a-100"
    plan_cells.fn([config(run, tmp_path / "out")], [taken])


def test_name_that_records_have_of_another_checkpoint_is_refused_with_both_places(tmp_path: Path) -> None:
    first, second = (
        write_checkpoint(tmp_path / name / "final", seed=seed) for name, seed in (("exp1", 1), ("exp2", 2))
    )
    moved = Path(shutil.copytree(first, tmp_path / "exp3" / "final"))

    def plan(checkpoint: Path, **named: str) -> None:
        [cell] = plan_cells.fn([config(checkpoint, tmp_path / "out", **named)], find_checkpoints(str(checkpoint)))
        if cell.record is None:
            write_record(cell.uri, make_record(**of_cell(cell)))

    plan(first)
    with pytest.raises(BadInput, match="a single checkpoint called final") as caught:
        plan(second)
    assert str(first) in caught.value.found and str(second) in caught.value.found
    assert "model_name" in caught.value.remedy
    plan(second, model_name="final-2")
    plan(moved)
    shutil.rmtree(first)
    plan(write_checkpoint(first, seed=3))  # rewritten in its place
    plan(write_checkpoint(tmp_path / "run-a" / "hf" / "step-1", seed=1))
    with pytest.raises(BadInput, match="a single checkpoint called run-a-1"):
        plan(write_checkpoint(tmp_path / "run-a" / "hf" / "checkpoint-1", seed=2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the start of a process in /proc")
def test_what_a_run_left_that_died_right_after_its_record_is_put_away_by_the_next(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [100])
    arguments = [config(run, tmp_path / "out", base_url="http://127.0.0.1:9/v1")], find_checkpoints(str(run))
    [cell] = plan_cells.fn(*arguments)
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = ProcessMark.of_this_process().model_copy(update={"pid": ended.pid, "started": started_at(ended.pid)})
    claims = Claims(str(tmp_path / "out" / "run-a" / "claims"), process=mark, in_background=False)
    claims.__enter__()
    assert claims.acquire([subject_of(cell)]).ours
    scope = begin_scope(cell.uri)
    segment = Path(cell.uri) / "journal" / "1.segment"
    segment.parent.mkdir()
    segment.touch()
    write_record(cell.uri, make_record(**of_cell(cell)))

    put_away(plan_cells.fn(*arguments))
    assert segment.exists(), "its process may be about to end it"
    ended.communicate()
    put_away(plan_cells.fn(*arguments))
    assert not segment.exists()
    assert [seen.claim.released for seen in read_claims(claims_folder(str(tmp_path / "out"), "run-a"))] == [True]
    Path(record_uri(cell.uri)).unlink()
    assert begin_scope(cell.uri) != scope


def test_failure_by_a_clock_that_was_ahead_does_not_keep_a_cell_from_being_evaluated_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1])

    def plan() -> Cell:
        [cell] = plan_cells.fn([config(run, tmp_path / "out")], find_checkpoints(str(run)))
        return cell

    def fail(cell: Cell, attempt: str) -> None:
        later = now() + timedelta(days=3)
        write_record(cell.uri, make_record(status="failed", created=later, attempt=attempt, **of_cell(cell)))

    fail(plan(), "attempt-1")
    with ClaimedCells([again := plan()], wait=False) as claimed:
        assert claimed.take() == [again]
    with ClaimedCells([again := plan()], wait=False) as claimed:
        fail(again, "attempt-2")  # by another run meanwhile
        assert claimed.take() == []


def test_served_name_for_several_checkpoints_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    evaluation = config(run, tmp_path / "out", base_url="http://127.0.0.1:9/v1", served_model_name="m")
    with pytest.raises(BadInput, match="a single checkpoint for served_model_name"):
        plan_cells.fn([evaluation], find_checkpoints(str(run)))


def test_what_machine_or_model_cannot_give_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run-a" / "hf" / "step-1", seed=1, config={**CONFIG, "max_position_embeddings": 64})
    checkpoints = find_checkpoints(str(tmp_path / "run-a"))
    pool: dict[str, Any] = {"model": {"name": "run-a", "engine_kwargs": {"max_model_len": 65}}}
    with pytest.raises(BadInput, match="at most max_model_len=64"):
        plan_cells.fn([config(tmp_path / "run-a", tmp_path / "out", pool_config=pool)], checkpoints)
    pool = {"model": {"name": "run-a"}, "resource_config": {"device": {"kind": "tpu", "variant": "v5litepod-8"}}}
    with pytest.raises(UnsatisfiableResources, match="v5litepod-8"):
        plan_cells.fn([config(tmp_path / "run-a", tmp_path / "out", pool_config=pool)], checkpoints)


def test_path_that_no_record_can_hold_is_refused_before_anything_is_evaluated(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"caf\xe9") / "run-a", [1])
    with pytest.raises(BadInput, match="UTF-8"):
        plan_cells.fn([config(run, tmp_path / "out")], find_checkpoints(str(run)))


def test_relative_path_in_a_deployed_flow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run-a", [1])
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
    with pytest.raises(BadInput, match="absolute paths in a deployed flow"):
        plan_cells.fn([config(run, "evaluations")], find_checkpoints(str(run)))


def test_endpoint_answers_under_the_checkpoints_name_its_path_or_the_name_given(tmp_path: Path) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1")))

    async def model_of(*offered: str, served_name: str | None = None) -> str:
        async with FakeEngine(models=offered) as engine:
            serving = EndpointServing(f"{engine.url}/v1", {"run-1": served}, served_name=served_name)
            opened = await asyncio.to_thread(serving.open, "run-1", cell="c", attempt="a", mirror="", in_chat=False)
            return opened.running.model

    assert asyncio.run(model_of("other", "run-1")) == "run-1"
    assert asyncio.run(model_of(served.uri)) == served.uri
    assert asyncio.run(model_of("prod", served_name="prod")) == "prod"
    with pytest.raises(EndpointUnusable, match="it offers something-else"):
        asyncio.run(model_of("something-else"))


def test_endpoint_that_takes_only_conversations_is_served(tmp_path: Path) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1")))

    async def opened() -> ServedCell:
        async with FakeEngine(models=("run-1",)) as engine:
            engine.faults.only_chat = True
            serving = EndpointServing(f"{engine.url}/v1", {"run-1": served})
            cell = await asyncio.to_thread(serving.open, "run-1", cell="c", attempt="a", mirror="", in_chat=True)
            await asyncio.to_thread(cell.prove_unchanged)
            return cell

    cell = asyncio.run(opened())
    assert (cell.running.prompt_logprobs, cell.weighed) == (False, ())


def test_judge_is_the_models_own_pool_unless_another_is_named(tmp_path: Path) -> None:
    own = RunningModel("http://127.0.0.1:1/v1", "run-1", "tokenizer", 8, True, 60.0, api_key="own-key")
    judged = config(tmp_path, tmp_path, evaluator="alpaca_eval", base_url="http://127.0.0.1:1/v1")
    assert judge_of(judged, own) is own
    assert judge_of(config(tmp_path, tmp_path, base_url="http://127.0.0.1:1/v1"), own) is None
    earlier = judged.model_copy(update={"evaluator": AlpacaEvalOptions(judge=Judge(model="run-0"))})
    assert judge_of(earlier, own) == replace(own, model="run-0")

    async def judge_at(model: str) -> RunningModel | None:
        async with FakeEngine(models=("big-judge",)) as engine:
            options = AlpacaEvalOptions(judge=Judge(base_url=f"{engine.url}/v1", model=model))
            elsewhere = judged.model_copy(update={"evaluator": options})
            judge_model = await asyncio.to_thread(judge_of, elsewhere, own)
            assert judge_model is not None
            assert judge_model.base_url == f"{engine.url}/v1"
            return judge_model

    judge = asyncio.run(judge_at("big-judge"))
    assert judge is not None
    assert (judge.model, judge.api_key) == ("big-judge", "none")
    with pytest.raises(EndpointUnusable, match="it offers big-judge"):
        asyncio.run(judge_at("bigger-judge"))
    for named in ("hf://acme/big-judge", "acme/big-judge"):  # as `assay pool up` names what it serves
        assert (judge := asyncio.run(judge_at(named))) and judge.model == "big-judge"
    gone = AlpacaEvalOptions(judge=Judge(base_url="http://127.0.0.1:9/v1", model="m"))
    with pytest.raises(EndpointUnusable):
        judge_of(judged.model_copy(update={"evaluator": gone}), own)


def test_judge_without_a_place_or_with_two_is_refused() -> None:
    with pytest.raises(ValidationError, match="one of base_url and pool_name"):
        Judge(base_url="http://127.0.0.1:9/v1", pool_name="p", model="m")
    with pytest.raises(ValidationError, match="needs model"):
        Judge(pool_name="p")


def test_native_evaluation_of_a_cell_keeps_run_benchmarks_and_resources(tmp_path: Path) -> None:
    served = config(
        tmp_path / "run-a",
        tmp_path / "out",
        model_name="run-a",
        evaluator={"without_prompt_logprobs": "levanter", "levanter": {"max_length": 99}, "long_prompts": "skip"},
        pool_config={"resource_config": {"cpu": 3}, "model": {"name": "run-a"}},
    )
    native = served.levanter_fallback()
    assert native is not None and config(tmp_path / "run-a", tmp_path / "out").levanter_fallback() is None
    options = native.options(LevanterOptions)
    assert (options.max_length, options.long_prompts) == (99, "skip")
    assert native.native
    assert native.pool_config is None
    assert (native.run_name, native.evals, native.evaluation_path) == ("run-a", served.evals, served.evaluation_path)
    assert native.resource_config is not None
    assert native.resource_config.cpu == 3
    assert native.score_inputs() != served.score_inputs()


def test_steps_that_are_not_there_are_named(tmp_path: Path) -> None:
    checkpoints = find_checkpoints(str(write_run(tmp_path / "run-a", [1, 2, 3])))
    assert [checkpoint.step for checkpoint in select(checkpoints, CheckpointSelection(steps=(3, 1)))] == [1, 3]
    assert [checkpoint.step for checkpoint in select(checkpoints, CheckpointSelection(which="first"))] == [1]
    with pytest.raises(NoCheckpoints, match="none of 7; there are 1, 2, 3"):
        select(checkpoints, CheckpointSelection(steps=(2, 7)))


def test_endpoint_without_v1_and_a_served_name_without_endpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="ends in /v1"):
        config(tmp_path, tmp_path, base_url="http://127.0.0.1:8000")
    with pytest.raises(ValidationError, match="served_model_name is for base_url"):
        config(tmp_path, tmp_path, served_model_name="m")


def test_latest_together_with_every_n_steps_is_refused() -> None:
    with pytest.raises(ValidationError, match="which='latest' and every_n_steps"):
        CheckpointSelection(which="latest", every_n_steps=5)


def test_pool_options_with_an_endpoint_are_refused_not_ignored() -> None:
    base: dict[str, Any] = {"model": "runs/a", "evals": ("demo_facts",), "base_url": "http://127.0.0.1:8000/v1"}
    assert evaluation_from_options(EvaluationOptions(**base)).base_url is not None
    extras: list[dict[str, Any]] = [{"gpu": "H100"}, {"engine": ("dtype=float32",)}, {"replicas": 2}, {"cpu": 1}]
    for extra in extras:
        with pytest.raises(BadInput, match=f"--base-url and --{next(iter(extra))}"):
            evaluation_from_options(EvaluationOptions(**base), PoolOptions(**extra))


def test_options_with_a_file_are_refused_not_ignored(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.yaml"
    file.write_text("model_path: /runs/a\nevals: [{name: demo_facts}]\n")
    assert evaluation_from_file(str(file), EvaluationOptions()).model_path == "/runs/a"
    with pytest.raises(BadInput, match="--config and --eval, --limit"):
        evaluation_from_file(str(file), EvaluationOptions(evals=("x",), limit=3))


def test_mlflow_with_the_records_needs_a_single_option(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "runs/llama", "evals": ("demo_facts",), "output": str(tmp_path / "evaluations")}
    (sink,) = evaluation_from_options(EvaluationOptions(**asked, mlflow=True)).sinks
    assert sink.name == f"mlflow:{tmp_path}/mlruns llama"
    (remote_sink,) = evaluation_from_options(
        EvaluationOptions(**asked, mlflow_uri="http://10.0.0.15:5000", name="a")
    ).sinks
    assert remote_sink.name == "mlflow:http://10.0.0.15:5000 a" and remote_sink.shown_by == "http://10.0.0.15:5000"
    with pytest.raises(BadInput, match="--mlflow-uri"):
        evaluation_from_options(EvaluationOptions(**{**asked, "output": "gs://bucket/evaluations"}, mlflow=True))


def test_mlflow_learns_where_in_git_a_configuration_lies(tmp_path: Path) -> None:
    file = tmp_path / "configs" / "nightly.yaml"
    file.parent.mkdir()
    sink = {"kind": "mlflow", "tracking_uri": "http://10.0.0.15:5000", "experiment": "e", "tags": {"creator": "me"}}
    content = {"model_path": "/runs/a", "evals": [{"name": "demo_facts"}], "sinks": [sink]}
    file.write_text(yaml.safe_dump(content))

    def tags() -> dict[str, str]:
        return evaluation_from_file(str(file), EvaluationOptions()).model_dump()["sinks"][0]["tags"]

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=me", "-c", "user.email=me@example.com")
        done = subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert tags() == {"creator": "me"}
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a configuration")
    commit = git("rev-parse", "HEAD")
    known = {"creator": "me", "config_path_git_repo": "configs/nightly.yaml"}
    assert tags() == {**known, "config_git_sha": commit}
    file.write_text(yaml.safe_dump({**content, "max_eval_instances": 5}))
    assert tags() == {**known, "config_git_sha": f"{commit}-dirty"}


def test_options_become_a_configuration() -> None:
    made = evaluation_from_options(
        EvaluationOptions(model="runs/a", evals=("arc_easy:5", "demo_facts")),
        PoolOptions(engine=("max_model_len=512", "enforce_eager=false", "dtype=float32"), chat=True, cpu=3),
    )
    assert [task.metric_key for task in made.evals] == ["arc_easy_5shot", "demo_facts"]
    assert made.evals[0].num_fewshot == 5
    assert made.pool_config is not None
    assert made.pool_config.model.engine_kwargs == {"max_model_len": 512, "enforce_eager": False, "dtype": "float32"}
    assert made.pool_config.resource_config.cpu == 3
    assert made.asks_in_chat
    assert made.evaluation_path == "evaluations"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evals": ("x",)}, "found:    --eval"),
        ({"model": "a"}, "found:    --model"),
        ({"model": "a", "evals": ("x:many",)}, "--eval x:many"),
        ({"model": "a", "evals": ("x",)}, "--engine oops"),
    ],
)
def test_incomplete_options_say_what_was_found(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        evaluation_from_options(EvaluationOptions(**options), PoolOptions(engine=("oops",)))
    assert words.lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    ("evaluator", "refused"), [("lm_evaluation_harness", True), ("helm", True), ("inspect_ai", False)]
)
def test_code_of_a_tokenizer_is_refused_for_another_server_if_the_harness_would_read_it(
    tmp_path: Path, evaluator: str, refused: bool
) -> None:
    folder = write_run(tmp_path / "run-a", [100]) / "hf" / "step-100"
    (folder / "tokenization_own.py").write_text("raise SystemExit")
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    changes = {} if refused else {"evals": [{"name": "demo_choices"}]}
    named = {"base_url": "http://there/v1", "evaluator": {"name": evaluator}}
    asked = config(tmp_path / "run-a", tmp_path / "out", **named, **changes)
    checkpoints = find_checkpoints(str(tmp_path / "run-a"))
    if not refused:
        assert plan_cells.fn([asked], checkpoints)
        return
    with pytest.raises(BadInput, match="tokenization_own") as caught:
        plan_cells.fn([asked], checkpoints)
    assert "--tokenizer" in caught.value.remedy
