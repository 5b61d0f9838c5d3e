"""Trains the demo's model, a tiny Llama, on the CPU and writes its checkpoints as Hugging Face folders.

Runs inside the engine environment, which has torch, transformers and tokenizers:

    python flows/demo/programs/train_demo_model.py --output demo/checkpoints

writes `demo/checkpoints/hf/step-N`. The training text comes from `demo_world.py`; its benchmarks' questions are never
part of it. The default 360 steps take about 12 seconds of two idle cores, and longer under load; all checkpoints are
written in any case. The same seed reproduces the run, up to the CPU's arithmetic.

Prints a JSON object per line: `{"step", "steps", "loss", "seconds", "checkpoint"}` while training, where `checkpoint`
is the folder just written or null, and finally `{"done", "step", "steps", "seconds", "parameters", "checkpoints"}`.
"""

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from demo_tokenizer import CONTEXT_TOKENS, build_tokenizer
from demo_world import training_text
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

PROCESSES = 2
"""With a thread each: threads of a process synchronize after each operation, up to 30 times slower on a shared core."""
HIDDEN_SIZE = 128
LAYERS = 2
HEADS = 4

BATCH_TEXTS = 32
PARTS = 2 * PROCESSES
"""Parts of a batch, each padded to its own longest text: together 41 % fewer tokens than a whole padded batch."""
MEETING_SECONDS = 300.0
"""Time after which a missing process counts as lost."""
LOG_EVERY_STEPS = 10
MATRIX_LEARNING_RATE = 0.015
OTHER_LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
DECAY_SHARE = 0.6
GRADIENT_NORM = 1.0
VERDICT_WEIGHT = 6.0
"""A verdict is a single token among hundreds; with the weight of the others it is not learnt in so few steps."""


def build_model(tokenizer: Any) -> LlamaForCausalLM:
    """Returns a Llama of half a million parameters in float32, newly initialised."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, rank: int) -> list[torch.optim.Optimizer]:
    """Returns Muon for a process's share of the layers' matrices, and in the first process AdamW for the rest.

    In the same number of steps AdamW alone reaches 0.26 on the facts and 0.00 on spelling, this 1.00 on both.
    """
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices[rank::PROCESSES], lr=MATRIX_LEARNING_RATE, weight_decay=0.0)
    if rank != 0:
        return [muon]
    return [muon, torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def learning_rate_factor(step: int, steps: int) -> float:
    """Returns the factor of a schedule that rises for the first steps, stays, and falls to almost zero at the end."""
    rise = min(1.0, step / WARMUP_STEPS)
    fall = min(1.0, (1 - step / steps) / DECAY_SHARE)
    return rise * (0.05 + 0.95 * fall)


def checkpoint_steps(steps: int, checkpoints: int) -> list[int]:
    """Returns the steps to save: denser at first, when scores change fastest; round numbers where they fit."""
    rounding = 10 if steps > 5 * checkpoints**2 else 1  # so that the first is not step 0
    planned = {round(steps * (number / checkpoints) ** 2 / rounding) * rounding for number in range(1, checkpoints)}
    return sorted({step for step in planned if 0 < step < steps} | {steps})


def next_batch(source: random.Random, tokenizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the parts of a batch, by length: token ids and their loss weights, both [texts, tokens of the longest].

    Each text starts at position 0, as prompts do. Padding and the judge's input have weight 0.
    """
    texts = [training_text(source) for _ in range(BATCH_TEXTS)]
    encoded = tokenizer([example.text for example in texts])["input_ids"]
    order = sorted(range(BATCH_TEXTS), key=lambda place: len(encoded[place]))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, BATCH_TEXTS, BATCH_TEXTS // PARTS):
        places = order[start : start + BATCH_TEXTS // PARTS]
        length = len(encoded[places[-1]])
        inputs = torch.full((len(places), length), tokenizer.pad_token_id)
        weights = torch.zeros((len(places), length))
        for row, place in enumerate(places):
            example, ids = texts[place], encoded[place]
            inputs[row, : len(ids)] = torch.tensor(ids)
            begin = len(tokenizer(example.text[: example.learnt_from])["input_ids"]) if example.is_judged else 0
            weights[row, begin : len(ids)] = VERDICT_WEIGHT if example.is_judged else 1.0
        parts.append((inputs, weights))
    return parts


class Learner:
    """A process that trains a model with others; `gradients` is [processes, parameters + 1], with the loss last."""

    def __init__(self, model: LlamaForCausalLM, gradients: torch.Tensor, meeting: Barrier) -> None:
        self._model = model
        self._gradients = gradients
        self._meeting = meeting

    def run(self, rank: int, *, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Iterator[float]:
        """Takes the steps; yields the loss of each, while no process changes the model.

        The loss is the weighted mean of negative token log-probs of a batch, without the first token of each text.
        """
        torch.set_num_threads(1)
        source = random.Random(seed)
        optimizers = build_optimizers(self._model, rank)
        peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        for step in range(1, steps + 1):
            factor = learning_rate_factor(step, steps)
            for optimizer, learning_rates in zip(optimizers, peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, learning_rates, strict=True):
                    group["lr"] = peak * factor
            loss = self._learn_from(next_batch(source, tokenizer), rank)
            for optimizer in optimizers:
                optimizer.step()
            self._model.zero_grad()
            self._meeting.wait()
            yield loss

    def _learn_from(self, batch: list[tuple[torch.Tensor, torch.Tensor]], rank: int) -> float:
        whole = sum(weights[:, 1:].sum() for _, weights in batch)
        mean = 0.0
        for inputs, weights in [batch[place] for place in (rank, -1 - rank)]:
            logits = self._model(input_ids=inputs, use_cache=False).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs[:, 1:], reduction="none")
            loss = (losses * weights[:, 1:]).sum() / whole
            loss.backward()
            mean += loss.item()
        parameters: list[Any] = list(self._model.parameters())
        own = torch.cat([*(parameter.grad.flatten() for parameter in parameters), torch.tensor([mean])])
        self._gradients[rank] = own
        self._meeting.wait()
        together = self._gradients.sum(dim=0)
        torch.nn.utils.vector_to_parameters(together[:-1], [parameter.grad for parameter in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
        return together[-1].item()


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, output: Path, step: int) -> Path:
    """Writes `output/hf/step-N` in a single move, so that no partial step is ever visible."""
    writing = output / ".writing"
    shutil.rmtree(writing, ignore_errors=True)
    fresh, replaced = writing / "fresh", writing / "replaced"
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh, save_jinja_files=False)  # keeps the template inside tokenizer_config.json
    tokenizer_config = fresh / "tokenizer_config.json"
    described = json.loads(tokenizer_config.read_text())
    described["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 does not know the class name of version 5
    tokenizer_config.write_text(json.dumps(described, indent=2) + "\n")

    final = output / "hf" / f"step-{step}"
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        final.rename(replaced)
    fresh.rename(final)
    shutil.rmtree(writing)
    return final


def train(*, output: Path, steps: int, checkpoints: int, seed: int) -> None:
    """Trains, prints progress and writes the checkpoints."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).share_memory()
    processes = multiprocessing.get_context("fork")
    gradients = torch.zeros(PROCESSES, model.num_parameters() + 1).share_memory_()
    learner = Learner(model, gradients, processes.Barrier(PROCESSES, timeout=MEETING_SECONDS))

    def help_to_learn(rank: int) -> None:
        for _ in learner.run(rank, tokenizer=tokenizer, seed=seed, steps=steps):
            pass

    for rank in range(1, PROCESSES):
        processes.Process(target=help_to_learn, args=(rank,), daemon=True).start()

    planned = checkpoint_steps(steps, checkpoints)
    saved: list[str] = []
    started = time.monotonic()
    step = 0
    for step, loss in enumerate(learner.run(0, tokenizer=tokenizer, seed=seed, steps=steps), 1):
        checkpoint = str(save_checkpoint(model, tokenizer, output=output, step=step)) if step in planned else None
        seconds = time.monotonic() - started
        if checkpoint or step % LOG_EVERY_STEPS == 0:
            report(step=step, steps=steps, loss=round(loss, 4), seconds=round(seconds, 2), checkpoint=checkpoint)
        if checkpoint:
            saved.append(checkpoint)

    report(
        done=True,
        step=step,
        steps=steps,
        seconds=round(time.monotonic() - started, 2),
        parameters=model.num_parameters(),
        checkpoints=saved,
    )


def report(**fields: object) -> None:
    """Prints a line of progress."""
    print(json.dumps(fields), flush=True)


def positive(text: str) -> int:
    """Parses a whole number above zero, for the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text}")
    return number


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="checkpoints are written to OUTPUT/hf/step-N")
    parser.add_argument("--steps", type=positive, default=360, help="training steps (default: 360)")
    parser.add_argument("--checkpoints", type=positive, default=6, help="checkpoints to write (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the text (default: 0)")
    options = parser.parse_args()
    names = {f"step-{step}" for step in checkpoint_steps(options.steps, options.checkpoints)}
    leftover = sorted({folder.name for folder in (options.output / "hf").glob("step-*")} - names)
    if leftover:  # of another run, which would be mistaken for part of this run
        sys.exit(
            f"Expected only this run's checkpoints in {options.output / 'hf'}, found also {', '.join(leftover)}. "
            "Remove them or choose another --output."
        )
    transformers_logging.disable_progress_bar()
    train(output=options.output, steps=options.steps, checkpoints=options.checkpoints, seed=options.seed)


if __name__ == "__main__":
    main()
