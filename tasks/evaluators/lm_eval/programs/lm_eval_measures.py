"""Measures lm-eval's prompts before they are sent, for `lm_eval_prompts.py`.

Counts their tokens and those of all requests, finds prompts that are too long, records where the question begins, which
lm-eval's samples do not show, and names the revision of a benchmark's data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from choice_scoring import LEAST_CONTEXT
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

REQUEST_TYPES = {"multiple_choice": "loglikelihood"}  # request type by output type
SPECIAL_TOKENS = 16  # more than any tokenizer puts around a text
BATCH = 1000
COUNTED = 32
"""Questions of a benchmark with counted tokens, for an estimate: all of MMLU's would take a minute."""


@dataclass(frozen=True)
class Text:
    """The text of a request, its end that may not be cut, and the tokens that it must leave free."""

    instance: Instance
    prompt: str
    kept: str
    reserved: int


@dataclass
class TooLong:
    """Questions of a benchmark with a prompt that does not fit."""

    needed: dict[int, int] = field(default_factory=dict)  # tokens by question
    hopeless: set[int] = field(default_factory=set)  # questions of which nothing would remain before the answer


def too_long(task: Task, model: Any, tokenizer: Any) -> TooLong:
    """Returns the questions with a prompt that lm-eval would cut, or an endpoint reject; none with whole texts."""
    questions = TooLong()
    texts = [text for instance in task.instances if (text := _text(instance, model, tokenizer)) is not None]
    candidates = _candidates(texts, model, tokenizer)
    for text, length in zip(candidates, _lengths([text.prompt for text in candidates], model, tokenizer), strict=True):
        needed = length + text.reserved
        if needed <= model.max_length:
            continue
        number = text.instance.doc_id or 0
        questions.needed[number] = max(needed, questions.needed.get(number, 0))
        if len(text.kept.encode()) + SPECIAL_TOKENS >= model.longest_window:
            [before] = _lengths([text.prompt.removesuffix(text.kept)], model, tokenizer)
            if length - before >= model.longest_window:
                questions.hopeless.add(number)
    return questions


def _text(instance: Instance, model: Any, tokenizer: Any) -> Text | None:
    arguments: Any = instance.args
    if instance.request_type == "loglikelihood":
        context, continuation = arguments
        # Log-probabilities may have more room than an answer, or less: see the model's window.
        reserved = model.max_length - model.longest_window + (0 if context or model.adds_bos else 1)
        return Text(instance, context + continuation, continuation, reserved)
    if instance.request_type != "generate_until":
        return None
    prompt, options = arguments[:2]
    if not isinstance(prompt, str):  # messages, as JSON; without a template their length is unknown
        if not tokenizer.chat_template:
            return None
        prompt = tokenizer.apply_chat_template(json.loads(prompt.prompt), tokenize=False, add_generation_prompt=True)
    return Text(instance, prompt, "", options.get("max_gen_toks", model._max_gen_toks))


def _candidates(texts: Sequence[Text], model: Any, tokenizer: Any) -> list[Text]:
    several: dict[tuple[Any, str], list[Text]] = defaultdict(list)
    for text in texts:
        short = text.prompt.isascii() and len(text.prompt) + SPECIAL_TOKENS + text.reserved <= model.max_length
        if not short:
            several[(text.instance.doc_id, text.prompt.removesuffix(text.kept) if text.kept else "")].append(text)
    groups = [sorted(group, key=lambda text: len(text.kept.encode())) for group in several.values()]
    longest = [group[-1] for group in groups]
    candidates = list[Text]()
    for group, length in zip(groups, _lengths([text.prompt for text in longest], model, tokenizer), strict=True):
        room = model.max_length - length - group[-1].reserved
        slack = max(len(text.kept.encode()) for text in group) + SPECIAL_TOKENS
        if room < slack:
            candidates += group
    return candidates


def _lengths(texts: Sequence[str], model: Any, tokenizer: Any) -> Iterator[int]:
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        ids = model.tok_encode(batch)
        if ids is batch:  # an endpoint's own template takes texts
            ids = tokenizer(batch, add_special_tokens=False, return_attention_mask=False).input_ids
        yield from map(len, ids)


def to_be_asked(task: Task, model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Returns the tokens of a task's requests as engines count them, cached tokens included, and at most of answers.

    Of more than `COUNTED` questions a regular sample is counted, and extrapolated by characters. None if unknown.
    """
    questions: dict[Any, list[Instance]] = defaultdict(list)
    for instance in task.instances:
        questions[instance.doc_id].append(instance)
    several = list(questions.values())
    counted = [instance for asked in several[:: -(-len(several) // COUNTED) or 1] for instance in asked]
    generates, whole = task.OUTPUT_TYPE == "generate_until", request_type(task) == "loglikelihood_rolling"
    known = [Text(i, i.args[0], i.args[0], 0) if whole else _text(i, model, tokenizer) for i in counted]
    texts = [text for text in known if text is not None]
    if not texts or len(texts) < len(known):
        return None
    lengths = list(_lengths([text.prompt for text in texts], model, tokenizer))
    if not whole:
        lengths = [min(length, model.max_length - text.reserved) for text, length in zip(texts, lengths, strict=True)]
    if whole or not (generates or model.adds_bos):  # lm-eval puts a token in front of a text without context
        lengths = [length + (text.prompt == text.kept) for text, length in zip(texts, lengths, strict=True)]
    repeats = [instance.repeats or 1 for instance in counted]
    asked = [length for length, times in zip(lengths, repeats, strict=True) for _ in range(times)]
    if request_type(task) == "loglikelihood" and getattr(model, "scoring", {}).get("scores_from_cache"):
        asked = _by_way_of_the_cache(texts, lengths, model, tokenizer)
    answers = sum(t.reserved * n for t, n in zip(texts, repeats, strict=True)) if generates else len(asked)
    share = _characters(task.instances) / (_characters(counted) or 1)
    tokens = {"prompt_tokens": round(sum(asked) * share), "answer_tokens": round(answers * share)}
    return {"questions": len(questions), "generates": generates, **tokens}


def _by_way_of_the_cache(texts: Sequence[Text], lengths: Sequence[int], model: Any, tokenizer: Any) -> list[int]:
    behind: dict[str, list[int]] = defaultdict(list)
    for text, length in zip(texts, lengths, strict=True):
        behind[text.prompt.removesuffix(text.kept)].append(length)
    requests: list[int] = []
    for context, wholes in zip(_lengths(list(behind), model, tokenizer), behind.values(), strict=True):
        longer = [length for length in wholes if length > context + 1]
        requests += wholes if longer and context < LEAST_CONTEXT else [context, *longer]
    return requests


def _characters(instances: Sequence[Instance]) -> int:
    parts = [part for i in instances for part in i.args[: 2 if i.request_type == "loglikelihood" else 1]]
    return sum(len(part if isinstance(part, str) else part.prompt) for part in parts)


def request_type(task: Task) -> str:
    """Returns the request type of a task."""
    kind = str(task.OUTPUT_TYPE)
    return REQUEST_TYPES.get(kind, kind)


def contexts_of(task: Task) -> dict[int, int]:
    """Returns characters of description and examples before each question, by question; without unknown numbers."""
    prompts: dict[int, list[Any]] = defaultdict(list)
    for instance in task.instances:
        prompts[instance.doc_id or 0].append(instance.args[0])
    lengths: dict[int, int] = {}
    for number, doc in {instance.doc_id or 0: instance.doc for instance in task.instances}.items():
        questions = task.doc_to_choice(doc) if getattr(task, "multiple_input", 0) else [task.doc_to_text(doc)]
        places = {_place(*pair) for pair in zip(prompts[number], questions, strict=False)}
        if len(places) == 1 and (place := places.pop()):
            lengths[number] = place
    return lengths


def _place(prompt: Any, question: Any) -> int:
    if not isinstance(prompt, str) or not isinstance(question, str):
        return 0
    whole = prompt.rfind(question)  # chat templates may strip their input
    return max(whole if whole >= 0 else prompt.rfind(question.strip()), 0) if question.strip() else 0


COMMIT = re.compile(r"/([0-9a-f]{40})/[^/]+$")
"""A commit of the hub in the path of a file in the cache of `datasets`."""
DIGITS = 16


def revision_of(task: Task) -> str | None:
    """Returns the data set and its commit on the hub; else a digest over the rows of the splits in use."""
    dataset = getattr(task, "dataset", None)
    if dataset is None:
        return None
    config = task.config
    examples = config.fewshot_config.split if config.fewshot_config else None
    parts = (config.test_split or config.validation_split, examples or config.training_split)
    rows = [dataset[name] for name in dict.fromkeys(parts) if name in dataset]
    files = [file["filename"] for part in rows for file in getattr(part, "cache_files", ())]
    commits = {match[1] for name in files if (match := COMMIT.search(name))}
    if len(commits) == 1:
        return f"{task.DATASET_PATH}@{commits.pop()}"
    return f"sha256:{digest(rows)[:DIGITS]}"


def digest(parts: Iterable[Iterable[Any]]) -> str:
    """Returns a hex digest over rows, the same for the same content."""
    hasher = hashlib.sha256()
    for part in parts:
        for row in part:
            hasher.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        hasher.update(b"\n")
    return hasher.hexdigest()
