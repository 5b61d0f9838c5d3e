"""A replica's loads, the weights in its engines' memory, its engines' deaths, and the errors in their logs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from pools.config import InferencePoolConfig
from pools.engine.engine_client import EngineClient
from pools.engine.launch import ServedCheckpoint
from pools.engine.reload_trust import differing, shown
from pools.jobs import Restarts
from pools.protocol import LoadedHow, ReplicaState
from resources.errors import AssayError, EndpointUnusable, EngineDied, EngineStartFailed, ModelUnusable, WeightsNotRead
from resources.jobs.jobs import JobHandle

DIED = "died"
_KILLED = ("from outside", "out of memory")  # in the reason of a job's end
_REMEMBERED = 100
"""Checkpoints with remembered digests, about 100 kB each."""
WITHOUT_PREFIX_CACHE = "it has a state, and its engine ended with a prefix cache, so it runs without"
"""Part of a load's reason: vLLM dies on a CPU if layers of Mamba 2 and of attention share a prefix cache."""
_SEARCHED_PARTS = 64  # of a megabyte each
_KEPT_LINES = 400
_SHOWN_LINES = 15
_SHOWN_CHARACTERS = 300
_ERROR = re.compile(
    r"(?:^|\] |\) )(?P<error>(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?|Fatal Python error: .*)$", re.MULTILINE
)
_FATAL = re.compile(r"EngineCore (?:failed to start|encountered a fatal error)|WorkerProc failed to start")
_CONSEQUENCE = re.compile(r"EngineDeadError|Engine core initialization failed|died unexpectedly|died with exit code")
_LOADS_WEIGHTS = re.compile(r", in (?:load_weights|\w*weight_loader\w*|load_\w*_weight)\b")
_REFUSES_TENSOR = re.compile(r"no module or parameter named|not initialized from|^(?:Assertion|Key|Runtime|Value)Error")
_READS_WEIGHTS, _WEIGHTS_ARE_READ = "Loading safetensors checkpoint shards", "Loading weights took"
_OF_MEMORY = re.compile(r"out ?of ?memory|allocate", re.IGNORECASE)
_FITTING_LENGTH = re.compile(r"maximum model length is (\d+)")


def may_end_of_its_cache(error: BaseException, log: str, config: InferencePoolConfig) -> bool:
    """Returns True if a failed start is worth a retry without a prefix cache: single host, Mamba model by its log."""
    ended = isinstance(error, EndpointUnusable | EngineStartFailed) and "mamba" in log.lower()
    chosen = "enable_prefix_caching" in config.model.engine_kwargs
    return ended and not chosen and config.resource_config.hosts_per_replica == 1


class Standing(NamedTuple):
    """State of a replica, and the checkpoint that it refers to."""

    state: ReplicaState
    checkpoint: ServedCheckpoint | None


class Loading:
    """A load of a checkpoint: wall seconds by phase, and the reason if it could not be reloaded in place."""

    def __init__(self) -> None:
        self.how: LoadedHow = "cold start"
        self.reason: str | None = None
        self.phases: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(self.phases.get(name, 0.0) + time.monotonic() - began, 4)


class WeightsInMemory:
    """Digests of the weights in the memory of a replica's engines, by the checkpoint that they held."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, str]] = {}

    def started(self, engine: EngineClient, checkpoint: ServedCheckpoint) -> None:
        engine.name_weights(checkpoint.digests.checkpoint)
        self._remember(checkpoint, engine.weights_in_memory())

    def why_wrong(self, engine: EngineClient, checkpoint: ServedCheckpoint) -> str | None:
        """Returns the reason that a reloaded engine does not hold a checkpoint; None if nothing contradicts it."""
        named, digest = engine.weights_name(), checkpoint.digests.checkpoint
        if named not in (None, digest):
            return f"the engine said that it holds {named}, not {digest}"
        now = engine.weights_in_memory()
        if other := differing(self._known.get(digest, now), now):
            return f"the engine's memory differed from what the same files gave before: {shown(other)}"
        self._remember(checkpoint, now)
        return None

    def _remember(self, checkpoint: ServedCheckpoint, digests: Mapping[str, str]) -> None:
        self._known[checkpoint.digests.checkpoint] = digests
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]


class Deaths:
    """The deaths of a replica's engines; deaths without an error allow `most` restarts in ten minutes."""

    def __init__(self, replica: str, most: int) -> None:
        self.revived = 0
        """Engines restarted because an engine died."""
        self.last: str | None = None
        """The first error in the log of the engine that died last."""
        self.of_errors: Counter[str] = Counter()
        """Engines that died of an error, by the digest of the checkpoint held."""
        self._replica = replica
        self._restarts = Restarts(most)

    def count(self, why: str, *, log: str, job: JobHandle | None, held: str) -> EngineDied | None:
        """Counts a death; returns the replica's failure if no restart is allowed. `why` completes "it …".

        A death by an error always allows a restart: the pool withdraws a checkpoint that killed two engines.
        """
        error = first_error(log)
        self.last = error or f"none in its log; it {why}"
        if error is not None and why == DIED:
            self.of_errors[held] += 1
        elif not self._restarts.allow():
            reason = (job.details().reason if job else None) or ""
            killed = any(word in reason for word in _KILLED) or _CONSEQUENCE.search(log)
            hint = "; it was killed, as for want of memory: give the replicas more with --ram" if killed else ""
            return EngineDied(
                expected=f"the engine of {self._replica} to live",
                found=f"it {why}, {self._restarts.last}{hint if why == DIED else ''}. {explained(log)}",
                remedy="read the log above, and run again",
            )
        self.revived += 1
        return None


def whole_log(job: JobHandle) -> str:
    """Returns the log of a job from its beginning, 64 MB of it at most."""
    parts, after = [], ""
    while len(parts) < _SEARCHED_PARTS and (part := job.read_log(after)).output:
        parts.append(part.output)
        after = part.end
    return b"".join(parts).decode(errors="replace")


def first_error(log: str) -> str | None:
    """Returns the line of the error that ended an engine; None if its log has none, as after SIGKILL."""
    match = _first_match(log)
    return _words(match)[:_SHOWN_CHARACTERS] if match else None


def explained(log: str) -> str:
    """Returns the end of a log, after the first error in it."""
    cause = first_error(log)
    tail = "\n".join(log.rstrip().splitlines()[-_SHOWN_LINES:])
    first = f"First error in its log: {cause}\n" if cause else ""
    return f"{first}Last lines of its log:\n{tail}"


def excerpt(log: str) -> str:
    """Returns the traceback of a log's first error, and its last 400 lines: short enough to be sent."""
    match = _first_match(log)
    return "\n".join([*([_trace(match)] if match else []), *log.splitlines()[-_KEPT_LINES:]])


def start_failure(log: str, *, model: str, ended: str, by_hand: str) -> AssayError:
    """Returns the failure of a start: `ModelUnusable` if the loader refused a tensor, `WeightsNotRead` for another
    error while it read the weights, except for want of memory, else `EngineStartFailed`."""
    match = _first_match(log)
    error = _words(match) if match else ""
    trace = _trace(match) if match else ""
    if _LOADS_WEIGHTS.search(trace) and _REFUSES_TENSOR.search(error) and not _OF_MEMORY.search(error):
        return ModelUnusable(
            expected=f"tensors in {model} with the names and shapes that an engine loads for its config.json",
            found=error[:_SHOWN_CHARACTERS],
            remedy="export it again, with the config.json of these weights and no wrapper's prefix such as _orig_mod.",
        )
    if length := _FITTING_LENGTH.search(log):
        fitting = int(length[1]) - 1  # engines have room for a token more than the model reads
        return EngineStartFailed(
            expected=f"room for a single answer of {model} in the memory of the engine's cache",
            found=error,
            remedy=f"--engine max_model_len={fitting}, or more memory: --ram, or --engine kv_cache_memory_bytes=",
        )
    reading = _READS_WEIGHTS in log and _WEIGHTS_ARE_READ not in log
    kind = WeightsNotRead if reading and error and not _OF_MEMORY.search(error) else EngineStartFailed
    return kind(
        expected=f"the engine to answer for {model}",
        found=f"{ended}. {explained(log)}",
        remedy=f"read the log; to see it by hand:\n{by_hand}",
    )


def _trace(match: re.Match[str]) -> str:
    log = match.string
    return log[max(0, log.rfind("Traceback (most recent call last)", 0, match.start())) : match.end()]


def _words(match: re.Match[str]) -> str:
    if ":" in match["error"]:
        return match["error"]
    lines = (line.rpartition("] ")[2].strip() for line in reversed(match.string[: match.start()].splitlines()))
    return f"{match['error']}: {next((line for line in lines if line.strip('^~ ')), '')}"


def _first_match(log: str) -> re.Match[str] | None:
    fatal = _FATAL.search(log)
    errors = _ERROR.finditer(log, fatal.start() if fatal else 0)
    return next((error for error in errors if not _CONSEQUENCE.search(error["error"])), None)
