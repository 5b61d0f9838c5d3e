"""Averages of blocks of a checkpoint's numbers, equal to the last bit to torch's sums in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

BLOCK_BYTES = 2**21
"""Bytes per read: for smaller reads, of several files in turn, a disk would behave as for random reads."""
_CACHED_BYTES = 2**17  # processed at once, with its float32 numbers: fits into the cache of a core
_UPPER = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)
_ODD = np.uint32(1)
_BELOW_HALF = np.uint32(0x7FFF)
_NAN = np.uint32(0x7FC00000)
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Width in bytes of each averaged type, by its name in safetensors."""
_TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


class Averager:
    """Averages blocks of at most `BLOCK_BYTES`; `weights` None is the plain mean. Use an instance per thread."""

    def __init__(self, count: int, weights: Sequence[float] | None) -> None:
        self._count = count
        self._weights = weights
        self._raw = np.zeros(BLOCK_BYTES, np.uint8)
        self._wide = np.zeros(2 * _CACHED_BYTES, np.uint8)
        self._total = np.zeros(2 * BLOCK_BYTES, np.uint8)

    def average(self, dtype: str, size: int, read: Callable[[int, memoryview], None]) -> memoryview:
        """Returns the average of a block of `size` bytes, which is valid until the next call.

        `dtype` is BF16, F16, F32 or F64; `read` reads a checkpoint's part, given its number, into a buffer.
        """
        raw = self._raw[: size + size % 4]  # bfloat16 is processed in pairs
        raw[size:] = 0
        parts = [
            (raw[at : at + _CACHED_BYTES], self._total[2 * at : 2 * (at + _CACHED_BYTES)])
            for at in range(0, len(raw), _CACHED_BYTES)
        ]
        with np.errstate(all="ignore"):  # infinity and NaN are kept
            for number in range(self._count):
                read(number, raw[:size].data)
                for held, room in parts:
                    self._add(number, self._widened(dtype, held), room)
            for held, room in parts:
                self._narrow(dtype, room, held)
        return raw[:size].data

    def _add(self, number: int, values: np.ndarray, room: np.ndarray) -> None:
        if self._weights is not None:
            np.multiply(values, values.dtype.type(self._weights[number]), out=values)
        total = room.view(values.dtype)[: values.size]
        if number == 0:
            np.copyto(total, values)
        else:
            np.add(total, values, out=total)

    def _widened(self, dtype: str, raw: np.ndarray) -> np.ndarray:
        if dtype != "BF16":
            numbers = raw.view(_TYPES[dtype])
            if dtype != "F16":
                return numbers
            wide = self._wide.view(np.float32)[: numbers.size]
            np.copyto(wide, numbers)
            return wide
        pairs = raw.view(np.uint32)
        bits = self._wide.view(np.uint32)[: 2 * pairs.size]
        np.left_shift(pairs, _HALF, out=bits[: pairs.size])
        np.bitwise_and(pairs, _UPPER, out=bits[pairs.size :])
        return bits.view(np.float32)

    def _narrow(self, dtype: str, room: np.ndarray, raw: np.ndarray) -> None:
        kind = np.float64 if dtype == "F64" else np.float32
        total = room.view(kind)[: len(raw) // BYTES[dtype]]
        if self._weights is None:
            np.divide(total, kind(self._count), out=total)
        if dtype != "BF16":
            np.copyto(raw.view(_TYPES[dtype]), total, casting="same_kind")
            return
        missing = np.isnan(total)
        bits = total.view(np.uint32)
        added = self._wide.view(np.uint32)[: bits.size]
        np.right_shift(bits, _HALF, out=added)
        np.bitwise_and(added, _ODD, out=added)
        np.add(added, _BELOW_HALF, out=added)
        np.add(bits, added, out=bits)
        if missing.any():
            bits[missing] = _NAN
        pairs = raw.view(np.uint32)
        lower, upper = bits[: pairs.size], bits[pairs.size :]
        np.right_shift(lower, _HALF, out=lower)
        np.bitwise_and(upper, _UPPER, out=upper)
        np.bitwise_or(lower, upper, out=pairs)
