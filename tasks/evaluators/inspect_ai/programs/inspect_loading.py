"""Loads the models and tasks of an Inspect job, and checks the tasks before the first request.

Inspect's `openai-api` models ask the endpoint and the judge, without Inspect's retries and caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import inspect_ai._eval.context
import inspect_ai._util.logger
import inspect_ai.model._model
import openai
import valid_answers
from inspect_ai import Task, task_with
from inspect_ai._eval.loader import load_task_spec, solver_from_spec
from inspect_ai._util.registry import registry_params
from inspect_ai.model import GenerateConfig, Model, ModelInfo, get_model, set_model_info
from inspect_ai.solver import SolverSpec
from refusals import Refused, causes

SANDBOXED_TOOLS = {
    *("bash", "bash_session", "code_execution", "computer", "grep", "list_files", "python", "read_file", "skill"),
    *("text_editor", "web_browser"),
}
"""Inspect's own tools that work in a sandbox."""
SHOWN_CHARACTERS = 300


def load_tasks(job: dict[str, Any]) -> dict[str, Task]:
    """Returns the tasks, keyed and named by the names that their metrics are published under."""
    tasks = {}
    for benchmark in job["benchmarks"]:
        task = _loaded(benchmark, job)
        _check(task, benchmark["name"], job)
        tasks[benchmark["key"]] = task_with(task, name=benchmark["key"])
    return tasks


def questions_of(task: Task, *, limit: int | None, epochs: int | None) -> int:
    """Returns the number of requested questions, over all epochs."""
    number = len(task.dataset) if limit is None else min(limit, len(task.dataset))
    return number * (epochs or task.epochs or 1)


def load_solver(job: dict[str, Any]) -> SolverSpec | None:
    """Returns the solver that replaces the tasks' own, if any; refuses a solver that cannot be created."""
    if job["solver"] is None:
        return None
    spec = SolverSpec(job["solver"], job["solver_args"], job["solver_args"])
    try:
        solver_from_spec(spec)
    except Exception as error:  # noqa: BLE001 - as with tasks
        _unusable(job["solver"], error)
    return spec


def _loaded(benchmark: dict[str, Any], job: dict[str, Any]) -> Task:
    name, file = benchmark["name"], benchmark["file"]
    spec = f"{Path(job['benchmarks_path']).absolute() / file}@{benchmark['task']}" if file else benchmark["task"]
    working_directory = os.getcwd()  # noqa: PTH109 - Inspect leaves a folder that a task's file goes to
    try:
        tasks = load_task_spec(spec, benchmark["task_kwargs"])
    except Exception as error:  # noqa: BLE001 - the code of a user's file may raise anything
        _unusable(name, error)
    finally:
        os.chdir(working_directory)
    if len(tasks) != 1:
        raise Refused(
            expected=f"a task {name} of Inspect, in the benchmarks folder or in a package of its environment",
            found=f"{len(tasks)} of that name",
            remedy="Correct its name in evals: task, file@task, or package@task",
            kind="UnknownBenchmark",
        )
    return tasks[0]


def _unusable(name: str, problem: str | Exception) -> NoReturn:
    if isinstance(problem, Exception):
        problem = f"{type(problem).__name__}: {str(problem)[:SHOWN_CHARACTERS]}"
    raise Refused(
        expected=f"a task or solver {name} that can be loaded, with its arguments",
        found=problem,
        remedy="Correct it, task_kwargs or evaluator.solver; `inspect eval` says more",
    )


def _check(task: Task, name: str, job: dict[str, Any]) -> None:
    if task.sample_source is not None:
        _unusable(name, "samples that are made while it runs, so their number is not known beforehand")
    if not len(task.dataset):
        _unusable(name, "no samples")
    tools = set(_tools_in(_params(task.solver), _params(task.setup)))
    sandboxes = {part.sandbox.type for part in (task, *task.dataset) if part.sandbox is not None}
    needs = {f"the sandbox {sandbox}" for sandbox in sandboxes}
    needs |= {f"the tool {tool}" for tool in tools & SANDBOXED_TOOLS}
    if needs and name not in job["allow_code_execution"]:
        raise Refused(
            expected=f"evaluator.allow_code_execution to name {name}, which lets the model act in a sandbox",
            found=f"it uses {', '.join(sorted(needs))}",
            remedy=f"Add {name} to evaluator.allow_code_execution (--allow-code {name}) if this machine may run what "
            "the model writes: it runs in Inspect's local sandbox, isolated as Assay isolates such code",
        )
    if needs and sandboxes != {"local"}:
        _unusable(name, f"it uses {', '.join(sorted(needs))}, and Assay runs the sandbox `local` alone")
    if tools and job["takes_tools"] is False and not job["emulate_tools"]:
        raise Refused(
            expected="an engine that takes requests with tools: enable_auto_tool_choice and tool_call_parser in "
            "engine_kwargs",
            found=f"{name} uses {', '.join(sorted(tools))}, and the pool's engine is started without them",
            remedy="Add --engine enable_auto_tool_choice=true --engine tool_call_parser=... with the parser of the "
            "model, or set evaluator.emulate_tools",
        )
    if tools and not job["chat"]:
        _unusable(name, "tools, and no chat template: apply_chat_template is not set")


def _params(part: Any) -> Any:
    parts = part if isinstance(part, list) else [part]
    return [getattr(each, "__registry_params__", None) and registry_params(each) for each in parts if each is not None]


def _tools_in(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict):
            if value.get("type") == "tool" and isinstance(value.get("name"), str):
                yield value["name"].rpartition("/")[2]
            yield from _tools_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from _tools_in(*value)


RETRIES = 2  # three attempts in all, as lm-eval makes
CONNECT_SECONDS = 10.0
TOOLS_REFUSED = "tool choice requires"  # in vLLM's error if it was started without a parser of tool calls
_tools_refused: list[str] = []


def nothing_but_ours() -> None:
    """Keeps Inspect from a .env file in a parent folder, from cached answers, and from traces."""
    os.environ["INSPECT_TRACE_FILE"] = os.devnull
    inspect_ai._util.logger.compress_trace_log = lambda handler: lambda: None
    inspect_ai._eval.context.init_dotenv = lambda: None
    inspect_ai.model._model.cache_fetch = lambda entry: None
    inspect_ai.model._model.cache_store = lambda entry, output: False


def model_of(job: dict[str, Any], key: str, unanswered: valid_answers.Unanswered) -> Model:
    """Returns the evaluated model: conversations to /chat/completions, or plain prompts to /completions."""
    # That provider samples greedily unless a task sets it.
    provider = "openai-api" if job["chat"] else "openai-api-completions"
    arguments = {"emulate_tools": True} if job["emulate_tools"] else {}
    longest = {} if job["chat"] else {"max_tokens": job["longest_answer"]}
    return _asks(f"{provider}/assay", job["model"], key, unanswered, arguments=arguments, config=longest)


def judge_of(job: dict[str, Any], keys: list[str], unanswered: valid_answers.Unanswered) -> Model | None:
    """Returns the model for the role `grader`; with None, Inspect lets the evaluated model judge."""
    if job["judge"] is None:
        return None
    key = keys[0] if job["judge"]["same_endpoint"] else keys[1]
    return _asks("openai-api/judge", job["judge"], key, unanswered, arguments={}, config={"temperature": 0.0})


def refused_tools(unanswered: valid_answers.Unanswered) -> str | None:
    """Returns the endpoint's message if it rejected requests because of tools."""
    return _tools_refused[0] if unanswered.refused and _tools_refused else None


def _asks(
    provider: str,
    endpoint: dict[str, Any],
    key: str,
    unanswered: valid_answers.Unanswered,
    *,
    arguments: dict[str, Any],
    config: dict[str, Any],
) -> Model:
    service = provider.partition("/")[2]
    # Else Inspect could take a checkpoint's name for one of OpenAI's models, such as o1.
    set_model_info(f"{service}/{endpoint['model']}", ModelInfo(family="assay"))
    timeout = openai.Timeout(endpoint["timeout"], connect=CONNECT_SECONDS)
    model = get_model(
        f"{provider}/{endpoint['model']}",
        config=GenerateConfig(max_connections=endpoint["capacity"], max_retries=0, cache=False, **config),
        base_url=endpoint["base_url"],
        api_key=key,
        memoize=False,
        http_client=openai.DefaultAsyncHttpxClient(event_hooks=valid_answers.later_hooks(), timeout=timeout),
        max_retries=RETRIES,
        **arguments,
    )
    model.model_args.clear()  # they would be logged
    _count_failures(model, unanswered)
    return model


def _count_failures(model: Model, unanswered: valid_answers.Unanswered) -> None:
    api: Any = model.api
    asked = api.generate

    async def generate(*given: Any, config: GenerateConfig, **named: Any) -> Any:
        stops = [stop for stop in config.stop_seqs or () if stop]  # endpoints reject an empty stop
        try:
            output = await asked(*given, config=config.model_copy(update={"stop_seqs": stops or None}), **named)
        except Exception as error:
            if clients := [each for each in causes(error) if isinstance(each, openai.OpenAIError)]:
                _note(clients[0], unanswered)
            raise
        failed = output[0] if isinstance(output, tuple) else None
        if isinstance(failed, Exception):
            _note(failed, unanswered)
        return output

    api.generate = generate
    api.handle_bad_request = lambda error: error


def _note(error: Exception, unanswered: valid_answers.Unanswered) -> None:
    unanswered.note(error)
    if TOOLS_REFUSED in str(error):
        _tools_refused.append(str(error))
