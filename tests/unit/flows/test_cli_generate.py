"""Command line of a generation: options become config fields, and invalid combinations are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.generate import GenerationOutputOptions, PromptOptions, SamplingOptions, generation_from_options
from flows.cli.options.evaluations import SelectionOptions, ServedOptions
from flows.cli.options.pools import PoolOptions
from resources.errors import BadInput
from tasks.generation.config import GenerationConfig


def generation(
    *, served: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, **fields: Any
) -> GenerationConfig:
    prompts = {name: fields.pop(name) for name in ("files", "template") if name in fields}
    engines = {name: fields.pop(name) for name in ("chat", "replicas") if name in fields}
    return generation_from_options(
        ServedOptions(**{"model": "runs/a", **(served or {})}),
        PromptOptions(**{"files": ("a.jsonl",), **prompts}),
        SamplingOptions(**(sampling or {})),
        GenerationOutputOptions(**{"output_path": "out", **fields}),
        SelectionOptions(),
        PoolOptions(**engines),
    )


def test_options_become_fields_and_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    (tmp_path / "template.txt").write_text("Say {{ x }}")
    sampling = {"json_schema": str(tmp_path / "schema.json"), "tools": str(tmp_path / "tools.json")}
    config = generation(
        chat=True,
        replicas=2,
        sampling={**sampling, "extra": ("top_k=5", "ignore_eos=true")},
        template=f"@{tmp_path}/template.txt",
        max_errors="2%",
    )
    assert config.prompts.template == "Say {{ x }}" and config.prompts.chat
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    assert config.sampling.body() == {
        "max_tokens": 256,
        "response_format": response_format,
        "tools": ({"type": "function"},),
        "top_k": 5,
        "ignore_eos": True,
    }
    assert config.pool_config is not None and config.pool_config.resource_config.replicas == 2
    assert config.most_errors(1000) == 20
    elsewhere = generation(served={"pool": "https://pool.test", "pool_key_block": "kept-pool"})
    assert (elsewhere.pool_name, elsewhere.pool_key_block) == ("https://pool.test", "kept-pool")


@pytest.mark.parametrize(("text", "most"), [("3", 3), ("0", 0), ("0.5", 500), ("any", float("inf"))])
def test_most_errors_are_a_number_a_share_or_any(text: str, most: float) -> None:
    assert generation(max_errors=text).most_errors(1000) == most


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"served": {"model": None}}, "--model or --pool, --prompts and --output"),
        ({"files": ()}, "--model or --pool, --prompts and --output"),
        ({"output_path": None}, "--model or --pool, --prompts and --output"),
        ({"served": {"pool": "warm"}, "replicas": 2}, "--pool and --replicas"),
        ({"served": {"pool_key_block": "kept-pool"}}, "--pool with --pool-key-block"),
        ({"max_errors": "few"}, "a number, a share or any"),
        ({"template": "@nowhere"}, "nowhere is not there"),
        ({"template": "{{"}, "expected a Jinja template"),
        ({"sampling": {"extra": ("top_k",)}}, "--extra key=value"),
        ({"output_format": "csv"}, "'parquet' or 'jsonl'"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        generation(**fields)
    assert words in str(refused.value)


def test_configuration_with_two_ways_of_serving_is_refused() -> None:
    fields = {"prompts": {"files": ["a.jsonl"]}, "output_path": "out"}
    with pytest.raises(ValueError, match="expected model_path, or the pool_name"):
        GenerationConfig.model_validate(fields)
    with pytest.raises(ValueError, match="pool_config or pool_name, found both"):
        GenerationConfig.model_validate({**fields, "pool_name": "a", "pool_config": {"model": {"name": "a"}}})
    config = GenerationConfig.model_validate({**fields, "pool_name": "warm"})
    assert (config.run_name, config.served_by, config.place) == ("warm", "warm", "warm · a.jsonl")
    assert json.loads(config.model_dump_json())["max_errors"] == 0.05
