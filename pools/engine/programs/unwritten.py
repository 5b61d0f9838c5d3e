"""Parameters that loading a checkpoint left unwritten. Imported by vLLM's workers.

vLLM leaves unquantised linears, embeddings and experts out of its own check, and never looks at parts of a fused
parameter, so they keep what was in their memory. Here parameters hold a NaN of a pattern of its own before they are
loaded, and those that hold it afterwards are found. Quantised layers have defaults for what checkpoints leave out, and
padded experts are written in part: both are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload import layerwise

PATTERNS = {
    torch.float16: (torch.int16, 0x7FA5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
}
"""By type, the integers of its size and that which is a NaN there that no arithmetic gives."""
AT_ONCE = 2**24
"""Numbers of a parameter that are compared at once: what is compared takes a byte of each."""
AT_START: dict[str, str] = {}
"""Of the model that this process was started with, how much of which parameters was left unwritten."""


def mark(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Fills parameters of a module, not of its children, with the pattern."""
    method = getattr(module, "quant_method", None)
    if method is not None and not type(method).__name__.startswith("Unquantized"):
        return
    for name in names:
        parameter = module._parameters.get(name)
        if parameter is not None and getattr(parameter, "weight_loader_numel", parameter.numel()) == parameter.numel():
            for bits, pattern in _pieces(parameter):
                bits.fill_(pattern)


def find(model: torch.nn.Module) -> dict[str, str]:
    """Returns how many numbers of which parameters still hold the pattern, and makes them 0."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        left = 0
        for bits, pattern in _pieces(parameter):
            held = bits == pattern
            if count := int(held.sum()):
                left += count
                bits.masked_fill_(held, 0)
        if left:
            found[name] = f"{left} of {parameter.numel()}"
    return found


def _pieces(parameter: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Views of a parameter as integers, along its first dimension, and the pattern."""
    if parameter.dtype not in PATTERNS or parameter.is_meta or not parameter.numel():
        return []
    integers, pattern = PATTERNS[parameter.dtype]
    bits = parameter.data.view(integers).reshape(1) if not parameter.ndim else parameter.data.view(integers)
    rows = max(1, AT_ONCE * len(bits) // bits.numel())
    return [(piece, pattern) for piece in bits.split(rows)]


def watch_loading() -> None:
    """Marks each model before its weights are loaded, and remembers which parameters were left unwritten.

    A reload in place loads into memory of its own, which is marked as well: `find` names what is left of that.
    """
    loader: Any = base_loader.BaseModelLoader
    create, process, materialize = (
        loader.create_model,
        base_loader.process_weights_after_loading,
        layerwise.materialize_layer,
    )

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
