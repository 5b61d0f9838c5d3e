"""Errors as they travel between the processes of a pool."""

from __future__ import annotations

from pools.protocol import Failure
from resources import errors
from resources.errors import AssayError


def as_failure(error: AssayError) -> Failure:
    """An error as a value."""
    return Failure(kind=type(error).__name__, expected=error.expected, found=error.found, remedy=error.remedy)


def as_error(failure: Failure) -> AssayError:
    """The error again, of its own kind where that is one of ours."""
    kind = getattr(errors, failure.kind, AssayError)
    if not (isinstance(kind, type) and issubclass(kind, AssayError)):
        kind = AssayError
    return kind(expected=failure.expected, found=failure.found, remedy=failure.remedy)
