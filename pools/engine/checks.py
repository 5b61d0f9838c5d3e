"""Checks of a checkpoint's tensors before an engine loads them, and of a started engine: its tokenizer, its scoring.

Tensors are held against the config: headers and the config are sufficient, since `programs/check_tensors.py` builds the
model without memory for its weights. The answer is stored on this machine, for all checkpoints with the same config,
names and shapes. Without an answer, the engine decides.

An engine must read text by the checkpoint's tokenizer.json. A class that a checkpoint names by mistake, or that
transformers takes for its architecture, replaces the file's rules.

vLLM reads no cache for a prompt with requested log-probabilities, unless `skip_reading_prefix_cache` is false. Then it
returns the token log-probs that it computed: those of cached tokens are omitted at the beginning, by one of vLLM's
model runners itself, in the other by `programs/reloading_worker.py`. So entries are indexed from the prompt's end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pools.config import InferencePoolConfig
from pools.endpoint import GENERATE, Scoring
from pools.engine.engine_client import CANARY_PROMPTS, EngineClient
from pools.engine.engines import CHECK_PROGRAM
from pools.engine.launch import Launcher, ServedCheckpoint, job_of
from pools.engine.reload_trust import ROUNDING_NATS
from pools.journal.terms import ROUNDING
from pools.weights.formats import read_json
from pools.weights.model_files import read_tensors
from resources.errors import AssayError, EndpointUnusable, ModelUnusable, ReloadUnavailable, SwapRefused
from resources.jobs.jobs import Client
from resources.settings import settings
from resources.storage import storage
from resources.storage.regular_files import read_cached

_OTHERWISE = {"config_format", "hf_config_path", "hf_overrides", "load_format", "model_impl", "quantization"}
"""Engine arguments by which vLLM makes another model of a config, or reads other files."""
_LONGEST_SECONDS = 120.0  # 0.1 s from a warm server; a cold start takes 5 to 15 s
LONGEST = 300
"""Tokens of the test text: more than two blocks of the cache, of 128 tokens at most as a rule."""
_BEYOND_BLOCKS = 44  # for longer blocks: 528 to 2,048 tokens for models with a state
_BLOCKS = ("block_size", "effective_attention_block_size")
_CACHE = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_CODE = """
def mean(values: list[float], *, digits: int = 3) -> float:
\t\"\"\"Returns the mean; 0.0 for none.\"\"\"
    if not values:        # an empty list
        return 0.0


    return round(sum(x**2 for x in values) / (len(values) + 1e-9), digits) \r\n
for (int i = 0; i <= n; ++i) { total[i] += (a[i] << 2) ^ 0xFF; }   // <p class="x">&amp;</p>
SELECT COUNT(*) FROM "t" WHERE a!=b AND c LIKE '%_x%'; {"key": [null, true, -1.5e+10]} https://a.example/?q=1&r=%20#top
"""
_WORDS = """
The QUICK brown fox doesn't jump; they're I'VE'd WE'LL O'Neill's co-operation, re-entry… “quoted” ‘single’ — dash–dash.
Straße Äpfel größer, naïve café déjà-vu façade, Ångström smørrebrød, ¿mañana? señor, Łódź żółć, příliš žluťoučký kůň,
İstanbul ağaç, Việt Nam tiếng, ﬁne ﬂow № ™ ａｂｃ ＤＥＦ, $5 €7 £9 50% #tag @user a_b CamelCase HTTPServer2Go
Все люди рождаются свободными и равными в своём достоинстве, й ё. Όλοι οι άνθρωποι γεννιούνται ελεύθεροι, ΐ ΰ.
يولد جميع الناس أحرارًا متساوين في الكرامة. כל בני האדם נולדו בני חורין, שָׁלוֹם. सभी मनुष्यों को गौरव और अधिकारों क़ ज़।
มนุษย์ทั้งหลายเกิดมามีอิสระ 人人生而自由,在尊严和权利上一律平等。すべての人間は、がぎぐ パピプ 東京は晴れ。
모든 인간은 태어날 때부터 자유로우며 존엄과 권리에 있어 동등하다.
🙂🙃 👩‍👩‍👧 🇩🇪 👍🏽 ∑∫√≤≥∞ αβγ →⇒ ░▒▓ \u00a0nbsp\u200bzero\u3000wide   three    four
"""
_NUMBERS = " ".join(f"{7**power} {power / 7:.4f} {power:05d}" for power in range(1, 30))
PROBE = f"{_NUMBERS}{_CODE}{_WORDS}{unicodedata.normalize('NFD', _WORDS)}"
"""Numbers, code, and words of several scripts, with composed and with decomposed accents: some 3,000 characters.

Excludes blanks before punctuation such as a full stop, which some tokenizers drop when they decode, and numerals such
as ½, the only texts for which SmolLM's class and file differ.
"""
_ONLY_AS_QWEN2 = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # for any class that a checkpoint names
_FRAMED = ("add_bos_token", "add_eos_token")
_SHOWN, _SHOWN_CHARACTERS = 5, 20

_log = logging.getLogger("assay.agent")


def require_fitting(
    checkpoint: ServedCheckpoint, config: InferencePoolConfig, *, launcher: Launcher, client: Client
) -> None:
    """Raises ModelUnusable if matrices of a checkpoint's language model are missing, or have other shapes."""
    if _OTHERWISE & config.model.engine_kwargs.keys():
        return
    shapes = {name: list(tensor.shape) for name, tensor in read_tensors(checkpoint.files).items()}
    about = [launcher.identity, CHECK_PROGRAM.read_text(), checkpoint.digests.config, sorted(shapes.items())]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    path = settings().cache_dir / "fitting" / f"{name}.json"
    try:
        why = json.loads(read_cached(path))["why"]
    except (OSError, ValueError, TypeError, KeyError):
        why = _answer_of_check(checkpoint, shapes, path, launcher=launcher, client=client)
    if why is not None:
        raise ModelUnusable(
            expected=f"tensors in {checkpoint.name} with the names and shapes that its config.json makes",
            found=str(why),
            remedy="export it again, with the config.json of these weights and the names of this architecture",
        )


def _answer_of_check(
    checkpoint: ServedCheckpoint, shapes: dict[str, list[int]], path: Path, *, launcher: Launcher, client: Client
) -> str | None:
    with tempfile.TemporaryDirectory(prefix="assay-fitting-") as folder:
        order, answer = Path(folder) / "order.json", Path(folder) / "answer.json"
        order.write_text(json.dumps({"folder": str(checkpoint.folder), "shapes": shapes}))
        launch = launcher.check(order, answer)
        if launch is None:
            return None
        job = client.submit(job_of("check", launch, launch.variables))
        try:
            job.wait(_LONGEST_SECONDS, raise_on_failure=False)
            content = json.loads(answer.read_bytes())
        except AssayError:  # it takes too long
            job.terminate()
            return None
        except (OSError, ValueError):
            _log.info("the tensors of %s were not checked: %s", checkpoint.name, job.logs(3).strip())
            content = {"why": None}
        storage.write_bytes(str(path), json.dumps(content).encode())
        return content["why"]


def scoring_of(engine: EngineClient, checkpoint: ServedCheckpoint, *, longest: int | None) -> Scoring:
    """Returns the scoring ability that an engine has proved; `longest` limits prompt plus answer in tokens."""
    dtype = ""
    with suppress(ReloadUnavailable, SwapRefused):
        dtype = engine.reading(()).dtype
    caches = [dict(_LABEL.findall(line["labels"])) for line in _CACHE.finditer(engine.metrics())]
    blocks = [int(labels[name]) for labels in caches for name in _BLOCKS if labels.get(name, "").isdecimal()]
    asked = max(LONGEST, 2 * max(blocks, default=0) + _BEYOND_BLOCKS)
    return Scoring(
        scores_from_cache=_scores_from_cache(
            engine, checkpoint.name, most=min((longest or LONGEST) - 1, asked), dtype=dtype
        ),
        kv_cache_tokens=_cache_tokens(caches),
        architecture=hashlib.sha256("\n".join(checkpoint.architecture).encode()).hexdigest()[:24],
        dtype=dtype,
    )


def row_of(rows: Sequence[Any], token: int, *, from_end: int) -> float | None:
    """Returns the log-probability of a prompt's token in `prompt_logprobs`; None if the engine did not compute it.

    `from_end` is the token's position from the prompt's end; 1 for the last token.
    """
    row = rows[-from_end] if from_end <= len(rows) else None
    entry = row.get(str(token)) if isinstance(row, dict) else None
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return value if isinstance(value, (int, float)) and value <= ROUNDING else None


def _scores_from_cache(engine: EngineClient, model: str, *, most: int, dtype: str) -> bool:
    if dtype not in ROUNDING_NATS:
        return False
    try:
        return _agrees(engine, model, most=most, bound=ROUNDING_NATS[dtype])
    except (EndpointUnusable, ModelUnusable, LookupError, TypeError, ValueError):
        return False


def _agrees(engine: EngineClient, model: str, *, most: int, bound: float) -> bool:
    asked = {"model": model, "temperature": 0, "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    [text] = engine.ask("/v1/completions", {**asked, "prompt": CANARY_PROMPTS[0], "echo": True})["choices"]
    known = [int(token.removeprefix("token_id:")) for token in text["logprobs"]["tokens"][:-1]]
    ids = (known * most)[:most]
    [echo] = engine.ask("/v1/completions", {**asked, "prompt": ids, "echo": True})["choices"]
    weighed: list[float] = echo["logprobs"]["token_logprobs"][:most]
    middle = most // 2
    labels = sorted({ids[middle], ids[middle - 1]})
    named = {**asked, "prompt": ids[:middle], "logprobs": len(labels), "logprob_token_ids": labels}
    [answer] = engine.ask("/v1/completions", named)["choices"]
    [top] = answer["logprobs"]["top_logprobs"]
    if abs(top[f"token_id:{ids[middle]}"] - weighed[middle]) > bound or any(f"token_id:{i}" not in top for i in labels):
        return False
    sampling = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": False}
    rows = engine.ask(GENERATE, {"model": model, "token_ids": ids, "sampling_params": sampling})["prompt_logprobs"]
    scored = len(rows) - 1
    if not 0 < scored < most - 1:  # nothing was computed, or nothing read from the cache
        return False
    pairs = [(row_of(rows, ids[-at], from_end=at), weighed[-at]) for at in range(1, scored + 1)]
    return all(value is not None and abs(value - before) <= bound for value, before in pairs)


def _cache_tokens(caches: Sequence[Mapping[str, str]]) -> int | None:
    sizes: list[int] = []
    for labels in caches:
        tokens = labels.get("kv_cache_size_tokens", "")
        blocks = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
        if tokens.isdecimal():
            sizes.append(int(tokens))
        elif all(number.isdecimal() for number in blocks):
            sizes.append(int(blocks[0]) * int(blocks[1]))
    return min(sizes, default=None)


def require_read_as_written(engine: EngineClient, checkpoint: ServedCheckpoint, config: InferencePoolConfig) -> None:
    """Raises ModelUnusable unless an engine encodes and decodes text as `tokenizers` does with tokenizer.json.

    Skips the comparison if neither the checkpoint nor the engine argument `tokenizer` has such a file.
    """
    folder = config.model.engine_kwargs.get("tokenizer", str(checkpoint.folder))
    if not (written := engine.ask("/assay_read", {"folder": folder, "text": PROBE})):
        return
    asked = {"model": checkpoint.name, "prompt": PROBE}
    plain, special = (
        engine.ask("/tokenize", {**asked, "add_special_tokens": special})["tokens"] for special in (False, True)
    )
    text = engine.ask("/detokenize", {"model": checkpoint.name, "tokens": written["ids"]})["prompt"]
    tokenizer_config = read_json(checkpoint.files.files["tokenizer_config.json"], [])
    engine_reading = {"ids": plain, "special": special, "text": text}
    if (
        why := difference(written, engine_reading, framed=any(name in tokenizer_config for name in _FRAMED))
    ) is not None:
        raise ModelUnusable(
            expected=f"the engine to read text by the tokenizer.json of {checkpoint.name}, as `tokenizers` does",
            found=why,
            remedy=_remedy(str(checkpoint.files.config.get("model_type")), tokenizer_config.get("tokenizer_class")),
        )


def difference(written: Mapping[str, Any], engine_reading: Mapping[str, Any], *, framed: bool) -> str | None:
    """Returns the first difference between two readings of the probe, or None.

    Each has `ids`, the `text` decoded from them, and `special`, the ids with special tokens; if `framed`, other special
    tokens than the file's may surround the text. `starts` are the offsets of the file's ids in the probe.
    """
    count = len(ids := engine_reading["ids"])
    for name, part in (("ids", "ids"), ("text", "text of its ids"), ("special", "ids with special tokens")):
        ours, theirs = written[name], engine_reading[name]
        holds = any(theirs[start : start + count] == ids for start in range(len(theirs) - count + 1))
        if ours == theirs or (name == "special" and framed and holds):
            continue
        place = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
        start = written["starts"][place] if name == "ids" else 0
        shown = [repr(each[place:][:_SHOWN]) for each in (theirs, ours)]
        return f"{part} {shown[0]} where the file gives {shown[1]}, in {PROBE[start:][:_SHOWN_CHARACTERS]!r}"
    return None


def _remedy(model_type: str, tokenizer_class: Any) -> str:
    if model_type in _ONLY_AS_QWEN2:
        return (
            f"no setting helps: transformers reads each checkpoint of model_type {model_type} by Qwen2Tokenizer; "
            "give the model another architecture, or a tokenizer with the rules of Qwen2Tokenizer"
        )
    named = f"in place of {tokenizer_class!r} " if tokenizer_class else ""
    return f'set "tokenizer_class": "PreTrainedTokenizerFast" {named}in tokenizer_config.json'
