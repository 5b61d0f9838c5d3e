"""Adapters on their base: choice of the base, refusals, written files, and the number of reads."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.hub import running_hub, use_hub
from fakes.models import CONFIG, write_checkpoint, write_safetensors
from fakes.stores import HashKind, folder_store
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import Merge, with_options
from pools.weights.model_files import ModelFolder, digest_model_folder, inspect_staged_folder, read_tensors
from pools.weights.staging import Staging
from resources.settings import settings
from resources.storage import storage
from tasks.checkpoints.discovery import find_checkpoints
from tasks.checkpoints.run_snapshot import listing_of, snapshot_run, with_digests

PREFIX = "base_model.model."
PROJECTION, EMBEDDING, HEAD = "model.layers.0.q_proj", "model.embed_tokens", "lm_head"
SHAPES = {f"{EMBEDDING}.weight": (16, 8), f"{PROJECTION}.weight": (6, 8), f"{HEAD}.weight": (16, 8)}
LORA = {f"{PROJECTION}.lora_A.weight": (2, 8), f"{PROJECTION}.lora_B.weight": (6, 2)}


def write_base(folder: Path, *, shapes: Mapping[str, Sequence[int]] = SHAPES, seed: int = 0) -> Path:
    return write_checkpoint(folder, parameters=shapes, seed=seed)


def write_adapter(
    folder: Path,
    base: str | Path | None,
    *,
    shapes: Mapping[str, Sequence[int]] = LORA,
    zero: str = "nothing",
    **settings: Any,
) -> Path:
    """Writes an adapter of float32; the numbers are 1, 2, 3 … over 16, those of tensors that end in `zero` are 0."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        numbers = np.zeros(count) if name.endswith(f"{zero}.weight") else np.arange(1, count + 1) / 16
        content = numbers.astype(np.float32).tobytes()
        place = [len(data), len(data) + len(content)]
        header[PREFIX + name] = {"dtype": "F32", "shape": list(shape), "data_offsets": place}
        data += content
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return folder


def numbers_of(folder: ModelFolder) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(storage.read_bytes(tensor.uri, start=tensor.span[0], end=tensor.span[1]), np.float32)
        for name, tensor in read_tensors(folder).items()
    }


def made(uri: str | Path, place: Path) -> dict[str, np.ndarray]:
    """Returns the numbers of a checkpoint as it is staged."""
    digests = digest_model_folder(inspect_checkpoint(str(uri)))
    with Staging(place, max_bytes=10**8) as staging, staging.stage(str(uri), digests) as staged:
        return numbers_of(inspect_staged_folder(staged.path))


def test_staged_adapter_is_its_base_with_the_product_added(tmp_path: Path):
    base, adapter = write_base(tmp_path / "base"), write_adapter(tmp_path / "run" / "checkpoint-1", "../../base")
    before, after = numbers_of(inspect_checkpoint(str(base))), made(adapter, tmp_path / "staged")
    product = (np.arange(1, 13) / 16).reshape(6, 2) @ (np.arange(1, 17) / 16).reshape(2, 8) * 2
    changed = f"{PROJECTION}.weight"
    assert after[changed] == pytest.approx(before[changed] + product.ravel(), rel=1e-6)
    assert all((after[name] == before[name]).all() for name in before.keys() - {changed})
    folder = inspect_checkpoint(str(adapter))
    assert folder.notes == (f"an adapter of {base}",) and folder.made_by == "adapter 1"


def test_base_named_from_the_working_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = write_base(tmp_path / "bases" / "tiny")
    adapter = write_adapter(tmp_path / "runs" / "lora" / "checkpoint-1", "bases/tiny")
    monkeypatch.chdir(tmp_path)
    location = str(adapter.relative_to(tmp_path))
    [problem] = inspect_checkpoint(location).problems
    assert "its base 'bases/tiny' is not there" in problem
    folder = inspect_checkpoint(with_options(location, base="bases/tiny"))
    assert folder.complete and folder.notes == (f"an adapter of {base}",)


def test_digest_of_an_adapter_differs_with_its_base_and_its_settings(tmp_path: Path):
    bases = [write_base(tmp_path / f"base-{seed}", seed=seed) for seed in range(2)]
    adapter = write_adapter(tmp_path / "run" / "checkpoint-1", bases[0])
    stronger = write_adapter(tmp_path / "run" / "checkpoint-2", bases[0], lora_alpha=8)
    uris = [str(adapter), with_options(str(adapter), base=str(bases[1])), str(stronger)]
    digests = [digest_model_folder(inspect_checkpoint(uri)) for uri in uris]
    assert len({each.weights for each in digests}) == 3
    assert len({(each.tokenizer, each.config) for each in digests}) == 1
    first = made(uris[0], tmp_path / "staged")[f"{PROJECTION}.weight"]
    assert (first != made(uris[1], tmp_path / "staged")[f"{PROJECTION}.weight"]).all()


def test_mean_of_adapters_is_the_mean_of_what_they_make(tmp_path: Path):
    base = write_base(tmp_path / "base")
    adapters = [str(write_adapter(tmp_path / f"checkpoint-{step}", base, lora_alpha=step)) for step in (2, 6)]
    mean = made(str(Merge.of_folders("mean", adapters)), tmp_path / "staged")
    first, second = (made(each, tmp_path / "staged") for each in adapters)
    assert all(mean[name] == pytest.approx((first[name] + second[name]) / 2, rel=1e-6) for name in mean)


def test_tokenizer_of_an_adapter_is_its_own_if_it_has_any(tmp_path: Path):
    base = write_base(tmp_path / "base")
    plain, own = (write_adapter(tmp_path / name, base) for name in ("plain", "own"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own / name).write_text(json.dumps({"own": True}))
    of_base, of_plain, of_own = (digest_model_folder(inspect_checkpoint(str(each))) for each in (base, plain, own))
    assert of_plain.tokenizer == of_base.tokenizer != of_own.tokenizer
    assert of_plain.config == of_base.config == of_own.config


def test_new_vocabulary_and_layers_apart_are_in_the_config(tmp_path: Path):
    tied = {name: shape for name, shape in SHAPES.items() if name != f"{HEAD}.weight"}
    base = write_base(tmp_path / "base", shapes=tied)
    larger = {f"{EMBEDDING}.weight": (20, 8), **LORA}
    resized = inspect_checkpoint(str(write_adapter(tmp_path / "resized", base, shapes=larger)))
    assert (resized.problems, resized.config) == ((), {**CONFIG, "vocab_size": 20})
    saved = {f"{HEAD}.weight": (16, 8), **LORA}
    apart = inspect_checkpoint(str(write_adapter(tmp_path / "apart", base, shapes=saved)))
    assert (apart.problems, apart.config) == ((), {**CONFIG, "tie_word_embeddings": False})
    assert made(tmp_path / "apart", tmp_path / "staged").keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("settings", "shapes", "words"),
    [
        ({"peft_type": "IA3"}, LORA, "an adapter of type 'IA3', which is not merged here"),
        ({"use_qalora": True}, LORA, "asks for use_qalora, which is not merged here"),
        ({"lora_bias": True}, LORA, "asks for lora_bias"),
        ({"target_parameters": ["experts.up"]}, LORA, "asks for target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, LORA, "pissa_niter_4 changed its base, too"),
        ({"alpha_pattern": {"(a+)+": 1}}, LORA, "too slow an expression"),
        ({"use_dora": True}, LORA, f"has only A, B for {PROJECTION}.weight"),
        ({}, {**LORA, f"{PROJECTION}.lora_B.weight": (5, 2)}, f"{PROJECTION}.weight is [6, 8] in its base, and [5, 8]"),
        ({}, {f"{EMBEDDING}.weight": (16, 9)}, f"{EMBEDDING}.weight is [16, 8] in its base, and [16, 9]"),
        ({}, {f"{EMBEDDING}.weight": (20, 8)}, f"rows differ: {EMBEDDING}.weight has 20, {HEAD}.weight has 16"),
        ({}, {f"{PROJECTION}.lora_C.weight": (2, 8)}, "are not in its base"),
        ({}, {"model.layers.7.q_proj.lora_A.weight": (2, 8)}, "model.layers.7.q_proj.weight"),
        ({}, {}, "holds no tensor that changes its base"),
        ({"base_model_name_or_path": "../nowhere"}, LORA, "its base '../nowhere' is not there; name it with --base"),
        ({"base_model_name_or_path": None}, LORA, "its base None is not there"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_adapter_that_cannot_be_merged_is_refused_by_what_it_has(
    tmp_path: Path, settings: dict[str, Any], shapes: Mapping[str, Sequence[int]], words: str
):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "run" / "checkpoint-1", base, shapes=shapes, **settings)
    [problem] = inspect_checkpoint(str(adapter)).problems
    assert words in problem


def test_adapter_of_zeros_is_said_to_change_nothing(tmp_path: Path):
    base = write_base(tmp_path / "base")
    folder = inspect_checkpoint(str(write_adapter(tmp_path / "run", base, zero="lora_B")))
    assert folder.complete and f"it changes nothing of its base {base}: all that it adds is zero" in folder.notes


def test_pickled_adapter_is_whole_once_its_end_is_written(tmp_path: Path):
    adapter = write_adapter(tmp_path / "run", write_base(tmp_path / "base"))
    (adapter / "adapter_model.safetensors").unlink()
    with zipfile.ZipFile(adapter / "adapter_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"weights")
    folder = inspect_checkpoint(str(adapter))
    assert folder.complete and "safetensors are made of adapter_model.bin while it is staged" in folder.notes
    os.truncate(adapter / "adapter_model.bin", 50)
    assert inspect_checkpoint(str(adapter)).problems == ("adapter_model.bin is cut off (50 bytes)",)


def test_adapter_on_an_adapter_is_refused(tmp_path: Path):
    adapter = write_adapter(tmp_path / "first", tmp_path / "first")
    [problem] = inspect_checkpoint(str(adapter)).problems
    assert "is an adapter, too; merge that first" in problem


def test_base_in_a_store_is_copied_once_for_its_adapters(tmp_path: Path):
    base = write_base(tmp_path / "base")
    storage.copy_from_local(base, "memory://models/base")
    for step in range(3):
        adapter = write_adapter(tmp_path / "adapter", "../../base", lora_alpha=step + 1)
        storage.copy_from_local(adapter, f"memory://models/run/checkpoint-{step}")
    digests = [inspect_checkpoint(f"memory://models/run/checkpoint-{step}") for step in range(3)]
    with Staging(tmp_path / "staged", max_bytes=10**8) as staging:
        for folder in digests:
            staging.stage(folder.uri, digest_model_folder(folder)).release()
    copies = list((tmp_path / "staged").glob("*/model.safetensors"))
    assert len(copies) == 4  # the base, and what each adapter makes of it


@pytest.mark.parametrize("hash_kind", [None, "crc32c"])
def test_adapters_on_a_base_in_a_store_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hash_kind: HashKind | None
):
    monkeypatch.setattr("pools.weights.content.SETTLED_SECONDS", -1e9)
    base = write_base(tmp_path / "base")
    adapters = [write_adapter(tmp_path / f"checkpoint-{step}", base, lora_alpha=step + 1) for step in range(5)]
    with folder_store(tmp_path / "reads") as store, Staging(tmp_path / "staged", max_bytes=10**8) as staging:
        store.hash_kind = hash_kind
        for adapter in adapters:
            uri = with_options(str(adapter), base=f"store:/{base}")
            staging.stage(uri, digest_model_folder(inspect_checkpoint(uri))).release()
        read_bytes = sum(end - start for start, end in store.ranges("model.safetensors") if start or end > 2**10)
    size = (base / "model.safetensors").stat().st_size
    assert read_bytes <= size * (1 if hash_kind else 2)  # for its digest, and for its copy


def test_adapters_on_a_base_in_a_folder_hash_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pools.weights.content.SETTLED_SECONDS", -1e9)
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    base = write_base(tmp_path / "base", shapes={**SHAPES, "model.norm.weight": (2**22,)})
    adapters = [str(write_adapter(tmp_path / f"checkpoint-{step}", base, lora_alpha=step + 1)) for step in range(5)]
    size, before = (base / "model.safetensors").stat().st_size, bytes_read()
    digests = [digest_model_folder(inspect_checkpoint(adapter)) for adapter in adapters]
    planned = bytes_read()
    with Staging(tmp_path / "staged", max_bytes=10**9) as staging:
        for adapter, each in zip(adapters, digests, strict=True):
            staging.stage(adapter, each).release()
    settings.cache_clear()
    assert planned - before < 1.1 * size  # for its digest
    assert bytes_read() - planned < 5 * 1.1 * size  # to be merged


def bytes_read() -> int:
    """Returns the bytes that this process has read from files, cached or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_adapter_on_a_base_on_the_hub_is_merged_with_the_revision_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bases = [write_base(tmp_path / f"base-{seed}", seed=seed) for seed in range(2)]
    main, named = ({path.name: path.read_bytes() for path in base.iterdir()} for base in bases)
    adapter = write_adapter(tmp_path / "run" / "checkpoint-1", "acme/base", revision="step100")
    nearby = write_adapter(tmp_path / "run" / "checkpoint-2", bases[1])
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    with running_hub({}, {"models/acme/base": {"main": main, "step100": named}}) as hub:
        use_hub(hub, monkeypatch, home=tmp_path / "hf")
        on_hub = made(adapter, tmp_path / "staged")
    settings.cache_clear()
    on_disk = made(nearby, tmp_path / "staged")
    assert all((on_hub[name] == on_disk[name]).all() for name in on_disk)


def test_two_merges_at_once_leave_nothing_changed_in_the_process(tmp_path: Path):
    base = write_base(tmp_path / "base")
    adapters = [write_adapter(tmp_path / f"checkpoint-{step}", base, lora_alpha=step + 1) for step in range(2)]
    before = state_of_process()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda adapter: made(adapter, tmp_path / f"staged-{adapter.name}"), adapters))
    assert state_of_process() == before


def state_of_process() -> tuple[object, ...]:
    """Returns what numpy, its BLAS and the environment are set to, in this process."""
    libraries = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64*")
    counts = [ctypes.CDLL(str(library)).scipy_openblas_get_num_threads64_() for library in libraries]
    return counts, np.geterr(), dict(os.environ), Path.cwd()


def test_run_of_adapters_is_listed_with_digests_that_follow_their_base(tmp_path: Path):
    base, run = write_base(tmp_path / "base"), tmp_path / "my-run"
    for step in (100, 200):
        write_adapter(run / f"checkpoint-{step}", "../../base", lora_alpha=step)
    bases: list[list[tuple[str, str | None]]] = []
    for seed in range(2):
        write_safetensors(base / "model.safetensors", parameters=SHAPES, seed=seed)
        checkpoints = find_checkpoints(str(run))
        seen = with_digests(str(run), snapshot_run(str(run)), reference=None)
        assert [(each.name, each.problems) for each in seen] == [("my-run-100", ()), ("my-run-200", ())]
        assert [each.listing for each in seen] == [listing_of(checkpoint) for checkpoint in checkpoints]
        digests = [digest_model_folder(each.folder).checkpoint for each in checkpoints if each.folder]
        assert [each.digest for each in seen] == digests and len(set(digests)) == 2
        bases.append([(each.listing, each.digest) for each in seen])
    assert not set(bases[0]) & set(bases[1])
