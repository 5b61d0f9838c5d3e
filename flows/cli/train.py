"""`assay train-and-evaluate`: a training, with its checkpoints evaluated while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.gate import GateOptions, gate_of, write_summaries
from flows.cli.options.groups import flattened
from flows.console.console import ERR, OUT, Json
from resources.settings import set_process_environment_defaults


@flattened
def train_and_evaluate(
    config: Annotated[str, typer.Argument(help="YAML file with a TrainAndEvaluateConfig.")],
    gating: GateOptions,
    as_json: Json = False,
) -> None:
    """Train a model with Levanter and evaluate each checkpoint as soon as it is complete."""
    from flows.cli.evaluate import show_series
    from flows.console.running import run_series
    from flows.training import train_and_evaluate as flow
    from tasks.spec.loading import load_config
    from tasks.spec.training import TrainAndEvaluateConfig

    judged_by = gate_of(gating)
    training = load_config(config, TrainAndEvaluateConfig)
    first = training.asked()[0]
    result = run_series(
        lambda: flow(training, judged_by), evaluation_path=first.evaluation_path, run_name=first.run_name, console=ERR
    )
    write_summaries([result.verdict] if result.verdict else [], gating.summary)
    show_series(result, as_json=as_json)


def demo_train(
    folder: Annotated[Path, typer.Option(help="Folder for everything.")] = Path("demo-train"),
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 240,
    exports: Annotated[int, typer.Option(help="Checkpoints to evaluate.", min=1)] = 4,
    as_json: Json = False,
) -> None:
    """Train a tiny Llama with Levanter on this CPU while lm-eval evaluates its checkpoints."""
    home = (folder / "prefect").absolute()
    home.mkdir(parents=True, exist_ok=True)
    set_process_environment_defaults({"PREFECT_HOME": str(home)})
    from flows.cli.evaluate import show_series
    from flows.demo.training import prepare, run_demo, seconds_to_records

    config = prepare(folder, steps=steps, exports=exports, console=ERR)
    result = run_demo(config, console=ERR)
    show_series(result, as_json=as_json)
    if not as_json and result.evaluated:
        OUT.print(seconds_to_records(config, result.records), highlight=False, soft_wrap=True)
