"""Executes a pickled call in the job's own interpreter, and writes its result to the file named by `ASSAY_RESULT`.

python run_call.py <seal, and pickle of (function, args, kwargs)> [folder for sys.path …]

The seal is a nonce and the key that signs the result; `resources/jobs/results.py` creates seals and verifies results.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path
from typing import Any

_OURS = {"cloudpickle", "pydantic", "pydantic_settings"}  # for callables pickled by value, and for modules of Assay
_NONCE_BYTES, _SEAL_BYTES = 16, 48
LARGEST_RESULT_BYTES = 512 * 1024  # limit of all backends: in base64 a ConfigMap holds 768 KiB
_SHOWN_CHARACTERS = 32 * 1024


def main(arguments: list[str]) -> None:
    """Unpickles and calls the function; its exceptions propagate, so that the traceback ends the log."""
    call_file, *import_folders = arguments
    sys.path[:1] = import_folders  # replaces this file's folder
    content = Path(call_file).read_bytes()
    leave = _Leaving(content[:_SEAL_BYTES])
    gc.disable()  # garbage collection would take a fifth of the time of the imports
    try:
        function, args, kwargs = pickle.loads(content[_SEAL_BYTES:])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OURS:
            sys.exit(f"{sys.executable} lacks {missing}, which this callable needs. Add it to that environment.")
        raise
    gc.freeze()
    gc.enable()
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        leave("raised", bounded(raised(error)))
        raise
    leave(*returned(value))


def returned(value: object) -> tuple[str, bytes | str]:
    """Returns the kind of a call's result and its pickle, or the reason that it cannot be transferred."""
    try:
        content = _pickler().dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling code of user objects may raise anything
        problem = f"a value of type {type(value).__name__}: {type(error).__name__}: {error}"
        return "unreadable", problem[:_SHOWN_CHARACTERS]
    if len(content) > LARGEST_RESULT_BYTES:
        return "unreadable", f"a value of type {type(value).__name__} with {len(content):,} bytes once pickled"
    return "returned", content


def raised(error: BaseException) -> tuple[bytes | None, str, str, str]:
    """Returns the fields of `resources.jobs.results.Raised`, from which another process raises the exception."""
    import traceback

    try:
        content = _pickler().dumps(error)
    except Exception:  # noqa: BLE001 - pickling code of user objects may raise anything; type and text are kept
        content = None
    return content, type(error).__name__, str(error), "".join(traceback.format_exception(error))


def bounded(fields: tuple[bytes | None, str, str, str]) -> tuple[bytes | None, str, str, str]:
    """Drops the pickled exception if it is too large, and shortens the text and the traceback, which keeps its end."""
    content, type_name, text, shown = fields
    small = content if content is None or len(content) <= LARGEST_RESULT_BYTES // 2 else None
    return small, type_name, text[:_SHOWN_CHARACTERS], shown[-_SHOWN_CHARACTERS:]


class _Leaving:
    def __init__(self, seal: bytes) -> None:
        self._nonce, self._key = seal[:_NONCE_BYTES], seal[_NONCE_BYTES:]
        self._path = os.environ.pop("ASSAY_RESULT", None)  # the call may change the environment
        self._job = f"{os.environ.get('ASSAY_JOB_ID')}\0{os.environ.get('ASSAY_REPLICA_INDEX')}\0".encode()

    def __call__(self, kind: str, content: Any) -> None:
        if self._path is None:
            return
        import hmac

        body = pickle.dumps((kind, content))
        proof = hmac.digest(self._key, self._job + body, "sha256")
        unfinished = Path(f"{self._path}.unfinished")
        try:
            unfinished.write_bytes(self._nonce + proof + body)
            unfinished.replace(self._path)  # atomic: readers see no partial file
        except OSError as error:  # the call has had its effect; readers of the result get an error
            print(f"the result could not be written: {error}", file=sys.stderr, flush=True)


def _pickler() -> Any:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


if __name__ == "__main__":
    main(sys.argv[1:])
