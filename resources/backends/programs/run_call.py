"""Executes one pickled call in the job's own interpreter, and leaves its result in the file that `ASSAY_RESULT` names.

python run_call.py <seal, and pickle of (function, args, kwargs)> [folder for sys.path …]

The seal is a nonce and the key that signs the result; `resources/jobs/results.py` makes the one and reads the other.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path
from typing import Any

_OURS = {"cloudpickle", "pydantic", "pydantic_settings"}  # for callables sent whole, and modules of ours
_NONCE_BYTES, _SEAL_BYTES = 16, 48
LARGEST_RESULT_BYTES = 512 * 1024  # what all backends can carry: in base64 a ConfigMap holds 768 KiB
_SHOWN_CHARACTERS = 32 * 1024


def main(arguments: list[str]) -> None:
    """Unpickles and calls; exceptions of the call pass through, so its traceback ends the log."""
    call_file, *import_folders = arguments
    sys.path[:1] = import_folders  # in place of this file's folder
    content = Path(call_file).read_bytes()
    leave = _Leaving(content[:_SEAL_BYTES])
    gc.disable()  # a fifth of the time of the imports would go to looking for garbage that is not there
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
    """The pickle of what a call returned, or the reason that there is none."""
    try:
        content = _pickler().dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever the objects' own pickling code raises
        found = f"a value of type {type(value).__name__}: {type(error).__name__}: {error}"
        return "unreadable", found[:_SHOWN_CHARACTERS]
    if len(content) > LARGEST_RESULT_BYTES:
        return "unreadable", f"a value of type {type(value).__name__} with {len(content):,} bytes once pickled"
    return "returned", content


def raised(error: BaseException) -> tuple[bytes | None, str, str, str]:
    """All that another process needs to raise an exception: the fields of `resources.jobs.results.Raised`."""
    import traceback

    try:
        content = _pickler().dumps(error)
    except Exception:  # noqa: BLE001 - whatever the objects' own pickling code raises; type and text go without it
        content = None
    return content, type(error).__name__, str(error), "".join(traceback.format_exception(error))


def bounded(fields: tuple[bytes | None, str, str, str]) -> tuple[bytes | None, str, str, str]:
    """The fields of an exception, less what is too large: the exception itself, and the beginning of its traceback."""
    content, type_name, text, shown = fields
    small = content if content is None or len(content) <= LARGEST_RESULT_BYTES // 2 else None
    return small, type_name, text[:_SHOWN_CHARACTERS], shown[-_SHOWN_CHARACTERS:]


class _Leaving:
    """Writes the signed result, whole or not at all; knows its place before the call can change the environment."""

    def __init__(self, seal: bytes) -> None:
        self._nonce, self._key = seal[:_NONCE_BYTES], seal[_NONCE_BYTES:]
        self._path = os.environ.pop("ASSAY_RESULT", None)
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
            unfinished.replace(self._path)
        except OSError as error:  # the call has had its effect; who asks for the result is told that it is lost
            print(f"the result could not be written: {error}", file=sys.stderr, flush=True)


def _pickler() -> Any:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


if __name__ == "__main__":
    main(sys.argv[1:])
