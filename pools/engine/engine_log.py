"""The log of an ended engine: the error that ended it, and failures with a specific remedy."""

from __future__ import annotations

import re

from resources.errors import AssayError, EngineStartFailed, ModelUnusable
from resources.jobs.jobs import JobHandle

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
_OF_MEMORY = re.compile(r"out of memory|allocate", re.IGNORECASE)
_FITTING_LENGTH = re.compile(r"maximum model length is (\d+)")


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


def computing_process_ended(log: str) -> bool:
    """Returns True if the log reports the end of the process that computes behind the engine's server."""
    return _CONSEQUENCE.search(log) is not None


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
    """Returns the failure of a start: `ModelUnusable` if the loader refused a tensor, else `EngineStartFailed`."""
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
    return EngineStartFailed(
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
