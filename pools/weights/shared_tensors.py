"""Tensors that two models have in common, by content."""

from __future__ import annotations

from pools.weights.model_files import ModelFolder, Tensor, read_tensors
from resources.storage import storage

_FIRST_COMPARED_BYTES = 4096
_COMPARED_BYTES = 2**24


def tensor_in_common(folder: ModelFolder, other: ModelFolder) -> str | None:
    """Returns the name of a tensor with the same content in two complete models; None if all tensors differ.

    Most differ in their first bytes, so little is read.
    """
    others = read_tensors(other)
    for name, tensor in read_tensors(folder).items():
        if name in others and tensor.span[0] < tensor.span[1] and _same_content(tensor, others[name]):
            return name
    return None


def _same_content(tensor: Tensor, other: Tensor) -> bool:
    (start, end), (other_start, other_end) = tensor.span, other.span
    if end - start != other_end - other_start:
        return False
    read, step = 0, _FIRST_COMPARED_BYTES
    while start + read < end:
        length = min(step, end - start - read)
        content = storage.read_bytes(tensor.uri, start=start + read, end=start + read + length)
        if content != storage.read_bytes(other.uri, start=other_start + read, end=other_start + read + length):
            return False
        read, step = read + length, _COMPARED_BYTES
    return True
