"""The flow for text generation in bulk: prompts answered by checkpoints on a shared pool."""

from __future__ import annotations

from typing import Any

from flows.hooks import pipeline
from pools.jobs import Restarts
from resources.errors import AssayError, EngineDied, ProxyFailed
from tasks.generation.config import GenerationConfig
from tasks.generation.generate import (
    PlannedGeneration,
    Target,
    conclude_generation,
    generate_answers,
    plan_generation,
    pool_of,
    require_same_prompts,
    with_run_named,
)
from tasks.prefect_server.flow_runs import marked_as
from tasks.prefect_server.progress import report_event

_POOLS_IN_TEN_MINUTES = 10


@pipeline("generate-text", run_name="generate {config.place}")
def generate_text(config: GenerationConfig) -> list[dict[str, Any]]:
    """Generates answers of checkpoints to prompts, and writes each once; existing answers are not requested again.

    Args:
        config: The prompts, the checkpoints, and the output.
    """
    config = with_run_named(config)
    with marked_as(config.run_name, tags=[f"run={config.run_name}", "generation"]):
        planned = plan_generation(config)
        failures = _answer(planned)
        require_same_prompts(planned)
        totals = conclude_generation(planned)
        if failures:
            raise failures[0]
        return totals


def _answer(planned: PlannedGeneration) -> list[AssayError]:
    losses = Restarts(_POOLS_IN_TEN_MINUTES)
    failures: dict[Target, AssayError] = {}
    lost = False
    while pending := [target for target in planned.missing() if target not in failures]:
        try:
            with pool_of(planned, pending, lost=lost) as session:
                for target in pending:
                    try:
                        generate_answers(planned, target, session)
                    except (ProxyFailed, EngineDied):
                        raise
                    except AssayError as error:  # of this checkpoint; the others may succeed
                        failures[target] = error
        except (ProxyFailed, EngineDied) as error:
            lost = True
            if not losses.allow():
                raise
            report_event(f"the pool is lost, and another is taken: {error.found}")
    return list(failures.values())
