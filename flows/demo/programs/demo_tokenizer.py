"""The tokenizer of both demos: a word of the invented world is a single token, all other text is bytes.

With bytes alone the same texts have 3.6 times as many tokens. Needs transformers and tokenizers.
"""

from collections.abc import Iterator

from demo_world import CHAT_TEMPLATE, END, FACTS, HEDGE, SPECIAL_TOKENS, spelt_backwards
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTEXT_TOKENS = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer, which adds no special tokens by itself."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = set(splitter.alphabet())
    words = {word for text in known_texts() for word, _ in splitter.pre_tokenize_str(text)} - alphabet
    vocabulary = {token: number for number, token in enumerate([*sorted(alphabet), *sorted(words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def known_texts() -> Iterator[str]:
    """Yields texts with each word of the world as in the training texts: at the start, or after a space."""
    exchanges = [exchange for fact in FACTS for exchange in (*fact.practised(), fact.examined())]
    for exchange in (*exchanges, spelt_backwards("")):
        yield from (exchange.question, exchange.prompt(), exchange.answer, f" {exchange.answer}")
    for fact in FACTS:
        yield from fact.statements()
    yield f" {HEDGE.format(answer='')}"
