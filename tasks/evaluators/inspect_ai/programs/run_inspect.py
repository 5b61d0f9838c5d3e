"""Runs Inspect on the tasks of a job file, with the interpreter of its environment.

    python run_inspect.py <job file>
    python run_inspect.py --fetch <job file>    only loads the tasks with their data, and refuses what it would refuse

Also a program for `fork_server.py`. Inspect's own `eval` runs and scores all tasks together, without its cache and
retries: only the client retries, and a failed sample is counted without a score. The number of questions is written to
`plan.json` beforehand. The keys OPENAI_API_KEY (the model's) and ASSAY_JUDGE_API_KEY (the judge's) are removed from the
environment first: a task may name a model of OpenAI's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "programs")]  # -I leaves them out
import inspect_shuffles  # before Inspect
import valid_answers
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.hooks import Hooks, SampleEnd, hooks
from inspect_ai.log import EvalLog, EvalSample, EvalScore, read_eval_log_samples
from inspect_ai.model import get_model_info
from inspect_ai.scorer import value_to_float
from inspect_ai.solver import SolverSpec
from inspect_loading import judge_of, load_solver, load_tasks, model_of, nothing_but_ours, questions_of, refused_tools
from refusals import Refused, chat_template_needed, digest_of, refusals_into, write_json

PLAN_NAME, RESULTS_NAME, SAMPLES_NAME = "plan.json", "results.json", "samples.jsonl"
LOGS, LEFT_OUT = "inspect", {"store", "timelines"}
DISTRIBUTIONS = {"inspect_ai": "inspect-ai", "openai": "openai"}
LATE_MODULES = (
    *("httpcore2", "inspect_ai.agent._acp.server", "openai.lib.streaming.chat"),
    *("inspect_ai.model._providers.openai_compatible", "inspect_ai.model._providers.openai_compatible_completions"),
)
FETCH_OPTION = "--fetch"
SHOWN_FAILURES, SHOWN_CHARACTERS = 20, 200
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "INSPECT_")
"""Prefixes of variables that a fork server must have been started with, too."""


def preload(arguments: list[str]) -> None:
    """Imports modules and reads files that would take Inspect three seconds later."""
    for name in LATE_MODULES:
        importlib.import_module(name)
    get_model_info("assay/any")  # reads Inspect's data on models


def main(arguments: list[str]) -> None:
    """Loads and runs the tasks of a job file, or only loads them."""
    job = json.loads(Path(arguments[-1]).read_text())
    with refusals_into(Path(job["output"])):
        run(job, only_fetch=FETCH_OPTION in arguments)


def run(job: dict[str, Any], *, only_fetch: bool) -> None:
    """Loads and runs the tasks, and writes results into the job's output folder."""
    output = Path(job["output"])
    keys = [os.environ.pop(name, "") for name in ("OPENAI_API_KEY", "ASSAY_JUDGE_API_KEY")]
    inspect_shuffles.repeat()  # same requests for each checkpoint, and for the journal after a kill
    nothing_but_ours()
    template = chat_template_needed(job)
    tasks, solver = load_tasks(job), load_solver(job)
    if only_fetch:
        return
    asking = {
        "seeds": {"answers": "as the tasks say", "shuffles": 0},
        "bos": f"as the endpoint's {'chat template' if job['chat'] else 'tokenizer'} does",
        "chat_template": digest_of(template),
    }
    questions = {key: questions_of(task, limit=job["limit"], epochs=job["epochs"]) for key, task in tasks.items()}
    write_json(output / PLAN_NAME, {"questions": questions, "asking": asking})
    unanswered = valid_answers.Unanswered()
    _count_samples(sum(questions.values()))
    logs = asked(job, tasks, keys, solver=solver, unanswered=unanswered)
    if tools := refused_tools(unanswered):
        raise Refused(
            expected="an engine that takes requests with tools: --engine enable_auto_tool_choice=true and --engine "
            "tool_call_parser=... with the parser of the model",
            found=f"it refused them: {tools}",
            remedy="Start the pool with these arguments, or set evaluator.emulate_tools",
            kind="EndpointUnusable",
        )
    _write_rows(output, logs)
    versions = {name: importlib.metadata.version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    judged = {"judge": job["judge"]["model"]} if job["judge"] else {}
    results = {
        "metrics": {key: metrics_of(log) for key, log in logs.items()},
        "logs": {key: Path(log.location).name for key, log in logs.items()},
        "problems": {key: log.error.message for key, log in logs.items() if log.error is not None},
        "versions": {**versions, **judged},
        "unanswered": unanswered.as_values(),
    }
    write_json(output / RESULTS_NAME, results)


def asked(
    job: dict[str, Any],
    tasks: dict[str, Task],
    keys: list[str],
    *,
    solver: SolverSpec | None,
    unanswered: valid_answers.Unanswered,
) -> dict[str, EvalLog]:
    """Runs all tasks; returns their logs by the names that their metrics are published under."""
    model, judge = model_of(job, keys[0], unanswered), judge_of(job, keys, unanswered)
    given = {name: job[name] for name in ("temperature", "top_p", "max_tokens") if job[name] is not None}
    logs = evaluate(
        list(tasks.values()),
        model=model,
        model_roles={"grader": judge} if judge is not None else None,
        solver=solver,
        limit=job["limit"],
        epochs=job["epochs"],
        max_tasks=len(tasks),
        max_samples=job["model"]["capacity"],
        fail_on_error=False,
        continue_on_fail=True,
        retry_on_error=0,
        score_on_error=False,
        display="none",
        log_level="warning",
        log_dir=str(Path(job["output"]) / LOGS),
        log_format="eval",
        log_realtime=False,
        log_model_api=False,
        log_header_only=True,
        ctl_server=False,
        max_connections=job["model"]["capacity"],
        max_retries=0,
        cache=False,
        **given,
    )
    return dict(zip(tasks, logs, strict=True))


def _write_rows(output: Path, logs: dict[str, EvalLog]) -> None:
    failed = 0
    with (output / SAMPLES_NAME).open("w", encoding="utf-8", errors="replace") as rows:
        for key, log in logs.items():
            samples = read_eval_log_samples(
                log.location, all_samples_required=False, resolve_attachments="full", exclude_fields=LEFT_OUT
            )
            for sample in samples:
                rows.write(json.dumps(row_of(key, sample), allow_nan=False) + "\n")
                failed += sample.error is not None
                if sample.error is not None and failed <= SHOWN_FAILURES:
                    print(f"sample {sample.id} of {key} failed: {sample.error.message[:SHOWN_CHARACTERS]}")


def _count_samples(total: int) -> None:
    @hooks(name="assay_progress", description="Counts samples.")
    class Progress(Hooks):
        done = 0

        async def on_sample_end(self, data: SampleEnd) -> None:
            Progress.done += 1
            print(f"Answered {Progress.done} of {total} samples", flush=True)


SPREADS = {"bootstrap_stderr", "ci", "std", "stderr", "var"}
"""Metrics that give the uncertainty of another metric."""
FINISHES = {"max_tokens": "length"}
"""Finish reasons that Inspect names differently."""
GRADER = "grader"
as_number = value_to_float()


def row_of(key: str, sample: EvalSample) -> dict[str, Any]:
    """Returns a sample in the orchestrator's format."""
    own, grading, scoring = _calls(sample)
    first = own[0].input if own else sample.input if isinstance(sample.input, list) else []
    asked = next((at for at in range(len(first) - 1, -1, -1) if first[at].role == "user"), None)
    finishes = [choice.stop_reason for call in own for choice in call.output.choices]
    failed = any(call.error for call in own) or (sample.error is not None and not scoring)
    usages = [call.output.usage for call in own if call.output.usage is not None]
    return {
        "benchmark": key,
        "id": str(sample.id),
        "epoch": sample.epoch,
        "context": "".join(f"{message.text}\n\n" for message in first[:asked]) if asked is not None else "",
        "prompt": first[asked].text if asked is not None else _text(sample.input),
        "choices": sample.choices or [],
        "target": sample.target if isinstance(sample.target, str) else "\n".join(sample.target),
        "output": sample.output.completion,
        "answered": not failed,
        "scores": _numbers(sample) if sample.error is None else {},
        "graded": bool(grading),
        "finish": [FINISHES.get(reason, reason) for reason in finishes],
        "tokens": sum(usage.output_tokens for usage in usages) if usages else None,
        "metadata": {name: str(value) for name, value in sample.metadata.items() if isinstance(value, str | int)},
    }


def metrics_of(log: EvalLog) -> list[dict[str, Any]]:
    """Returns the metrics of a task, each with its error if Inspect has it, and the score that it is taken over.

    The scorer's name is part of a metric's name if there are several scorers, or several values of a scorer.
    """
    scores = log.results.scores if log.results is not None else []
    metrics = []
    for score in scores:
        spread = {metric.name: metric for metric in score.metrics.values()}
        errors = [spread[name] for name in ("stderr", "bootstrap_stderr") if name in spread]
        for name, metric in score.metrics.items():
            if metric.name in SPREADS or metric.group in SPREADS or not math.isfinite(metric.value):
                continue
            mean = metric.name in ("accuracy", "mean")
            error = next((each.value for each in errors if mean and math.isfinite(each.value)), None)
            cluster = next((each.params.get("cluster") for each in errors), None)
            metrics.append(
                {
                    "name": _named(score, name, scores),
                    "value": metric.value,
                    "stderr": error,
                    "n": score.scored_samples,
                    "better": True if metric.name == "accuracy" else None,
                    "score": f"{score.scorer}\n{score.name}" if score.name != score.scorer else score.scorer,
                    "cluster": cluster,
                    "group": _group(metric),
                }
            )
    return metrics


def _group(metric: Any) -> dict[str, str] | None:
    if metric.group != "grouped" or "group_key" not in metric.params:
        return None
    template = metric.params.get("name_template", "{group_name}")
    return {"field": metric.params["group_key"], "template": template, "name": metric.name}


def _named(score: EvalScore, metric: str, scores: list[EvalScore]) -> str:
    several = len({(each.scorer, each.name) for each in scores}) > 1
    parts = [score.name] if several else []
    if score.reducer is not None and Counter((each.scorer, each.name) for each in scores)[score.scorer, score.name] > 1:
        parts.append(score.reducer)
    return "_".join([*parts, metric])


def _numbers(sample: EvalSample) -> dict[str, float]:
    numbers = {}
    for scorer, score in (sample.scores or {}).items():
        values = (
            {f"{scorer}\n{name}": value for name, value in score.value.items()} if isinstance(score.value, dict) else {}
        )
        for name, value in (values or {scorer: score.value}).items():
            if not isinstance(value, str | int | float) or not math.isfinite(number := as_number(value)):
                continue
            numbers[name] = number
    return numbers


def _calls(sample: EvalSample) -> tuple[list[Any], list[Any], bool]:
    scoring = False
    own, grading = [], []
    for event in sample.events:
        scoring = scoring or (event.event == "span_begin" and event.name == "scorers")
        if event.event == "model" and not event.pending:
            if scoring or event.role == GRADER:
                grading.append(event)
            elif event.role is None:
                own.append(event)
    return own, grading, scoring


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n\n".join(message.text for message in value)


if __name__ == "__main__":
    main(sys.argv[1:])
