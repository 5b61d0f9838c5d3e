"""Engine and evaluators of a command, imported once, before they are needed.

Importing them takes longer than all other preparation and depends neither on Prefect's server nor on the pool. So this
module does not import Prefect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path

from pools.config import InferencePoolConfig
from pools.engine.engines import with_engine_variables
from pools.engine.launch import Launcher, VllmLauncher, environment_name
from resources.backends.current import current_client
from resources.backends.local.client import local_client
from resources.environments.environments import ENVIRONMENTS, Environment, EnvironmentSpec, ensure_environment, is_built
from resources.warm.fork_server import WarmProgram
from tasks.evaluators.evaluator import Evaluator, evaluator_of
from tasks.evaluators.harness import warmed
from tasks.evaluators.native import NativeProgram
from tasks.spec.evaluation import EvaluationConfig


@dataclass(frozen=True, eq=False)
class Harness:
    """An evaluator, its interpreter, and the server that keeps it imported; the last two are None if remote."""

    evaluator: Evaluator
    python: Path | None
    server: WarmProgram | None

    @property
    def native(self) -> NativeProgram:
        return NativeProgram(self.evaluator, self.python, self.server)


class WarmPrograms:
    """Programs that stay imported until `stack` is closed; each is started on first use."""

    def __init__(self, stack: ExitStack, *, on_progress: Callable[[str], None] = lambda line: None) -> None:
        self._stack = stack
        self._on_progress = on_progress
        self._harnesses: dict[tuple[str, str], Harness] = {}
        self._launchers: list[tuple[InferencePoolConfig, Environment, Launcher]] = []
        self._preparing = threading.RLock()
        self._endings = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="ending"))

    def end(self, close: Callable[[], None]) -> None:
        """Closes a user of the programs in the background; the end of the block waits for it."""
        ending = self._endings.submit(copy_context().run, close)
        self._stack.callback(ending.result)

    def prepare(self, configs: Sequence[EvaluationConfig]) -> None:
        """Starts importing the evaluators in the background; blocks only while an environment is built."""
        for kind in dict.fromkeys(map(_kind, configs)):
            self._harness([config for config in configs if _kind(config) == kind])

    def harness_of(self, config: EvaluationConfig) -> Harness:
        return self._harness([config])

    def _harness(self, configs: Sequence[EvaluationConfig]) -> Harness:
        with self._preparing:
            if (harness := self._harnesses.get(_kind(configs[0]))) is not None:
                return harness
            evaluator = evaluator_of(configs[0])
            python, server = None, None
            if runs_here(configs[0]):
                python = ensure_environment(evaluator.environment(configs[0]), on_progress=self._on_progress).python
                server = self._stack.enter_context(warmed(evaluator, configs, python=python, client=local_client()))
            harness = self._harnesses[_kind(configs[0])] = Harness(evaluator, python, server)
            return harness

    def launcher(self, config: InferencePoolConfig) -> Launcher | None:
        """Returns the engine launcher of a local pool; None if replicas run remotely and import the engine there."""
        client = current_client()
        if not client.is_local:
            return None
        config = with_engine_variables(config)
        environment = ensure_environment(ENVIRONMENTS[environment_name(config)], on_progress=self._on_progress)
        with self._preparing:
            for known, built, launcher in self._launchers:
                if (known, built) == (config, environment):
                    return launcher
            launcher = self._stack.enter_context(VllmLauncher(config, environment).warmed(client))
            self._launchers.append((config, environment, launcher))
            return launcher


_begun: ContextVar[WarmPrograms | None] = ContextVar("warm_programs", default=None)


@contextmanager
def begun_early(configs: Sequence[EvaluationConfig]) -> Iterator[None]:
    """Starts importing programs with existing environments, for all evaluations in the block; does not wait."""
    with warm_programs() as warm:
        for config in configs:
            own = config.pool_config if config.pool_name is None and not config.native else None
            if own is not None and is_built(ENVIRONMENTS[environment_name(own)]):
                warm.launcher(own)
        warm.prepare([config for config in configs if runs_here(config) and is_built(_environment_of(config))])
        yield


@contextmanager
def warm_programs(*, on_progress: Callable[[str], None] = lambda line: None) -> Iterator[WarmPrograms]:
    """Yields the caller's programs if there are any, else new programs, which calls in the block share."""
    if (begun := _begun.get()) is not None:
        yield begun
        return
    with ExitStack() as stack:
        warm = WarmPrograms(stack, on_progress=on_progress)
        stack.callback(_begun.reset, _begun.set(warm))
        yield warm


def runs_here(config: EvaluationConfig) -> bool:
    """Returns True if the evaluator runs on this machine, and so needs its environment locally."""
    return not config.native or current_client().is_local


def _environment_of(config: EvaluationConfig) -> EnvironmentSpec:
    return evaluator_of(config).environment(config)


def _kind(config: EvaluationConfig) -> tuple[str, str]:
    return config.evaluator.name, _environment_of(config).name
