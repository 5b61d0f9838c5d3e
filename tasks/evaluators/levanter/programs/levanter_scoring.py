"""Log-probabilities of a model in Levanter, as lm-eval requests them; for `run_levanter.py`.

Uses Levanter's packing and compiled scoring only: its own harness model splits context and continuation elsewhere than
lm-eval's do, adds no BOS, and packs requests for models with absolute positions too. Scores outlive the process, so
that an interrupted evaluation resumes: a line of output announces each new file in the working folder, which the caller
copies to durable storage, and back.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import haliax as hax
import numpy as np
from levanter.data.loader import stack_batches
from levanter.data.packing import PromptCompletion, greedy_pack_prompt_completions
from levanter.eval_harness import _LmEvalHarnessWorker as Worker
from levanter.models.lm_model import LmExample
from levanter_model import Model
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

FOLDER = "kept"
AT_LEAST_EVERY_SECONDS = 20.0

Scored = tuple[float, bool]
"""A log-probability, and True if the continuation is the greedy choice."""


class Journal:
    """Scores of packed rows, by a digest of everything that they depend on."""

    def __init__(self, folder: Path, subject: str) -> None:
        self._folder = folder
        self._subject = subject.encode()  # model, method and devices: part of every key
        self._rows: dict[str, list[Scored]] = {}
        self._new: dict[str, list[Scored]] = {}
        self._kept_at = time.monotonic()
        self.known = 0  # requests with scores reused from the folder
        for file in sorted(folder.glob("*.json")):
            try:
                rows = json.loads(file.read_bytes())
                self._rows |= {key: [(float(score), bool(greedy)) for score, greedy in rows[key]] for key in rows}
            except (ValueError, TypeError, LookupError):
                continue  # a damaged file

    def key(self, *parts: np.ndarray) -> str:
        digest = hashlib.blake2b(self._subject, digest_size=20)
        for part in parts:
            digest.update(f"{part.dtype.str} {part.shape} ".encode() + part.tobytes())
        return digest.hexdigest()

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Sequence[Scored]:
        """Returns the scores of a row's requests, in order; empty if it was not scored."""
        scores = self._rows.get(key, ())
        self.known += len(scores)
        return scores

    def add(self, key: str, scores: list[Scored]) -> None:
        self._new[key] = scores

    def keep(self, *, at_once: bool) -> None:
        """Writes new scores to a file, at once, or at least 20 s after the last file."""
        if not self._new or not (at_once or time.monotonic() - self._kept_at > AT_LEAST_EVERY_SECONDS):
            return
        self._folder.mkdir(exist_ok=True)
        name = f"{next(iter(self._new))}.json"
        aside = self._folder / f"{name}.new"
        aside.write_text(json.dumps(self._new))
        aside.replace(self._folder / name)
        print(f"kept {name}", flush=True)
        self._new, self._kept_at = {}, time.monotonic()


SHORTEST_ROW = 256
MOST_IN_A_ROW = 64
PADDING = 0  # any token: padding is a segment of its own without weight

WORKERS: dict[Any, Worker] = {}  # compiled scoring functions of this process

Pair = tuple[Any, list[int], list[int]]


class LevanterLM(TemplateLM):
    """An lm-eval model that returns log-probabilities only, and computes none that a journal has."""

    def __init__(self, model: Model, benchmarks: str, journal: Journal) -> None:
        super().__init__()
        self.model = model
        self.journal = journal
        self.tokenizer = model.tokenizer
        self.max_length = self.longest_window = model.max_length
        bos = self.tokenizer.bos_token_id
        self.adds_bos = bos is not None and self.tokenizer("a").input_ids[:1] == [bos]
        self._benchmarks = benchmarks
        self._ends: list[int] = []

    @property
    def asking(self) -> dict[str, Any]:
        note = "Windows of long texts are 1 token shorter than those of --model hf."
        bos = self.tokenizer.bos_token if self.adds_bos else "none"
        return {"bos": f"the tokenizer's own rule, unless a template brings it: {bos}", "notes": [note]}

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)  # in names of lm-eval's caches

    @property
    def prefix_token_id(self) -> int:  # as in `--model hf`
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **kwargs: Any) -> Any:
        """Returns token ids of a text, or of several, as in `--model hf`: with a BOS if the tokenizer puts it."""
        if not isinstance(string, str):
            return [self.tok_encode(text, add_special_tokens) for text in string]
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Scored]:
        self._ends = ends([str(request.task_name) for request in requests])
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
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
        self._ends = ends([str(requests[owner].task_name) for owner in owners])
        sums = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[owner] += log_probability
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> NoReturn:
        raise NotImplementedError("generation goes to an endpoint")

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[Scored]:
        by_number: dict[int, Scored] = {}
        for scores in self._scored([self._shortened(*pair) for pair in enumerate(requests)]):
            by_number |= scores
            print(f"Scoring ({self._benchmarks}): {len(by_number)}/{len(requests)}", file=sys.stderr, flush=True)
        return [by_number[number] for number in range(len(requests))]

    def _shortened(self, number: int, pair: Pair) -> PromptCompletion:
        _, context, continuation = pair
        tokens = (context + continuation)[-self.max_length :]
        lost = len(context) + len(continuation) - len(tokens)
        return PromptCompletion(ids=tokens, prompt_length=max(1, len(context) - lost), segment_id=number)

    def _scored(self, requests: Sequence[PromptCompletion]) -> Iterable[dict[int, Scored]]:
        if not requests:
            return
        longest = max(len(request.ids) for request in requests)
        row = min(self.max_length, max(SHORTEST_ROW, 1 << (longest - 1).bit_length()))
        position = self.model.network.Pos.resize(row)
        packed = greedy_pack_prompt_completions(
            position, requests, pad_token=PADDING, max_segments_per_example=MOST_IN_A_ROW if self.model.packed else 1
        )
        # Packing is the same in every run, so the remaining rows also give the same numbers.
        keys = [_key_of(self.journal, example) for example in packed]
        left = [place for place, key in enumerate(keys) if key not in self.journal]
        yield {
            number: score
            for key, example in zip(keys, packed, strict=True)
            for number, score in zip(_members(example), self.journal.get(key), strict=False)
        }
        batch = hax.Axis("batch", self.model.rows)
        worker = _worker_for(batch, position, self.model)
        batches = list(stack_batches((packed[place] for place in left), position, batch))  # enters its own mesh
        begins = range(0, len(left), self.model.rows)
        for first, examples in zip(begins, batches, strict=True):
            numbers, values, correct = (np.asarray(part.array) for part in worker.dispatch_loglikelihood(examples))
            scores = {int(n): (float(v), bool(g)) for n, v, g in zip(numbers, values, correct, strict=True) if n >= 0}
            for place in left[first : first + self.model.rows]:
                self.journal.add(keys[place], [scores[number] for number in _members(packed[place])])
            self.journal.keep(at_once=any(min(scores) < end <= max(scores) + 1 for end in self._ends))
            yield scores
        self.journal.keep(at_once=True)
        worker.model = None  # frees memory for the next checkpoint


def ends(benchmarks: Sequence[str]) -> list[int]:
    """Returns the indexes of requests at which another benchmark begins."""
    return [number for number, (before, name) in enumerate(pairwise(benchmarks), start=1) if name != before]


def _members(example: LmExample) -> range:
    numbers = segments(example)
    return range(int(numbers[0]), int(numbers.max()) + 1)


def segments(example: LmExample) -> np.ndarray:
    """Returns the request index of each position in a row; -1 for padding."""
    mask: Any = example.attn_mask
    return np.asarray(mask.segment_ids[0].array)


def _key_of(journal: Journal, example: LmExample) -> str:
    numbers = segments(example)
    within = np.where(numbers < 0, -1, numbers - numbers[0])
    return journal.key(within, np.asarray(example.tokens.array), np.asarray(example.loss_weight.array))


def _worker_for(batch: hax.Axis, position: hax.Axis, model: Model) -> Worker:
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
