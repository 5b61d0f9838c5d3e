"""Runs a harness, the same way for all evaluators.

Each gets a folder, an environment and a time limit; its job ends with this process; errors name their cause.
"""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from pools.endpoint import RunningModel
from resources.config import ResourceConfig
from resources.errors import AssayError, EndpointUnusable, JobTimeout, StorageError, error_of
from resources.jobs import inheritance
from resources.jobs.addresses import is_loopback
from resources.jobs.jobs import Client, Command, JobHandle, JobRequest, JobStatus, create_environment
from resources.settings import process_environment, settings
from resources.storage import storage
from resources.tracing import span
from resources.warm.fork_server import WarmProgram, fork_server
from tasks.errors import AnswersCutOff, CountsDisagree, HarnessFailed, HarnessInterrupted
from tasks.evaluators.early import WantedEarly, scores_decided
from tasks.evaluators.evaluator import Evaluator, HarnessCommand, Parsed, Progress, with_samples
from tasks.evaluators.isolation import cage, isolated
from tasks.evaluators.reading import invalid_results
from tasks.records.samples import SAMPLES_NAME
from tasks.spec.evaluation import EvaluationConfig

LOG_NAME = "harness.log"
REFUSAL_NAME = "refused.json"
"""Written by our programs when the request is at fault, not the harness."""
WORKING_FOLDER = "work"
_REFUSALS = (
    *("BadInput", "CountsDisagree", "EndpointUnusable", "EnvironmentBuildFailed", "GraderFailed", "HarnessFailed"),
    "UnknownBenchmark",
)

_PROGRESS_LINES, _PROGRESS_CHARACTERS = 200, 1 << 14  # may be from model-written code: bounds the search
_KEPT_LOG_LINES, _REFUSAL_CHARACTERS = 1_000_000, 1 << 20
_SHOWN_LOG_LINES = 25
_SHOWN_LINE_CHARACTERS = 300  # harnesses print whole answers, and answers echo prompts
_KEY_VARIABLES = {"OPENAI_API_KEY": "the key of the endpoint", "ASSAY_JUDGE_API_KEY": "the key of the judge's endpoint"}


def run_harness(
    evaluator: Evaluator,
    model: RunningModel,
    config: EvaluationConfig,
    *,
    output: Path,
    python: Path,
    client: Client,
    judge: RunningModel | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    check_endpoint: Callable[[], None] = lambda: None,
    poll_seconds: float = 1.0,
    server: WarmProgram | None = None,
    name: str | None = None,
    early: WantedEarly | None = None,
) -> Parsed:
    """Runs a harness against an endpoint, for `timeout_seconds` at most, and parses its results.

    Its log is kept in `output`, which is created. `check_endpoint` is called at every poll; its error ends the harness
    and is raised. Without a `server`, see `warmed`, it starts cold. With `early`, verdicts may be in `Parsed.early`.
    """
    output = output.absolute()
    ask = partial(evaluator.command, model, config, python=python, judge=judge)
    with ExitStack() as stack:
        with _writing_into(output):
            (output / REFUSAL_NAME).unlink(missing_ok=True)
            caged = stack.enter_context(cage(output, apart=ask(output).model_code is not None))
        command = ask(caged.folder)
        if early is not None:
            command = replace(command, files={**command.files, **early.files()})
        variables = {**cache_variables(), **command.variables, **_past_proxies(model, judge)}
        working_folder = prepare(command, caged.folder)
        with _writing_into(output):
            argv = isolated(
                command.argv,
                command.model_code,
                caged,
                python=python,
                refusal=output / REFUSAL_NAME,
                seconds=config.timeout_seconds,
                variables=variables,
            )
        request = JobRequest(
            name or f"{evaluator.environment(config).name}-{secrets.token_hex(4)}",
            server.command(*command.arguments) if server and argv == command.argv else Command(argv[0], argv[1:]),
            resources=ResourceConfig(),
            environment=create_environment(
                workspace=working_folder, python=python, env_vars=variables, inherited=inheritance.HARNESS
            ),
            max_retries_preemption=0,  # the caller retries, with a fresh folder
        )

        def check() -> None:
            caged.bring_plan()
            check_endpoint()

        deadline = time.monotonic() + config.timeout_seconds
        job = client.submit(request)
        left: str | None = None
        try:
            with span("ask"):
                _follow(job, evaluator, deadline, on_progress=on_progress, check_endpoint=check, poll=poll_seconds)
        finally:
            job.terminate()
            left = caged.bring_out()
            log = "\n".join(filter(None, [_without_keys(job.logs(_KEPT_LOG_LINES), command), left]))
            with suppress(OSError):  # a full disk must not hide how the harness ended
                (output / LOG_NAME).write_text(log + "\n")
            refusal = output / REFUSAL_NAME  # seldom exists; may quote an endpoint's message
            with suppress(OSError), refusal.open(errors="replace") as file:
                refusal.write_text(_without_keys(file.read(_REFUSAL_CHARACTERS), command))
    if job.status() is not JobStatus.SUCCEEDED:
        by_hand = f"Run it by hand: {_by_hand(command, working_folder)}"
        remedy = f"Read the whole log: {output / LOG_NAME}" if caged.apart else by_hand
        late = time.monotonic() > deadline
        raise refusal_in(output) or job_failure(job, evaluator, config, log=log, remedy=remedy, late=late)
    if early is not None and early.scores and (answered := early.stopped_after(output)) is not None:
        parsed = replace(evaluator.read(output, config)[0], early=scores_decided(answered, early))
    else:
        parsed = read_output(evaluator, config, output, samples=output / SAMPLES_NAME)
    notes = (*parsed.asking.notes, *parsed.unanswered.notes, *([left] if left else []))
    return replace(parsed, asking=parsed.asking.model_copy(update={"notes": notes}))


def read_output(evaluator: Evaluator, config: EvaluationConfig, output: Path, *, samples: Path) -> Parsed:
    """Parses the results of an evaluator in a folder, and writes its samples to a new file."""
    try:
        with span("score"):
            parsed, read_samples = evaluator.read(output, config)
            return with_samples(parsed, read_samples, samples)
    except (ValueError, ArithmeticError, RecursionError) as error:  # model-written code can cause it
        raise invalid_results(evaluator.name, output, f"{type(error).__name__} where they are read") from error


@contextmanager
def warmed(
    evaluator: Evaluator, configs: Sequence[EvaluationConfig], *, python: Path, client: Client
) -> Iterator[WarmProgram | None]:
    """Keeps the evaluator's program imported for `run_harness` while the block lasts; does not wait for the import."""
    if not evaluator.preloads:
        yield None
        return
    with fork_server(
        evaluator.program,
        python=python,
        client=client,
        variables={**cache_variables(), **evaluator.import_variables},
        inherited=inheritance.HARNESS if evaluator.needs_endpoint else inheritance.NATIVE_HARNESS,
        preload_arguments=tuple(dict.fromkeys(a for config in configs for a in evaluator.preload_arguments(config))),
    ) as server:
        yield server


def verify_counts(parsed: Parsed) -> None:
    """Raises unless there are questions, and each was answered and scored."""
    counts = parsed.counts
    if counts.requested == counts.answered == counts.scored and counts.requested > 0:
        return
    summary = f"{counts.requested} questions requested, {counts.answered} answered, {counts.scored} scored"
    if counts.judge_errors:
        summary += f"; the judge gave no usable verdict on {counts.judge_errors}"
    unanswered = parsed.unanswered
    if unanswered.endpoint_refusal is not None:
        summary += f"; {unanswered.endpoint_refusal}"
    if unanswered.endpoint_failure is not None:
        raise EndpointUnusable(
            expected="the endpoint to answer every request within all tries",
            found=f"{unanswered.endpoint_failure}; {summary}",
            remedy="There is no score. See to the endpoint, and evaluate again",
        )
    raise CountsDisagree(
        expected="as many answers and scores as questions, and at least 1 question",
        found=summary,
        remedy="The score is withheld. Read harness.log and the samples next to the record, then evaluate again",
    )


def verify_ends(parsed: Parsed, max_at_limit: float | None) -> None:
    """Raises if more than this share of a benchmark's answers ended at the length limit, or while reasoning."""
    if max_at_limit is None:
        return
    cut = {name: max(part.at_limit or 0, part.unclosed) for name, part in parsed.details.items()}
    answered = parsed.counts.answered / parsed.counts.requested if parsed.early else 1.0  # of several, assumed equal
    many = [name for name, count in cut.items() if count > max_at_limit * answered * parsed.details[name].questions]
    if many:
        shown = ", ".join(f"{cut[name]} of {parsed.details[name].questions} of {name}" for name in many)
        raise AnswersCutOff(
            expected=f"at most a share of {max_at_limit:g} of a benchmark's answers to be cut (max_at_limit)",
            found=f"answers that ended at the length limit, or never ended to reason: {shown}",
            remedy="The score is withheld. Let answers be longer (max_gen_toks, max_model_len), or raise max_at_limit",
        )


@contextmanager
def _writing_into(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            expected=f"to write the harness's files into {output}",
            found=str(error),
            remedy="check that the folder is yours and has space, or choose another evaluation_path",
        ) from error


def prepare(command: HarnessCommand, output: Path) -> Path:
    """Creates a command's working folder below `output`, with its files and copies."""
    working_folder = output / WORKING_FOLDER
    with _writing_into(output):
        working_folder.mkdir(parents=True, exist_ok=True)
        (output / REFUSAL_NAME).unlink(missing_ok=True)
        for name, text in command.files.items():
            (working_folder / name).write_text(text)
    for name, uri in command.copies.items():
        storage.copy_to_local(uri, working_folder / name)
    return working_folder


def cache_variables() -> dict[str, str]:
    """Returns variables by which a machine downloads data sets once, into our folder unless the user has another."""
    shared = {"HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"} & set(process_environment())
    ours = {
        "HF_HOME": str(settings().cache_dir / "hub"),
        "HF_TOKEN_PATH": str(Path.home() / ".cache" / "huggingface" / "token"),  # where a login leaves it
    }
    variables = {} if shared else {name: value for name, value in ours.items() if name not in process_environment()}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if settings().offline else {}
    return {**variables, **offline, "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_MININTERVAL": "1"}


def _follow(
    job: JobHandle,
    evaluator: Evaluator,
    deadline: float,
    *,
    on_progress: Callable[[Progress], None],
    check_endpoint: Callable[[], None],
    poll: float,
) -> None:
    last: Progress | None = None
    finished = False
    while True:
        with suppress(JobTimeout):
            finished = job.wait(max(0.0, min(poll, deadline - time.monotonic())), raise_on_failure=False).finished
        progress = evaluator.progress(job.logs(_PROGRESS_LINES)[-_PROGRESS_CHARACTERS:])
        if progress is not None and progress != last:
            on_progress(progress)
            last = progress
        if finished and job.status() is JobStatus.SUCCEEDED:
            return
        check_endpoint()  # before the harness is blamed: it may have failed because the pool is gone
        if finished or time.monotonic() >= deadline:
            return


def _past_proxies(*asked: RunningModel | None) -> dict[str, str]:
    models = [(urlsplit(model.base_url).hostname or "", model) for model in asked if model is not None]
    hosts = [host for host, model in models if model.direct or is_loopback(host)]
    return {"NO_PROXY": ",".join(dict.fromkeys(hosts))} if hosts else {}


def job_failure(
    job: JobHandle, evaluator: Evaluator, config: EvaluationConfig, *, log: str, remedy: str, late: bool = False
) -> AssayError:
    """Returns the error for a job that ended without results."""
    details = job.details()
    return failure_of(
        evaluator,
        config,
        log=log,
        ending=f"it is {details.status}" + (f": {details.reason}" if details.reason else ""),
        interrupted=details.status is JobStatus.STOPPED or details.preemptions > 0,
        late=late,
        remedy=remedy,
    )


def failure_of(
    evaluator: Evaluator, config: EvaluationConfig, *, log: str, ending: str, interrupted: bool, late: bool, remedy: str
) -> AssayError:
    """Returns the error for a harness that ended, as `ending`, without results; `remedy` is for an error of its own."""
    kind = HarnessInterrupted if late or interrupted else HarnessFailed
    if late:
        ending = "it was still running then, and was ended"
        remedy = "Raise timeout_seconds, lower max_eval_instances, or give the pool more replicas"
    elif interrupted:
        ending = f"it was ended from outside ({ending})"
        remedy = "Evaluate again; if the machine ran out of memory, give it more"
    lines = [line[:_SHOWN_LINE_CHARACTERS] for line in log.splitlines() if line.strip()]
    return kind(
        expected=f"{evaluator.name} to end with exit code 0 within {config.timeout_seconds:g} s",
        found="\n".join([f"{ending}. Its last lines:", *lines[-_SHOWN_LOG_LINES:]]),
        remedy=remedy,
    )


def refusal_in(output: Path) -> AssayError | None:
    """Returns the refusal that our program wrote into its output; None if it did not refuse."""
    try:
        refusal = json.loads((output / REFUSAL_NAME).read_text())
        return error_of(refusal) if refusal["kind"] in _REFUSALS else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _by_hand(command: HarnessCommand, working_folder: Path) -> str:
    shown = {name: _KEY_VARIABLES.get(name, value) for name, value in command.variables.items()}
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items())]
    return f"cd {shlex.quote(str(working_folder))} && {' '.join(variables)} {shlex.join(command.argv)}"


def _without_keys(text: str, command: HarnessCommand) -> str:
    for name in _KEY_VARIABLES:
        key = command.variables.get(name, "")
        if len(key) >= 8:  # shorter keys, such as "none", protect nothing
            text = text.replace(key, "***")
    return text
