"""Parts of a model from elsewhere: its tokenizer, chat template, and the base of its adapters."""

from __future__ import annotations

from functools import partial
from typing import Any

from pools.weights.merges import with_options
from resources.config import Config
from resources.storage.hub import hub_location


class ModelParts(Config):
    """Parts of a model in place of those of its checkpoints, which may lack them. They become a part of the model's
    name."""

    tokenizer: str | None = None
    """A folder with the tokenizer, or owner/name[@revision] on the hub; the checkpoint's own, or its run's, when
    unset."""
    chat_template: str | None = None
    """A file with the chat template; the tokenizer's own when unset."""
    base: str | None = None
    """The model that adapters change, as a folder or owner/name[@revision]; as in adapter_config.json when unset."""


def with_parts_named(values: Any, field: str = "model_path") -> Any:
    """Moves the model's parts in a request into a field of it, as options in the names of its locations."""
    is_request = isinstance(values, dict)
    given = {name: values[name] for name in ModelParts.model_fields if values.get(name)} if is_request else {}
    if not given:
        return values
    parts = ModelParts.model_validate(given)
    tokenizer, base = (place and hub_location(place) for place in (parts.tokenizer, parts.base))
    named = partial(with_options, tokenizer=tokenizer, template=parts.chat_template, base=base)
    left = {name: value for name, value in values.items() if name not in given}
    match values.get(field):
        case str() as place:
            return {**left, field: named(place)}
        case list() | tuple() as places if all(isinstance(place, str) for place in places):
            return {**left, field: [named(place) for place in places]}
        case _:
            raise ValueError(f"expected {field} with {', '.join(given)}: name the checkpoints")
