"""The tensors of a base that an adapter changes, and how.

Names and formulas are those of PEFT 0.21: `tuners/lora/layer.py`, `tuners/lora/dora.py`,
`tuners/trainable_tokens/layer.py` and `utils/save_and_load.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pools.weights.formats import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BYTES, Tensor, read_json, read_safetensors_header
from pools.weights.model_files import ModelFolder, read_tensors
from resources.errors import CheckpointError
from resources.storage import storage

_PARTS = re.compile(
    r"(?P<module>.+?)\.(?:(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
    r"|(?:token_adapter\.)?(?P<rows>trainable_tokens_delta)"
    r"|(?:token_adapter\.)?(?:base_layer\.)?(?P<full>weight|bias))"
)
_RENAMED = (  # modules in transformers 5, and the tensors of older files and of text models inside others
    ("", ""),
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head", "language_model.lm_head"),
    ("model.", ""),
    ("transformer.", ""),
)
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
_HEADS = frozenset(
    f"{inside}{head}.weight"
    for inside in ("", "model.", "language_model.")
    for head in ("lm_head", "embed_out", "output")
)
_CONV1D = frozenset({"gpt2", "openai-gpt"})  # their linear layers are stored as (in, out)
_MOST_REPEATED = 3  # a regular expression with more takes too long on a name that does not match
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_READ_BYTES = 2**16
_MOST_NAMED = 3


@dataclass(frozen=True)
class LowRank:
    """A product of two thin matrices, added to a matrix after scaling.

    `first` is A, of shape (rank, in); `second` is B, of shape (out, rank). The matrix is (out, in), or (in, out) if
    `transposed`. For DoRA the sum is scaled so that each output has the norm in `magnitude`, of shape (out,).
    """

    first: Tensor
    second: Tensor
    scaling: float
    transposed: bool
    magnitude: Tensor | None


@dataclass(frozen=True)
class Change:
    """A tensor of the result: the numbers of `source`, with a product added, and then the rows `numbers` replaced."""

    tensor: Tensor
    source: Tensor
    low_rank: LowRank | None = None
    rows: Tensor | None = None
    numbers: tuple[int, ...] = ()


@dataclass
class _Module:
    path: str
    full: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    is_embedding: bool = False
    is_conv1d: bool = False


def changes_of(folder: ModelFolder) -> dict[str, Change]:
    """Returns the changed tensors of an adapter on its base, by their names in the result.

    Raises:
        CheckpointError: a tensor of the adapter fits none of the base, or not that which it names, by its shape.
    """
    [base] = folder.inputs
    problems: list[str] = []
    config = read_json(folder.files[ADAPTER_CONFIG], problems)
    tensors = read_tensors(base)
    embedding = _embedding(tensors)
    changes: dict[str, Change] = {}
    unreached: list[str] = []
    for path, module in _modules(read_safetensors_header(folder.files[ADAPTER_WEIGHTS]), problems).items():
        is_head = f"{path}.weight" in _HEADS
        is_conv1d = base.config.get("model_type") in _CONV1D or config.get("fan_in_fan_out")
        module.is_conv1d = not is_head and bool(is_conv1d)
        for part in {*module.full, *(["weight"] if module.parts or module.rows else [])}:
            name = _found(f"{path}.{part}", tensors)
            if name is None and is_head and part == "weight" and embedding:  # tied in the base
                name, source = f"{path}.{part}", tensors[embedding]
            elif name is None:
                unreached.append(f"{path}.{part}")
                continue
            else:
                source = tensors[name]
            resizable = name == embedding or is_head
            try:
                changes[name] = _change(name, source, module, part, config, resizable=resizable)
            except ValueError as error:
                problems.append(str(error))
    if unreached:
        named = ascii(min(unreached))[1:-1]
        problems.append(f"{len(unreached)} of the tensors that it changes are not in its base {base.uri}: {named}")
    if not changes and not problems:
        problems.append(f"{ADAPTER_WEIGHTS} holds no tensor that changes its base")
    if not problems and embedding:
        if _is_untied(base, tensors, changes, embedding) and not _HEADS & {*tensors, *changes}:
            head = f"{'language_model.' if embedding.startswith('language_model.') else ''}lm_head.weight"
            changes[head] = Change(tensors[embedding], tensors[embedding])
        made = tensors | {name: change.tensor for name, change in changes.items()}
        rows = {name: made[name].shape[0] for name in (embedding, *sorted(_HEADS & made.keys()))}
        if len(set(rows.values())) > 1:
            problems.append(f"rows differ: {', '.join(f'{name} has {count}' for name, count in rows.items())}")
    if problems:
        raise CheckpointError(
            expected=f"an adapter that fits its base {base.uri}",
            found="; ".join(problems[:_MOST_NAMED]),
            remedy="name the base that it was trained on, with --base",
        )
    return changes


def _modules(held: Mapping[str, Tensor], problems: list[str]) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for key, tensor in held.items():
        matched = _PARTS.fullmatch(key.removeprefix("base_model.model."))
        if matched is None or not _is_readable(tensor):
            problems.append(f"{ascii(key)[1:-1]} is {ascii(tensor.dtype)[:20]}, which is not merged here")
            continue
        module = modules.setdefault(matched["module"], _Module(matched["module"]))
        if matched["rows"]:
            module.rows = tensor
        elif matched["full"]:
            module.full[matched["full"]] = tensor
        else:
            module.parts[matched["kind"].removeprefix("lora_").removeprefix("embedding_")] = tensor
            module.is_embedding |= matched["kind"].startswith("lora_embedding")
    return modules


def _is_readable(tensor: Tensor) -> bool:
    whole = all(isinstance(size, int) and size > 0 for size in tensor.shape)
    return whole and tensor.span[1] - tensor.span[0] == math.prod(tensor.shape) * BYTES.get(tensor.dtype, 0)


def _found(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    renamed = (new + name.removeprefix(old) for old, new in _RENAMED if name.startswith(old))
    return next((each for each in renamed if each in tensors), None)


def _change(
    name: str, source: Tensor, module: _Module, part: str, config: Mapping[str, Any], *, resizable: bool
) -> Change:
    if not _is_readable(source):
        raise ValueError(f"{name} is {ascii(source.dtype)[:20]} in its base: name the base in bfloat16, not quantised")
    full = module.full.get(part)
    shape = full.shape if full else source.shape
    if shape != source.shape and not (resizable and shape[1:] == source.shape[1:]):
        raise ValueError(f"{name} is {list(source.shape)} in its base, and {list(shape)} in the adapter")
    change = Change(Tensor(source.dtype, shape), full or source)
    if part != "weight":
        return change
    if module.rows is not None:
        numbers = _row_numbers(module.path, config)
        if module.rows.shape != (len(numbers), *shape[1:]) or not all(0 <= each < shape[0] for each in numbers):
            raise ValueError(f"{name} is {list(shape)}, and the adapter replaces {len(numbers)} rows by {module.rows}")
        change = replace(change, rows=module.rows, numbers=numbers)
    return replace(change, low_rank=_low_rank(name, shape, module, config)) if module.parts else change


def _low_rank(name: str, shape: tuple[int, ...], module: _Module, config: Mapping[str, Any]) -> LowRank:
    first, second, magnitude = (module.parts.get(part) for part in ("A", "B", "magnitude_vector"))
    if first is None or second is None or (magnitude is None and config.get("use_dora")):
        raise ValueError(f"the adapter has only {', '.join(sorted(module.parts))} for {name}")
    if len(first.shape) != 2 or len(second.shape) != 2 or first.shape[0] != second.shape[1] or not first.shape[0]:
        raise ValueError(f"the adapter has A {list(first.shape)} and B {list(second.shape)} for {name}: not whole")
    out, into = second.shape[0], first.shape[1]
    transposed = module.is_embedding or (shape == (into, out) and (into != out or module.is_conv1d))
    if shape != ((into, out) if transposed else (out, into)):
        raise ValueError(f"{name} is {list(shape)} in its base, and {[out, into]} in the adapter")
    if magnitude is not None and magnitude.shape != (out,):
        raise ValueError(f"the adapter has a magnitude of {list(magnitude.shape)} for {name}, which has {out} outputs")
    patterns = config.get("alpha_pattern") or {}
    alpha = next((patterns[key] for key in patterns if _matches(key, module.path)), config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha for {name} is {ascii(alpha)[:40]}")
    rank = first.shape[0]
    return LowRank(
        first, second, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), transposed, magnitude
    )


def _matches(pattern: str, path: str) -> bool:
    if len(re.findall(r"[*+{]", pattern)) > _MOST_REPEATED or _REPEATED_GROUP.search(pattern):
        raise ValueError(f"alpha_pattern has {ascii(pattern)[:40]}, too slow an expression")
    try:
        return re.match(rf"(.*\.)?({pattern})$", path) is not None
    except re.error:
        raise ValueError(f"alpha_pattern has {ascii(pattern)[:40]}, no regular expression") from None


def _row_numbers(path: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    listed = config.get("trainable_token_indices") or config.get("token_indices")
    if isinstance(listed, dict):
        listed = next((numbers for key, numbers in listed.items() if f".{path}".endswith(f".{key}")), None)
    whole = isinstance(listed, list) and all(isinstance(each, int) for each in listed)
    return tuple(listed) if whole and listed else ()


def _embedding(tensors: Mapping[str, Tensor]) -> str | None:
    matrices = [name for name, tensor in tensors.items() if len(tensor.shape) == 2]
    ends = (f".{name}.weight" for name in _EMBEDDINGS)
    return next((name for end in ends for name in matrices if f".{name}".endswith(end)), None)


def _is_untied(base: ModelFolder, tensors: Mapping[str, Tensor], changes: Mapping[str, Change], embedding: str) -> bool:
    # the base's output layer is its embedding, and the adapter changes them apart
    text = base.config.get("text_config")
    configs = [base.config, *([text] if isinstance(text, dict) else [])]
    if _HEADS & tensors.keys() and all(config.get("tie_word_embeddings") is not True for config in configs):
        return False
    own = changes.get(embedding)
    apart = own is not None and (own.low_rank is not None or own.source.uri != tensors[embedding].uri)
    resized = own is not None and own.tensor.shape != tensors[embedding].shape
    return bool(_HEADS & changes.keys()) or (apart and not resized)


def is_nothing(changes: Mapping[str, Change]) -> bool:
    """Returns True if all that an adapter adds are products, and each of them is zero."""
    return all(
        change.low_rank is not None
        and change.low_rank.magnitude is None
        and not all(map(_has_numbers, (change.low_rank.second, change.low_rank.first)))
        for change in changes.values()
    )


def _has_numbers(tensor: Tensor) -> bool:
    start, end = tensor.span
    ranges = ((at, min(at + _READ_BYTES, end)) for at in range(start, end, _READ_BYTES))
    return any(any(storage.read_bytes(tensor.uri, start=at, end=to)) for at, to in ranges)


def changed_config(base: ModelFolder, changes: Mapping[str, Change]) -> dict[str, Any]:
    """Returns the keys of a base's config that an adapter changes, with their values."""
    tensors = read_tensors(base)
    changed: dict[str, Any] = {}
    if (embedding := _embedding(tensors)) is not None:
        if embedding in changes and changes[embedding].tensor.shape != tensors[embedding].shape:
            changed["vocab_size"] = changes[embedding].tensor.shape[0]
        if _is_untied(base, tensors, changes, embedding):
            changed["tie_word_embeddings"] = False
    text = base.config.get("text_config")
    if changed and isinstance(text, dict):
        changed["text_config"] = {**text, **changed}
        changed = {name: value for name, value in changed.items() if name == "text_config" or name in base.config}
    return changed
