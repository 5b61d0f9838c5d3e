"""Evaluates HELM's runs one at a time and summarises them, for `run_helm.py`. Needs the HELM environment.

Before a run's first request, its own metrics score known answers: a grader that marks every answer wrong gives each
model the same low score. So at least one of the scenario's right answers, in one of several forms, must score
differently from an empty answer. Only runs can fail that show references as answers in their prompts, or request their
letters.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import helm.benchmark.runner as helm_runner
import helm_choices
from helm.benchmark import server
from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec
from helm.benchmark.metrics.metric import PerInstanceStats, create_metric
from helm.benchmark.presentation.summarize import Summarizer
from helm.benchmark.runner import Runner, set_benchmark_output_path
from helm.benchmark.scenarios.scenario import Scenario, ScenarioMetadata, ScenarioSpec, create_scenario
from helm.common.authentication import Authentication
from helm.common.general import asdict_without_nones
from helm.common.hierarchical_logger import hlog, hwarn
from helm.common.request import GeneratedOutput, RequestResult
from helm_asking import Asking, Run, missing_data, question
from helm_choices import HIGHER_IS_BETTER
from refusals import Refused

PLAN_NAME = "plan.json"
OUTPUT_FOLDER = "benchmark_output"
SUITE = "assay"
RUN_FILES = ("run_spec.json", "scenario.json", "scenario_state.json", "stats.json", "per_instance_stats.json")
PICTURES = (".png", ".jpg", ".jpeg", ".gif")


class Harness:
    """Evaluates runs below a folder, which is a web site in the end; `scenarios` have returned their instances."""

    def __init__(self, job: dict[str, Any], runs: list[Run], *, local_path: str) -> None:
        self._job = job
        self._output = Path(job["output"])
        self._site = self._output / job["results_folder"]
        self._folder = self._site / OUTPUT_FOLDER
        self._runs = runs
        self._plan = {run.spec.name: planned(run) for run in runs}
        self._folder.mkdir(parents=True, exist_ok=True)
        set_benchmark_output_path(str(self._folder))
        self.scenarios = _shared_scenarios(Path(job["scenarios_path"]))
        # No cache: HELM's does not distinguish endpoints, and the pool keeps the checkpoint's answers.
        execution = ExecutionSpec(
            url=None, auth=Authentication(""), local_path=local_path, parallelism=job["num_threads"]
        )
        self._runner = Runner(
            execution,
            str(self._folder),
            SUITE,
            skip_instances=False,
            cache_instances=False,
            cache_instances_only=False,
            skip_completed_runs=True,
            exit_on_error=True,
        )
        self._asking = self._runner.executor = Asking(
            execution, job, before=self._note_questions, on_way=self._note_way
        )
        self._write_plan()

    def evaluate(self, run: Run) -> None:
        """Evaluates a run, or takes it over from an earlier attempt at the same cell that finished it."""
        place = self._runs.index(run) + 1
        self._asking.now(run, f"{run.key} ({place} of {len(self._runs)})" if len(self._runs) > 1 else run.key)
        if self._job["skip_completed_runs"]:
            self._take_over(run)
        self._runner.run_one(run.spec)

    def summarize(self) -> None:
        """Writes the web site with its data, and which metrics are better when lower."""
        summarizer = PlannedSummarizer(
            release=None,
            suites=None,
            suite=SUITE,
            schema_path=None,
            output_path=str(self._folder),
            verbose=False,
            num_threads=1,
            allow_unknown_models=True,
            schema_validation="off",
        )
        summarizer.planned = self._plan
        summarizer.run_pipeline(skip_completed=False)
        lower = sorted(item.name for item in summarizer.get_metric_metadata() if item.lower_is_better)
        self._write_plan(lower_is_better=lower, unanswered=self._asking.unanswered.as_values())
        if self._job["site"]:
            _write_site(self._site)

    def _note_questions(self, run: Run, states: list[RequestState]) -> None:
        plan = self._plan[run.spec.name]
        plan["questions"] = len({question(state) for state in states})
        withhold = self._job["failed_control"] == "withhold"
        plan["control"] = control(run, states, plan["metrics"], partial(self._scored, run), withhold=withhold)
        self._write_plan()

    def _note_way(self, run: Run, way: dict[str, Any]) -> None:
        self._plan[run.spec.name]["loglikelihood"] = way
        self._write_plan()

    def _scored(self, run: Run, states: list[RequestState]) -> list[PerInstanceStats]:
        state = ScenarioState(replace(run.spec.adapter_spec, num_train_trials=1), states)
        metrics = map(create_metric, run.spec.metric_specs)
        service, cache = self._runner.metric_service, self._runner.eval_cache_path
        results = [metric.evaluate(state, service, cache, 1) for metric in metrics]
        return [stats for result in results for stats in result.per_instance_stats]

    def _write_plan(self, **known: Any) -> None:
        content = {"suite": SUITE, "helm": metadata.version("crfm-helm"), "runs": self._plan}
        content["smooth"] = list(HIGHER_IS_BETTER)
        way = helm_choices.together(self._plan)
        content = {**content, "asking": {**self._job.get("asking", {}), "loglikelihood": way}, **known}
        unfinished = self._output / f"{PLAN_NAME}.unfinished"
        unfinished.write_text(json.dumps(content, indent=2))
        unfinished.replace(self._output / PLAN_NAME)

    def _take_over(self, run: Run) -> None:
        began = modified(Path(self._job["begun_with"]))
        target = self._folder / "runs" / SUITE / run.spec.name
        for earlier in sorted(self._output.parent.glob("attempt-*")):
            source = earlier / self._job["results_folder"] / OUTPUT_FOLDER / "runs" / SUITE / run.spec.name
            if earlier == self._output or not source.is_dir() or modified(earlier / PLAN_NAME) < began:
                continue
            try:
                texts = {name: (source / name).read_text() for name in RUN_FILES}
                finished = self._finished(run, earlier, texts)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if finished:
                target.mkdir(parents=True, exist_ok=True)
                for name, text in texts.items():
                    (target / name).write_text(text)
                self._plan[run.spec.name].update(finished)
                self._write_plan()
                hlog(f"{run.spec.name}: taken over from {earlier.name}")
                return

    def _finished(self, run: Run, earlier: Path, texts: dict[str, str]) -> dict[str, Any]:
        content = {name: json.loads(text) for name, text in texts.items()}
        # Benchmarks that were fetched lie in each attempt's own folder.
        entry = json.loads(texts["run_spec.json"].replace(str(earlier), str(self._output)))
        plan = json.loads((earlier / PLAN_NAME).read_text())
        before, now = plan["runs"][run.spec.name], self._plan[run.spec.name]
        same = (
            entry == json.loads(json.dumps(asdict_without_nones(run.spec)))
            and before["data"] == now["data"]
            and plan["helm"] == metadata.version("crfm-helm")
        )
        results = [state["result"] for state in content["scenario_state.json"]["request_states"]]
        known = {name: before[name] for name in ("questions", "loglikelihood") if name in before}
        return known if same and before["questions"] and all(result["success"] for result in results) else {}


def modified(path: Path) -> int:
    """Returns the time at which a file was written, in nanoseconds; 0 if it is missing."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class PlannedSummarizer(Summarizer):
    """HELM's summarizer, which also shows scenarios without metadata."""

    planned: dict[str, dict[str, Any]]

    def get_scenario_metadata(self) -> list[ScenarioMetadata]:
        known = super().get_scenario_metadata()
        names = {item.name for item in known}
        for run in self.runs:
            plan = self.planned[run.run_spec.name]
            if plan["metrics"] and not names & set(run.run_spec.groups):
                name = run.run_spec.groups[0] if run.run_spec.groups else plan["key"]
                split = plan["split"] or "test"
                known.append(ScenarioMetadata(name, plan["metrics"][0], split, display_name=plan["key"]))
                names.add(name)
        return known


def planned(run: Run) -> dict[str, Any]:
    """Returns the plan of a run, made before its requests: the metrics that count, the most important first."""
    names: list[str] = []
    split = None
    try:
        known = create_scenario(run.spec.scenario_spec).get_metadata()
        names, split = [known.main_metric], known.main_split
    except Exception:  # noqa: BLE001 - the boundary to scenarios: a third of them do not say, or need their data for it
        pass
    for metric in run.spec.metric_specs:
        names += [name for name in metric.args.get("names", []) if isinstance(name, str)]
    return {
        "key": run.key,
        "label": run.label,
        "metrics": list(dict.fromkeys(name for name in names if name != "unknown")),
        "split": split,
        "questions": None,
        "data": {
            name: hashlib.sha256(Path(value).read_bytes()).hexdigest()
            for name, value in sorted(run.spec.scenario_spec.args.items())
            if isinstance(value, str) and Path(value).is_file()
        },
    }


def _shared_scenarios(folder: Path) -> list[str]:
    names: list[str] = []

    def path_of(output_path: str, scenario_name: str) -> str:
        (folder / scenario_name).mkdir(parents=True, exist_ok=True)
        return str(folder / scenario_name)

    def create_locked(spec: ScenarioSpec) -> Scenario:
        scenario = create_scenario(spec)
        get_instances = scenario.get_instances

        def locked(output_path: str) -> Any:
            with (Path(output_path) / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                instances = get_instances(output_path)
            names.append(Path(output_path).relative_to(folder).as_posix())
            return instances

        scenario.get_instances = locked
        return scenario

    helm_runner.get_scenario_cache_path = path_of
    helm_runner.create_scenario = create_locked
    return names


def _write_site(folder: Path) -> None:
    server.app.config.update(
        {"helm.outputurl": OUTPUT_FOLDER, "helm.suite": SUITE, "helm.release": None, "helm.project": "lite"}
    )
    shutil.copytree(
        Path(server.__file__).parent / "static_build",
        folder,
        dirs_exist_ok=True,
        ignore=lambda _, names: [name for name in names if name.endswith(PICTURES)],
    )
    (folder / "config.js").write_text(server.serve_config())


PASSED, NO_GOLD = "passed", "no control: no gold answers"
NOT_IN_FORM = "no control: gold answers are not in the form that its metrics look for"
QUESTIONS = 8
FORMS = ("{}", "The answer is {}.", "#### {}", "### {}", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "({})")  # of a gold text
Evaluate = Callable[[list[RequestState]], Iterable[PerInstanceStats]]
Scores = dict[Any, dict[str, float]]


def control(run: Run, states: list[RequestState], names: list[str], evaluate: Evaluate, *, withhold: bool) -> str:
    """Returns the outcome over the first questions that have gold answers.

    Args:
        names: of the metrics that count.
        evaluate: scores answered questions as the run itself does.
        withhold: refuse a run if its grader fails.
    """
    if any(state.request.echo_prompt for state in states) or run.spec.annotators:
        judged = "others judge its answers" if run.spec.annotators else "it does not only let the model write"
        return f"no control: {judged}"
    plain = [s for s in states if not (s.train_trial_index or s.instance.perturbation or s.request.random)]
    first = {state.instance.id: state for state in reversed(plain) if gold(state)}
    known = [state for state in states if first.get(state.instance.id) is state][:QUESTIONS]
    if not known or not names:
        return NO_GOLD if names else "no control: no metric that counts is known beforehand"
    try:
        empty = scores(evaluate([answered(state, "") for state in known]), names)
        passed: set[Any] = set()
        for form in FORMS:
            right = scores(evaluate([answered(state, form.format(gold(state))) for state in known]), names)
            passed |= {question for question, metrics in right.items() if metrics != empty.get(question, {})}
            if passed:
                break
    except Exception as error:  # the boundary to HELM's metrics; if they fail so on answers, the run does
        if missing_data(error, run):
            raise
        hwarn(f"no control of {run.spec.name}: {type(error).__name__}")
        return f"no control: {type(error).__name__} as known answers were scored"
    if len(passed) == len(known):
        return PASSED
    if passed:
        return f"{PASSED} for {len(passed)} of {len(known)} known answers"
    if not (run.spec.adapter_spec.max_train_instances or known[0].output_mapping):
        return NOT_IN_FORM
    if withhold:
        raise Refused(
            expected=f"{run.key} to give its own right answers other scores than an empty answer",
            found=f"no difference for {len(known)} known answers, the first to question {known[0].instance.id}",
            remedy="The score is withheld, since every model would get it. Mend the run entry, or what its metrics need"
            " on this machine; if the control is wrong, set helm.failed_control to note",
            kind="GraderFailed",
        )
    return f"failed for {len(known)} known answers"


def gold(state: RequestState) -> str:
    """Returns a right answer in the expected form: the letter if choices have letters; empty without any."""
    right = state.instance.first_correct_reference
    text = right.output.text if right else ""
    return next((letter for letter, choice in (state.output_mapping or {}).items() if choice == text), text)


def answered(state: RequestState, text: str) -> RequestState:
    """Returns a question with a made-up answer."""
    completions = [GeneratedOutput(text, 0.0, [], finish_reason={"reason": "stop"})] * state.request.num_completions
    result = RequestResult(
        success=True, cached=False, embedding=[], completions=completions, request_time=0.0, request_datetime=0
    )
    return replace(state, result=result)


def scores(per_instance_stats: Iterable[PerInstanceStats], names: list[str]) -> Scores:
    """Returns means of metrics by question."""
    result: Scores = {}
    for part in per_instance_stats:
        for stat in part.stats:
            if stat.name.name in names and stat.mean is not None and math.isfinite(stat.mean):
                result.setdefault(part.instance_id, {})[stat.name.name] = stat.mean
    return result
