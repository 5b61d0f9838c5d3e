"""Addresses with a user's name or password are refused everywhere, with messages that do not repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from pools.config import InferencePoolConfig
from resources.backends.current import client_from_url
from resources.config import Config
from resources.errors import BadInput
from resources.regions.region_table import Region
from resources.storage import storage
from tasks.policies.policy import Policy
from tasks.prefect_server.client import require_server
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import build_config
from tasks.spec.suites import SuiteRequest

SECRET = "hunter2"
WEB = f"http://user:{SECRET}@127.0.0.1:8000/v1"
EVALUATION: dict[str, Any] = {"model_path": "/runs/run-a", "evals": [{"name": "demo_facts"}]}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (EvaluationConfig, {"base_url": WEB}),
        (EvaluationConfig, {"base_url": f"HTTPS://{SECRET}@127.0.0.1/"}),
        (EvaluationConfig, {"evaluator": {"name": "alpaca_eval", "judge": {"base_url": WEB, "model": "j"}}}),
        (EvaluationConfig, {"sinks": [{"kind": "mlflow", "tracking_uri": WEB, "experiment": "e"}]}),
        (EvaluationConfig, {"sinks": [{"kind": "wandb", "project": "p", "base_url": WEB}]}),
        (EvaluationConfig, {"sinks": [{"kind": "object_store", "url": f"s3://user:{SECRET}@bucket/x"}]}),
        (EvaluationConfig, {"model_path": f"s3://user:{SECRET}@bucket/run"}),
        (EvaluationConfig, {"benchmarks_path": f"ftp://user:{SECRET}@host/benchmarks"}),
        (EvaluationConfig, {"evals": [{"name": "x", "task_kwargs": {"dataset_kwargs": {"data_files": [WEB]}}}]}),
        (SuiteRequest, {"base_url": WEB, "model_path": "/runs/run-a"}),
        (Policy, {"suites": [{"suite": "demo", "base_url": WEB}]}),
        (
            InferencePoolConfig,
            {"model": {"name": "m", "engine_kwargs": {"otlp_traces_endpoint": f"grpc://{SECRET}@h"}}},
        ),
        (Region, {"ray": f"ray://user:{SECRET}@10.0.0.2:10001"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else next(iter(value)),
)
def test_user_information_in_a_configuration_is_refused_without_being_repeated(
    kind: type[Config], content: dict[str, Any]
) -> None:
    whole = {**EVALUATION, **content} if kind is EvaluationConfig else content
    for build in (kind.model_validate, lambda given: build_config(given, kind, source="a file")):
        with pytest.raises(BadInput) as caught:
            build(whole)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "take",
    [
        lambda: client_from_url(f"ray://user:{SECRET}@host:10001"),
        lambda: client_from_url(f"iris://{SECRET}@host:10000"),
        lambda: storage.read_bytes(f"ftp://user:{SECRET}@host/x"),
        lambda: storage.list_files(f"http://user:{SECRET}@host/x"),
    ],
)
def test_user_information_in_an_address_elsewhere_is_refused_without_being_repeated(take: Callable[[], Any]) -> None:
    with pytest.raises(BadInput, match="between :// and @") as caught:
        take()
    assert SECRET not in str(caught.value)


def test_user_information_in_the_address_of_the_prefect_server_is_refused() -> None:
    with temporary_settings({PREFECT_API_URL: WEB}), pytest.raises(BadInput, match="PREFECT_API_URL") as caught:
        require_server()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["abfs://container@account.dfs.core.windows.net/x", "http://host:8000/models/x@v1/v1", "gs://bucket/a@b:c@d"],
)
def test_addresses_with_another_meaning_of_the_sign_are_accepted(address: str) -> None:
    assert EvaluationConfig.model_validate({**EVALUATION, "model_path": address}).model_path == address
