"""Variables that each kind of job of ours inherits: none that is not named here.

Jobs that run a user's own code (`assay submit`, trainings, actors) inherit everything, as their user's shell would give
it. A name may hold `*`, which passes on no key, see `resources/key_variables.py`; `ASSAY_INHERIT` names more for every
kind.
"""

from __future__ import annotations

from resources.key_variables import SERVICES, STORES

_PROCESS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR"),
    *("PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES", "DO_NOT_TRACK"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_ANY = (
    *_PROCESS,
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
_COMPUTE = (
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "ROCR_*", "HIP_*", "TPU_*", "LIBTPU_*", "MEGASCALE_*"),
    *("JAX_*", "XLA_*", "TORCH*", "PYTORCH_*", "TRITON_*", "OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*"),
)
# All of the hub's but its tokens: HF_TOKEN and HUGGING_FACE_HUB_TOKEN.
_HUB = ("HF_[!T]*", "HF_TOKEN_PATH", "HUGGINGFACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_*")
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT")  # the last with a password, if it has one
_STORES = (*STORES, "STORAGE_EMULATOR_HOST", *_HUB_TOKENS)  # a hub's repository is a store as well

_ENGINE_PLACES = (
    *("VLLM_LOGGING_*", "VLLM_CONFIGURE_LOGGING", "VLLM_LOG_STATS_INTERVAL", "VLLM_DEBUG_*", "VLLM_TRACE_FUNCTION"),
    *("VLLM_TORCH_PROFILER_*", "VLLM_USAGE_*", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_RPC_BASE_PATH"),
    *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE*", "VLLM_MEDIA_CACHE*", "VLLM_XLA_CACHE_PATH"),
    *("VLLM_DISABLE_COMPILE_CACHE", "VLLM_COMPILE_CACHE_SAVE_FORMAT", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"),
    *("VLLM_*_TIMEOUT*", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_*_HOST", "VLLM_*_PORT", "VLLM_*_IP"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_SERVER_DEV_MODE", "VLLM_SKIP_MODEL_NAME_VALIDATION"),
)
ENGINE_SETTINGS = "VLLM_*"
"""Variables that can change what an engine answers: a pool hands them over, and they count as its arguments do; but:"""
NO_ENGINE_SETTINGS = (
    *_ENGINE_PLACES,
    *("VLLM_API_KEY", "VLLM_MODEL_REDIRECT_PATH", "VLLM_TEST_*", "VLLM_USE_MODELSCOPE"),
)
"""Logs, folders, addresses and times, which change no answer; and what would put other weights in place of ours."""
ENGINE = (*_ANY, *_COMPUTE, *_HUB, *_ENGINE_PLACES, "FLASHINFER_*")
"""For an engine: it loads files of this machine, some with code of their own."""
HARNESS = (*_ANY, *_COMPUTE, *_HUB, *_HUB_TOKENS, "LMEVAL_*", "NLTK_DATA")
"""For a harness: it asks an endpoint, and fetches data sets, of which some are gated."""
ISOLATED = (*_PROCESS, *_COMPUTE, "HF_[!T]*", "TOKENIZERS_*", "LMEVAL_*", "NLTK_DATA")
"""For a harness that runs code which a model wrote, beside its own: nothing that opens anything."""
NATIVE_HARNESS = (*HARNESS, *_STORES)
"""For a harness that loads the checkpoint itself, wherever that lies."""
SERVICE = (*ENGINE, *_STORES, *SERVICES, "KUBECONFIG", "SLURM_CONF")
"""For proxies, agents and what keeps a pool up, our own code: they use stores, build environments and submit jobs."""
SENDER = (*_ANY, *_HUB, *_STORES, "NETRC")
"""For the process that talks to a sink, which reads records from their store, beside the variables of that sink."""
