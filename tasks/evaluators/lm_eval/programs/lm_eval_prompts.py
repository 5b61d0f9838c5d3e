"""Checks, plans and labels lm-eval's prompts between building and sending them, for `run_lm_eval.py`.

lm-eval cuts too long prompts on the left and only logs it. Here the decisions on them are written to `plan.json`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.models import api_models
from lm_eval.utils import handle_non_serializable, hash_string
from lm_eval_loading import name_of, seed
from lm_eval_measures import TooLong, contexts_of, request_type, revision_of, to_be_asked, too_long
from lm_eval_scores import add_smooth_scores, control, evidence
from refusals import Refused, write_json

PLAN_NAME = "plan.json"
SKIPPED_NAME = "skipped.jsonl"
CONTROL_NAME = "control.json"
DOCUMENTS = ("rank", "limit", "world_size", "samples")  # arguments that select documents
_log = logging.getLogger("lm_eval")


@dataclass
class Questions:
    """The questions of a run; settled once the last prompt is built, before lm-eval's first request."""

    job: dict[str, Any]
    tasks: dict[str, list[Task]]
    model: Any
    tokenizer: Any
    output: Path
    on_settled: Callable[[], None]
    on_planned: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._skipped: list[str] = []
        self._contexts: dict[str, dict[int, int]] = {}
        self._everything = [task for items in self.tasks.values() for task in items]
        self._unbuilt = len(self._everything)
        for task in self._everything:
            task.build_all_requests = partial(self._build, task, task.build_all_requests)

    def _build(self, task: Task, build: Callable[..., None], **options: Any) -> None:
        seed()
        try:
            asked = list(task.doc_iterator(**{name: options[name] for name in DOCUMENTS}))
            task.doc_iterator = lambda **_: iter(asked)
            build(**options)
            self._contexts[name_of(task)] = contexts_of(task)
            add_smooth_scores(task, [doc for _, doc in asked])
        except Exception as error:
            _log.error("%s cannot be asked", name_of(task), exc_info=error)
            raise Refused(
                expected=f"a prompt for every question of {name_of(task)}",
                found=f"{type(error).__name__}: {error}",
                remedy="Mend its file or its data; harness.log has the whole error",
            ) from error
        self._unbuilt -= 1
        if self._unbuilt == 0:
            self._settle()

    def _settle(self) -> None:
        long_prompts = {name_of(task): too_long(task, self.model, self.tokenizer) for task in self._everything}
        policy = self.job["long_prompts"]
        for task in self._everything:
            long = long_prompts[name_of(task)]
            if long.needed and policy == "skip":
                self._skip(task, long)
            elif refused := set(long.needed) if policy == "fail" or self.job["conversations"] else long.hopeless:
                self._refuse(task, long, refused)
            else:
                self._check_truncated(task, long)
        controls = {name_of(task): self._controlled(task) for task in self._everything}
        planned = {key: plan(tasks, self.job["limit"]) for key, tasks in self.tasks.items()}
        for name, row in (pair for rows in planned.values() for pair in rows.items()):
            needed = long_prompts[name].needed
            row["skipped" if policy == "skip" else "truncated"] = len(needed)
            row["questions"] -= row.get("skipped", 0)
            row["control"] = controls[name]
            row["truncated_questions"] = sorted(needed) if policy != "skip" else []
            row["contexts"] = self._contexts[name]
        self.on_settled()
        if self._skipped:
            (self.output / SKIPPED_NAME).write_text("".join(self._skipped), encoding="utf-8")
        asked = {name_of(task): to_be_asked(task, self.model, self.tokenizer) for task in self._everything}
        write_json(self.output / PLAN_NAME, {"benchmarks": planned, "to_be_asked": asked})
        self.on_planned()

    def _skip(self, task: Task, long: TooLong) -> None:
        skipped = {instance.doc_id: instance for instance in task.instances if instance.doc_id in long.needed}
        kept = [instance for instance in task.instances if instance.doc_id not in long.needed]
        if not kept:
            self._refuse(task, long, set(long.needed))
        for number, instance in skipped.items():
            doc = json.dumps(instance.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
            line = {"benchmark": name_of(task), "doc_id": number, "doc_hash": hash_string(doc)}
            line |= {"prompt": str(instance.args[0]), "target": str(task.doc_to_target(instance.doc))}
            self._skipped.append(json.dumps(line, ensure_ascii=False) + "\n")
        task._instances = kept
        every = task.doc_iterator
        task.doc_iterator = lambda **options: (pair for pair in every(**options) if pair[0] not in long.needed)

    def _controlled(self, task: Task) -> str | None:
        if task.OUTPUT_TYPE != "generate_until":
            return None
        name = name_of(task)
        outcome, failure = control(task, list(task.doc_iterator()))
        if failure is None or self.job["failed_control"] == "note":
            return outcome
        (self.output / CONTROL_NAME).write_text(evidence(name, failure), encoding="utf-8")
        raise Refused(
            expected=f"{name} to score its own right answers better than an empty answer",
            found=f"{outcome}, the first to question {failure.doc_id}: {failure.scores}, where an empty answer has"
            f" {failure.empty}; {CONTROL_NAME} next to the harness's log has all of it",
            remedy="The score is withheld, since every model would get it. Mend the benchmark, or what its code needs"
            " on this machine; if the control is wrong, set lm_eval.failed_control to note",
            kind="GraderFailed",
        )

    def _check_truncated(self, task: Task, long: TooLong) -> None:
        asked = len({instance.doc_id for instance in task.instances})
        if len(long.needed) > self.job["max_truncated"] * asked:
            self._refuse(task, long, set(long.needed))
        if long.needed:
            room = f"the {self.model.max_length} tokens there are for them and their answers"
            task.notes.append(f"{len(long.needed)} of {asked} prompts were cut on the left to fit into {room}.")

    def _refuse(self, task: Task, long: TooLong, questions: set[int]) -> NoReturn:
        asked = len({instance.doc_id for instance in task.instances})
        longest = max(long.needed[number] for number in questions)
        policy, most = self.job["long_prompts"], self.job["max_truncated"]
        remedy = {
            "fail": "set lm_eval.long_prompts to truncate_left or skip",
            "skip": "leave it out: no question of it fits",
            "truncate_left": "set lm_eval.long_prompts to skip"
            + (": these cannot be cut" if questions == long.hopeless else f", or raise max_truncated above {most:g}"),
        }[policy]
        raise Refused(
            expected=f"prompts of {name_of(task)} that fit into the {self.model.max_length} tokens there are for them"
            f" and their answers (lm_eval.long_prompts is {policy}, max_truncated {most:g})",
            found=f"{len(questions)} of {asked} questions that do not, the longest with {longest} tokens",
            remedy=f"Raise max_model_len in engine_kwargs if the model allows it, lower num_fewshot, or {remedy}",
        )


def plan(tasks: list[Task], limit: int | None) -> dict[str, dict[str, Any]]:
    """Returns the number of questions, type, notes and data of each task."""
    totals = {name_of(task): len(task.eval_docs) for task in tasks}
    return {
        name_of(task): {
            "questions": totals[name_of(task)] if limit is None else min(limit, totals[name_of(task)]),
            "output_type": task.OUTPUT_TYPE,
            "notes": task.notes,
            "smooth": task.smooth,
            "data": revision_of(task),
        }
        for task in tasks
    }


def means(benchmarks: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns the benchmarks that each group, also a nested group, averages, and by metric if sizes are weights."""
    return {
        group.name: {
            "leaves": [task.task_name for task in group.get_all_tasks()],
            "by_size": {metric.metric: metric.weight_by_size for metric in group.aggregate_metric_list or ()},
        }
        for group in groups_in(benchmarks)
    }


def groups_in(benchmarks: dict[str, list[Any]]) -> list[Group]:
    """Returns groups of tasks, and the groups inside them."""
    top = [part for parts in benchmarks.values() for part in parts if isinstance(part, Group)]
    return [below for part in top for below in (part, *part.get_all_groups())]


def label_progress(tasks: dict[str, list[Task]], model: Any, prompts_per_request: int) -> None:
    """Labels lm-eval's progress bars with their benchmarks and the total number of prompts.

    Bars count requests, scaled to prompts: the last request may hold fewer, so the end of a bar may be a few too high.
    """
    stage: dict[str, Any] = {"names": "", "before": 0, "all": 0}

    def note(record: logging.LogRecord) -> bool:
        if record.msg == "Running %s requests" and isinstance(record.args, tuple):
            kind = record.args[0]
            instances = [instance for items in tasks.values() for task in items for instance in task.instances]
            stage["all"] = sum(instance.repeats or 1 for instance in instances)
            asking = [key for key, items in tasks.items() if any(request_type(task) == kind for task in items)]
            stage["names"] = ", ".join(asking)
        return True

    # The bar of a batch of requests; a request type may need several.
    class LabelledBar(api_models.tqdm_asyncio):
        def __init__(self, *args: Any, **options: Any) -> None:
            everything = stage["all"] + model.more_requests
            label = f"Requesting API ({stage['names']}; {stage['before']} before, {everything} in all)"
            super().__init__(*args, **{"unit_scale": prompts_per_request, **options, "desc": label})

        def close(self) -> None:
            if not self.disable:
                stage["before"] += self.n * self.unit_scale
            super().close()

    logging.getLogger("lm_eval.evaluator").addFilter(note)
    api_models.tqdm_asyncio = LabelledBar


def save_results(results: dict[str, Any], tracker: Any) -> None:
    """Writes the results of lm-eval and the samples of each task."""
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    if not list(Path(tracker.output_path).glob("*/results_*.json")):
        sys.exit("lm-eval could not write its results: see above")
