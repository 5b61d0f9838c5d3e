"""Fork servers of the flows that run in the test process, kept between flows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from resources.jobs.jobs import Client
from resources.settings import process_environment
from resources.warm.fork_server import WarmProgram
from tasks.evaluators.evaluator import Evaluator
from tasks.evaluators.harness import cache_variables, warmed
from tasks.spec.evaluation import EvaluationConfig

_NOT_READ_BY_HARNESSES = ("PYTEST_", "ASSAY_", "PREFECT_", "DO_NOT_TRACK")
_MOST = 6  # each holds 0.2 to 0.5 GB


class KeptServers:
    """Hands out servers as `warmed` does, but keeps them until `close`: importing a harness takes seconds.

    Two flows share a server only if all inputs of its start are the same.
    """

    def __init__(self) -> None:
        self._servers: dict[object, tuple[WarmProgram | None, ExitStack]] = {}

    @contextmanager
    def warmed(
        self, evaluator: Evaluator, configs: Sequence[EvaluationConfig], *, python: Path, client: Client
    ) -> Iterator[WarmProgram | None]:
        arguments = frozenset(argument for config in configs for argument in evaluator.preload_arguments(config))
        present = {**process_environment(), **cache_variables(), **evaluator.import_variables}.items()
        read = frozenset(item for item in present if not item[0].startswith(_NOT_READ_BY_HARNESSES))
        key = (evaluator.program, python, client, arguments, read)
        kept = self._servers.pop(key, None)
        if kept is None:
            stack = ExitStack()
            kept = stack.enter_context(warmed(evaluator, configs, python=python, client=client)), stack
        self._servers[key] = kept  # the newest is last
        yield kept[0]
        while len(self._servers) > _MOST:
            self._servers.pop(next(iter(self._servers)))[1].close()

    def close(self) -> None:
        while self._servers:
            self._servers.popitem()[1][1].close()
