"""`assay evaluate`: benchmarks or a suite, asked of one checkpoint or of a run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from flows.cli.gate import GateFile, Summary, gate_of, show_verdict, write_summaries
from flows.console.console import ERR, OUT, Json, print_json


def evaluate(
    model: Annotated[str | None, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.")] = None,
    eval_: Annotated[list[str] | None, typer.Option("--eval", help="Benchmark or benchmark:shots; repeatable.")] = None,
    evaluator: Annotated[str | None, typer.Option(help="lm-eval (when left out), helm, alpaca-eval, levanter.")] = None,
    suite: Annotated[str | None, typer.Option(help="A suite by its name, or a YAML file; see assay suites.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="A part of the suite; repeatable.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with an EvaluationConfig, in place of options.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder for records, evaluations when left out.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in records and reports.")] = None,
    which: Annotated[str, typer.Option(help="all, latest or first.")] = "all",
    every: Annotated[int | None, typer.Option(help="Only steps that are multiples of this, and the last.")] = None,
    step: Annotated[list[int] | None, typer.Option("--step", help="Only this training step; repeatable.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for checkpoints that are being written.")] = 0.0,
    limit: Annotated[int | None, typer.Option(help="Questions per benchmark.")] = None,
    benchmarks: Annotated[str | None, typer.Option(help="Folder with benchmarks of your own (YAML).")] = None,
    base_url: Annotated[str | None, typer.Option(help="An endpoint that serves the checkpoint already.")] = None,
    served_name: Annotated[str | None, typer.Option(help="Its name there, where it is another one.")] = None,
    pool: Annotated[str | None, typer.Option(help="A pool that is kept up, by its name: see assay pool.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines side by side, 1 when left out.")] = None,
    cpu: Annotated[int | None, typer.Option(help="CPU cores per engine, 2 when left out.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of each engine, such as H100:2 or auto.")] = None,
    tpu: Annotated[str | None, typer.Option(help="TPU slice of each engine, such as v5litepod-8.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="Engine argument key=value; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    allow_code: Annotated[
        list[str] | None, typer.Option("--allow-code", help="A benchmark that may run code the model wrote.")
    ] = None,
    judge_url: Annotated[str | None, typer.Option(help="Endpoint of a judge; its own pool when left out.")] = None,
    judge_pool: Annotated[str | None, typer.Option(help="A pool that is kept up, as the judge.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="Name of the judge there.")] = None,
    judge_annotator: Annotated[str | None, typer.Option(help="How it is asked: AlpacaEval's configuration.")] = None,
    sinks: Annotated[str | None, typer.Option(help="YAML file with sinks, where results are announced.")] = None,
    on_work_pool: Annotated[
        bool, typer.Option("--on-work-pool", help="At the work pool of the best region, not here; waits for it.")
    ] = False,
    max_egress_usd: Annotated[float, typer.Option(help="What reading from another region may cost there.")] = 0.0,
    gate: GateFile = None,
    summary: Summary = None,
    as_json: Json = False,
) -> None:
    """Evaluate the checkpoints of a run that have no succeeded record yet."""
    from flows.cli.options import (
        EvaluationOptions,
        evaluation_from_file,
        evaluation_from_options,
        suite_request_from_options,
    )
    from flows.console.running import run_series
    from flows.series import evaluate_checkpoints
    from resources.errors import BadInput
    from tasks.spec.evaluation import CheckpointSelection
    from tasks.spec.loading import build_config

    judged_by = gate_of(gate, summary)
    options = EvaluationOptions(
        model=model,
        evals=tuple(eval_ or ()),
        evaluator=evaluator,
        suite=suite,
        only=tuple(only or ()),
        output=output,
        name=name,
        limit=limit,
        benchmarks=benchmarks,
        base_url=base_url,
        served_name=served_name,
        replicas=replicas,
        cpu=cpu,
        gpu=gpu,
        tpu=tpu,
        engine=tuple(engine or ()),
        chat=chat,
        pool=pool,
        allow_code=tuple(allow_code or ()),
        judge_url=judge_url,
        judge_pool=judge_pool,
        judge_model=judge_model,
        judge_annotator=judge_annotator,
        sinks=sinks,
    )
    selection = build_config(
        {"which": which, "every_n_steps": every, "steps": step or (), "wait_for_incomplete_seconds": wait},
        CheckpointSelection,
        source="the options",
    )
    there: dict[str, Any] = {"gate": judged_by, "max_egress_usd": max_egress_usd, "on_event": _tell}
    if on_work_pool and summary is not None:
        raise BadInput(
            expected="--summary where the gate is judged",
            found="--summary and --on-work-pool",
            remedy="leave --summary out; the verdict is an artifact of the flow run, and `assay gate` judges again",
        )
    if suite is not None and config is None:
        from flows.suites import evaluate_suite
        from tasks.spec.suites import load_suite

        request, chosen = suite_request_from_options(options), load_suite(suite)
        if on_work_pool:
            from flows.console.on_work_pool import send_suite

            show_series(send_suite(chosen, request, selection=selection, **there), as_json=as_json)
            return
        first = chosen.evaluations_of(request)[0]
        place = {"evaluation_path": first.evaluation_path, "run_name": first.run_name}
        result = run_series(lambda: evaluate_suite(chosen, request, selection, judged_by), **place, console=ERR)
    else:
        wanted = evaluation_from_options(options) if config is None else evaluation_from_file(config, options)
        if on_work_pool:
            from flows.console.on_work_pool import send_evaluation

            show_series(send_evaluation(wanted, selection, **there), as_json=as_json)
            return
        place = {"evaluation_path": wanted.evaluation_path, "run_name": wanted.run_name}
        result = run_series(lambda: evaluate_checkpoints(wanted, selection, judged_by), **place, console=ERR)
    write_summaries([result.verdict] if result.verdict else [], summary)
    show_series(result, as_json=as_json)


def _tell(line: str) -> None:
    ERR.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def show_series(result: Any, *, as_json: bool) -> None:
    """Prints what a series came to; raises its error afterwards, so that it decides the exit code."""
    from tasks.reports.page import results_rows, results_table
    from tasks.spec.names import how_many

    if as_json:
        print_json(
            {
                "evaluated": result.evaluated,
                "already_recorded": result.already_recorded,
                "report": result.report,
                "gate": result.verdict.as_dict() if result.verdict else None,
                "results": results_rows(result.records),
                "records": [json.loads(record.model_dump_json()) for record in result.records],
            }
        )
    else:
        if result.records:
            OUT.print(results_table(result.records))
        if result.evaluated == 0 and result.error is None:
            OUT.print(f"Nothing to evaluate: {how_many(result.already_recorded, 'cell')} recorded already.")
        else:
            OUT.print(f"Evaluated {result.evaluated}, already recorded {result.already_recorded}.", highlight=False)
        if result.report:
            OUT.print(f"Report: {result.report}", soft_wrap=True, highlight=False)
        if result.verdict is not None:
            show_verdict(result.verdict)
    if result.error is not None:
        raise result.error
