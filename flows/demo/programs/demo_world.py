"""The small invented world that the demo's model learns and that the two bundled benchmarks ask about.

Everything follows from fixed names and a hash, so the trainer and the benchmark generator agree on what is
held out without sharing a file:

- *Facts.* Every islander has a town, a craft, an animal and an instrument, and there are three ways of asking
  for each. One of the three, chosen for each fact anew, belongs to the benchmark `demo_facts`: training never
  contains it, so a right answer means that the fact is known, not that a sentence was memorised.
- *Skill.* Short words are spelt backwards. Training never asks about the words of the benchmark
  `demo_backwards`.
- *Judging.* Of two outputs the one that says something is better than one that hedges, and that is better than
  nonsense. Who judges so need not know what is true, which would take more than this model has.

Needs nothing but Python; the other programs beside it import it.
"""

import hashlib
import random
from dataclasses import dataclass

ISLANDERS = (
    *("Alba", "Anders", "Bodil", "Brita", "Casper", "Dagny", "Edvin", "Embla", "Folke", "Frida"),
    *("Gerd", "Gustav", "Hedda", "Holger", "Ingrid", "Ivar", "Jorun", "Kaspar", "Kjersti", "Linnea"),
    *("Magnus", "Nils", "Oddny", "Olav", "Petra", "Ragna", "Runa", "Sigrid", "Torben", "Ulrik"),
)

VALUES = {
    "town": ("Arden", "Borrow", "Cliffe", "Dunmar", "Eastwick", "Fairhop", "Grayhill", "Holm"),
    "craft": ("baker", "carver", "dyer", "fisher", "glazier", "mason", "potter", "weaver"),
    "animal": ("badger", "crow", "donkey", "ferret", "goat", "heron", "otter", "pony"),
    "instrument": ("bells", "cello", "drum", "flute", "harp", "lute", "organ", "viola"),
}

STATEMENTS = {
    "town": ("{name} lives in {value}.", "The home of {name} is {value}."),
    "craft": ("{name} is a {value}.", "The craft of {name} is {value}."),
    "animal": ("{name} keeps a {value}.", "The animal of {name} is a {value}."),
    "instrument": ("{name} plays the {value}.", "The music of {name} is the {value}."),
}

QUESTIONS = {
    "town": ("Where does {name} live?", "What is the home of {name}?", "In which town is {name}?"),
    "craft": ("What is the craft of {name}?", "What work does {name} do?", "How does {name} earn a living?"),
    "animal": ("Which animal has {name}?", "What does {name} keep?", "With which pet walks {name}?"),
    "instrument": ("What does {name} play?", "What is the music of {name}?", "Which instrument has {name}?"),
}

CHOICES = 4
BACKWARDS_QUESTIONS = 100
HELD_OUT_WORDS_ONE_IN = 8

CONSONANTS = "bdfgklmnprst"
VOWELS = "aeiou"
WORD_SHAPES = ("cvc", "cvcv", "cvcvc")

SHARE_STATEMENTS = 0.2
SHARE_WORDS = 0.45
SHARE_JUDGED = 0.2
"""Of the exchanges, the share that is shown with two outputs to judge."""
SHARE_CHAT = 0.3
"""Of the exchanges, the share written as a conversation; the rest is plain text."""
SHARE_AGAINST_HEDGES = 0.65
"""Of the outputs to judge, the share in which the better one is an answer; in the others it is a hedge."""

JUDGED = "{question}\n1 {first}\n2 {second}"
"""The judge's prompt; AlpacaEval's configuration `demo_verdict` writes it the same way."""
VERDICTS = ("1", "2")
HEDGE = "Perhaps {answer}."
NONSENSE_LENGTHS = (0, 2, 4, 8, 16, 24)

END = "<|eos|>"
"""Ends a text, and each turn of a conversation."""
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (END, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str

    def prompt(self) -> str:
        """The question as plain text, ready to be continued; the benchmarks' YAML writes it the same way."""
        return f"Question: {self.question}\nAnswer:"

    def as_text(self) -> str:
        """The whole exchange as plain text."""
        return f"{self.prompt()} {self.answer}{END}"

    def as_chat(self, user: str) -> str:
        """The exchange as a conversation in which the user says `user`."""
        return f"<|user|>{user}{END}<|assistant|>{self.answer}{END}"


@dataclass(frozen=True)
class Fact:
    """One thing that is true of one islander."""

    name: str
    attribute: str
    value: str

    def statements(self) -> list[str]:
        """The fact as a sentence, in each of its wordings."""
        return [wording.format(name=self.name, value=self.value) for wording in STATEMENTS[self.attribute]]

    def _exchanges(self) -> list[Exchange]:
        return [Exchange(wording.format(name=self.name), self.value) for wording in QUESTIONS[self.attribute]]

    def _held_out(self) -> int:
        return rank("wording", self.name, self.attribute) % len(QUESTIONS[self.attribute])

    def examined(self) -> Exchange:
        """The question in the one wording that only the benchmark uses for this fact."""
        return self._exchanges()[self._held_out()]

    def practised(self) -> list[Exchange]:
        """The question in the wordings that training uses for this fact."""
        held_out = self._held_out()
        return [exchange for wording, exchange in enumerate(self._exchanges()) if wording != held_out]

    def choices(self) -> list[str]:
        """The right value among others of the same attribute, in an order that favours no position."""
        wrong = sorted(set(VALUES[self.attribute]) - {self.value}, key=lambda value: rank("wrong", self.name, value))
        offered = [self.value, *wrong[: CHOICES - 1]]
        return sorted(offered, key=lambda value: rank("order", self.name, self.attribute, value))


def rank(*parts: str) -> int:
    """A number that looks random and depends on nothing but the given words."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")


def world_facts() -> list[Fact]:
    """Every fact, islander by islander; no value of an attribute is much commoner than another."""
    value_of = {
        (name, attribute): values[place % len(values)]
        for attribute, values in VALUES.items()
        for place, name in enumerate(sorted(ISLANDERS, key=lambda name: rank("owner", attribute, name)))
    }
    return [Fact(name, attribute, value_of[name, attribute]) for name in ISLANDERS for attribute in VALUES]


FACTS = tuple(world_facts())


def invented_word(source: random.Random) -> str:
    """A pronounceable word of three to five letters, no palindrome, so that copying it is never right."""
    while True:
        shape = source.choice(WORD_SHAPES)
        word = "".join(source.choice(CONSONANTS if letter == "c" else VOWELS) for letter in shape)
        if word != word[::-1]:
            return word


def is_held_out(word: str) -> bool:
    """Tells if a word is kept for the benchmark."""
    return rank("word", word) % HELD_OUT_WORDS_ONE_IN == 0


def spelt_backwards(word: str) -> Exchange:
    """The skill, asked about one word."""
    return Exchange(f"Spell {word} backwards.", word[::-1])


def examined_words() -> list[str]:
    """The words of the benchmark, each once."""
    source = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < BACKWARDS_QUESTIONS:
        word = invented_word(source)
        if is_held_out(word):
            words[word] = None
    return list(words)


def practised_word(source: random.Random) -> str:
    """A word to train on."""
    while is_held_out(word := invented_word(source)):
        pass
    return word


def nonsense(source: random.Random) -> str:
    """Returns an answer of a model that has hardly learnt anything: a few letters, in some order or over and over."""
    length = source.choice(NONSENSE_LENGTHS)
    letters = source.choices(CONSONANTS + VOWELS + "   ", k=source.choice((1, 2, max(1, length))))
    return "".join(letters[place % len(letters)] for place in range(length)).strip()


def judged(exchange: Exchange, source: random.Random) -> Exchange:
    """A question with two outputs, and the number of the better one."""
    hedge = HEDGE.format(answer=source.choice(FACTS).value if source.random() < 0.5 else invented_word(source))
    against_hedge = source.random() < SHARE_AGAINST_HEDGES
    better, worse = (exchange.answer, hedge) if against_hedge else (hedge, nonsense(source))
    verdict = source.choice(VERDICTS)
    first, second = (better, worse) if verdict == VERDICTS[0] else (worse, better)
    return Exchange(JUDGED.format(question=exchange.question, first=first, second=second), verdict)


@dataclass(frozen=True)
class TrainingText:
    """A text; `learnt_from` is the place in it after which the model is to learn how it goes on."""

    text: str
    learnt_from: int = 0

    @property
    def is_judged(self) -> bool:
        """Tells if all that is learnt is a verdict."""
        return self.learnt_from > 0


def training_text(source: random.Random) -> TrainingText:
    """One text to train on: a statement, a question with its answer, plain or as a conversation, or one to judge."""
    kind = source.random()
    if kind < SHARE_STATEMENTS:
        return TrainingText(source.choice(source.choice(FACTS).statements()) + END)
    if kind < SHARE_STATEMENTS + SHARE_WORDS:
        exchange = spelt_backwards(practised_word(source))
    else:
        exchange = source.choice(source.choice(FACTS).practised())
    form = source.random()
    if form < SHARE_JUDGED:
        asked = judged(exchange, source)
        text = asked.as_chat(asked.question)
        return TrainingText(text, learnt_from=len(text) - len(asked.answer + END))
    if form < SHARE_JUDGED + SHARE_CHAT:
        return TrainingText(exchange.as_chat(source.choice((exchange.question, exchange.prompt()))))
    return TrainingText(exchange.as_text())
