"""Holds the names and shapes of a checkpoint's tensors against its config, without reading weights.

    python check_tensors.py ORDER.json ANSWER.json

An order is {"folder", "shapes"}; the answer is {"why"}, null if nothing speaks against the checkpoint. Executed by
vLLM's environment. transformers builds the model on torch's meta device and gets the names, as `from_pretrained` does:
it renames, joins and ties them by its own rules. Only findings that no engine can serve count: a matrix of the language
model that is missing, or has another shape. Architectures that transformers does not have, quantised weights, and
models that cannot be built here are left to the engine.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

SHOWN = 2


def why_unfit(folder: str, shapes: dict[str, list[int]]) -> str | None:
    """Returns a difference between tensors, with shapes by name, and the model of a folder's config; or None."""
    transformers: Any = importlib.import_module("transformers")
    described = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = getattr(transformers, (described.architectures or [""])[0], None)
    if kind is None or getattr(described, "quantization_config", None) is not None:
        return None
    model, loaded = load(kind, described, shapes)
    if loaded.conversion_errors:
        return None
    parts = language_parts(model)
    made = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, held, shape in sorted(loaded.mismatched_keys):
        if name.startswith((*parts, "lm_head.")):
            return f"{name} has the shape {list(held)}, and its config makes {list(shape)}"
    missing = sorted(name for name in loaded.missing_keys if name.startswith(parts) and len(made[name]) > 1)
    if not missing:
        return None
    others = sorted(loaded.unexpected_keys)
    unknown = f"; of no use are {len(others)}, such as {', '.join(others[:SHOWN])}" if others else ""
    return f"{len(missing)} of its tensors are missing, such as {', '.join(missing[:SHOWN])}{unknown}"


def load(kind: Any, described: Any, shapes: dict[str, list[int]]) -> tuple[Any, Any]:
    """Returns the model on the meta device, and transformers' account of loading tensors of these shapes into it."""
    torch: Any = importlib.import_module("torch")
    loading: Any = importlib.import_module("transformers.core_model_loading")
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    with torch.device("meta"):
        model = kind(described)
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    config = modeling.LoadStateDictConfig(
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        weight_mapping=mapping.get_model_conversion_mapping(model),
    )
    loaded, _ = loading.convert_and_load_state_dict_in_model(
        model=model, state_dict=tensors, load_config=config, disk_offload_index=None
    )
    model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(loaded)
    return model, loaded


def language_parts(model: Any) -> tuple[str, ...]:
    """Returns the beginnings of the names of a model's decoder, which has no parts for images or sound."""
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return (f"{name}." if name else "",)


def main(arguments: list[str]) -> None:
    """Writes the answer to an order."""
    order = json.loads(Path(arguments[0]).read_bytes())
    why = why_unfit(order["folder"], order["shapes"])
    Path(arguments[1]).write_text(json.dumps({"why": why}))


if __name__ == "__main__":
    main(sys.argv[1:])
