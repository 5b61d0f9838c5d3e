"""HELM, driven by our program in its environment, checks of its run entries, and the reader of its files.

Any of HELM's files may be incomplete. Questions are counted in the plan, written before a run's first request, answers
in the scenario state, and scores in the statistics of each question.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from pools.endpoint import RunningModel
from resources.errors import BadInput, not_there, unknown
from resources.settings import settings
from resources.storage import storage
from tasks.errors import HarnessFailed, UnknownBenchmark
from tasks.evaluators.environments import HELM
from tasks.evaluators.evaluator import Evaluator, Parsed, benchmarks_of
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.helm.runs import (
    HARNESS,
    RESULTS_FOLDER,
    TRUNCATED,
    Instance,
    Plan,
    QuestionKey,
    RequestState,
    Run,
    finish,
    is_answered,
    planned_runs,
)
from tasks.evaluators.listings import listed, remembered
from tasks.evaluators.reading import PLAN_NAME, invalid_results, is_unclosed, read_result
from tasks.records.details import BenchmarkDetails
from tasks.records.record import SCOPE_NAME, Counts, Metric
from tasks.records.samples import Sample
from tasks.spec.benchmarks import benchmarks_uri
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

ALL_ENTRIES = "all"  # the benchmark that means every entry of a file
OWN_FOLDER = "helm"  # of a user's own run entries, inside the benchmarks folder
_PROGRAM = Path(__file__).parent / "programs" / "list_helm.py"


class _Arguments(BaseModel):
    needed: list[str]
    optional: list[str]
    any: bool


class _Known(BaseModel):
    entries: dict[str, _Arguments]
    expanders: list[str]


def check_entries(config: EvaluationConfig, python: Path) -> None:
    """Looks up every benchmark with its arguments."""
    folder = config.benchmarks_path
    if folder is not None and storage.is_local(folder) and not storage.local_path(folder).is_dir():
        expected = "a folder with the files that task_kwargs name"
        raise not_there(expected, f"benchmarks_path={folder}", "Correct the path, or leave it out")
    path = config.options(HelmOptions).run_specs_path
    place = storage.join(benchmarks_uri(config), OWN_FOLDER)
    files = [storage.basename(file.uri) for file in storage.list_files(place)] if path is None else []
    own = {name.removesuffix(".json") for name in files if name.endswith(".json")}
    foreign = [task for task in config.evals if task.name not in own]
    if not foreign:
        return
    known = remembered(python, _PROGRAM, kind=_Known)
    if path is None:
        for task in foreign:
            if task.name not in known.entries:
                raise _unknown(
                    task.name, {*own, *known.entries}, place=f"HELM, or a benchmark in {benchmarks_uri(config)}"
                )
            _check_arguments(task, known, whole=True)
        return
    present = _names_in(path, python)
    for name in sorted(present - set(known.entries)):
        raise _unknown(name, known.entries, place=f"HELM, as {path} has it")
    for task in config.evals:
        if task.name == ALL_ENTRIES:
            continue
        if task.name not in present:
            raise _unknown(task.name, present, place=path)
        _check_arguments(task, known, whole=False)


def read_entries_file(uri: str) -> bytes:
    """Returns the content of a file of run entries."""
    if storage.content_digest(uri) is None:
        raise not_there("a file of run entries", f"run_specs_path={uri}", "Correct the path")
    return storage.read_bytes(uri, within="/")


def _check_arguments(task: EvalTaskConfig, known: _Known, *, whole: bool) -> None:
    entry = known.entries[task.name]
    own = [*entry.needed, *entry.optional]
    for name in [] if entry.any else sorted(set(task.task_kwargs) - {*own, *known.expanders}):
        expected = f"arguments of {task.name} ({', '.join(own) or 'none'}) or of every run entry"
        raise unknown(expected, name, [*own, *known.expanders], "Correct task_kwargs")
    missing = [name for name in entry.needed if whole and name not in task.task_kwargs]
    if missing:
        raise BadInput(
            expected=f"all arguments that {task.name} needs: {', '.join(entry.needed)}",
            found=f"none for {', '.join(missing)}",
            remedy="Give them in task_kwargs",
        )


def _unknown(name: str, known: Iterable[str], *, place: str) -> BadInput:
    remedy = "Correct its name in evals; arguments belong into task_kwargs"
    return unknown(f"a run entry of {place}", name, known, remedy, kind=UnknownBenchmark)


def _names_in(uri: str, python: Path) -> set[str]:
    content = read_entries_file(uri)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "run_specs.conf"
        copy.write_bytes(content)
        try:
            descriptions: list[str] = json.loads(listed(python, _PROGRAM, str(copy)))
        except HarnessFailed as error:
            raise BadInput(
                expected="run entries as HELM reads them: entries: [{description: ..., priority: 1}]",
                found=error.found.splitlines()[-1],
                remedy=f"Correct {uri}",
            ) from error
    return {description.partition(":")[0] for description in descriptions}


_MOST_THREADS = 64
"""HELM uses a thread per request; more than 64 slow each other down."""


def _job(model: RunningModel, config: EvaluationConfig, output: Path, _: object) -> dict[str, Any]:
    options = config.options(HelmOptions)
    entries = read_entries_file(options.run_specs_path).decode() if options.run_specs_path is not None else None
    same = ("priority", "groups", "num_train_trials", "request_retries", "exit_on_error", "skip_completed_runs")
    return {
        "benchmarks": [{**benchmark, "arguments": benchmark["task_kwargs"]} for benchmark in benchmarks_of(config)],
        "run_specs": entries,
        **options.model_dump(mode="json", include={*same, "failed_control", "site"}),
        "num_threads": options.num_threads or max(1, min(model.capacity, _MOST_THREADS)),
        "begun_with": str(output.parent / SCOPE_NAME),
        "max_truncated": config.max_truncated,
        "model": model.model,
        "base_url": model.base_url.rstrip("/"),
        "tokenizer": model.tokenizer,
        "trust_remote_code": config.trusts_code,
        "apply_chat_template": model.apply_chat_template,
        "prompt_logprobs": model.prompt_logprobs,
        **model.scoring.model_dump(),
        "trust_folder": str(settings().cache_dir / "loglikelihood"),
        "max_model_len": model.max_model_len,
        "request_timeout_seconds": model.request_timeout_seconds,
        "scenarios_path": str(settings().cache_dir / "helm" / "scenarios"),
        "results_folder": RESULTS_FOLDER,
    }


SITE = f"{RESULTS_FOLDER}/index.html"
_CORRECT = "correct"
_CHOSEN = "predicted_index"
_HASH_DIGITS = 12


def read_results(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    """Reads metrics and counts of the runs in `output`, and every question in each trial."""
    plan = read_result(HARNESS, output / PLAN_NAME, Plan)
    metrics: dict[str, list[list[Metric]]] = defaultdict(list)
    details: dict[str, BenchmarkDetails] = {}
    requested = answered = scored = truncated = 0
    for run in planned_runs(output, plan, config):
        run_metrics = list(_metrics(run, plan))
        metrics[run.plan.key].append(run_metrics)
        whole = {key for key, states in run.states.items() if all(is_answered(state) for state in states)}
        requested += run.plan.questions or 0
        answered += len(whole)
        scored += _scored(run, whole, run_metrics)
        truncated += sum(stats.get(TRUNCATED, 0) > 0 for stats in run.by_question.values())
        details[run.benchmark] = _details(run)
    counts = Counts(requested=requested, answered=answered, scored=scored, truncated=truncated)
    if requested == answered == scored:
        for key, runs in metrics.items():
            if not all(runs):
                raise invalid_results(HARNESS, output, f"no usable number for {key}")
    parsed = Parsed(
        metrics=tuple(metric for key, runs in metrics.items() for metric in _together(key, runs)),
        counts=counts,
        versions={"helm": plan.helm},
        links={"HELM": SITE} if (output / SITE).is_file() else {},
        details=details,
        asking=plan.asking,
        unanswered=plan.unanswered,
    )
    return parsed, _samples(planned_runs(output, plan, config))


def _scored(run: Run, whole: set[QuestionKey], metrics: list[Metric]) -> int:
    if not metrics:
        return 0
    name = metrics[0].name
    if not any(name in stats for stats in run.by_question.values()):
        return len(whole)
    return sum(name in run.scores(key) for key in whole)


def _metrics(run: Run, plan: Plan) -> Iterator[Metric]:
    for name, stat in run.published.items():
        if stat.mean is None or not math.isfinite(stat.mean):
            continue
        of_question: dict[str, list[float]] = defaultdict(list)
        for (instance, _, perturbation), stats in run.by_question.items():
            if name in stats and not perturbation and run.splits[instance] == stat.name.split:
                of_question[instance].append(stats[name])
        values = [fmean(trials) for trials in of_question.values()]
        yield Metric(
            benchmark=run.benchmark,
            name=name,
            value=stat.mean,
            stderr=stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
            n=len(values) or len({key.instance for key in run.states}),
            higher_is_better=name not in plan.lower_is_better,
            smooth=name in plan.smooth,
        )


def _together(key: str, runs: list[list[Metric]]) -> Iterator[Metric]:
    if len(runs) > 1:
        for first in runs[0]:
            same = [metric for metrics in runs for metric in metrics if metric.name == first.name]
            if len(same) < len(runs):
                continue
            errors = [metric.stderr for metric in same if metric.stderr is not None]
            yield first.model_copy(
                update={
                    "benchmark": key,
                    "value": fmean(metric.value for metric in same),
                    "stderr": math.hypot(*errors) / len(same) if len(errors) == len(same) else None,
                    "n": sum(metric.n for metric in same),
                }
            )
    for metrics in runs:
        yield from metrics


def _details(run: Run) -> BenchmarkDetails:
    answers = [
        [completion.text for state in states if state.result for completion in state.result.completions]
        for states in run.states.values()
        if finish(states) is not None
    ]
    return BenchmarkDetails(
        questions=run.plan.questions or 0,
        truncated=sum(run.is_truncated(key) for key in run.states),
        control=run.plan.control,
        finish_reasons=dict(Counter(filter(None, (finish(states, of_letters=True) for states in run.states.values())))),
        unclosed=sum(any(map(is_unclosed, texts)) for texts in answers),
    )


def _samples(runs: Iterator[Run]) -> Iterator[Sample]:
    for run in runs:
        forms = Counter(key.instance for key in run.states)
        for key, states in run.states.items():
            prompt, before = _prompt(states, input_prefix=run.input_prefix)
            further = (f"trial {key.trial}" if key.trial else "", key.perturbation, key.random or "")
            yield Sample(
                benchmark=run.benchmark,
                id="/".join([_id(states[0].instance), *(part for part in further if part)]),
                prompt=prompt,
                output=_output(states, run.statistics(key)),
                target=_target(states[0]),
                scores=run.shares(key),
                cluster=key.instance if forms[key.instance] > 1 else None,
                finish=finish(states),
                truncated=run.is_truncated(key),
                choices=_choices(states),
                context=before,
                tokens=_tokens(states),
            )


def _id(instance: Instance) -> str:
    offered = [[reference.output.text, _CORRECT in reference.tags] for reference in instance.references]
    content = json.dumps([instance.input.text, offered])
    return f"{instance.id}-{hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]}"


def _prompt(states: list[RequestState], *, input_prefix: str) -> tuple[str, str]:
    question, messages = states[0].instance.input.text, states[0].request.messages
    sent = "\n".join(str(message.get("content")) for message in messages) if messages else states[0].request.prompt
    place = max(sent.rfind(question), 0) if question else 0
    if len(states) > 1:
        return question, sent[:place]
    place -= len(input_prefix) if sent[:place].endswith(input_prefix) else 0
    return sent[place:], sent[:place]


def _choices(states: list[RequestState]) -> tuple[str, ...]:
    if states[0].output_mapping:
        return tuple(states[0].output_mapping.values())
    references = states[0].instance.references
    numbers = [state.reference_index for state in states if state.request_mode != "calibration"]
    return tuple(
        references[number].output.text for number in numbers if number is not None and number < len(references)
    )


def _tokens(states: list[RequestState]) -> int | None:
    result = states[0].result
    if len(states) > 1 or states[0].request.echo_prompt or result is None or not result.completions:
        return None
    return len(result.completions[0].tokens) or None


def _output(states: list[RequestState], statistics: Mapping[str, float]) -> str:
    if len(states) == 1:
        result = states[0].result
        return result.completions[0].text if result and result.completions else ""
    offered = [state for state in states if is_answered(state) and state.request_mode != "calibration"]
    if not offered:
        return ""
    likeliest = max(offered, key=lambda state: state.result.completions[0].logprob if state.result else -math.inf)
    references = likeliest.instance.references
    chosen = int(statistics.get(_CHOSEN, likeliest.reference_index or 0))
    return references[chosen].output.text if 0 <= chosen < len(references) else ""


def _target(state: RequestState) -> str | None:
    right = [reference.output.text for reference in state.instance.references if _CORRECT in reference.tags]
    if not right:
        return None
    for letter, text in (state.output_mapping or {}).items():
        if text == right[0]:
            return letter
    return right[0]


EVALUATOR = Evaluator(
    name="helm",
    environments=(HELM,),
    program=Path(__file__).parent / "programs" / "run_helm.py",
    job=_job,
    read=read_results,
    bar=re.compile(r"Answered (?P<done>\d{1,15}) of (?P<total>\d{1,15}) requests of (?P<stage>[^\r\n]+)"),
    check=check_entries,
    import_variables={"TOKENIZERS_PARALLELISM": "false"},
)
"""HELM 0.5."""
