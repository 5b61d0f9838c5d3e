"""Serves a model with vLLM on a CPU, like `vllm serve` but quicker to start. Executed by vLLM's environment.

    python serve_vllm.py <arguments of vllm serve>

Also a program for `fork_server.py`: `preload` imports, `main` serves. Nothing may start a thread or compute before a
fork, since OpenMP's threads do not survive it.

Six functions of vLLM are replaced without changing a number; a test compares. The engine process is forked from the
server's process instead of starting a new interpreter, and closes the server's socket. Memory of the KV cache is zero
because it was never written to, not because it was zeroed: writing 2 GiB took 1 to 6 s. Counting ranks of tokens, and
finding tokens with an embedding on another rank, need no compiler. A discarded sample, of a partly read prompt, is
taken back in a way that works on a CPU. The text of a token is looked up once.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import ipaddress
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

READ_AT_IMPORT = (
    *("CUDA_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_"),
    "VLLM_",
)
"""Prefixes of the variables that a fork server must have been started with, too."""
MODULES = (
    "uvloop",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.platforms.cpu",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_model_runner",
)
LATE_MODULES = (
    "compressed_tensors",
    "vllm.entrypoints.generate.api_router",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
)
"""Imported later by vLLM, some only for some models; a missing module does no harm."""
OWN_FOLDER = str(Path(__file__).parent)
ROWS = 8
"""Rows of log-probabilities that are compared with their threshold at once."""
_SIOCGIFADDR = 0x8915  # Linux' call for the address of an interface


def preload(arguments: list[str]) -> None:
    """Imports the modules of a server, and replaces functions."""
    search_own_folder()
    import_all(MODULES, late=LATE_MODULES)
    replace_rank_count()
    leave_embedding_uncompiled()


def import_all(modules: Sequence[str], *, late: Sequence[str]) -> None:
    """Imports modules, and as many of the `late` modules as exist."""
    for name in modules:
        importlib.import_module(name)
    for name in late:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not preloaded: {name} ({error})", file=sys.stderr)


def main(arguments: list[str]) -> None:
    """Serves until the process is stopped, or checks tensors if that is requested."""
    if checks_tensors(arguments):
        return
    preload([])
    fork_engine_process()
    allocate_kv_cache_untouched()
    take_back_discarded_samples()
    remember_texts_of_tokens()
    entry: Any = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
    keep_address_from_forks(entry)
    run(entry, arguments)


def checks_tensors(arguments: list[str]) -> bool:
    """Returns True after running `check_tensors.py` instead, if the first argument asks for it."""
    if arguments[:1] != ["--check-tensors"]:
        return False
    search_own_folder()
    importlib.import_module("check_tensors").main(arguments[1:])
    return True


def search_own_folder() -> None:
    """Lets imports find middleware, worker and placeholders, which an isolated interpreter does not search for."""
    sys.path.extend(place for place in (OWN_FOLDER, f"{OWN_FOLDER}/placeholders") if place not in sys.path)


def run(entry: Any, arguments: list[str]) -> None:
    """Serves; on hosts without the server, computes this host's part."""
    faulthandler.enable()  # logs crashes, so that only a killed engine ends without an error
    if (address := os.environ.get("ASSAY_ENGINE_HOST")) is not None:
        os.environ["VLLM_HOST_IP"] = address
        if (interface := interface_of(address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    sys.argv = ["vllm", *arguments]
    if "--headless" not in arguments:
        entry.main()
        return
    commands: Any = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parsing: Any = importlib.import_module("vllm.utils.argparse_utils")
    serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    serve.ServeSubcommand.cmd(commands.make_arg_parser(parsing.FlexibleArgumentParser()).parse_args())


def interface_of(address: str) -> str | None:
    """Returns the network interface that has an address; None if Linux lists none.

    Gloo would listen at the address of the host's own name, which is 127.0.1.1 on Debian: no other host reaches that.
    """
    if ":" in address:
        packed = ipaddress.ip_address(address).packed.hex()
        known = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((name for number, *_, name in known if number == packed), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                ifreq = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(ifreq[20:24]) == address:
                    return name
    return None


def fork_engine_process() -> None:
    """Runs an engine of a single rank in a single process, forked from this process.

    vLLM starts two processes, each importing everything again, to set OpenMP's variables between them; here they are
    set before the first import. Several ranks on a host are left to vLLM, since their threads must be bound to cores.
    Ranks of several hosts are not bound, and are forked as well, from their host's first process.
    """
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        alone = parallel.distributed_executor_backend == "uni"
        check(cls, vllm_config)
        if parallel.numa_bind or not (alone or parallel.nnodes > 1):
            return
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if alone:
            parallel.distributed_executor_backend = "uni"

    platform.check_and_update_config = classmethod(check_and_update_config)


def keep_address_from_forks(entry: Any) -> None:
    """Closes the server's socket in the engine process, which is forked after the server has bound it.

    Otherwise the address would be in use for as long as that process lives. Besides, vLLM's server looks at its end for
    the process that has the address: a process that ends during the look-up makes the server fail, with exit code 1.
    """
    setup: Callable[..., Any] = entry.setup_server

    def setup_server(*given: Any, **options: Any) -> Any:
        address, bound = setup(*given, **options)
        os.register_at_fork(after_in_child=bound.close)
        return address, bound

    entry.setup_server = setup_server


def allocate_kv_cache_untouched() -> None:
    """Takes the KV cache's memory from the kernel already zeroed: a page costs its time at its first use."""
    torch: Any = importlib.import_module("torch")
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    allocate: Callable[..., Any] = runner.allocate_kv_cache
    zeros: Callable[..., Any] = torch.zeros

    def untouched(*size: Any, **options: Any) -> Any:
        if len(size) != 1 or not isinstance(size[0], int) or size[0] < 1 or options.get("dtype") is not torch.int8:
            return zeros(*size, **options)
        memory = mmap.mmap(-1, size[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.int8)

    def allocate_kv_cache(*given: Any, **options: Any) -> Any:
        torch.zeros = untouched
        try:
            return allocate(*given, **options)
        finally:
            torch.zeros = zeros

    runner.allocate_kv_cache = allocate_kv_cache


def take_back_discarded_samples() -> None:
    """Resets a request's generator to its state before a discarded sample.

    vLLM samples for a partly read prompt, and takes that back by an offset, which generators of a CPU do not have: its
    engine process ended, for every split prompt of a request with seed and temperature, as lm-eval sends them.
    """
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    sample: Callable[..., Any] = runner._sample
    bookkeeping: Callable[..., Any] = runner._bookkeeping_sync

    def _sample(self: Any, *given: Any, **options: Any) -> Any:
        generators = self.input_batch.generators.items()
        before = [(generator, generator.get_state()) for n, generator in generators if self.discard_request_mask.np[n]]
        try:
            return sample(self, *given, **options)
        finally:
            for generator, state in before:
                generator.set_state(state)

    def _bookkeeping_sync(self: Any, *given: Any, **options: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *given, **options)
        finally:
            self.input_batch.generators = generators

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


def remember_texts_of_tokens() -> None:
    """Caches the text of each token, which token log-probs repeat again and again.

    A third of the server's time for echoes went into decoding each token by itself, each time. An id without a piece in
    the tokenizer, as in a padded vocabulary, has no text: it crashed vLLM (vllm#56100).
    """
    rows: Any = importlib.import_module("vllm.v1.engine.logprobs")
    convert: Callable[[Any, list[int]], list[str]] = rows.convert_ids_list_to_tokens
    known: dict[int, tuple[Any, dict[int, str]]] = {}

    def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
        _, texts = known.setdefault(
            id(tokenizer), (tokenizer, {})
        )  # keeps the tokenizer alive, so that its id stays unique
        new = [token for token in dict.fromkeys(token_ids) if token not in texts]
        pieces = tokenizer.convert_ids_to_tokens(new) if hasattr(tokenizer, "backend_tokenizer") else new
        known_ids = [token for token, piece in zip(new, pieces, strict=True) if piece is not None]
        texts.update(dict.fromkeys(new, ""))
        texts.update(zip(known_ids, convert(tokenizer, known_ids), strict=True))
        return [texts[token] for token in token_ids]

    rows.convert_ids_list_to_tokens = convert_ids_list_to_tokens


def replace_rank_count() -> None:
    """Counts, for each row, the values that reach the row's threshold, without torch.compile.

    Compiling takes 15 s at the first request of a machine, 2 s at that of any other server, and a C++ compiler. Plain
    torch, all rows at once, takes 0.43 s for 512 rows of 128 thousand values; this 0.05 s, compiled code 0.02 s, and
    the log-probabilities themselves 0.13 s.
    """
    torch: Any = importlib.import_module("torch")
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler")

    def count_reaching(values: Any, thresholds: Any) -> Any:
        counts = [
            torch.ge(rows, threshold, out=torch.empty(rows.shape)).sum(-1)  # exact: a float counts to 16 million
            for rows, threshold in zip(values.split(ROWS), thresholds.split(ROWS), strict=True)
        ]
        return torch.cat(counts).long()

    sampler.batched_count_greater_than = count_reaching


def leave_embedding_uncompiled() -> None:
    """Finds tokens with an embedding on another rank without torch.compile: a few additions of integers.

    Compiling them took two ranks 20 s of processor time at their first start on a machine, and a C++ compiler.
    """
    embedding: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    compiled = embedding.get_masked_input_and_mask
    embedding.get_masked_input_and_mask = getattr(compiled, "__wrapped__", compiled)  # a fork's program preloads, too


if __name__ == "__main__":
    main(sys.argv[1:])
