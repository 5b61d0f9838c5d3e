"""Evaluates checkpoints with Levanter's model code, with the interpreter of the levanter environment.

    python run_levanter.py [<job file> ...]

Without arguments it reads paths of job files, separated by newlines, from standard input, works in the folder of each,
prints a line `evaluated PATH` after each, and ends when standard input closes. Compiled code serves all checkpoints of
an architecture; the first failure ends the program. Also a program for `fork_server.py`: `preload` imports, with
--built-in reads lm-eval's benchmarks. Benchmarks, plan, tokens and results are those of `run_lm_eval.py`, without
generation.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # -I leaves it out
sys.path += [str(Path(__file__).parents[2] / "lm_eval" / "programs"), str(Path(__file__).parents[2] / "programs")]
import jax
from levanter_model import load
from levanter_scoring import FOLDER, Journal, LevanterLM
from lm_eval import simple_evaluate
from lm_eval.api.task import Task
from lm_eval.loggers import EvaluationTracker
from lm_eval.utils import setup_logging
from lm_eval_index import preload_for, use_remembered_index
from lm_eval_loading import check_tasks, leaves, load_benchmarks, task_manager
from lm_eval_prompts import Questions, groups_in, means, save_results
from lm_eval_scores import weigh_in_groups
from refusals import HUB_VARIABLES, Refused, no_chat_template, refusals_into, write_json

READ_AT_IMPORT = (*HUB_VARIABLES, "DISABLE_MULTIPROC", "JAX_", "LIBTPU_", "LMEVAL_", "XLA_")
"""Prefixes of variables that a fork server must have been started with, too."""
LATE_MODULES = ("datasets.packaged_modules.json.json", "levanter.models.llama", "transformers.tokenization_utils_fast")
FACTS_NAME = "levanter.json"
ASKED_NAME = "asked.json"
MOST_COMPILED_BYTES = 2**30
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""JAX's platforms by the device kinds of `resource_config`."""


def preload(arguments: list[str]) -> None:
    """Imports late modules. JAX starts its threads with the first computation, which is after the fork."""
    preload_for(arguments, LATE_MODULES)


def main(arguments: list[str]) -> None:
    """Evaluates each job in its own folder."""
    setup_logging(logging.INFO)
    use_remembered_index()
    for name in arguments or asked():
        path = Path(name).absolute()
        os.chdir(path.parent)
        job = json.loads(path.read_text())
        with refusals_into(Path(job["output"])):
            evaluate(job)
        gc.collect()  # frees memory for the next model
        print(f"evaluated {name}", flush=True)


def asked() -> Iterator[str]:
    """Yields lines of standard input when they are needed; ends this process as soon as standard input closes."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        rest = b""
        while block := os.read(0, 65536):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                lines.put(os.fsdecode(line))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def evaluate(job: dict[str, Any]) -> None:
    """Evaluates a job, and writes results and samples below `job["output"]`."""
    output = Path(job["output"])
    benchmarks = load_benchmarks(job, task_manager(job, {}))
    tasks = {key: leaves(items) for key, items in benchmarks.items()}
    _check_kinds(tasks)
    check_tasks(job, tasks, {"max_length": job["max_length"]})
    devices = _use_devices(job)
    model = load(job["checkpoint"], max_length=job["max_length"], precision=job["precision"], rows=job["rows"])
    if job["apply_chat_template"] and not model.tokenizer.chat_template:
        raise no_chat_template(job["checkpoint"]["reference"])
    facts = {
        "versions": {"levanter": version("marin-levanter"), "jax": version("jax")},
        "devices": sorted({device.device_kind for device in devices}),
        "precision": model.precision,
        "max_length": model.max_length,
        "parameters": model.parameters,
    }
    journal = Journal(Path(FOLDER), json.dumps(facts, sort_keys=True))
    lm = LevanterLM(model, ", ".join(tasks), journal)
    on_settled = partial(weigh_in_groups, groups_in(benchmarks))
    Questions(job, tasks, lm, model.tokenizer, output=output, on_settled=on_settled)
    tracker = EvaluationTracker(output_path=str(output / job["results_folder"]))
    evaluate_tasks: Any = simple_evaluate  # its decorator hides its arguments
    with model.mesh():
        results = evaluate_tasks(
            model=lm,
            model_args={"model": job["checkpoint"]["name"]},
            tasks=[part for items in benchmarks.values() for part in items],
            limit=job["limit"],
            log_samples=True,
            evaluation_tracker=tracker,
            apply_chat_template=job["apply_chat_template"],
            fewshot_as_multiturn=job["apply_chat_template"],
            confirm_run_unsafe_code=True,  # forbidden code was refused before
        )
    write_json(output / FACTS_NAME, {**facts, "requests_scored_before": journal.known})
    write_json(output / ASKED_NAME, {"asking": lm.asking, "groups": means(benchmarks)})
    save_results(results, tracker)


def _check_kinds(tasks: dict[str, list[Task]]) -> None:
    writing = [key for key, items in tasks.items() if any(task.OUTPUT_TYPE == "generate_until" for task in items)]
    if writing:
        raise Refused(
            expected="benchmarks that compare log-probabilities, which is all that Levanter evaluates",
            found=f"{', '.join(writing)}, which lets the model write",
            remedy="Send generation to the endpoint: evaluate it with lm_evaluation_harness",
        )


def _use_devices(job: dict[str, Any]) -> list[Any]:
    jax.config.update("jax_platforms", PLATFORMS[job["device"]])
    jax.config.update("jax_compilation_cache_dir", job["compiled"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # 68 small programs in a cell take 2 s
    jax.config.update("jax_compilation_cache_max_size", MOST_COMPILED_BYTES)
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        return jax.devices()
    except RuntimeError as error:
        raise Refused(
            expected=f"a {job['device'].upper()} for JAX {jax.__version__}, since resource_config asks for it",
            found=str(error).splitlines()[0],
            remedy="Evaluate on a machine with this device, in an environment with JAX built for it, or ask for a CPU",
        ) from error


if __name__ == "__main__":
    main(sys.argv[1:])
