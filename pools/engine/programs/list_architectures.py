"""Prints the architectures that this environment's vLLM can write text with, as JSON. Executed by vLLM's environment.

    python list_architectures.py

`text` has those of text alone; `multimodal` those with images, video or sound as well. They are the models of vLLM's
registry, and those of transformers that it serves by transformers' own code (its `_try_resolve_transformers`).
`configs` has the types of models with a config class in vLLM or transformers, in a single text.
Models for embeddings, classes, rewards, drafts and transcription are left out. A model that cannot be imported here is
listed by its table in the registry.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

ELSEWHERE = ("timm", "torchaudio")
"""Packages that only this program lacks: some models of other devices import them."""


def architectures() -> dict[str, list[str]]:
    """Returns sorted names of architectures, by `text` and `multimodal`."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    kinds = {name: kind for name, kind in of_transformers().items() if name not in registry._VLLM_MODELS}
    text, shown = registry._TEXT_GENERATION_MODELS, registry._MULTIMODAL_MODELS
    for name in {**text, **shown, **registry._TRANSFORMERS_SUPPORTED_MODELS}:
        facts = inspected(registry, name)
        if facts is None or not facts.supports_transcription_only:
            kinds[name] = "multimodal" if name in shown or (facts and facts.supports_multimodal) else "text"
    return {kind: sorted(name for name in kinds if kinds[name] == kind) for kind in ("text", "multimodal")}


def configs() -> str:
    """Returns sorted types of models; their config.json is read without code of the checkpoint."""
    auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    vllm: Any = importlib.import_module("vllm.transformers_utils.config")
    return " ".join(sorted({*auto.CONFIG_MAPPING.keys(), *vllm._CONFIG_REGISTRY}))


def inspected(registry: Any, name: str) -> Any:
    """Returns vLLM's facts about a model's class; None if it cannot be imported here."""
    try:
        return registry._ModelInfo.from_model_cls(registry.ModelRegistry.models[name].load_model_cls())
    except Exception as error:  # noqa: BLE001 - the boundary: each module may need a device or a package of its own
        print(f"{name} is listed by its table: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def of_transformers() -> dict[str, str]:
    """Returns the kinds of transformers' decoders that vLLM runs by transformers' code."""
    transformers: Any = importlib.import_module("transformers")
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    kinds: dict[str, str] = {}
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    for kind, table in zip(("text", "multimodal"), tables, strict=True):
        for listed in table.values():
            for name in (listed,) if isinstance(listed, str) else listed:
                try:
                    model = getattr(transformers, name)
                    usable = model.is_backend_compatible() or model._can_set_attn_implementation()
                    config = model.config_class()
                    words = getattr(config.get_text_config(decoder=True), "vocab_size", None)  # drafts have none
                    if usable and words and not config.is_encoder_decoder:
                        kinds[name] = kind
                except Exception as error:  # noqa: BLE001 - the boundary, as above
                    print(f"{name} of transformers is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return kinds


def main() -> None:
    """Prints the list."""
    sys.path.append(str(Path(__file__).parent / "placeholders"))
    placeholders: Any = importlib.import_module("torchvision")
    getattr(placeholders, "PLACEHOLDERS", []).extend(ELSEWHERE)
    version = importlib.metadata.version("vllm").partition("+")[0]
    print(json.dumps({version: {**architectures(), "configs": configs()}}, indent=1))


if __name__ == "__main__":
    main()
