"""Folders as training frameworks write them: run, steps, labels, series, and words on folders that are left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fakes.cells import of_cell
from fakes.cli import invoke
from fakes.layouts import DESCRIBED, OTHER, THIRD, WHOLE, write_layout
from fakes.records import make_record
from tasks.checkpoints.discovery import discover, discover_checkpoint, find_checkpoints, with_pinned_model
from tasks.checkpoints.run_snapshot import listing_of, snapshot_run
from tasks.records.details import cell_place
from tasks.records.record import read_record, write_record
from tasks.running.cells import plan_cells
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig


class Row(NamedTuple):
    """The content of folders below the run (N: 100 and 200; a list names files); the names of its complete checkpoints
    without the run's; words on incomplete checkpoints; and words on folders that are left out."""

    folders: Mapping[str, str | tuple[str, ...]]
    complete: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps_from: str | None = None


ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json")
DCP = ("model_and_optim/.metadata", "model_and_optim/__0_0.distcp", ".metadata.json", "train/rank0.pt")
ZERO = ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt")

ROWS: dict[str, Row] = {
    "1 transformers": Row({"checkpoint-N": WHOLE}, "100 200"),
    "2 final save": Row({"checkpoint-N": WHOLE, ".": OTHER}, "100 200 final"),
    "2 final save with its step": Row(
        {"checkpoint-N": WHOLE, ".": OTHER, "trainer_state.json": '{"global_step": 250}'}, "100 200 250"
    ),
    "2 step of the final save in the last checkpoint": Row(
        {"checkpoint-N": WHOLE, ".": OTHER, "checkpoint-200/trainer_state.json": '{"global_step": 200}'},
        "100 200 final",
    ),
    "2 best model saved with the last step": Row(
        {"checkpoint-N": WHOLE, ".": OTHER, "trainer_state.json": '{"global_step": 200}'}, "100 200 final"
    ),
    "3 final save equal": Row(
        {"checkpoint-N": WHOLE, ".": "whole 200"}, "100 200", notes=("its content is that of {run}/checkpoint-200",)
    ),
    "4 temporary": Row({"checkpoint-100": WHOLE, "tmp-checkpoint-200": WHOLE}, "100", notes=("still writing",)),
    "5 merged next to them": Row({"checkpoint-N": WHOLE, "merged": OTHER}, "100 200 merged"),
    "6 merged inside": Row({"checkpoint-N/merged": WHOLE, "checkpoint-N": ADAPTER}, "100 200", notes=("an export of",)),
    "7 ms-swift": Row(
        {"v0-2024/checkpoint-N": WHOLE, "v1-2025/checkpoint-N": WHOLE},
        "v0-2024-100 v1-2025-100 v0-2024-200 v1-2025-200",
    ),
    "8 ms-swift merges": Row({"v0-2024/checkpoint-N-merged": WHOLE}, "100 200"),
    "9 torchtune": Row({"epoch_0": WHOLE, "epoch_1": OTHER}, "epoch-0 epoch-1", notes=("--steps-from 'epoch'",)),
    "9 torchtune by epoch": Row({"epoch_0": WHOLE, "epoch_1": OTHER}, "0 1", steps_from="epoch"),
    "10 torchtitan": Row({"checkpoint/step-N": WHOLE}, "100 200"),
    "11 litgpt": Row({"step-00000100": WHOLE}, "100"),
    "12 OLMo": Row({"stepN-unsharded-hf": WHOLE, "latest-unsharded-hf": "whole 200"}, "100 200"),
    "12 OLMo, later": Row({"stepN-unsharded-hf": WHOLE, "latest-unsharded-hf": OTHER}, "100 200 latest"),
    "13 OLMo-core": Row({"stepN": DCP, "stepN-hf": WHOLE}, "100 200"),
    "14 OLMo-core alone": Row({"stepN": DCP}, "", ("convert_checkpoint_to_hf.py -i {run}/step100 -o",)),
    "15 open-instruct": Row({"out": OTHER, "out_checkpoints/step_N": WHOLE}, "100 200 out"),
    "16 llm-foundry": Row({"huggingface/baN": WHOLE}, "100 200"),
    "17 NeMo 2": Row({"hf/llama--val_loss=1.20-step=N-consumed_samples=800.0": WHOLE}, "100 200"),
    "18 NeMo-RL": Row(
        {
            "step_N/policy/weights/model/consolidated": "no tokenizer",
            "step_N/policy/tokenizer": ("tokenizer.json", "tokenizer_config.json"),
            "step_N/policy/optimizer": (".metadata", "__0_0.distcp"),
        },
        "100 200",
    ),
    "19 NeMo-RL, written": Row(
        {"step_100/policy/hf": WHOLE, "tmp_step_200/policy/hf": WHOLE}, "100", notes=("still writing",)
    ),
    "20 Megatron-Bridge": Row(
        {"iter_0000100/hf": WHOLE, "iter_0000200/hf": WHOLE, "latest_checkpointed_iteration.txt": "200"}, "100 200"
    ),
    "21 DeepSpeed": Row({"global_stepN": WHOLE}, "100 200"),
    "22 DeepSpeed inside": Row({"checkpoint-N": WHOLE, "checkpoint-N/global_stepN": ZERO}, "100 200"),
    "23 ZeRO-3": Row(
        {"checkpoint-N": (*DESCRIBED, "zero_to_fp32.py", "latest"), "checkpoint-N/global_stepN": ZERO},
        "",
        ("python -m deepspeed.utils.zero_to_fp32 {run}/checkpoint-100 {run}/hf/checkpoint-100 --tag global_step100",),
    ),
    "24 GPT-NeoX": Row(
        {"global_stepN": ("layer_00-model_00-model_states.pt", "mp_rank_00_model_states.pt")},
        "",
        ("convert_neox_to_hf.py --input_dir {run}/global_step100",),
    ),
    "25 accelerate": Row({"checkpoint_0": WHOLE, "checkpoint_1": OTHER}, "0 1", notes=("count",)),
    "26 verl": Row(
        {"global_step_N/actor/huggingface": WHOLE, "global_step_N/critic/huggingface": OTHER},
        "100 200",
        notes=("critic",),
    ),
    "27 verl, default": Row(
        {
            "global_step_N/actor/huggingface": DESCRIBED,
            "global_step_N/actor": ("model_world_size_8_rank_0.pt", "optim_world_size_8_rank_0.pt"),
            "global_step_N": ("data.pt",),
        },
        "",
        ("python -m verl.model_merger merge --backend fsdp --local_dir {run}/global_step_100/actor",),
    ),
    "28 verl, merged": Row({"global_step_N/actor/merged_hf": WHOLE}, "100 200"),
    "29 OpenRLHF": Row({"global_stepN_hf": WHOLE, "_actor/global_step100": (ZERO[1],)}, "100 200"),
    "30 prime-rl": Row(
        {"weights/step_N": WHOLE, "weights/step_100/STABLE": "", "weights/step_200/STABLE": ""}, "100 200"
    ),
    "31 miles": Row({"hf/N": WHOLE}, "100 200"),
    "32 slime": Row({"hf/rollout_N": WHOLE}, "100 200"),
    "33 nanotron": Row({"checkpoints/N": WHOLE}, "100 200"),
    "34 MaxText": Row(
        {"100/items": ("_METADATA", "_sharding", "manifest.ocdbt", "d/0")},
        "",
        ("maxtext.checkpoint_conversion.to_huggingface", "load_parameters_path={run}/100/items"),
    ),
    "35 Levanter": Row({"hf/run-a/step-N": WHOLE}, "100 200"),
    "36 Pythia": Row({"stepN": WHOLE}, "100 200"),
    "37 OLMo 2": Row(
        {
            "stage1-step100-tokens1B": WHOLE,
            "stage1-step200-tokens2B": WHOLE,
            "stage2-ingredient1-step100-tokens1B": OTHER,
        },
        "stage1-100 stage2-ingredient1-100 stage1-200",
    ),
    "38 SmolLM": Row({"stage1-step-N": WHOLE, "stage2-step-100": OTHER}, "stage1-100 stage2-100 stage1-200"),
    "39 LLM360": Row({"ckpt_N": WHOLE}, "100 200"),
    "40 users": Row({"step-N-consolidated": WHOLE}, "100 200"),
    "40 users, hf": Row({"step_N_hf": WHOLE}, "100 200"),
    "40 users, iteration": Row({"iteration_N": WHOLE}, "100 200"),
    "40 users, equal sign": Row({"step=N": WHOLE}, "100 200"),
    "41 labels": Row(
        {"checkpoint-100": WHOLE, "checkpoint-best": "whole 100", "last": OTHER, "final": THIRD}, "100 last final"
    ),
    "42 two of a step": Row(
        {"step-100": WHOLE, "checkpoint-100": OTHER}, "100 100", notes=("different checkpoints called my-run-100",)
    ),
    "43 padded": Row(
        {"step-100": WHOLE, "step-000100": WHOLE}, "100", notes=("step-000100: its content is that of {run}/step-100",)
    ),
    "44 EMA": Row({"checkpoint-100": WHOLE, "checkpoint-100/ema": OTHER}, "100 ema-100"),
    "45 value": Row({"step_N/policy": WHOLE, "step_N/value": OTHER}, "100 200", notes=("value",)),
    "46 tokenizer above": Row(
        {".": ("tokenizer.json", "tokenizer_config.json"), "checkpoint-N": "no tokenizer"}, "100 200"
    ),
    "47 no tokenizer": Row({"checkpoint-N": "no tokenizer"}, "", ("--tokenizer",)),
    "48 PEFT": Row({"checkpoint-N": "adapter"}, "100 200"),
    "49 transformers 4": Row({"checkpoint-N": (*DESCRIBED, "pytorch_model.bin")}, "100 200"),
    "50 both formats": Row({"checkpoint-N": WHOLE, "checkpoint-100/pytorch_model.bin": "{}"}, "100 200"),
    "51 index and single file": Row({"checkpoint-N": "shards", "checkpoint-N/model.safetensors": "{}"}, "100 200"),
    "52 Mistral": Row({"checkpoint-N": ("consolidated.safetensors", "params.json", "tekken.json")}, "", ("Mistral",)),
    "53 adapter next to weights": Row({"epoch_0": WHOLE, "epoch_0/adapter_model.safetensors": "{}"}, "epoch-0"),
    "54 GGUF": Row({"step-100": ("model.gguf",)}, "", ("GGUF",)),
    "54 litgpt": Row(
        {"step-00000100": ("lit_model.pth", "model_config.yaml")},
        "",
        ("litgpt convert_from_litgpt {run}/step-00000100",),
    ),
    "54 composer": Row(
        {".": ("ep0-ba1000-rank0.pt",)}, "", ("convert_composer_to_hf.py --composer_path {run}/ep0-ba1000-rank0.pt",)
    ),
    "54 Lightning": Row({"checkpoints": ("epoch=0-step=100.ckpt",)}, "", ("Lightning",)),
    "55 FSDP": Row(
        {"checkpoint-N": (*DESCRIBED, "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp")}, "100 200"
    ),
}
XFAIL: dict[str, str] = {}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=XFAIL[name])] if name in XFAIL else [])
        for name in ROWS
    ],
)
def test_folder_of_a_trainer_has_the_run_steps_and_labels_that_it_means(tmp_path: Path, row: str) -> None:
    expected, run = ROWS[row], tmp_path / "my-run"
    write_layout(run, expected.folders)
    notes: list[str] = []
    listed = find_checkpoints(str(run), steps_from=expected.steps_from, note=notes.append)
    names = [checkpoint.name for checkpoint in listed if checkpoint.complete]
    assert " ".join(name.removeprefix("my-run-") for name in names) == expected.complete, listed
    words = "\n".join(problem for checkpoint in listed for problem in checkpoint.problems)
    assert bool(words) == bool(expected.problems), words
    for problem in expected.problems:
        assert problem.format(run=run) in words
    for note in expected.notes:
        assert note.format(run=run) in "\n".join(notes)
    for _ in range(2):
        seen = snapshot_run(str(run), steps_from=expected.steps_from)
        assert [(each.uri, each.name, each.label, each.series, each.problems) for each in seen] == [
            (each.uri, each.name, each.label, each.series, each.problems) for each in listed
        ]
        listings = {each.uri: listing_of(each) for each in listed if each.complete}
        assert {each.uri: each.listing for each in seen if each.complete} == listings


def evaluation(run: Path, output: Path, **more: Any) -> EvaluationConfig:
    content = {"model_path": str(run), "evaluation_path": str(output), "evals": [{"name": "demo_facts"}], **more}
    return EvaluationConfig.model_validate({**content, "base_url": "http://127.0.0.1:9/v1"})


@pytest.mark.parametrize("former", [("my-run", 100), ("checkpoint-100-merged", 0)])
def test_record_under_a_former_name_is_found_by_its_digest(tmp_path: Path, former: tuple[str, int]) -> None:
    run = tmp_path / "my-run"
    write_layout(run, {"v0-2024/checkpoint-100-merged": WHOLE, "v1-2025/checkpoint-100-merged": OTHER})
    selection = CheckpointSelection(series="v0-2024")
    config = with_pinned_model(evaluation(run, tmp_path / "out"), "v0-2024")
    [cell] = plan_cells.fn([config], discover.fn(str(run), selection))
    assert not cell.done
    before = cell.reference.model_copy(update={"run": former[0], "step": former[1], "name": f"{former[0]}-100"})
    place = cell_place(before, config.evaluator.name, evaluation_hash=cell.evaluation_hash, shown="demo_facts")
    written = make_record(**{**of_cell(cell), "checkpoint": before})
    write_record(str(tmp_path / "out" / place), written)

    [again] = plan_cells.fn([config], discover.fn(str(run), selection))
    assert again.done
    record = read_record(cell.uri)
    assert record is not None and record.checkpoint == cell.reference and record.benchmarks == written.benchmarks
    others = discover.fn(str(run), CheckpointSelection(series="v1-2025"))
    [other] = plan_cells.fn([with_pinned_model(evaluation(run, tmp_path / "out"), "v1-2025")], others)
    assert not other.done


@pytest.mark.parametrize("expression", ["step", r"(step)-(\d+)", "step-("])
def test_expression_without_a_single_group_is_refused(tmp_path: Path, expression: str) -> None:
    refused = invoke(["checkpoints", tmp_path, "--steps-from", expression])
    assert refused.exit_code == 3 and "group" in str(refused.exception).replace("unterminated subpattern", "group")


def test_expression_names_the_steps_and_leaves_other_folders_out(tmp_path: Path) -> None:
    write_layout(tmp_path / "my-run", {**ROWS["37 OLMo 2"].folders, "checkpoint-7": THIRD, "final": "whole 9"})
    notes: list[str] = []
    listed = find_checkpoints(str(tmp_path / "my-run"), steps_from="tokens", note=notes.append)
    assert [(each.series, each.step) for each in listed if each.label is None] == [
        ("stage1", 10**9),
        ("stage2-ingredient1", 10**9),
        ("stage1", 2 * 10**9),
    ]
    assert [each.label for each in listed if each.label] == ["final"]
    assert "checkpoint-7: no match" in notes[0]


def test_folders_without_steps_are_said_with_the_option_to_add(tmp_path: Path) -> None:
    write_layout(tmp_path / "my-run", {"llama-100-sft": WHOLE, "llama-200-sft": OTHER})
    result = invoke(["checkpoints", tmp_path / "my-run"])
    assert r"--steps-from 'llama-(\d+)-sft'" in result.output.replace("\n", " ")
    again = invoke(["checkpoints", tmp_path / "my-run", "--steps-from", r"llama-(\d+)-sft", "--json"])
    assert [each["step"] for each in json.loads(again.stdout)] == [100, 200]


@pytest.mark.parametrize(
    ("selection", "steps"),
    [({"which": "latest"}, [200]), ({"which": "first"}, [100]), ({"every_n_steps": 150}, [200]), ({}, [100, 200, 0])],
)
def test_rules_by_number_take_no_label(tmp_path: Path, selection: dict[str, Any], steps: list[int]) -> None:
    write_layout(tmp_path / "my-run", ROWS["2 final save"].folders)
    run = str(tmp_path / "my-run")
    taken = discover.fn(run, CheckpointSelection.model_validate(selection))
    assert [checkpoint.step for checkpoint in taken] == steps
    assert discover_checkpoint.fn(run, latest=True).step == 200


def test_results_of_steps_among_checkpoints_are_no_series(tmp_path: Path) -> None:
    write_layout(tmp_path / "my-run", {"v0-2024/checkpoint-N": WHOLE, "results/step-100": ("results.json",)})
    names = [checkpoint.name for checkpoint in find_checkpoints(str(tmp_path / "my-run")) if checkpoint.complete]
    assert names == ["my-run-100", "my-run-200"]


def test_incomplete_double_of_a_step_is_not_waited_for(tmp_path: Path) -> None:
    write_layout(tmp_path / "my-run", {"step-100": WHOLE, "checkpoint-100": DESCRIBED})
    selection = CheckpointSelection(wait_for_incomplete_seconds=60)
    [taken] = discover.fn(str(tmp_path / "my-run"), selection, sleep=lambda _: pytest.fail("waited"))
    assert taken.uri.endswith("/step-100")
