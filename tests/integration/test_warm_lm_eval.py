"""lm-eval in forks of a shared process: the same numbers as in a separate process, cell after cell."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from fakes.engine import FakeEngine
from fakes.lm_eval import DEMO, Harness, make_config, make_model, samples, write_benchmark
from fakes.polling import eventually
from fakes.tokenizers import BOS, write_byte_tokenizer
from tasks.errors import UnknownBenchmark
from tasks.evaluators.harness import LOG_NAME, REFUSAL_NAME, verify_counts

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


def log_of(output: Path) -> str:
    return (output / LOG_NAME).read_text()


async def test_cells_from_forks_have_the_numbers_and_samples_of_a_process_of_their_own(
    tmp_path: Path, lm_eval: Harness
):
    plain, with_bos = (write_byte_tokenizer(tmp_path / f"tokenizer-{bos}", adds_bos=bos) for bos in (False, True))
    config = make_config(*DEMO)
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, plain)
        assert lm_eval.server is not None
        cold = Harness(lm_eval.python, lm_eval.client)
        both = await asyncio.gather(
            lm_eval.evaluate(model, config, tmp_path / "warm-1"), lm_eval.evaluate(model, config, tmp_path / "warm-2")
        )
        engine.bodies.clear()
        await lm_eval.evaluate(make_model(engine, with_bos), make_config(DEMO[1]), tmp_path / "bos")
        assert {json.loads(body)["prompt"][0][0] for body in engine.bodies} == {BOS}
        assert "threads run after preloading" not in eventually(lm_eval.client.attach(lm_eval.server.job_id).logs)
        expected = await cold.evaluate(model, config, tmp_path / "cold")
    verify_counts(expected)
    for folder in ("warm-1", "warm-2", "bos"):
        assert "no warm start" not in log_of(tmp_path / folder)
    assert both == [expected, expected]
    for folder in ("warm-1", "warm-2"):
        for benchmark in DEMO:
            assert samples(tmp_path / folder, benchmark) == samples(tmp_path / "cold", benchmark)


async def test_refusal_of_a_cell_in_a_fork_is_the_same_file(tmp_path: Path, lm_eval: Harness):
    config = make_config("no_such_benchmark")
    cold = Harness(lm_eval.python, lm_eval.client)
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        for name, harness in (("warm", lm_eval), ("cold", cold)):
            with pytest.raises(UnknownBenchmark):
                await harness.evaluate(model, config, tmp_path / name)
    assert "no warm start" not in log_of(tmp_path / "warm")
    assert (tmp_path / "warm" / REFUSAL_NAME).read_text() == (tmp_path / "cold" / REFUSAL_NAME).read_text()


async def test_cell_with_variables_missing_at_import_starts_cold_and_is_right(
    tmp_path: Path, lm_eval: Harness, monkeypatch: pytest.MonkeyPatch
):
    # lm-eval reads variables at import: with the server's values, a cell could be scored by other rules.
    monkeypatch.setenv("LMEVAL_OF_THIS_CELL", "1")
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        verify_counts(await lm_eval.evaluate(model, make_config(DEMO[1]), tmp_path / "cell"))
    log = log_of(tmp_path / "cell")
    assert "imported with other values of" in log and "LMEVAL_OF_THIS_CELL" in log


@pytest.mark.parametrize("warm", [False, True])
async def test_cell_uses_current_files_although_their_times_and_sizes_are_unchanged(
    tmp_path: Path, lm_eval: Harness, *, warm: bool
):
    code = "def part(doc):\n    return {{**doc, 'part': {0}}}\ndef parts(docs):\n    return docs.map(part)\n"
    code += "def score(doc, results):\n    return {{'acc': {0}}}\n"
    functions = {"process_docs": "!function utils.parts", "process_results": "!function utils.score"}
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    folder, harness = tmp_path / "benchmarks", lm_eval if warm else Harness(lm_eval.python, lm_eval.client)
    config = write_benchmark(folder, "mine", None, metric_list=metrics, **functions)
    described = folder / "mine.yaml"
    described.write_text(re.sub(r'"(!function [\w.]+)"', r"\1", described.read_text()))
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        for number in (1, 2):
            (folder / "mine.jsonl").write_text(json.dumps({"question": f"Which {number}?", "word": "me"}) + "\n")
            (folder / "utils.py").write_text(code.format(number))
            for name in ("mine.jsonl", "utils.py"):
                os.utime(folder / name, (1e9, 1e9))
            await harness.evaluate(model, config, tmp_path / str(number))
            [sample] = samples(tmp_path / str(number), "mine")
            assert sample["doc"] == {"question": f"Which {number}?", "word": "me", "part": number}
            assert sample["acc"] == number
