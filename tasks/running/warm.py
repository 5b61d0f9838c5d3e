"""Engine and evaluators of a command, imported once, and from before the first of them is needed.

Importing them takes longer than everything else that comes before the first question, and waits for nothing: not for
Prefect's server, nor for the pool. So nothing here imports Prefect.
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
from resources.warm.fork_server import ForkServer
from tasks.evaluators.evaluator import Evaluator, evaluator_of
from tasks.evaluators.harness import warmed
from tasks.evaluators.native import NativeProgram
from tasks.spec.evaluation import EvaluationConfig


@dataclass(frozen=True, eq=False)
class Harness:
    """An evaluator, the interpreter of its environment, and what keeps it imported; neither where it runs elsewhere."""

    evaluator: Evaluator
    python: Path | None
    server: ForkServer | None

    @property
    def native(self) -> NativeProgram:
        """The evaluator as a job of the current backend runs it."""
        return NativeProgram(self.evaluator, self.python, self.server.warm if self.server else None)


class WarmPrograms:
    """Programs that are kept imported until `stack` is closed; each is started when it is first asked for."""

    def __init__(self, stack: ExitStack, *, on_progress: Callable[[str], None] = lambda line: None) -> None:
        self._stack = stack
        self._on_progress = on_progress
        self._harnesses: dict[tuple[str, str], Harness] = {}
        self._launchers: list[tuple[InferencePoolConfig, Environment, Launcher]] = []
        self._preparing = threading.RLock()
        self._endings = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="ending"))

    def end(self, close: Callable[[], None]) -> None:
        """Begins to end something that the programs are used by, which the end of their block waits for."""
        ending = self._endings.submit(copy_context().run, close)
        self._stack.callback(ending.result)

    def prepare(self, configs: Sequence[EvaluationConfig]) -> None:
        """Begins to import the evaluators of some evaluations; takes no time but to build an environment."""
        for kind in dict.fromkeys(map(_kind, configs)):
            self._harness([config for config in configs if _kind(config) == kind])

    def harness_of(self, config: EvaluationConfig) -> Harness:
        """The evaluator of an evaluation; made ready now if it was not expected to be needed."""
        return self._harness([config])

    def _harness(self, configs: Sequence[EvaluationConfig]) -> Harness:
        with self._preparing:
            if (found := self._harnesses.get(_kind(configs[0]))) is not None:
                return found
            evaluator = evaluator_of(configs[0])
            python, server = None, None
            if runs_here(configs[0]):
                python = ensure_environment(evaluator.environment(configs[0]), on_progress=self._on_progress).python
                server = self._stack.enter_context(warmed(evaluator, configs, python=python, client=local_client()))
            harness = self._harnesses[_kind(configs[0])] = Harness(evaluator, python, server)
            return harness

    def launcher(self, config: InferencePoolConfig) -> Launcher | None:
        """The engine of a pool of this machine; None where its replicas run elsewhere, and import it there."""
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
    """Begins to import what some evaluations will need, for whoever evaluates in the block; waits for nothing.

    What has no environment yet is left to whoever builds it.
    """
    with warm_programs() as warm:
        for config in configs:
            own = config.pool_config if config.pool_name is None and not config.native else None
            if own is not None and is_built(ENVIRONMENTS[environment_name(own)]):
                warm.launcher(own)
        warm.prepare([config for config in configs if runs_here(config) and is_built(_environment_of(config))])
        yield


@contextmanager
def warm_programs(*, on_progress: Callable[[str], None] = lambda line: None) -> Iterator[WarmPrograms]:
    """The programs that were begun by whoever called, else those of the block, for everybody who is called in it."""
    if (begun := _begun.get()) is not None:
        yield begun
        return
    with ExitStack() as stack:
        warm = WarmPrograms(stack, on_progress=on_progress)
        stack.callback(_begun.reset, _begun.set(warm))
        yield warm


def runs_here(config: EvaluationConfig) -> bool:
    """Tells if the evaluator of an evaluation runs on this machine, which then needs its environment."""
    return not config.native or current_client().is_local


def _environment_of(config: EvaluationConfig) -> EnvironmentSpec:
    return evaluator_of(config).environment(config)


def _kind(config: EvaluationConfig) -> tuple[str, str]:
    return config.evaluator.name, _environment_of(config).name
