"""Log-probabilities by a model that Levanter loaded, as lm-eval asks for them; for `run_levanter.py`.

Levanter's own harness model cuts pairs of context and continuation elsewhere than lm-eval's do, adds no BOS, and packs
requests for models with absolute positions too. So only its packing and its compiled scoring are used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import haliax as hax
import numpy as np
from levanter.data.loader import stack_batches
from levanter.data.packing import PromptCompletion, greedy_pack_prompt_completions
from levanter.eval_harness import _LmEvalHarnessWorker as Worker
from levanter_model import Model
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

SHORTEST_ROW = 256
MOST_IN_A_ROW = 64
PADDING = 0  # any token will do, since padding is a segment of its own and weighs nothing

WORKERS: dict[Any, Worker] = {}
"""Compiled scorings of this process."""

Pair = tuple[Any, list[int], list[int]]
Scored = tuple[float, bool]


class LevanterLM(TemplateLM):
    """A model for lm-eval that answers with log-probabilities only."""

    def __init__(self, model: Model, benchmarks: str) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.max_length = self.longest_window = model.max_length
        bos = self.tokenizer.bos_token_id
        self.adds_bos = bos is not None and self.tokenizer("a").input_ids[:1] == [bos]
        self._benchmarks = benchmarks

    @property
    def asking(self) -> dict[str, Any]:
        """The part of a record that says how questions were put."""
        note = "Windows of long texts are one token shorter than those of --model hf."
        bos = self.tokenizer.bos_token if self.adds_bos else "none"
        return {"bos": f"the tokenizer's own rule, unless a template brings it: {bos}", "notes": [note]}

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        """lm-eval names its caches after it."""
        return str(self.tokenizer.name_or_path)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without context, as in `--model hf`."""
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **kwargs: Any) -> Any:
        """Token ids of a text, or of several, as `--model hf` makes them: with a BOS where the tokenizer puts one."""
        if not isinstance(string, str):
            return [self.tok_encode(text, add_special_tokens) for text in string]
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows that do not overlap."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            for window in windows:
                pairs.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[owner] += log_probability
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> NoReturn:
        """Refused before anything is loaded."""
        raise NotImplementedError("generation goes to an endpoint")

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[Scored]:
        found: dict[int, Scored] = {}
        for numbers, values, greedy in self._scored([self._shortened(*pair) for pair in enumerate(requests)]):
            found |= {int(n): (float(v), bool(g)) for n, v, g in zip(numbers, values, greedy, strict=True)}
            print(f"Scoring ({self._benchmarks}): {len(found)}/{len(requests)}", file=sys.stderr, flush=True)
        return [found[number] for number in range(len(requests))]

    def _shortened(self, number: int, pair: Pair) -> PromptCompletion:
        """A request that fits; what is too long loses its beginning, as it does with an endpoint."""
        _, context, continuation = pair
        tokens = (context + continuation)[-self.max_length :]
        lost = len(context) + len(continuation) - len(tokens)
        return PromptCompletion(ids=tokens, prompt_length=max(1, len(context) - lost), segment_id=number)

    def _scored(self, requests: Sequence[PromptCompletion]) -> Iterable[tuple[Any, Any, Any]]:
        """Numbers of requests, log-probabilities and whether each is the greedy choice, batch by batch."""
        if not requests:
            return
        longest = max(len(request.ids) for request in requests)
        row = min(self.max_length, max(SHORTEST_ROW, 1 << (longest - 1).bit_length()))
        position = self.model.network.Pos.resize(row)
        packed = greedy_pack_prompt_completions(
            position,
            requests,
            pad_token=PADDING,
            max_segments_per_example=MOST_IN_A_ROW if self.model.packed else 1,
        )
        batch = hax.Axis("batch", self.model.rows)
        worker = worker_for(batch, position, self.model)
        for examples in list(stack_batches(iter(packed), position, batch)):  # a generator that holds a mesh of its own
            numbers, values, correct = (np.asarray(part.array) for part in worker.dispatch_loglikelihood(examples))
            real = numbers >= 0
            yield numbers[real], values[real], correct[real]
        worker.model = None  # else it would keep the memory that the next checkpoint is loaded into


def worker_for(batch: hax.Axis, position: hax.Axis, model: Model) -> Worker:
    """Levanter's compiled scoring of rows of a length: one for all models, since it compiles for each that it made."""
    key = (batch, position, model.precision, str(model.mapping))
    if key not in WORKERS:
        WORKERS[key] = Worker(
            batch,
            position,
            model.network,
            model.mapping,
            model.tokenizer,
            model.trainer.mp,
            max_packed_segments=MOST_IN_A_ROW,
        )
    WORKERS[key].model = model.network
    return WORKERS[key]
