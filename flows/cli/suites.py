"""The commands about suites: `assay suites` and `assay stage`."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Column, Table

from flows.console.console import OUT, Json, note, print_json, say, table_of
from resources.environments.environments import ensure_environment
from resources.errors import BadInput
from tasks.errors import UnknownBenchmark
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.evaluator import evaluator_of
from tasks.evaluators.lm_eval.evaluator import listing, own_benchmarks
from tasks.spec.benchmark_sets import benchmark_sets, bundled_names
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import JudgedOptions, LmEvalBenchmarkOptions
from tasks.spec.loading import build_config
from tasks.spec.names import how_many
from tasks.spec.suites import Suite, SuiteEvaluation, built_in_suites, load_suite


def suites(
    name: Annotated[str | None, Parameter(help="A suite by its name, or a YAML file, to be shown whole.")] = None,
    /,
    *,
    sets: bool = False,
    check: bool = False,
    benchmarks: str | None = None,
    as_json: Json = False,
) -> None:
    """Show the suites, their benchmarks, and their requirements.

    Args:
        sets: Show the named sets of benchmarks instead.
        check: Look every benchmark up, as its harness would.
        benchmarks: Folder with benchmarks of your own, for --check.
    """
    if sets:
        _show_sets(as_json=as_json)
        return
    shown = [load_suite(name)] if name is not None else list(built_in_suites().values())
    if check:
        checked = _check(shown, benchmarks)
        known = f"{how_many(checked, 'benchmark')} {'is' if checked == 1 else 'are'} known"
        note(f"{known} to the harnesses.")
    elif benchmarks is not None:
        raise BadInput(expected="--check with --benchmarks", found="none", remedy="add it, or leave --benchmarks out")
    if as_json:
        contents = [
            {
                **suite.model_dump(mode="json", exclude={"evaluations", "extends"}),
                "evaluations": [
                    {**evaluation.model_dump(mode="json", exclude_defaults=True), "needs": _needs(evaluation)}
                    for evaluation in suite.evaluations
                ],
            }
            for suite in shown
        ]
        print_json(contents if name is None else contents[0])
    elif name is None:
        OUT.print(_suites_table(shown))
    else:
        OUT.print(shown[0].description, highlight=False)
        OUT.print(_evaluations_table(shown[0]))
        say(*dict.fromkeys(line for evaluation in shown[0].evaluations for line in evaluation.needs.access))


def stage(
    *,
    suite: tuple[str, ...] = (),
    model: tuple[str, ...] = (),
    revision: tuple[str, ...] = (),
    benchmarks: str | None = None,
    texts: str | None = None,
    target: str | None = None,
    source: Annotated[str | None, Parameter("--from")] = None,
    refresh: bool = False,
    prove: Annotated[bool, Parameter(negative="--no-prove")] = True,
    as_json: Json = False,
) -> None:
    """Stage data sets, texts and tokenizers for workers without access to the hub (ASSAY_OFFLINE=1).

    Args:
        suite: Suite or YAML file; repeatable.
        model: Tokenizer on the hub, owner/name[@revision]; repeatable.
        revision: Data set and commit, owner/name=commit, or address=SHA-256; repeatable.
        benchmarks: Folder with benchmarks of your own (YAML).
        texts: Folder or address to read texts from, such as a mirror.
        target: Shared copy to bring up to date: a folder, gs://, s3://.
        source: Shared copy to fill this machine's cache from.
        refresh: Fetch the newest revision of what is there, too.
        prove: Load everything once more without a network.
    """
    from flows.staging import StagingRequest, staged_by  # with Prefect, which takes seconds

    content = {
        "suites": suite,
        "tokenizers": model,
        "revisions": dict(_pair(text) for text in revision),
        "benchmarks_path": benchmarks,
        "texts_from": texts,
        "target": target,
        "fill_from": source,
        "refresh": refresh,
        "prove": prove,
    }
    staged = staged_by(build_config(content, StagingRequest, source="the options"), on_event=note)
    if as_json:
        print_json(staged)
    else:
        OUT.print(_staged_table(staged))


def _check(shown: list[Suite], benchmarks: str | None) -> int:
    evaluations = [(suite, evaluation) for suite in shown for evaluation in suite.evaluations]
    _check_lm_eval(
        [(suite, evaluation) for suite, evaluation in evaluations if not _checks_itself(evaluation)], benchmarks
    )
    for evaluation in (evaluation for _, evaluation in evaluations if _checks_itself(evaluation)):
        config = EvaluationConfig(
            model_path="unasked",
            base_url="http://unasked/v1",
            evaluator=evaluation.evaluator,
            evals=evaluation.evals,
            benchmarks_path=benchmarks,
        )
        evaluator = evaluator_of(config)
        evaluator.check(config, ensure_environment(evaluator.environment(config)).python)
    return len({(evaluation.evaluator.name, task.name) for _, evaluation in evaluations for task in evaluation.evals})


def _checks_itself(evaluation: SuiteEvaluation) -> bool:
    return not isinstance(evaluation.evaluator, LmEvalBenchmarkOptions)


def _check_lm_eval(evaluations: list[tuple[Suite, SuiteEvaluation]], benchmarks: str | None) -> None:
    if not evaluations:
        return
    known = set(listing(ensure_environment(LM_EVAL).python).benchmarks)
    if benchmarks is None:
        known |= bundled_names()
    else:
        asked = {"model_path": "unasked", "base_url": "http://unasked/v1", "evals": evaluations[0][1].evals}
        known |= own_benchmarks(EvaluationConfig(**asked, benchmarks_path=benchmarks)).names
    missing = {
        task.name: suite.name
        for suite, evaluation in evaluations
        for task in evaluation.evals
        if task.name not in known
    }
    if missing:
        near = {name: difflib.get_close_matches(name, known, n=2) for name in missing}
        raise UnknownBenchmark(
            expected="benchmarks that lm-eval knows" + (f", or in {benchmarks}" if benchmarks else ""),
            found="; ".join(
                f"{name} of {suite}" + (f", did you mean {' or '.join(near[name])}?" if near[name] else "")
                for name, suite in missing.items()
            ),
            remedy="correct the names in the suite, or leave out benchmarks that lm-eval has dropped",
        )


def _data_of(evaluation: SuiteEvaluation) -> str:
    if evaluation.texts:
        return f"assay stage ({evaluation.texts})"
    if all(task.name in bundled_names() for task in evaluation.evals):
        return "with Assay"
    return {"helm": "HELM's own", "inspect_ai": "its tasks'"}.get(evaluation.evaluator.name, "hub")


def _needs(evaluation: SuiteEvaluation) -> dict[str, Any]:
    needs = evaluation.needs
    return {
        "fewshot": needs.fewshot,
        "prompt_logprobs": needs.prompt_logprobs,
        "generates": needs.generates,
        "runs_code": needs.runs_code,
        "chat_template": bool(evaluation.apply_chat_template),
        "judge": isinstance(evaluation.evaluator, JudgedOptions) and evaluation.evaluator.judge is not None,
        "data": _data_of(evaluation),
        "access": list(needs.access),
    }


def _words(needs: dict[str, Any]) -> str:
    words = {
        "examples": needs["fewshot"] > 0,
        "prompt log-probabilities": needs["prompt_logprobs"],
        "runs code": needs["runs_code"],
        "chat template": needs["chat_template"],
        "judge": needs["judge"],
        "keys or forms": bool(needs["access"]),
    }
    return ", ".join(word if is_needed else f"{word}?" for word, is_needed in words.items() if is_needed is not False)


def _suites_table(shown: list[Suite]) -> Table:
    rows: list[tuple[str, ...]] = []
    for suite in shown:
        needs = dict.fromkeys(
            word for evaluation in suite.evaluations for word in _words(_needs(evaluation)).split(", ") if word
        )
        number = sum(len(evaluation.evals) for evaluation in suite.evaluations)
        rows.append((suite.name, suite.description, str(len(suite.evaluations)), str(number), ", ".join(needs)))
    return table_of(Column("Suite", no_wrap=True), "For", "Parts", "Asks", "Needs", rows=rows)  # names are copied


def _evaluations_table(suite: Suite) -> Table:
    rows: list[tuple[str, ...]] = []
    for evaluation in suite.evaluations:
        benchmarks = ", ".join(
            task.metric_key if task.num_fewshot is None else f"{task.metric_key} ({task.num_fewshot})"
            for task in evaluation.evals
        )
        needs = _needs(evaluation)
        rows.append((evaluation.label, evaluation.evaluator.title, benchmarks, _words(needs), needs["data"]))
    return table_of(Column("Label", no_wrap=True), "Evaluator", "Benchmarks", "Needs", "Data", rows=rows)


def _show_sets(*, as_json: bool) -> None:
    sets = benchmark_sets()
    if as_json:
        print_json({name: benchmark_set.model_dump(mode="json") for name, benchmark_set in sets.items()})
        return
    rows = []
    for name, benchmark_set in sets.items():
        left_out = [f"without {benchmark}: {why}" for benchmark, why in benchmark_set.left_out.items()]
        notes = "\n".join([*([benchmark_set.note] if benchmark_set.note else []), *left_out])
        rows.append((name, str(len(benchmark_set.evals)), benchmark_set.about, notes))
    OUT.print(table_of("Set", "Benchmarks", "For", "Notes", rows=rows))


def _staged_table(staged: dict[str, Any]) -> Table:
    rows: list[tuple[str, str, str]] = []
    for part in ("datasets", "files_of_datasets", "tokenizers"):
        for name, entry in staged.get(part, {}).items():
            rows.append((name, entry["revision"][:12], f"{entry['bytes']:,}"))
    for name, entry in staged.get("texts", {}).items():
        size = sum(file["bytes"] for file in entry["files"].values())
        rows.append((name, entry["revision"][:12], f"{size:,}"))
    for name, entry in staged.get("scenarios", {}).items():
        digests = ", ".join(address["sha256"][:12] for address in entry["addresses"].values())
        rows.append((f"HELM's {name}", digests, f"{entry['bytes']:,}"))
    return table_of("Staged", "Revision", "Bytes", rows=rows)


def _pair(text: str) -> tuple[str, str]:
    name, separator, commit = text.rpartition("=")  # an address may contain = itself
    if not (separator and name and commit):
        raise BadInput(
            expected="--revision owner/name=commit",
            found=f"--revision {text}",
            remedy="for example --revision cais/mmlu=main",
        )
    return name, commit
