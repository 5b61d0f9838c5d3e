"""Serialization of callables for another process."""

from __future__ import annotations

import cloudpickle

from resources.errors import BadInput
from resources.jobs.jobs import Call
from resources.jobs.results import new_seal


def pickled(call: Call, *, job_id: str) -> bytes:
    """Returns the content of the file that `resources/backends/programs/run_call.py` executes in a job."""
    try:
        return new_seal(job_id) + cloudpickle.dumps((call.function, call.args, dict(call.kwargs)))
    except Exception as error:  # the objects' own pickling code can raise anything
        raise BadInput(
            expected="a callable and arguments that can be pickled, since they are sent to another process",
            found=f"{getattr(call.function, '__qualname__', call.function)}: {type(error).__name__}: {error}",
            remedy="Pass paths, names and numbers; open files, locks and connections inside the callable.",
        ) from error
