"""Benchmarks of every bundled set: generated data in their own layouts, lm-eval itself, and vLLM on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.benchmark_hub import ask, benchmarks_of_sets, layouts_of, of_each_shape, repositories, served_nano
from fakes.hub import running_hub
from resources.environments.environments import ensure_environment
from tasks.evaluators.environments import LM_EVAL
from tasks.spec.benchmark_sets import needs_of

AT_ONCE = 20


@pytest.mark.timeout(1800)
def test_a_task_of_every_shape_is_asked_answered_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = ensure_environment(LM_EVAL).python
    entries = benchmarks_of_sets()
    layouts = layouts_of(python, (entry.name for entry in entries))
    tasks = of_each_shape(entries, layouts, most_examples=2)
    data = repositories(layout for group in layouts.values() for layout in group)
    with served_nano(tmp_path) as model, running_hub(data) as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}.items():
            monkeypatch.setenv(name, value)
        for runs_code in (True, False):
            evals = [task for task in tasks if needs_of([task]).runs_code is runs_code]
            details = ask(model, evals, tmp_path / f"code-{runs_code}", python=python, questions=2)
            assert details.keys() == {task.metric_key for task in evals}
    assert details["gsm8k_2"].data == f"openai/gsm8k@{hub.commit('datasets/openai/gsm8k')}"


@pytest.mark.timeout(4 * 3600)
def test_every_benchmark_of_every_set_is_asked_answered_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = ensure_environment(LM_EVAL).python
    entries = [
        entry.model_copy(update={"task_alias": f"{entry.name}_{number}"})
        for number, entry in enumerate(benchmarks_of_sets())
    ]
    layouts = layouts_of(python, (entry.name for entry in entries))
    data = repositories(layout for group in layouts.values() for layout in group)
    failed: dict[str, str] = {}
    with served_nano(tmp_path) as model, running_hub(data) as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}.items():
            monkeypatch.setenv(name, value)
        for start in range(0, len(entries), AT_ONCE):
            batch = entries[start : start + AT_ONCE]
            try:
                ask(model, batch, tmp_path / f"cell-{start}", python=python, questions=2)
            except Exception as error:  # noqa: BLE001 - all failures are listed at the end
                failed[", ".join(entry.name for entry in batch)] = str(error)
            print(f"{min(start + AT_ONCE, len(entries))} of {len(entries)} asked", flush=True)
    assert not failed
