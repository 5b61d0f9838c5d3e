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
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "programs")]  # -I leaves them out
import inspect_shuffles  # before Inspect
import valid_answers
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.hooks import Hooks, SampleEnd, hooks
from inspect_ai.log import EvalLog, read_eval_log_samples
from inspect_ai.model import get_model_info
from inspect_ai.solver import SolverSpec
from inspect_asking import judge_of, model_of, nothing_but_ours, refused_tools
from inspect_loading import load_solver, load_tasks, questions_of
from inspect_rows import metrics_of, row_of
from refusals import Refused, chat_template_needed, digest_of, refusals_into, write_json

PLAN_NAME, RESULTS_NAME, SAMPLES_NAME = "plan.json", "results.json", "samples.jsonl"
LOGS = "inspect"
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
    logs = asked(job, tasks, keys, solver=solver, unanswered=unanswered, total=sum(questions.values()))
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
    total: int,
) -> dict[str, EvalLog]:
    """Runs all tasks; returns their logs by the names that their metrics are published under."""
    _count_samples(total)
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
            for sample in _samples_of(log):
                rows.write(json.dumps(row_of(key, sample), allow_nan=False) + "\n")
                failed += sample.error is not None
                if sample.error is not None and failed <= SHOWN_FAILURES:
                    print(f"sample {sample.id} of {key} failed: {sample.error.message[:SHOWN_CHARACTERS]}")


def _samples_of(log: EvalLog) -> Iterator[Any]:
    left_out = {"store", "timelines"}
    yield from read_eval_log_samples(
        log.location, all_samples_required=False, resolve_attachments="full", exclude_fields=left_out
    )


def _count_samples(total: int) -> None:
    @hooks(name="assay_progress", description="Counts samples.")
    class Progress(Hooks):
        done = 0

        async def on_sample_end(self, data: SampleEnd) -> None:
            Progress.done += 1
            print(f"Answered {Progress.done} of {total} samples", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
