"""Runs HELM on the benchmarks of a job file, with the interpreter of the HELM environment.

    python run_helm.py <job file>

Also a program for `fork_server.py`. Does the work of `helm-run`, `helm-summarize` and `helm-server --export-path`, with
a name of its own for each benchmark, the number of questions in `plan.json` beforehand, and no end at a failed request.
The OpenAI client itself reads the endpoint's key from OPENAI_API_KEY.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nltk
from helm.benchmark.adaptation.adapter_spec import ADAPT_MULTIPLE_CHOICE_SEPARATE_METHODS
from helm.benchmark.config_registry import register_builtin_configs_from_helm_package, register_configs_from_directory
from helm.benchmark.presentation.run_entry import RunEntry, read_run_entries
from helm.benchmark.run_spec import RunSpec, discover_run_spec_functions
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.common.hierarchical_logger import setup_default_logging
from helm.common.object_spec import ObjectSpec, parse_object_spec

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "programs")]  # -I leaves them out
import helm_asking
import helm_runs
import helm_unpacking
from helm_choices import with_smooth_scores
from refusals import HUB_VARIABLES, Refused, digest_of, no_chat_template, read_tokenizer, refusals_into, shape_of

DEPLOYMENT_FOLDER = "prod_env"
DEPLOYMENT = "assay/checkpoint"
"""Clients search this name for models of OpenAI; so it does not contain the checkpoint's own name."""
TOKENIZER = "huggingface/checkpoint"
COMPLETIONS_CLIENT = "helm.clients.openai_client.OpenAILegacyCompletionsClient"
CHAT_CLIENT = "helm.clients.openai_client.OpenAIClient"
READER = "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer"
ENTRIES_NAME = "run_specs.conf"
ALL_ENTRIES = "all"
OWN_FOLDER = "helm"
"""Folder of a user's own run entries inside the benchmarks folder, a JSON file each."""
WORDS = "punkt_tab"
WORDS_SECONDS = 60
DEFAULT_CONTEXT = 2048
READ_AT_IMPORT = (*HUB_VARIABLES, "NLTK_")
"""Prefixes of variables that a fork server must have been started with, too."""
LATE_MODULES = (
    "helm.benchmark.metrics.basic_metrics",
    "helm.clients.auto_client",
    "helm.clients.openai_client",
    "helm.tokenizers.huggingface_tokenizer",
    "openai.resources.chat",
    "openai.resources.completions",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_fast",
)


def preload(arguments: list[str]) -> None:
    """Imports late modules, and reads the models, tokenizers and run entries that come with HELM."""
    put_downloads_off()
    for name in LATE_MODULES:
        importlib.import_module(name)
    built_in()


@cache
def built_in() -> None:
    """Registers everything that comes with HELM, once per process: 2 s."""
    helm_unpacking.support_filters()
    discover_run_spec_functions()
    register_builtin_configs_from_helm_package()


def main(arguments: list[str]) -> None:
    """Evaluates a job file."""
    setup_default_logging()
    put_downloads_off()
    built_in()
    job = json.loads(Path(arguments[0]).read_text())
    with refusals_into(Path(job["output"])):
        evaluate(job)


def put_downloads_off() -> None:
    """Defers NLTK's downloads: HELM's metrics request them at import, few need them, and a failure can take minutes."""
    words: Any = nltk
    if not hasattr(words, "download_now"):
        words.download_now = words.download
        words.download = lambda *args, **kwargs: False


def keep_words(job: dict[str, Any]) -> None:
    """Stores NLTK's data next to those of scenarios, once per machine."""
    nltk.data.path.insert(0, str(Path(job["scenarios_path"]).parent / "nltk"))


def with_words(harness: helm_runs.Harness, run: helm_asking.Run) -> None:
    """Evaluates a run, and again after a download if its metrics turn out to need NLTK's data."""
    try:
        harness.evaluate(run)
    except LookupError as error:
        if "nltk" not in str(error).lower() or os.environ.get("HF_HUB_OFFLINE") == "1":
            raise
        socket.setdefaulttimeout(WORDS_SECONDS)
        words: Any = nltk
        if not words.download_now(WORDS, download_dir=nltk.data.path[0]):
            raise
        socket.setdefaulttimeout(None)
        harness.evaluate(run)


def evaluate(job: dict[str, Any]) -> None:
    """Runs, scores and summarises a job; writes everything below `job["output"]`."""
    keep_words(job)
    job = {**job, "asking": _write_deployment(job)}
    register_configs_from_directory(DEPLOYMENT_FOLDER)
    runs = plan_runs(job)
    helm_asking.bound_retries()
    helm_asking.keep_ends()
    helm_asking.leave_prompts_out_of_the_log()
    harness = helm_runs.Harness(job, runs, local_path=DEPLOYMENT_FOLDER)
    failed: list[str] = []
    for run in runs:
        try:
            with_words(harness, run)
        except Refused:
            raise
        except Exception as error:
            if refusal := helm_asking.missing_data(error, run):
                raise refusal from error
            helm_asking.log_failure(run, error)
            failed.append(run.spec.name)
            if job["exit_on_error"]:
                break
    if failed:
        sys.exit(f"HELM could not finish {', '.join(failed)}: see above")
    harness.summarize()


def _write_deployment(job: dict[str, Any]) -> dict[str, Any]:
    tokenizer = read_tokenizer(job["tokenizer"], trusted=job["trust_remote_code"])
    in_chat = job["apply_chat_template"]
    if in_chat and not tokenizer.chat_template:
        raise no_chat_template(job["tokenizer"])
    empty = tokenizer("")  # may hold a BOS, which the engine puts in front
    if in_chat:
        empty = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)
    first = list(getattr(empty, "input_ids", empty))
    length = (job["max_model_len"] or _context_of(Path(job["tokenizer"]))) - len(first)
    args = {"base_url": job["base_url"], "openai_model_name": job["model"]}
    args |= {"timeout": job["request_timeout_seconds"], "max_retries": job["request_retries"]}
    model = {
        **{"name": model_name(job), "creator_organization_name": "Assay", "display_name": job["model"]},
        **{"description": "A checkpoint of a training run.", "access": "open", "release_date": None},
        "tags": ["TEXT_MODEL_TAG", "FULL_FUNCTIONALITY_TEXT_MODEL_TAG"],
    }
    read_by = {"pretrained_model_name_or_path": job["tokenizer"], "trust_remote_code": job["trust_remote_code"]}
    reader = {
        "name": TOKENIZER,
        "tokenizer_spec": {"class_name": READER, "args": read_by},
        "end_of_text_token": tokenizer.eos_token or "",
        "prefix_token": tokenizer.bos_token or tokenizer.eos_token or "",
    }
    deployment = {
        **{"name": DEPLOYMENT, "model_name": model["name"], "tokenizer_name": TOKENIZER, "max_sequence_length": length},
        "client_spec": {"class_name": CHAT_CLIENT if in_chat else COMPLETIONS_CLIENT, "args": args},
    }
    files = {
        "model_metadata.yaml": {"models": [model]},
        "tokenizer_configs.yaml": {"tokenizer_configs": [reader]},
        "model_deployments.yaml": {"model_deployments": [deployment]},
    }
    Path(DEPLOYMENT_FOLDER).mkdir(exist_ok=True)
    for file_name, content in files.items():
        (Path(DEPLOYMENT_FOLDER) / file_name).write_text(json.dumps(content, indent=2))
    rule = "as the chat template does" if in_chat else "as the endpoint's tokenizer does"
    bos = "with a BOS" if first[:1] == [tokenizer.bos_token_id] else "without a BOS"
    return {
        "seeds": {"questions": 0, "examples": "number of the trial"},
        "bos": f"{rule}: {bos}",
        "chat_template": digest_of(json.dumps(tokenizer.chat_template, sort_keys=True)) if in_chat else None,
    }


def model_name(job: dict[str, Any]) -> str:
    """Returns HELM's name for the checkpoint: an organisation, and a name without slashes."""
    return f"assay/{re.sub(r'[^A-Za-z0-9._+@-]', '_', job['model'])}"


def _context_of(checkpoint: Path) -> int:
    try:
        return int(shape_of(checkpoint)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_CONTEXT


def plan_runs(job: dict[str, Any]) -> list[helm_asking.Run]:
    """Returns HELM's runs, each with its benchmark; their names are unique, since they name folders."""
    conf: list[RunEntry] | None = None
    if job["run_specs"] is not None:
        Path(ENTRIES_NAME).write_text(job["run_specs"])
        conf = read_run_entries([ENTRIES_NAME]).entries
    runs: list[helm_asking.Run] = []
    for item in (_with_own_run_entry(item, job) for item in job["benchmarks"]):
        entries = [RunEntry(item["name"])] if conf is None else _matching_entries(item, conf, job)
        specs = [changed(spec, entry, job) for entry in entries for spec in _constructed(entry, item, job)]
        specs = [spec for spec in specs if not job["groups"] or set(spec.groups) & set(job["groups"])]
        if not specs:
            place = f"in {ENTRIES_NAME}" if conf is not None else "of the groups wanted"
            raise Refused(
                expected=f"at least 1 run entry {place} for {item['key']}, after priority and groups",
                found="none",
                remedy="Correct name and task_kwargs in evals, or priority and groups in the options of HELM",
            )
        for spec, label in zip(specs, labels([spec.name for spec in specs]), strict=True):
            taken = any(run.spec.name == spec.name for run in runs)
            named = replace(spec, name=f"{spec.name},as={item['key']}") if taken else spec
            runs.append(helm_asking.Run(item["key"], label, named))
    return runs


def _with_own_run_entry(item: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    path = Path(job["benchmarks_path"]) / OWN_FOLDER / f"{item['name']}.json"
    if not path.is_file():
        return item
    own = json.loads(path.read_text())
    return {**item, "name": own["run_entry"], "arguments": {**own["arguments"], **item["arguments"]}}


def _matching_entries(item: dict[str, Any], conf: list[RunEntry], job: dict[str, Any]) -> list[RunEntry]:
    return [
        entry
        for entry in conf
        if job["priority"] is None or entry.priority is None or entry.priority <= job["priority"]
        if matches(parse_object_spec(entry.description), item)
    ]


def matches(entry: ObjectSpec, item: dict[str, Any]) -> bool:
    """Returns True if a benchmark includes an entry of the file."""
    if item["name"] not in (ALL_ENTRIES, entry.class_name):
        return False
    return all(str(entry.args.get(name, value)) == str(value) for name, value in item["arguments"].items())


def _constructed(entry: RunEntry, item: dict[str, Any], job: dict[str, Any]) -> list[RunSpec]:
    parsed = parse_object_spec(entry.description)
    arguments = {name: _located(value, job) for name, value in {**parsed.args, **item["arguments"]}.items()}
    arguments.pop("model_deployment", None)
    if item["num_fewshot"] is not None:
        arguments["max_train_instances"] = item["num_fewshot"]
    try:
        return construct_run_specs(ObjectSpec(parsed.class_name, {**arguments, "model": model_name(job)}))
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        raise Refused(
            expected=f"arguments of {parsed.class_name} that HELM accepts",
            found=f"{item['arguments']}: {type(error).__name__}: {error}",
            remedy="Correct task_kwargs in evals",
        ) from error


def _located(value: Any, job: dict[str, Any]) -> Any:
    for folder in (Path(job["benchmarks_path"]), Path(job["benchmarks_path"]) / OWN_FOLDER):
        if isinstance(value, str) and value and (folder / value).is_file():
            return str((folder / value).absolute())
    return value


def changed(spec: RunSpec, entry: RunEntry, job: dict[str, Any]) -> RunSpec:
    """Returns the run with limits and groups, by the rules of `helm-run`, and smooth scores of choices."""
    stops = [stop for stop in spec.adapter_spec.stop_sequences if stop]  # endpoints reject an empty stop
    adapter = replace(spec.adapter_spec, stop_sequences=stops)
    if job["limit"] is not None and adapter.max_eval_instances is None:
        adapter = replace(adapter, max_eval_instances=job["limit"])
    if adapter.max_train_instances == 0:
        adapter = replace(adapter, num_train_trials=1)
    elif job["num_train_trials"] is not None:
        adapter = replace(adapter, num_train_trials=job["num_train_trials"])
    if adapter.method in ADAPT_MULTIPLE_CHOICE_SEPARATE_METHODS:
        # Only for cutting prompts: requests have 0. vLLM needs room for a token behind an echo.
        adapter = replace(adapter, max_tokens=1)
    groups = list(entry.groups or [])
    place = str(Path(job["benchmarks_path"]).absolute()).replace(os.sep, "_") + "_"
    # No path of our files in the name.
    name = spec.name.replace(place, "") + (f",groups={'-'.join(sorted(groups))}" if groups else "")
    return with_smooth_scores(replace(spec, name=name, adapter_spec=adapter, groups=spec.groups + groups))


def labels(names: list[str]) -> list[str]:
    """Returns labels that distinguish the runs of a benchmark: the parts of their names that they do not share."""
    parts = [re.split("[:,]", name) for name in names]
    common = set.intersection(*map(set, parts))
    candidates = [".".join(part for part in own if part not in common) for own in parts]
    times = Counter(candidates)
    return [label if times[label] == 1 else f"{label or 'run'}.{place}" for place, label in enumerate(candidates, 1)]


if __name__ == "__main__":
    main(sys.argv[1:])
