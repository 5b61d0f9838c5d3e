"""Request bodies of evaluators that must arrive byte for byte: 49 kinds that a rewriting proxy corrupts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODEL = "tiny"


@dataclass(frozen=True)
class Kind:
    """A kind of request. `text` is its whole body; @ in it is replaced by a number that makes each body unique."""

    name: str
    path: str
    text: str

    def body(self, number: int) -> bytes:
        return self.text.replace("@", str(number)).encode()


def _written(text: str) -> str:
    return text.replace("MODEL", MODEL)


def _completion(**fields: Any) -> str:
    return json.dumps({"model": MODEL, "prompt": "number @: Once upon", "max_tokens": 16, **fields})


def _chat(**fields: Any) -> str:
    messages = [{"role": "user", "content": "number @: hello"}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16, **fields})


_SCHEMA = {"type": "object", "properties": {"answer": {"enum": ["A", "B"]}}, "required": ["answer"]}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"answer": "A"}'}}

_COMPLETIONS: dict[str, str] = {
    "plain": _completion(),
    "log-likelihood": _completion(echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234),
    "no new tokens": _completion(echo=True, logprobs=5, max_tokens=0),
    "generation": _completion(stop=["\n\n", "Q:"], temperature=0.0, seed=1234),
    "token ids": _completion(prompt=[1, 2, 3, 250]).replace("250", "25@"),
    "batch of token ids": _completion(prompt=[[1, 2, 3], [4, 250]]).replace("250", "25@"),
    "batch of texts": _completion(prompt=["first @", "second @", ""]),
    "logprobs null": _completion(logprobs=None),
    "logprobs zero": _completion(logprobs=0),
    "stop null": _completion(stop=None),
    "stop text": _completion(stop="\n"),
    "five stops": _completion(stop=["a", "b", "c", "d", "e"]),
    "sixteen stops": _completion(stop=[f"stop {place}" for place in range(16)]),
    "no stops": _completion(stop=[]),
    "long float": _completion(temperature=0.30000000000000004, top_p=0.9499999999999999556),
    "float that f32 cannot hold": _completion(temperature=0.1, top_p=0.7, frequency_penalty=1.1),
    "whole number for a float": _completion(temperature=0, top_p=1),
    "exponents": _written('{"model": "MODEL", "prompt": "n @", "temperature": 1e-05, "min_p": 1E-3, "top_p": 1.0e0}'),
    "negative zero": _written('{"model": "MODEL", "prompt": "n @", "presence_penalty": -0.0}'),
    "large seed": _completion(seed=9007199254740993),
    "logit bias": _completion(logit_bias={"220": -100, "198": -0.5}),
    "spaces and tabs": _written('{ "model" :\t"MODEL" ,  "prompt" : "n @" ,\r\n "max_tokens" : 1 }'),
    "indented": json.dumps(json.loads(_completion(stop=["a"])), indent=2),
    "without spaces": json.dumps(json.loads(_completion(stop=["a"])), separators=(",", ":")),
    "newline at the end": _completion() + "\n",
    "characters as they are": json.dumps({"model": MODEL, "prompt": "@ é 漢字 🙂"}, ensure_ascii=False),
    "characters escaped": json.dumps({"model": MODEL, "prompt": "@ é 漢字 🙂"}),
    "half a surrogate pair": _written('{"model": "MODEL", "prompt": "@ cut \\ud83d"}'),
    "needless escapes": _written('{"model": "MODEL", "prompt": "@ a\\/b \\u0041"}'),
    "control characters": _completion(prompt="@ \x00\x1f\x7f\u2028"),
    "model last": _written('{"prompt": "n @", "max_tokens": 4, "model": "MODEL"}'),
    "a key twice": _written('{"model": "MODEL", "prompt": "first", "prompt": "second @"}'),
    "unknown field": _completion(my_own={"nested": [1, None, True, {"deep": 1.50}]}),
    "vLLM's sampling": _completion(top_k=-1, min_p=0.05, repetition_penalty=1.1, ignore_eos=True, min_tokens=4),
    "vLLM's guided_json": _completion(guided_json=_SCHEMA),
    "vLLM's structured_outputs": _completion(structured_outputs={"choice": ["A", "B"]}),
    "vLLM's prompt_logprobs": _completion(prompt_logprobs=1, return_tokens_as_token_ids=True),
    "vLLM's token lists": _completion(stop_token_ids=[2], allowed_token_ids=[1, 2], bad_words=["x"]),
    "vLLM's prompt handling": _completion(truncate_prompt_tokens=128, add_special_tokens=False, priority=1),
    "200 kB prompt": _completion(prompt="@ " + "word " * 40_000),
}
_CHATS: dict[str, str] = {
    "plain": _chat(),
    "content in parts": _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "number @"}]}]),
    "log-probabilities": _chat(logprobs=True, top_logprobs=5, max_completion_tokens=8),
    "template arguments": _chat(chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=True),
    "echo and continuation": _chat(echo=True, continue_final_message=True, add_generation_prompt=False),
    "JSON schema": _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}),
    "tools and null content": _chat(
        tools=[_TOOL],
        messages=[
            {"role": "user", "content": "number @", "name": "someone"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        ],
    ),
    "vLLM's guided_json": _chat(guided_json=_SCHEMA, guided_decoding_backend="auto"),
    "vLLM's prompt_logprobs": _chat(prompt_logprobs=0, top_k=20, min_p=0.0),
}

KINDS: tuple[Kind, ...] = tuple(
    Kind(f"{group}: {name}", path, text)
    for group, path, texts in (("completion", COMPLETIONS, _COMPLETIONS), ("chat", CHAT, _CHATS))
    for name, text in texts.items()
)
