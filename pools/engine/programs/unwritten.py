"""Detects parameters that loading a checkpoint left unwritten. Imported by vLLM's workers.

vLLM excludes unquantised linears, embeddings and experts from its own check, and never checks parts of a fused
parameter, so they keep the previous content of their memory. Here parameters are filled with a certain NaN before
loading; afterwards parameters with that NaN are reported. Quantised layers have defaults for missing tensors, and
padded experts are written in part: both are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload import layerwise

PATTERNS = {torch.int16: 0x7FFE, torch.int32: 0x7FFFFFFE}
"""The second largest integer, as a float a NaN that no arithmetic produces: GPUs produce the largest."""
AT_START: dict[str, str] = {}
"""Counts of unwritten numbers by parameter, for the model that this process was started with."""


def bits_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a parameter as integers; None for a parameter without numbers of two or four bytes."""
    if parameter is None or parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
        return None
    integers = {2: torch.int16, 4: torch.int32}.get(parameter.itemsize)
    return parameter.data.view(integers) if integers else None


def mark(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Fills parameters of a module, not of its children, with the pattern."""
    method = getattr(module, "quant_method", None)
    for name in names if method is None or type(method).__name__.startswith("Unquantized") else ():
        bits = bits_of(parameter := module._parameters[name])
        if bits is not None and getattr(parameter, "weight_loader_numel", bits.numel()) == bits.numel():
            bits.fill_(PATTERNS[bits.dtype])


def find(model: torch.nn.Module) -> dict[str, str]:
    """Returns counts of numbers that still hold the pattern, by parameter, and sets them to 0."""
    counts: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        bits = bits_of(parameter)
        if bits is None or int(bits.amax()) < PATTERNS[bits.dtype]:  # takes a tenth of the time of comparing all
            continue
        held = bits == PATTERNS[bits.dtype]
        if count := int(held.count_nonzero()):
            counts[name] = f"{count} of {bits.numel()}"
            bits.masked_fill_(held, 0)
    return counts


def watch_loading() -> None:
    """Marks each model before its weights are loaded, and the buffers that a reload in place loads into."""
    loader: Any = base_loader.BaseModelLoader
    create, materialize = loader.create_model, layerwise.materialize_layer
    process = base_loader.process_weights_after_loading

    def create_model(self: Any, *given: Any, **options: Any) -> Any:
        model = create(self, *given, **options)
        for module in model.modules():
            mark(module, module._parameters)
        return model

    def process_weights_after_loading(model: Any, *given: Any, **options: Any) -> None:
        AT_START.update(find(model))
        process(model, *given, **options)

    def materialize_layer(layer: Any, info: Any) -> None:
        new = [name for name, parameter in layer._parameters.items() if parameter is not None and parameter.is_meta]
        materialize(layer, info)
        mark(layer, new)

    loader.create_model, layerwise.materialize_layer = create_model, materialize_layer
    base_loader.process_weights_after_loading = process_weights_after_loading
