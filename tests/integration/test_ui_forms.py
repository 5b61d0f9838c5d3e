"""Flows started from Prefect's UI: the run forms of the deployments, filled by hand in a real Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prefect import Flow
from prefect.deployments.runner import RunnerDeployment

from fakes.browser import Page, browser
from fakes.polling import eventually
from fakes.prefect_server import NO_SERVICES, start_prefect_server, used_here
from fakes.processes import end, free_port
from flows.evaluation import evaluate_checkpoint
from flows.generation import generate_text
from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from resources.config import TpuConfig
from tasks.evaluators.helm.options import HelmOptions
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template
from tasks.spec.evaluation import CheckpointSelection
from tasks.spec.suites import built_in_suites
from tasks.verdicts.gate import BaselineRule, Gate

pytestmark = [pytest.mark.chromium, pytest.mark.timeout(240)]

FLOWS = (evaluate_checkpoint, evaluate_checkpoints, evaluate_suite, generate_text)
# A field is found by its label, inside its parent field; a choice in a list by its text.
FINDERS = """
window.field = (...names) => names.reduce((root, name) => {
  const labels = root ? [...root.querySelectorAll("label")] : [];
  const label = labels.find((each) => each.textContent.replace(" (Optional)", "") === name);
  return label && label.closest("div.group");
}, document);
window.withText = (root, selector, text) =>
  root && [...root.querySelectorAll(selector)].find((each) => each.textContent.trim() === text);
"""


@dataclass(frozen=True)
class Form:
    page: Page

    def tab(self, *field: str, choose: str) -> None:
        """Selects one of the value types of a field."""
        self.page.click(f"withText({_field(*field)}, '[role=tab]', {json.dumps(choose)})")

    def tabs(self, *field: str) -> list[str]:
        """Returns the names of a field's value types."""
        return self.page.value(
            f"[...{_field(*field)}.querySelector('[role=tablist]').querySelectorAll('[role=tab]')]"
            ".map((each) => each.textContent)"
        )

    def choices(self, *field: str) -> list[str]:
        """Returns the choices in the list of a field, and leaves the list closed: another click would only close it."""
        choices = self._opened(*field)
        self.page.press("Escape", 27)
        self.page.until("!document.querySelector('[role=option]')")
        return choices

    def choose(self, *field: str, choice: str) -> None:
        assert choice in self._opened(*field)
        self.page.click(f"withText(document, '[role=option]', {json.dumps(choice)})")
        self.page.until("!document.querySelector('[role=option]')")

    def _opened(self, *field: str) -> list[str]:
        self.page.click(f"{_field(*field)}.querySelector('[aria-haspopup=listbox]')")
        self.page.until("document.querySelectorAll('[role=option]').length")
        return self.page.value("[...document.querySelectorAll('[role=option]')].map((each) => each.textContent.trim())")

    def type(self, *field: str, text: str) -> None:
        self.page.fill(f"{_field(*field)}.querySelector('textarea, input')", text)

    def add(self, *field: str) -> None:
        self.page.click(f"withText({_field(*field)}, 'button', 'Add item')")

    def help_texts(self) -> dict[str, str]:
        """Returns the help text below the label of each shown field, by label; fields of the same name share a key."""
        return self.page.value(
            "Object.fromEntries([...document.querySelectorAll('div.group label')].map((each) =>"
            " [each.textContent.replace(' (Optional)', ''), each.parentElement.querySelector('p')?.textContent ?? '']))"
        )

    def submit(self) -> None:
        self.page.click("withText(document, 'button', 'Submit')")

    def says(self, text: str) -> None:
        self.page.until(f"document.body.textContent.includes({json.dumps(text)})")


def _field(*names: str) -> str:
    return f"field({', '.join(map(json.dumps, names))})"


@pytest.fixture(scope="module")
def prefect_ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prefect server with its UI, which Prefect's own test server does not serve."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    variables = {**NO_SERVICES, "PREFECT_UI_API_URL": f"{address}/api"}
    server = start_prefect_server(tmp_path_factory.mktemp("prefect"), port, variables=variables)
    try:
        yield address
    finally:
        end(server)


@pytest.fixture(scope="module")
def deployed(prefect_ui: str) -> dict[str, str]:
    with used_here(f"{prefect_ui}/api"):
        apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))])
        return {flow.name: _deploy(flow) for flow in FLOWS}


def _deploy(flow: Flow[..., Any]) -> str:
    deployment = flow.to_deployment("local", work_pool_name=LOCAL_WORK_POOL)
    assert isinstance(deployment, RunnerDeployment)
    return str(deployment.apply())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as new_page:
        yield new_page


def opened(page: Page, server: str, deployed: dict[str, str], flow: str) -> Form:
    page.go(f"{server}/v2/deployments/deployment/{deployed[flow]}/run")
    page.until(
        f"location.href.includes({json.dumps(deployed[flow])})"
        " && document.querySelector('div.group label')"
        " && [...document.querySelectorAll('button')].some((each) => each.textContent === 'Submit')"
    )
    page.value(FINDERS)
    return Form(page)


def runs_of(server: str, deployment: str) -> list[dict[str, Any]]:
    query = {"deployments": {"id": {"any_": [deployment]}}}
    return httpx.post(f"{server}/api/flow_runs/filter", json=query).json()


def explains_every_field(form: Form, *resources: str, tabs: tuple[tuple[str, ...], ...] = ()) -> None:
    """Asserts that each field has a help text, and that the device of the resources is one of three."""
    for *field, choice in tabs:
        form.tab(*field, choose=choice)
    form.page.until(f"!!{_field(*resources, 'device')}")
    assert form.tabs(*resources, "device") == ["CpuConfig", "GpuConfig", "TpuConfig"]
    explained = form.help_texts()
    assert len(explained) > 12
    assert [name for name, text in explained.items() if not text] == []
    form.tab(*resources, "device", choose="GpuConfig")
    form.page.until(f"!!{_field(*resources, 'device', 'count')}")
    form.tab(*resources, "device", choose="CpuConfig")
    form.page.until(f"!{_field(*resources, 'device', 'count')}")


CONFIG = ("config", "resource_config")
REQUEST = ("request", "resource_config")
WHOLE = "ResourceConfig"


def test_suite_filled_by_hand_becomes_a_flow_run_with_what_was_filled_in(
    page: Page, prefect_ui: str, deployed: dict[str, str]
):
    form = opened(page, prefect_ui, deployed, "evaluate-suite")
    explains_every_field(form, *REQUEST, tabs=((*REQUEST, WHOLE),))
    assert form.tabs("suite") == ["built in", "file", "Suite"]
    assert form.choices("suite") == list(built_in_suites())
    form.choose("suite", choice="key_evals")
    form.type("request", "model_path", text="gs://bucket/runs/a")
    form.type("request", "evaluation_path", text="gs://bucket/evaluations")
    form.tab("request", "resource_config", "device", choose="TpuConfig")
    form.type("request", "resource_config", "device", "variant", text="v5p-8")
    form.choose("selection", "which", choice="latest")
    form.tab("gate", choose="Gate")
    form.add("gate", "rules")
    form.tab("gate", "rules", choose="BaselineRule")
    form.type("gate", "rules", "benchmark", text="mmlu*")
    form.type("gate", "rules", "metric", text="acc")
    form.type("gate", "rules", "not_worse_than", text="mean of last 5")
    form.type("gate", "rules", "by_more_than", text="0.02")
    form.submit()
    [run] = eventually(lambda: runs_of(prefect_ui, deployed["evaluate-suite"]))

    asked = evaluate_suite.validate_parameters(run["parameters"])
    assert asked["suite"] == "key_evals"
    assert (asked["request"].model_path, asked["request"].evaluation_path) == (
        "gs://bucket/runs/a",
        "gs://bucket/evaluations",
    )
    assert asked["request"].resource_config.device == TpuConfig(variant="v5p-8")
    assert asked["selection"] == CheckpointSelection(which="latest")
    rule = BaselineRule(benchmark="mmlu*", metric="acc", not_worse_than="mean of last 5", by_more_than=0.02)
    assert asked["gate"] == Gate(rules=(rule,))


def test_evaluator_is_lm_eval_until_another_is_chosen(page: Page, prefect_ui: str, deployed: dict[str, str]):
    form = opened(page, prefect_ui, deployed, "evaluate-checkpoint")
    explains_every_field(form, *CONFIG, tabs=((*CONFIG, WHOLE),))
    evaluators = ("LmEvalOptions", "HelmOptions", "AlpacaEvalOptions", "InspectOptions", "LevanterOptions")
    assert form.tabs("config", "evaluator") == [*evaluators]
    chosen = f"{_field('config', 'evaluator')}.querySelector('[role=tab][aria-selected=true]').textContent"
    assert page.value(chosen) == "LmEvalOptions"
    form.tab("config", "evaluator", choose="HelmOptions")
    form.type("config", "evaluator", "request_retries", text="5")
    form.type("config", "model_path", text="gs://bucket/runs/a")
    form.add("config", "evals")
    form.type("config", "evals", "name", text="mmlu")
    form.submit()
    [run] = eventually(lambda: runs_of(prefect_ui, deployed["evaluate-checkpoint"]))
    asked = evaluate_checkpoint.validate_parameters(run["parameters"])["config"]
    assert asked.evaluator == HelmOptions(request_retries=5)


def test_generation_filled_by_hand_becomes_a_flow_run_with_what_was_filled_in(
    page: Page, prefect_ui: str, deployed: dict[str, str]
):
    form = opened(page, prefect_ui, deployed, "generate-text")
    explains_every_field(form, "config", "worker_resources")
    form.tab("config", "model_path", choose=form.tabs("config", "model_path")[0])  # the other is None
    form.type("config", "model_path", text="gs://bucket/runs/a")
    form.add("config", "prompts", "files")
    form.type("config", "prompts", "files", text="gs://bucket/prompts/*.jsonl")
    form.type("config", "sampling", "samples", text="2")
    form.type("config", "output_path", text="gs://bucket/generated")
    form.submit()
    [run] = eventually(lambda: runs_of(prefect_ui, deployed["generate-text"]))
    asked = generate_text.validate_parameters(run["parameters"])["config"]
    assert (asked.model_path, asked.output_path) == ("gs://bucket/runs/a", "gs://bucket/generated")
    assert (asked.prompts.files, asked.sampling.samples) == (("gs://bucket/prompts/*.jsonl",), 2)


def test_wrong_value_is_refused_with_a_message_and_nothing_is_started(
    page: Page, prefect_ui: str, deployed: dict[str, str]
):
    form = opened(page, prefect_ui, deployed, "evaluate-checkpoints")
    explains_every_field(form, *CONFIG, tabs=((*CONFIG, WHOLE),))
    form.type("selection", "wait_for_incomplete_seconds", text="-5")
    form.submit()
    waiting = f"{_field('selection', 'wait_for_incomplete_seconds')}.querySelector('input')"
    page.until(f"document.activeElement === {waiting}")  # the browser focuses it and shows the reason
    assert page.value(f"{waiting}.validationMessage") == "Value must be greater than or equal to 0."
    form.type("selection", "wait_for_incomplete_seconds", text="5")
    form.submit()
    form.says("'model_path' is a required property")
    form.says("'evals' is a required property")
    assert runs_of(prefect_ui, deployed["evaluate-checkpoints"]) == []
