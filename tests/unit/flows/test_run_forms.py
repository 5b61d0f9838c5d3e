"""The schemas from which Prefect's UI builds the run forms of the flows."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from flows.evaluation import evaluate_checkpoint
from flows.generation import generate_text
from flows.reconcile import reconcile_policy
from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from flows.training import train_and_evaluate

FLOWS: tuple[Flow[..., Any], ...] = (
    evaluate_checkpoint,
    evaluate_checkpoints,
    evaluate_suite,
    generate_text,
    reconcile_policy,
    train_and_evaluate,
)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_field_of_a_run_form_has_a_help_text_and_the_device_is_one_of_three(flow: Flow[..., Any]):
    schema = parameter_schema(flow).model_dump_for_openapi()
    fields = {
        (name, field): content
        for name, model in {"": schema, **schema["definitions"]}.items()
        for field, content in model.get("properties", {}).items()
    }
    assert len(fields) > 12
    assert [field for field, content in fields.items() if not content.get("description")] == []
    devices = [choice["$ref"].rpartition("/")[2] for choice in fields["ResourceConfig", "device"]["anyOf"]]
    assert devices == ["CpuConfig", "GpuConfig", "TpuConfig"]
