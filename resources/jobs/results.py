"""Calls for another process, and their results: return values or exceptions.

`resources/backends/programs/run_call.py` writes a result where the job ran, and signs it with a key that was sent with
the call, is derived from the user's key, and is valid only for that job: other results are never unpickled.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from resources.errors import AssayError, BadInput, JobFailed, StorageError
from resources.jobs.jobs import Call, JobHandle, JobStatus
from resources.jobs.logs import check_replica
from resources.jobs.user_key import user_key

_NONCE_BYTES, _PROOF_BYTES = 16, 32  # run_call.py has the same constants


class Raised(NamedTuple):
    """An exception of another process, sent as a plain tuple, so that reading it needs none of its modules."""

    pickled: bytes | None
    """The exception; None if it could not be pickled."""
    type_name: str
    text: str
    traceback: str

    def raise_here(self, unreadable: Callable[[str], AssayError]) -> NoReturn:
        """Raises the exception, or `unreadable(text)` if it cannot be unpickled, caused by the remote traceback."""
        try:
            error = pickle.loads(self.pickled) if self.pickled is not None else None
        except Exception:  # noqa: BLE001 - the objects' own pickling code can raise anything; type and text remain
            error = None
        if not isinstance(error, Exception):
            error = unreadable(f"{self.type_name}: {self.text}")
        raise error from _RemoteTraceback(self.traceback)


class _RemoteTraceback(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f'\n"""\n{self._text}"""'


def pickled(call: Call, *, job_id: str) -> bytes:
    """Returns the content of the file that `resources/backends/programs/run_call.py` executes in a job."""
    try:
        return _new_seal(job_id) + cloudpickle.dumps((call.function, call.args, dict(call.kwargs)))
    except Exception as error:  # the objects' own pickling code can raise anything
        raise BadInput(
            expected="a callable and arguments that can be pickled, since they are sent to another process",
            found=f"{getattr(call.function, '__qualname__', call.function)}: {type(error).__name__}: {error}",
            remedy="Pass paths, names and numbers; open files, locks and connections inside the callable.",
        ) from error


def _new_seal(job_id: str) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        return nonce + _key_of(nonce, job_id)
    except StorageError:  # no key of the user: most callers read no result, and `result_of` reports it to the others
        return nonce + secrets.token_bytes(_PROOF_BYTES)


def result_of(
    job: JobHandle, timeout: float | None, *, replica: int, read: Callable[[], bytes | None], where: str
) -> Any:
    """Implements `JobHandle.result` for every backend; `timeout` in seconds, None for no limit.

    `read` returns the replica's result bytes of its last attempt, or None. `where` is a clause with advice, such as
    "read …/replica-*.log".
    """
    details = job.details()
    if details.returns is False:
        raise BadInput(
            expected=f"a job that calls a Python callable, to ask {job.job_id} for its result",
            found="it runs a command, which has none",
            remedy="Submit an Entrypoint.from_callable, or have the command write a file.",
        )
    if details.replicas is not None:
        check_replica(replica, details.replicas)
    status = job.wait(timeout, raise_on_failure=False)
    kind, content = _opened(None if status is JobStatus.STOPPED else read(), job.job_id, replica)
    if kind == "raised":
        Raised(*content).raise_here(_unsendable(job.job_id))
    if status is not JobStatus.SUCCEEDED:
        job.wait(0)  # raises with the reason
    if kind == "returned":
        try:
            return pickle.loads(content)
        except Exception as error:  # the objects' own pickling code can raise anything
            raise _unreadable(job.job_id, f"{type(error).__name__}: {error}") from error
    if kind == "unreadable":
        raise _unreadable(job.job_id, content)
    raise BadInput(
        expected=f"job {job.job_id} to have left a result",
        found="it succeeded and left none: it exited before it returned, or its result was lost on the way or removed",
        remedy=where[:1].upper() + where[1:],
    )


def raised_by(job: JobHandle, read: Callable[[int], bytes | None]) -> Exception | None:
    """Returns the exception of a failed job's callable, from the first replica that raised; None if unknown.

    `read` returns a replica's result bytes of its last attempt, or None.
    """
    details = job.details()
    if details.returns is False or details.status is not JobStatus.FAILED:
        return None
    for replica in range(details.replicas or 1):
        try:
            kind, content = _opened(read(replica), job.job_id, replica)
        except AssayError:  # unreadable for this user, or forgotten by the backend: the job has failed all the same
            continue
        if kind == "raised":
            try:
                Raised(*content).raise_here(_unsendable(job.job_id))
            except Exception as error:  # noqa: BLE001 - the callable can raise anything
                return error
    return None


def _unsendable(job_id: str) -> Callable[[str], JobFailed]:
    return lambda problem: JobFailed(
        expected=f"the callable of {job_id} to return, or to raise what can be sent to another process",
        found=problem,
        remedy="Read its traceback above.",
    )


def _key_of(nonce: bytes, job_id: str) -> bytes:
    return hmac.digest(user_key(), b"result of a job\0" + nonce + job_id.encode(), "sha256")


def _opened(left: bytes | None, job_id: str, replica: int) -> tuple[str, Any]:
    if left is None:
        return "nothing", None
    nonce, proof = left[:_NONCE_BYTES], left[_NONCE_BYTES : _NONCE_BYTES + _PROOF_BYTES]
    body = left[_NONCE_BYTES + _PROOF_BYTES :]
    signed = f"{job_id}\0{replica}\0".encode() + body
    if not hmac.compare_digest(proof, hmac.digest(_key_of(nonce, job_id), signed, "sha256")):
        raise BadInput(
            expected=f"a result of {job_id} signed with the key of that job, since reading it can run code",
            found="a signature of another job or user, or none",
            remedy="Ask as the user, and with the cache's folder, that submitted it; or give this process its "
            "ASSAY_ACTOR_KEY.",
        )
    return pickle.loads(body)


def _unreadable(job_id: str, problem: str) -> BadInput:
    return BadInput(
        expected=f"a result of {job_id} that can be pickled, unpickled here, and has 512 KiB at most",
        found=problem,
        remedy="Return values, no open files, locks or connections; write what is large to a file or an object store "
        "and return its path; install the modules of its types on both sides.",
    )
