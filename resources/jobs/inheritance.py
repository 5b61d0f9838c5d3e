"""Environment variables that each kind of Assay's own jobs inherits; jobs with a user's own code inherit everything.

In a name, `*` matches no key, see `is_named`; `ASSAY_INHERIT` adds names for every kind.
"""

from __future__ import annotations

from resources.settings import SERVICES, STORES

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
# The hub's variables without its tokens HF_TOKEN and HUGGING_FACE_HUB_TOKEN.
_HUB = ("HF_[!T]*", "HF_TOKEN_PATH", "HUGGINGFACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_*")
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT")  # HF_ENDPOINT may contain a password
_STORES = (*STORES, "STORAGE_EMULATOR_HOST", *_HUB_TOKENS)  # a hub's repository is a store too

_ENGINE_PLACES = (
    *("VLLM_LOGGING_*", "VLLM_CONFIGURE_LOGGING", "VLLM_LOG_STATS_INTERVAL", "VLLM_DEBUG_*", "VLLM_TRACE_FUNCTION"),
    *("VLLM_TORCH_PROFILER_*", "VLLM_USAGE_*", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_RPC_BASE_PATH"),
    *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE*", "VLLM_MEDIA_CACHE*", "VLLM_XLA_CACHE_PATH"),
    *("VLLM_DISABLE_COMPILE_CACHE", "VLLM_COMPILE_CACHE_SAVE_FORMAT", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"),
    *("VLLM_*_TIMEOUT*", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_*_HOST", "VLLM_*_PORT", "VLLM_*_IP"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_SERVER_DEV_MODE", "VLLM_SKIP_MODEL_NAME_VALIDATION"),
)
ENGINE_SETTINGS = "VLLM_*"
"""Variables that can change an engine's answers: pools treat them as arguments, except `NO_ENGINE_SETTINGS`."""
NO_ENGINE_SETTINGS = (
    *_ENGINE_PLACES,
    *("VLLM_API_KEY", "VLLM_MODEL_REDIRECT_PATH", "VLLM_TEST_*", "VLLM_USE_MODELSCOPE"),
)
"""Logs, folders, addresses and timeouts, which change no answer; and variables that would replace the weights."""
ENGINE = (*_ANY, *_COMPUTE, *_HUB, *_ENGINE_PLACES, "FLASHINFER_*")
"""Variables of engines, which load local files, some of which contain code."""
HARNESS = (*_ANY, *_COMPUTE, *_HUB, *_HUB_TOKENS, "LMEVAL_*", "NLTK_DATA")
"""Variables of harnesses, which query an endpoint, and download data sets, some of which are gated."""
ISOLATED = (*_PROCESS, *_COMPUTE, "HF_[!T]*", "TOKENIZERS_*", "LMEVAL_*", "NLTK_DATA")
"""Variables of harnesses that also run model-written code; none gives access to anything."""
NATIVE_HARNESS = (*HARNESS, *_STORES)
"""Variables of harnesses that load the checkpoint themselves, from any store."""
SERVICE = (*ENGINE, *_STORES, *SERVICES, "KUBECONFIG", "SLURM_CONF")
"""Variables of Assay's proxies, agents and pool keepers, which use stores, build environments and submit jobs."""
SENDER = (*_ANY, *_HUB, *_STORES, "NETRC")
"""Variables of sink processes, which read records from their store; those of the sink are added."""
