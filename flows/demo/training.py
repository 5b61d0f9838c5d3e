"""The training demo: Levanter trains a tiny model, and lm-eval evaluates its checkpoints meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.console.live import live_view
from flows.console.running import SeriesResult, run_series
from flows.training import train_and_evaluate
from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.jobs.jobs import Command, JobRequest, create_environment
from resources.storage import storage
from tasks.evaluators.environments import LEVANTER, LM_EVAL
from tasks.prefect_server.progress import Event
from tasks.records.record import Record
from tasks.spec.training import TrainAndEvaluateConfig

RUN_NAME = "nano-llama"
BENCHMARKS = ("demo_facts", "demo_backwards")
_MAKER = Path(__file__).parent / "programs" / "make_training_demo.py"
_ENVIRONMENTS = (LEVANTER["cpu"], ENVIRONMENTS["vllm-cpu"], LM_EVAL)
_SEQUENCE_TOKENS = 128
_CONTEXT_TOKENS = 512


def prepare(folder: Path, *, steps: int, exports: int) -> TrainAndEvaluateConfig:
    """Builds the environments and writes texts and tokenizer unless they exist; returns the demo's configuration."""
    data = folder.absolute() / "data"
    with live_view() as show:
        for spec in _ENVIRONMENTS:
            ensure_environment(spec, on_progress=lambda line: show(Event(line)))
        if not (data / "reference" / "config.json").is_file():
            show(Event("writing texts of an invented world"))
            python = ensure_environment(LEVANTER["cpu"]).python
            job = current_client().submit(
                JobRequest(
                    name="make-training-demo",
                    entrypoint=Command(str(python), (str(_MAKER), "--output", str(data))),
                    resources=ResourceConfig(),
                    environment=create_environment(),
                )
            )
            job.wait()
    return demo_config(folder.absolute(), steps=steps, exports=exports)


def demo_config(folder: Path, *, steps: int, exports: int) -> TrainAndEvaluateConfig:
    """Returns the configuration: a Llama of half a million parameters, both bundled benchmarks for each export."""
    data = folder / "data"
    every = max(1, steps // exports)
    world = {"source": {"type": "url", "train_urls": [str(data / "texts.jsonl")]}}
    train_config: dict[str, Any] = {
        "data": {"tokenizer": str(data / "reference"), "components": {"world": world}},
        "model": {
            "type": "llama",
            "hidden_dim": 128,
            "intermediate_dim": 384,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 4,
            "max_seq_len": _CONTEXT_TOKENS,
            "gradient_checkpointing": False,
            "reference_checkpoint": str(data / "reference"),
        },
        "optimizer": {"type": "adam", "learning_rate": 3e-3, "warmup": 0.1},
        "trainer": {
            "tracker": {"type": "json_logger"},
            "mp": "f32",
            "num_train_steps": steps,
            "train_batch_size": 16,
            "checkpointer": {"save_interval": "1m", "keep": [{"every": steps}]},
            "log_jaxprs": False,
            "log_xla_hlo": False,
        },
        "train_seq_len": _SEQUENCE_TOKENS,
        "hf_save_steps": every,
    }
    pool = {
        "model": {"name": RUN_NAME, "engine_kwargs": {"max_model_len": _CONTEXT_TOKENS}},
        "resource_config": {"cpu": 2},
    }
    return TrainAndEvaluateConfig.model_validate(
        {
            "training": {
                "train_config": train_config,
                "output_path": str(folder / RUN_NAME),
                "resources": {"cpu": 2},
                "auto_build_caches": True,
            },
            "evaluations": [
                {
                    "evals": [{"name": name} for name in BENCHMARKS],
                    "evaluation_path": str(folder / "evaluations"),
                    "pool_config": pool,
                }
            ],
            "poll_seconds": 1.0,
        }
    )


def run_demo(config: TrainAndEvaluateConfig) -> SeriesResult:
    """Trains and evaluates; a finished training and existing records are reused."""
    return run_series(lambda: train_and_evaluate(config), config.asked()[0].evaluation_path, RUN_NAME)


def seconds_to_records(config: TrainAndEvaluateConfig, records: Sequence[Record]) -> str:
    """Returns the seconds between each checkpoint's last write and its record, as text."""
    lines = ["Seconds from a complete checkpoint to its record:"]
    for record in records:
        written = max((file.modified for file in storage.list_files(record.checkpoint.uri)), default=0.0)
        lines.append(f"  step {record.checkpoint.step}: {record.created.timestamp() - written:.1f}")
    return "\n".join(lines)
