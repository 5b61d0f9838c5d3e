"""The small invented world that the demo's model learns, and that the two bundled benchmarks test.

All content derives from fixed names and a hash, so that the trainer and the benchmark generator agree on the held-out
part without a shared file:

- *Facts.* Every islander has a town, a craft, an animal and an instrument, each with three wordings of its question. A
  wording per fact, chosen by hash, is held out for the benchmark `demo_facts`: training never contains it, so a right
  answer shows knowledge of the fact, not a memorised sentence.
- *Skill.* Short words are spelt backwards. Training never contains the words of the benchmark `demo_backwards`.
- *Judging.* Of two outputs an answer beats a hedge, and a hedge beats nonsense. Such a judge need not know the facts,
  which would exceed this model.

Needs only Python; the other programs in this folder import it.
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

HELD_OUT_WORD_INTERVAL = 8

CONSONANTS = "bdfgklmnprst"
VOWELS = "aeiou"
WORD_SHAPES = ("cvc", "cvcv", "cvcvc")

SHARE_STATEMENTS = 0.2
SHARE_WORDS = 0.45
SHARE_JUDGED = 0.2
"""Share of exchanges that are shown with two outputs to judge."""
SHARE_CHAT = 0.3
"""Share of exchanges written as a conversation; the rest is plain text."""
SHARE_AGAINST_HEDGES = 0.65
"""Share of judged pairs in which the better output is an answer; in the others it is a hedge."""

JUDGED = "{question}\n1 {first}\n2 {second}"
"""The judge's prompt, as in AlpacaEval's configuration `demo_verdict`."""
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
        """Returns the question as plain text to continue, as in the benchmarks' YAML."""
        return f"Question: {self.question}\nAnswer:"

    def as_text(self) -> str:
        return f"{self.prompt()} {self.answer}{END}"

    def as_chat(self, user: str) -> str:
        """Returns the exchange as a conversation in which the user's message is `user`."""
        return f"<|user|>{user}{END}<|assistant|>{self.answer}{END}"


@dataclass(frozen=True)
class Fact:
    """An attribute value of an islander."""

    name: str
    attribute: str
    value: str

    def statements(self) -> list[str]:
        return [wording.format(name=self.name, value=self.value) for wording in STATEMENTS[self.attribute]]

    def _exchanges(self) -> list[Exchange]:
        return [Exchange(wording.format(name=self.name), self.value) for wording in QUESTIONS[self.attribute]]

    def _held_out(self) -> int:
        return rank("wording", self.name, self.attribute) % len(QUESTIONS[self.attribute])

    def examined(self) -> Exchange:
        """Returns the question in the wording that only the benchmark uses for this fact."""
        return self._exchanges()[self._held_out()]

    def practised(self) -> list[Exchange]:
        """Returns the question in the wordings that training uses for this fact."""
        held_out = self._held_out()
        return [exchange for wording, exchange in enumerate(self._exchanges()) if wording != held_out]


def rank(*parts: str) -> int:
    """Returns a pseudorandom number that depends only on the given words."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")


def world_facts() -> list[Fact]:
    """Returns every fact, islander by islander; the values of an attribute are almost equally frequent."""
    value_of = {
        (name, attribute): values[place % len(values)]
        for attribute, values in VALUES.items()
        for place, name in enumerate(sorted(ISLANDERS, key=lambda name: rank("owner", attribute, name)))
    }
    return [Fact(name, attribute, value_of[name, attribute]) for name in ISLANDERS for attribute in VALUES]


FACTS = tuple(world_facts())


def invented_word(source: random.Random) -> str:
    """Returns a pronounceable word of three to five letters, no palindrome, so that a copy is never right."""
    while True:
        shape = source.choice(WORD_SHAPES)
        word = "".join(source.choice(CONSONANTS if letter == "c" else VOWELS) for letter in shape)
        if word != word[::-1]:
            return word


def is_held_out(word: str) -> bool:
    """Returns True if a word is held out for the benchmark."""
    return rank("word", word) % HELD_OUT_WORD_INTERVAL == 0


def spelt_backwards(word: str) -> Exchange:
    """Returns the spelling exchange for a word."""
    return Exchange(f"Spell {word} backwards.", word[::-1])


def practised_word(source: random.Random) -> str:
    """Returns a word for training."""
    while is_held_out(word := invented_word(source)):
        pass
    return word


def nonsense(source: random.Random) -> str:
    """Returns an answer like that of a barely trained model: a few letters, in random order or repeated."""
    length = source.choice(NONSENSE_LENGTHS)
    letters = source.choices(CONSONANTS + VOWELS + "   ", k=source.choice((1, 2, max(1, length))))
    return "".join(letters[place % len(letters)] for place in range(length)).strip()


def judged(exchange: Exchange, source: random.Random) -> Exchange:
    """Returns a question with two outputs, answered by the number of the better output."""
    hedge = HEDGE.format(answer=source.choice(FACTS).value if source.random() < 0.5 else invented_word(source))
    against_hedge = source.random() < SHARE_AGAINST_HEDGES
    better, worse = (exchange.answer, hedge) if against_hedge else (hedge, nonsense(source))
    verdict = source.choice(VERDICTS)
    first, second = (better, worse) if verdict == VERDICTS[0] else (worse, better)
    return Exchange(JUDGED.format(question=exchange.question, first=first, second=second), verdict)


@dataclass(frozen=True)
class TrainingText:
    """A training text; the loss covers the text from position `learnt_from` on."""

    text: str
    learnt_from: int = 0

    @property
    def is_judged(self) -> bool:
        return self.learnt_from > 0


def training_text(source: random.Random) -> TrainingText:
    """Returns a training text: a statement, a question with answer, plain or as a conversation, or a judged pair."""
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
