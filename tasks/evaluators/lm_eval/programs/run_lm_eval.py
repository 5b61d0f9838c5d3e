"""Runs lm-eval on the benchmarks of a job file, with the interpreter of the lm-eval environment.

    python run_lm_eval.py <job file>
    python run_lm_eval.py --fetch <job file>    only fetches what that needs, and refuses what it would refuse
    python run_lm_eval.py --list        the benchmarks that come with lm-eval, as JSON

Also a program for `fork_server.py`: `preload` imports, with --built-in reads lm-eval's benchmarks. Beyond lm-eval's own
`simple_evaluate`, it skips the scan of built-in benchmark files if none is used, gives each benchmark its own number of
examples, overrides and name, and checks the length of every prompt. Before the first request it writes the number of
questions to `plan.json`, or refuses, in `refused.json`, benchmarks that cannot be asked or scored correctly. A foreign
endpoint must prove that it uses the same tokenizer. lm-eval itself reads the endpoint's key from OPENAI_API_KEY.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "programs")]  # -I leaves them out
from choice_scoring import TOKEN_ID
from lm_eval_answers import installed
from refusals import (
    HUB_VARIABLES,
    Refused,
    few_of_each_kind,
    no_chat_template,
    read_tokenizer,
    refusals_into,
    shape_of,
    write_json,
)
from valid_answers import Unanswered


def _refuse_environment(arguments: list[str], error: BaseException) -> None:
    if not arguments or arguments[-1].startswith("-"):
        return
    with refusals_into(Path(json.loads(Path(arguments[-1]).read_text())["output"])):
        raise Refused(
            expected=f"an environment with all that lm-eval imports in {sys.prefix}",
            found=f"{type(error).__name__}: {error}",
            remedy=f"Delete the folder {sys.prefix} and run again: it is built again",
            kind="EnvironmentBuildFailed",
        ) from error


LATE_MODULES = (
    "datasets.packaged_modules.json.json",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_fast",
)
try:
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.utils import resolve_max_length
    from lm_eval.utils import setup_logging
    from lm_eval_early import WANTED_NAME, DecidedEarlyError, EarlyQuestions
    from lm_eval_index import listing, preload_for, use_remembered_index
    from lm_eval_loading import check_tasks, leaves, load_benchmarks, task_manager
    from lm_eval_model import Completions, Conversations, EndpointFaultError, RefusedError, way_of_asking
    from lm_eval_prompts import Questions, groups_in, label_progress, means, save_results
    from lm_eval_scores import weigh_in_groups

    if __name__ == "__main__":
        for name in LATE_MODULES:
            importlib.import_module(name)
except (ImportError, OSError, SyntaxError) as error:
    if __name__ == "__main__":
        _refuse_environment(sys.argv[1:], error)
    raise

RESAMPLES = 1000
"""Resamples for the errors of F1 and correlations, precise to 2 %; lm-eval's 100,000 take minutes."""
ASKED_NAME = "asked.json"
READ_AT_IMPORT = (*HUB_VARIABLES, "DISABLE_MULTIPROC", "LMEVAL_")
"""Prefixes of variables that a fork server must have been started with, too."""
DEFAULT_GENERATED = 256
FETCH_OPTION = "--fetch"


def preload(arguments: list[str]) -> None:
    """Imports what lm-eval imports late; with --built-in reads the index of its benchmarks."""
    preload_for(arguments, LATE_MODULES)


def main(arguments: list[str]) -> None:
    """Evaluates, fetches, or lists."""
    setup_logging(logging.INFO)
    use_remembered_index()
    if arguments == ["--list"]:
        print(json.dumps(listing()))
        return
    job = json.loads(Path(arguments[-1]).read_text())
    with refusals_into(Path(job["output"])):
        (load if arguments[0] == FETCH_OPTION else evaluate)(job)


def load(job: dict[str, Any]) -> tuple[Any, ...]:
    """Returns benchmarks, tasks, tokenizer, model arguments and manager of a job, fetched and checked; or refuses."""
    tokenizer = load_tokenizer(job)
    model_args = complete_model_args(job, tokenizer)
    manager = task_manager(job, model_args)
    benchmarks = load_benchmarks(job, manager)
    tasks = {key: leaves(items) for key, items in benchmarks.items()}
    check_tasks(job, tasks, model_args)
    return benchmarks, tasks, tokenizer, model_args, manager


def evaluate(job: dict[str, Any]) -> None:
    """Evaluates a job, and writes results and samples below `job["output"]`."""
    output = Path(job["output"])
    benchmarks, tasks, tokenizer, model_args, manager = load(job)
    prompts_per_request = 1 if job["conversations"] else job["prompts_per_request"]
    options = {**model_args, "pool": job["pool"], "batch_size": prompts_per_request}
    model = Conversations(**options) if job["conversations"] else Completions(**options, scoring=job)
    asking = way_of_asking(job, model, tokenizer)
    for note in asking["notes"]:
        logging.getLogger("lm_eval").warning(note)

    def settle() -> None:
        weigh_in_groups(groups_in(benchmarks))
        if isinstance(model, Completions) and job["prove_tokenizer"]:
            prove_tokenizer(job, model)

    def ask_early() -> None:
        if Path(WANTED_NAME).exists():
            room = job["model_args"]["num_concurrent"] * prompts_per_request
            EarlyQuestions(tasks, model, output, room=room).ask(json.loads(Path(WANTED_NAME).read_text()))

    Questions(job, tasks, model, tokenizer, output=output, on_settled=settle, on_planned=ask_early)
    label_progress(tasks, model, prompts_per_request)
    logging.getLogger("lm_eval.models.api_models").addFilter(few_of_each_kind())
    tracker = EvaluationTracker(output_path=str(output / job["results_folder"]))
    in_chat = job["apply_chat_template"] or job["conversations"]
    results: Any = None
    evaluate_tasks: Any = simple_evaluate  # its decorator hides its arguments
    try:
        results = evaluate_tasks(
            model=model,
            model_args=model_args,
            tasks=[part for items in benchmarks.values() for part in items],
            task_manager=manager,
            batch_size=prompts_per_request,
            limit=job["limit"],
            log_samples=True,
            evaluation_tracker=tracker,
            bootstrap_iters=RESAMPLES,
            apply_chat_template=in_chat,
            fewshot_as_multiturn=in_chat,
            confirm_run_unsafe_code=True,  # forbidden code was refused before
        )
    except DecidedEarlyError:
        logging.getLogger("lm_eval").info("Decided early: the rest is not asked")
    except EndpointFaultError as error:
        raise Refused(
            expected=f"{model.model} at {model.base_url} to answer every request within {model.max_retries} tries",
            found=str(error),
            remedy="See to the endpoint, and evaluate again",
            kind="EndpointUnusable",
        ) from error
    except RefusedError as error:
        raise Refused(
            expected=f"{model.model} at {model.base_url} to take what the benchmark asks",
            found=str(error),
            remedy="Ask for what the endpoint takes: see its words, and the benchmark's generation_kwargs",
            kind="HarnessFailed",
        ) from error
    if isinstance(model, Completions) and model.outcome is not None:
        asking["loglikelihood"] = asdict(model.outcome)
    unanswered = {"unanswered": Unanswered().as_values()}  # counts only changed answers: a failure ends the run
    write_json(
        output / ASKED_NAME,
        {"asking": asking, "ends": model.ends, "groups": means(benchmarks), "versions": installed(), **unanswered},
    )
    if results is not None:
        save_results(results, tracker)


def load_tokenizer(job: dict[str, Any]) -> Any:
    """Returns the checkpoint's tokenizer; refuses if it is missing or damaged, or lacks a template that is needed."""
    folder = job["model_args"]["tokenizer"]
    tokenizer = read_tokenizer(folder, trusted=job["model_args"]["trust_remote_code"])
    if job["apply_chat_template"] and not job["conversations"] and not tokenizer.chat_template:
        raise no_chat_template(folder)
    return tokenizer


def complete_model_args(job: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns model arguments with the lengths that the tokenizer and the model allow."""
    held = job["max_model_len"] or _context_of(Path(job["model_args"]["tokenizer"]), tokenizer)
    # As in `--model hf`: tokens read at once; our engines also hold the token that they generate.
    max_length = held - 1 if job["pool"] else held
    given = job["model_args"]
    if job["conversations"]:
        given = {key: value for key, value in given.items() if not key.startswith("token")}
    max_gen_toks = min(job["max_gen_toks"] or DEFAULT_GENERATED, max_length // 2)
    return {**given, "max_length": max_length, "max_gen_toks": max_gen_toks}


def _context_of(checkpoint: Path, tokenizer: Any) -> int:
    try:
        shape: Any = SimpleNamespace(**shape_of(checkpoint))
        return resolve_max_length(shape, tokenizer)
    except (OSError, ValueError, AttributeError, TypeError):
        return resolve_max_length(None, tokenizer)


PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 3.14159 times; def mean(xs): return sum(xs) / len(xs)\n\n"
    "\tnaïve café, Straße, Привет мир, 東京は晴れ, مرحبا, 🙂🙃 ~~~ https://example.org/?q=a+b&c=%20d FLOCCINAUCINIHIL"
)
"""Words, numbers, code and scripts, of which two tokenizers hardly ever make the same number of tokens."""


def prove_tokenizer(job: dict[str, Any], model: Completions) -> None:
    """Refuses a tokenizer that is not the endpoint's, by three requests with a token per answer.

    The endpoint must count as many tokens in a text as we do, with or without a BOS, must take its token ids, also
    those of a templated prompt, and must report the same tokens for both, if it reports tokens. Without an answer,
    nothing is concluded. The last request detects if it names tokens by ids, which proves that answers belong to their
    requests.
    """
    tokenizer = model.tokenizer
    forms = [tokenizer(PROBE, add_special_tokens=special).input_ids for special in (False, True)]
    asked = PROBE
    if job["apply_chat_template"]:
        asked = model.apply_chat_template([{"role": "user", "content": PROBE}])
    prompt = model.tok_encode(asked)
    if max(map(len, (prompt, *forms))) >= model.max_length:
        return
    options = {"echo": True, "logprobs": 1} if job["prompt_logprobs"] else {}
    as_text = _asked(model, PROBE, options)

    def other(problem: str) -> Refused:
        expected = f"the tokenizer in {job['model_args']['tokenizer']} to be that of {model.model} at {model.base_url}"
        return Refused(expected, problem, "Set model_path to the checkpoint that the endpoint serves, or serve this")

    counted = (as_text.get("usage") or {}).get("prompt_tokens", len(forms[0]))
    same = next((form for form in forms if len(form) == counted), None)
    if same is None:
        counts = " or ".join(str(count) for count in sorted({len(form) for form in forms}))
        raise other(f"{counted} tokens there in a text that has {counts} here")
    as_ids = _asked(model, [same, prompt], options)
    if "refused" in as_ids:
        raise other(f"token ids refused there: {as_ids['refused']}")
    read, meant = _tokens(as_ids)[: len(same)], _tokens(as_text)[: len(same)]
    if read and meant and read != meant:
        place = next(place for place, pair in enumerate(zip(read, meant, strict=False)) if pair[0] != pair[1])
        raise other(f"token {same[place]} is read there as {read[place]!r}, where the text has {meant[place]!r}")
    if options:
        named = _tokens(_asked(model, [same], {**options, "return_tokens_as_token_ids": True}))
        model.token_ids = bool(named) and all(token.startswith(TOKEN_ID) for token in named)


def _tokens(answer: dict[str, Any]) -> list[str]:
    first = min(answer.get("choices") or [{}], key=lambda choice: choice.get("index", 0))
    return (first.get("logprobs") or {}).get("tokens") or []


def _asked(model: Completions, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"model": model.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **options}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    try:
        request = urllib.request.Request(model.base_url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=model.timeout) as response:
            answer = json.loads(response.read())
            return answer if isinstance(answer, dict) else {}
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")[:300]
        logging.getLogger("lm_eval.models.api_models").warning("a prompt was refused with status %d", error.code)
        return {"refused": f"{error.code} {message}"} if error.code in (400, 422) else {}
    except (OSError, ValueError) as error:
        logging.getLogger("lm_eval.models.api_models").warning("a prompt was not answered: %s", error)
        return {}


if __name__ == "__main__":
    main(sys.argv[1:])
