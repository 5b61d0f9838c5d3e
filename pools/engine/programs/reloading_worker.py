"""Calls inside vLLM's workers: reload weights completely, and show the tensors that a worker computes with.

vLLM's own reload visits each layer that the files name. On a CPU it does not repack two things that are packed at a
cold start: the output layer of a model with tied embeddings, which the files do not name, and the experts of a mixture,
since their kernel exists already. Both are rebuilt here, by the layers' own methods. A mixer of Mamba keeps a view of
its convolution, which in bfloat16 is packed into other memory: it is filled again.

For prompt log-probabilities without those of cached tokens, one of vLLM's two model runners returns uninitialised
memory for the cached tokens: numbers of another request, or invalid token ids, which crash the server. They are omitted
here, as in the other runner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import unwritten
from vllm.distributed import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

ROWS = 4
"""Rows of random numbers for the output layer, each as after a norm."""
MOST_TOKENS = 512
"""Tokens per row, evenly over the vocabulary, with returned log-probabilities."""
DIGEST_THREADS = 8
"""Digests computed in parallel; each tensor is copied from its device first."""
OF_REQUESTS = ("kv_cache",)
"""Attributes of layers that hold results of requests, not weights."""


class ReloadingWorker:
    """A worker extension: its methods are called through `/collective_rpc`."""

    model_runner: Any

    def assay_reload(self, folders: list[str]) -> None:
        """Loads weights into the running model; `folders` has a folder for each host of the engine, in rank order."""
        if self.model_runner.model_config.word_embeddings_untied_by_checkpoint:
            raise RuntimeError("the weights hold an output layer that their config says is tied to the embedding")
        model = self.model_runner.get_model()
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            forget_kernels_of_experts(model)
        self.reload_weights(weights_path=folders[self.model_runner.parallel_config.node_rank])  # type: ignore[attr-defined]
        if on_cpu:
            pack_again(model)
            fill_convolutions(model)
        if left := unwritten.find(model):
            raise RuntimeError(f"nothing wrote these numbers of parameters: {left}")

    def assay_unwritten(self) -> dict[str, str]:
        """Returns counts of unwritten numbers by parameter, for the model that this worker was started with."""
        return dict(unwritten.AT_START)

    def assay_output_layer(self) -> dict[str, Any]:
        """Returns the model's dtype, and log-probabilities that its output layer alone gives for fixed random numbers.

        They are empty for ranks without an output layer, or without logits.
        """
        config = self.model_runner.model_config
        shown = {"dtype": str(config.dtype).removeprefix("torch."), "log_probabilities": []}
        if not get_pp_group().is_last_rank:
            return shown
        numbers = random_rows(ROWS, config.get_hidden_size()).to(self.model_runner.device, config.dtype)
        with torch.inference_mode():
            logits = self.model_runner.get_model().compute_logits(numbers)
        if logits is not None:
            values = logits.float().log_softmax(-1)
            tokens = torch.linspace(0, values.shape[-1] - 1, min(MOST_TOKENS, values.shape[-1])).long()
            shown["log_probabilities"] = values[:, tokens.to(values.device)].flatten().tolist()
        return shown

    def assay_weights(self) -> dict[str, str]:
        """Returns digests of everything that the model computes with, by name.

        For tensors, of their bytes; for a layer packed into hidden memory, of its output for fixed random numbers.
        """
        with torch.inference_mode(), ThreadPoolExecutor(DIGEST_THREADS) as threads:
            names, tensors = zip(*computed_with(self.model_runner.get_model()), strict=True)
            return dict(zip(names, threads.map(digest, tensors), strict=True))


def forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """Resets the experts' kernels, so that loading rebuilds them: only then are their weights packed."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_again(model: Any) -> None:
    """Packs each layer again that has kept its weight as well as the packed copy."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.ndim == 2 and weight.numel():
            module.quant_method.process_weights_after_loading(module)


def fill_convolutions(model: Any) -> None:
    """Copies each packed convolution's weight into the buffer that its mixer reads."""
    for module in model.modules():
        unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if unpacked is not None and "conv_weights" in module._buffers:
            module.conv_weights.copy_(unpacked)


def computed_with(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors of a model, and the outputs of layers with unreadable packed weights."""
    for prefix, module in model.named_modules():
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in held.items():
            if name in OF_REQUESTS:
                continue
            for index, tensor in enumerate(value if isinstance(value, list | tuple) else (value,)):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    yield f"{prefix}.{name}.{index}", tensor
        if hasattr(module, "cpu_linear") and not module.weight.is_meta:
            width = getattr(module, "embedding_dim", None) or getattr(module, "input_size_per_partition", None)
            numbers = random_rows(1, width or module.input_size).to(module.weight.dtype)
            yield f"{prefix}.cpu_linear", module.cpu_linear(numbers, module.weight, None)


def leave_out_rows_of_the_cache() -> None:
    """Makes prompt log-probabilities begin with the first position from which on a request computes all of them.

    A request that was preempted may find more of itself in the cache when it resumes: earlier positions are omitted.
    """
    runner: Any = GPUModelRunner
    collect: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict

    def _get_prompt_logprobs_dict(self: Any, hidden_states: Any, scheduled: dict[str, int]) -> dict[str, Any]:
        for name in self.num_prompt_logprobs:
            request = self.requests[name]
            if name in scheduled:
                at = request.num_computed_tokens
                first, end = getattr(request, "assay_rows", (at, at))
                if request.in_progress_prompt_logprobs_cpu is None or at > end:
                    first = at
                request.assay_rows = first, at + scheduled[name]
        logprobs = collect(self, hidden_states, scheduled)
        for name, rows in logprobs.items():
            if rows is not None and (first := self.requests[name].assay_rows[0]):
                kept = type(rows)(*(column[first:] for column in rows[:3]))
                logprobs[name] = kept if len(kept.logprobs) else None
        return logprobs

    runner._get_prompt_logprobs_dict = _get_prompt_logprobs_dict


leave_out_rows_of_the_cache()
unwritten.watch_loading()


def random_rows(count: int, width: int) -> torch.Tensor:
    """Returns the same normal random numbers each time."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def digest(tensor: torch.Tensor) -> str:
    """Returns the digest of a tensor's dtype, shape and bytes."""
    checksum = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    checksum.update(content)
    return checksum.hexdigest()
