"""Runs AlpacaEval on the instruction sets of a job file, with the interpreter of its environment.

    python run_alpaca_eval.py <job file>

Also a program for `fork_server.py`. Our code generates the outputs, since AlpacaEval's decoder makes empty outputs of
failed requests and loses all others at the first error. Reads the keys OPENAI_API_KEY (the model's) and
ASSAY_JUDGE_API_KEY (the judge's).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import openai
import tqdm
from huggingface_hub import hf_hub_download

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "programs")]  # -I leaves them out
import valid_answers
from alpaca_eval_judge import CONNECT_SECONDS, DATA_SET, NO_ANSWER, RETRIES, SHOWN_CHARACTERS, Judge
from refusals import Refused, chat_template_needed, digest_of, few_of_each_kind, refusals_into, write_json

PLAN_NAME = "plan.json"
RESULTS_NAME = "results.json"
OFFICIAL_SET = "alpaca_eval_gpt4_baseline.json"
"""Downloaded as a file: current versions of datasets refuse to run the data set's own loading script."""
ENGINE_PARAMETERS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids")
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "IS_ALPACA_EVAL_2", "OPENAI_MAX_CONCURRENCY", "OPENAI_CLIENT_CONFIG_PATH")
"""Prefixes of variables that a fork server must have been started with, too."""
LATE_MODULES = ("openai.resources.chat", "openai.resources.completions", "pandas.io.json")


def preload(arguments: list[str]) -> None:
    """Imports modules that are otherwise imported late."""
    for name in LATE_MODULES:
        importlib.import_module(name)


def main(arguments: list[str]) -> None:
    """Generates, judges, and writes results into the job's output folder."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(few_of_each_kind())
    for noisy in ("httpx", "httpx2", "httpcore2", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    job = json.loads(Path(arguments[0]).read_text())
    with refusals_into(Path(job["output"])):
        evaluate(job, Path(job["output"]))


def evaluate(job: dict[str, Any], output: Path) -> None:
    """Generates the outputs of all sets, then judges the sets that have all outputs."""
    template = chat_template_needed(job)
    sets = {instruction_set["key"]: _load_set(instruction_set, limit=job["limit"]) for instruction_set in job["sets"]}
    asking = {
        "seeds": {"outputs": "none: each is sampled without a seed"},
        "bos": f"as the endpoint's {'chat template' if job['chat'] else 'tokenizer'} does",
        "chat_template": digest_of(template),
    }
    write_json(output / PLAN_NAME, {"sets": {key: len(rows) for key, rows in sets.items()}, "asking": asking})
    unanswered = valid_answers.Unanswered()
    judge = Judge(job, output, unanswered)
    if job["judge"]["elsewhere"]:
        judge.probe()  # before hundreds of outputs are generated in vain
    whole: list[dict[str, Any]] = []
    for instruction_set in job["sets"]:
        key, folder = instruction_set["key"], Path(instruction_set["folder"])
        rows = asyncio.run(generate(job, key, sets[key], unanswered))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "model_outputs.json", rows)
        write_json(folder / "reference_outputs.json", sets[key])
        if missing := sum(row["output"] is None for row in rows):
            logging.error("%s: %d of %d outputs are missing, so they are not judged", key, missing, len(rows))
        else:
            whole.append({**instruction_set, "rows": rows, "references": sets[key]})
    if whole and not job["judge"]["elsewhere"]:
        judge.probe()
    metrics = {instruction_set["key"]: judge.compare(instruction_set) for instruction_set in whole}
    results = {"metrics": metrics, "versions": {**versions(), **judge.described}, "unanswered": unanswered.as_values()}
    write_json(output / RESULTS_NAME, results)


def _load_set(instruction_set: dict[str, Any], *, limit: int | None) -> list[dict[str, Any]]:
    path = Path(instruction_set["path"]) if instruction_set["path"] else _official_set()
    rows = json.loads(path.read_bytes())
    if instruction_set["references"]:
        given = {row["instruction"]: row for row in json.loads(Path(instruction_set["references"]).read_bytes())}
        rows = [{**row, **given.get(row["instruction"], {})} for row in rows]
    rows = rows[:limit]
    if missing := sum(not isinstance(row.get("output"), str) for row in rows):
        raise Refused(
            expected=f"an output to compare with for each instruction of {instruction_set['key']}",
            found=f"none for {missing} of {len(rows)}",
            remedy="Name a file that has them as evaluator.reference_outputs_path",
        )
    return [
        {
            "instruction": row["instruction"],
            "output": row["output"],
            "generator": row.get("generator") or "reference",
            "dataset": row.get("dataset") or instruction_set["key"],
        }
        for row in rows
    ]


def _official_set() -> Path:
    try:
        return Path(hf_hub_download(DATA_SET, OFFICIAL_SET, repo_type="dataset"))
    except (OSError, ValueError) as error:  # errors of hub, network and disk
        raise Refused(
            expected=f"{OFFICIAL_SET} of the data set {DATA_SET}, staged or to be had from the hub",
            found=f"{type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}",
            remedy="Run `assay stage` where there is a network, or name a file as evaluator.instructions_path",
        ) from error


async def generate(
    job: dict[str, Any], key: str, instructions: list[dict[str, Any]], unanswered: valid_answers.Unanswered
) -> list[dict[str, Any]]:
    """Returns an output for each instruction, in order; its text is None where the request failed in all tries."""
    model = job["model"]
    client = openai.AsyncOpenAI(
        base_url=model["base_url"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_retries=RETRIES,
        timeout=openai.Timeout(model["timeout"], connect=CONNECT_SECONDS),
        http_client=openai.DefaultAsyncHttpxClient(event_hooks=valid_answers.later_hooks()),
    )
    fields = _sampling_fields(job)
    free = asyncio.Semaphore(max(1, model["capacity"]))
    bar = tqdm.tqdm(total=len(instructions), desc=f"{key}, answers")

    async def answer(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["instruction"].strip()  # as AlpacaEval's decoders do
        if not job["chat"]:
            prompt = job["prompt_template"].replace("{instruction}", prompt)
        request = {"instruction": row["instruction"], "dataset": row["dataset"], "prompt": prompt}
        async with free:
            try:
                text, reason, tokens = await ask(client, fields, prompt, chat=job["chat"], stops=job["prompt_stops"])
            except NO_ANSWER as error:  # a missing output, which is counted
                logging.warning("no output: %s", valid_answers.described(error))
                unanswered.note(error)
                text, reason, tokens = None, "error", None
        bar.update()
        output = text.strip() if isinstance(text, str) else None
        ends = {"finish_reason": reason, "completion_tokens": tokens}
        return {**request, "output": output, "generator": model["model"], **ends}

    async with client:
        rows = await asyncio.gather(*map(answer, instructions))
    bar.close()
    return list(rows)


async def ask(
    client: openai.AsyncOpenAI, fields: dict[str, Any], prompt: str, *, chat: bool, stops: list[str]
) -> tuple[str | None, str | None, int | None]:
    """Returns text, finish reason and token count of an output; the text is None, not empty, without an output."""
    if chat:
        answer = await client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **fields)
        text = answer.choices[0].message.content
    else:
        answer = await client.completions.create(prompt=prompt, stop=stops or None, **fields)
        text = answer.choices[0].text
    return text, answer.choices[0].finish_reason, answer.usage.completion_tokens if answer.usage else None


def _sampling_fields(job: dict[str, Any]) -> dict[str, Any]:
    sampling = dict(job["sampling"])
    fields: dict[str, Any] = {"model": job["model"]["model"], "max_tokens": sampling.pop("max_new_tokens")}
    for_engines = {name: sampling.pop(name) for name in ENGINE_PARAMETERS if name in sampling}
    if job["engine_parameters"]:
        fields["extra_body"] = for_engines
    return {**fields, **sampling}


def versions() -> dict[str, str]:
    """Returns the versions of the harness and its client."""
    return {name: importlib.metadata.version(name) for name in ("alpaca_eval", "openai")}


if __name__ == "__main__":
    main(sys.argv[1:])
