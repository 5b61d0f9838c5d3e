"""HELM's requests, for `helm_runs.py`. Needs the HELM environment.

HELM's executor gives up a run for a failed request, and takes some errors for empty answers. Ours makes it a question
without an answer, and continues; the score is withheld when answers are counted.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import helm_choices
import openai
import valid_answers
from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec, Executor
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.window_services.tokenizer_service import TokenizerService
from helm.benchmark.window_services.window_service_factory import WindowServiceFactory
from helm.clients import auto_client, openai_client
from helm.common.hierarchical_logger import hlog, hwarn
from helm.common.request import GeneratedOutput, RequestResult
from helm.proxy.retry import get_retry_decorator, retry_if_request_failed
from helm_choices import scores_choices
from refusals import Refused, causes

PROGRESS_SECONDS = 0.5
NO_DATA = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "URLError", "gaierror")
"""Errors of libraries that could not download something."""
LAST = threading.local()
BLOCKED = "The prompt violates"
"""Prefix of the reason that HELM gives for an empty answer that it made up itself."""


@dataclass(frozen=True)
class Run:
    """A run of HELM; `label` distinguishes it from other runs of the same benchmark, and is empty if there are none."""

    key: str
    label: str
    spec: RunSpec


class Client(openai.OpenAI):
    """OpenAI's client; keeps the last error of each thread in `LAST`, since HELM's client turns errors into text."""

    def request(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().request(*arguments, **options)
        except openai.OpenAIError as error:
            LAST.error = error
            raise


class Asking(Executor):
    """HELM's executor; calls `before` with a run's requests before they are sent, `on_way` with the scoring method."""

    def __init__(
        self,
        execution: ExecutionSpec,
        job: dict[str, Any],
        *,
        before: Callable[[Run, list[RequestState]], None],
        on_way: Callable[[Run, dict[str, Any]], None],
    ) -> None:
        super().__init__(execution)
        self._job = job
        self._before = before
        self._on_way = on_way
        self._weighed: dict[int, RequestResult] = {}
        self._lock = threading.Lock()
        self.unanswered = valid_answers.Unanswered()
        self._run: Run | None = None
        self._stage = ""
        self._done = self._total = 0
        self._shown = 0.0

    def now(self, run: Run, stage: str) -> None:
        self._run, self._stage = run, stage

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        assert self._run is not None
        states = scenario_state.request_states
        _check_requests(self._run, states, self._job)
        self._before(self._run, states)
        self._done, self._total = 0, len(states)
        self._show(0.0)
        self._weighed = self._weigh(self._run, states) if scores_choices(self._run.spec) else {}
        self._done = len(self._weighed)
        return super().execute(scenario_state)

    def _weigh(self, run: Run, states: list[RequestState]) -> dict[int, RequestResult]:
        window = WindowServiceFactory.get_window_service(
            run.spec.adapter_spec.model_deployment, TokenizerService(self.context)
        )
        context: Any = self.context
        client = context.client._get_client(run.spec.adapter_spec.model_deployment)
        weighed, way = helm_choices.weigh(
            states,
            self._job,
            length=lambda text: len(window.tokenize(text)),
            raw=client._to_raw_completion_request,
            on_weighed=lambda count: self._show(PROGRESS_SECONDS, more=count),
        )
        if way["reason"]:
            hwarn(f"choices are weighed by echoes: {way['reason']}")
        self._on_way(run, way)
        return {id(states[place]): result for place, result in weighed.items()}

    def process(self, state: RequestState) -> RequestState:
        """Sends a request; a request that failed in all tries gets a result without success, which is not scored."""
        if (weighed := self._weighed.get(id(state))) is not None:
            return replace(state, result=weighed)
        LAST.error = None
        try:
            result = self.context.make_request(state.request)
            if result.success and len(result.completions) < state.request.num_completions:
                result = dead("too few completions came back")
        except Exception as error:  # noqa: BLE001 - the boundary to clients, which raise anything on odd answers
            result = dead(f"{type(error).__name__} in HELM's client")
        reasons = [str((completion.finish_reason or {}).get("reason", "")) for completion in result.completions]
        if result.success and any(reason.startswith(BLOCKED) for reason in reasons):
            result = dead("the endpoint refused the prompt")
        if not result.success:
            with self._lock:
                self.unanswered.note(LAST.error or str(result.error))
            result = dead(str(result.error))
            hwarn(f"no answer to question {state.instance.id}")
            if self._job["exit_on_error"]:
                self._end(state)
        self._show(PROGRESS_SECONDS, more=1)
        return replace(state, result=result)

    def _end(self, state: RequestState) -> NoReturn:
        problem = f"no answer to question {state.instance.id}, and exit_on_error is set"
        if self.unanswered.refused:
            raise RuntimeError(problem)
        raise Refused(
            expected=f"{self._job['base_url']} to answer every request",
            found=f"{problem}: {self.unanswered.first}",
            remedy="See to the endpoint, and evaluate again",
            kind="EndpointUnusable",
        )

    def _show(self, every_seconds: float, *, more: int = 0) -> None:
        with self._lock:
            self._done += more
            moment = time.monotonic()
            if self._done == self._total or moment - self._shown >= every_seconds:
                self._shown = moment
                print(f"Answered {self._done} of {self._total} requests of {self._stage}", flush=True)


def question(state: RequestState) -> tuple[Any, ...]:
    """Returns a key that requests of the same question share."""
    return state.instance.id, state.train_trial_index, repr(state.instance.perturbation), state.request.random


def _check_requests(run: Run, states: list[RequestState], job: dict[str, Any]) -> None:
    asked = {question(state) for state in states}
    cut = {question(state) for state in states if state.prompt_truncated}
    if len(cut) > job["max_truncated"] * len(asked):
        raise Refused(
            expected=f"prompts of {run.key} that the model has room for (max_truncated {job['max_truncated']:g})",
            found=f"{len(cut)} of {len(asked)} questions that do not, even without examples",
            remedy="Raise max_model_len in engine_kwargs if the model allows it, or raise max_truncated",
        )
    if not any(state.request.echo_prompt for state in states):
        return
    if job["apply_chat_template"]:
        raise Refused(
            expected=f"to send {run.key} as plain text, since it weighs given texts",
            found="apply_chat_template, which gives no log-probabilities of them",
            remedy="Set apply_chat_template to false, or leave this benchmark out",
        )
    if not job["prompt_logprobs"]:
        raise Refused(
            expected=f"an endpoint that returns log-probabilities of the prompt, which {run.key} needs",
            found="an endpoint without them (echo with logprobs)",
            remedy="Serve the model with vLLM, or leave this benchmark out: its score would be chance",
            kind="EndpointUnusable",
        )


def dead(error: str) -> RequestResult:
    """Returns a failed result; HELM would take an error that it survives for an empty answer."""
    return RequestResult(
        success=False, cached=False, error=error, completions=[GeneratedOutput("", 0, [])], embedding=[]
    )


def bound_retries() -> None:
    """Leaves retries, also of malformed answers, to the OpenAI client; HELM would add five over 150 s."""
    http_client = openai.DefaultHttpxClient(event_hooks=valid_answers.hooks())
    openai_client.OpenAI = partial(Client, http_client=http_client)
    auto_client.retry_request = get_retry_decorator(
        "Request", max_attempts=1, wait_exponential_multiplier_seconds=1, retry_on_result=retry_if_request_failed
    )


def keep_ends() -> None:
    """Keeps the finish reasons of answers, which HELM loses where it searches them for stop sequences."""
    cut = openai_client.truncate_sequence

    def cut_and_keep(sequence: GeneratedOutput, *arguments: Any, **options: Any) -> GeneratedOutput:
        truncated = cut(sequence, *arguments, **options)
        kept = sequence.finish_reason if truncated.text == sequence.text else {"reason": "stop"}
        return replace(truncated, finish_reason=truncated.finish_reason or kept)

    openai_client.truncate_sequence = cut_and_keep


def leave_prompts_out_of_the_log() -> None:
    """Filters prompts out of HELM's log, which has those of a question of each run."""
    hidden = {"behind": ""}

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if hidden["behind"]:
            if text.startswith(hidden["behind"]):
                hidden["behind"] = ""
            return False
        if text.strip() == "Sample prompts {":
            hidden["behind"] = text[: len(text) - len(text.lstrip())] + "} ["
            return False
        return True

    logging.getLogger("helm").addFilter(keep)


def missing_data(error: BaseException, run: Run) -> Refused | None:
    """Returns the refusal for a run that failed for a missing file; None if it failed for another reason."""
    for cause in causes(error):
        problem = None
        if isinstance(cause, FileNotFoundError) and cause.filename:
            problem = f"no file {cause.filename}"
        elif isinstance(cause, LookupError) and "nltk" in str(cause).lower():
            problem = "no data of NLTK on this machine (python -m nltk.downloader punkt_tab gets it)"
        elif any(kind.__name__ in NO_DATA for kind in type(cause).__mro__):
            problem = f"no way to get them ({type(cause).__name__})"
        if problem:
            remedy = "Correct the path in task_kwargs, evaluate once where there is a network, or leave it out"
            return Refused(f"the data that {run.spec.name} needs", problem, remedy)
    return None


def log_failure(run: Run, error: BaseException) -> None:
    """Logs an error with its location in HELM; cuts off prompts that HELM puts into messages."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    message = str(error).partition(" Request: ")[0]
    hlog("\n".join([f"{run.spec.name} failed:", *lines, f"{type(error).__name__}: {message}"]))
