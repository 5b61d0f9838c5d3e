"""Inspect's `openai-api` models for the endpoint and the judge, without Inspect's retries and caches."""

from __future__ import annotations

import os
from typing import Any

import inspect_ai._eval.context
import inspect_ai._util.logger
import inspect_ai.model._model
import openai
import valid_answers
from inspect_ai.model import GenerateConfig, Model, ModelInfo, get_model, set_model_info

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
    asked = model.api.generate

    async def generate(*given: Any, config: GenerateConfig, **named: Any) -> Any:
        stops = [stop for stop in config.stop_seqs or () if stop]  # endpoints reject an empty stop
        try:
            output = await asked(*given, config=config.model_copy(update={"stop_seqs": stops or None}), **named)
        except Exception as error:
            if (clients := _of_client(error)) is not None:
                _note(clients, unanswered)
            raise
        failed = output[0] if isinstance(output, tuple) else None
        if isinstance(failed, Exception):
            _note(failed, unanswered)
        return output

    model.api.generate = generate
    model.api.handle_bad_request = lambda error: error


def _of_client(error: BaseException | None) -> Exception | None:
    while error is not None and not isinstance(error, openai.OpenAIError):
        error = error.__cause__ or error.__context__
    return error


def _note(error: Exception, unanswered: valid_answers.Unanswered) -> None:
    unanswered.note(error)
    if TOOLS_REFUSED in str(error):
        _tools_refused.append(str(error))
