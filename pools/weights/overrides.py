"""Names of checkpoints with options, such as `with(runs/a/step-1000, tokenizer=tokenizers/llama)`.

    with(LOCATION, tokenizer=FOLDER, template=FILE, base=LOCATION)

Each option can be left out; given options are in this order. The tokenizer of the folder `tokenizer` and the chat
template in the file `template` replace the checkpoint's own; `base` is the model that an adapter changes. The name is
the location of the checkpoint, or of the run, for pools and records. In a location `,()@%` are written as `%` and their
hex digits, as in names of merged checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from resources.errors import BadInput

OVERRIDE = r"with\([^()]*\)"
"""Pattern of the names."""
_NAME = re.compile(OVERRIDE)
_RESERVED = {letter: f"%{ord(letter):02X}" for letter in "%,()@"}
_QUOTED = re.compile("|".join(_RESERVED.values()))


@dataclass(frozen=True)
class Override:
    """A location with options, as written in its name; see the module. An option that is left out is None."""

    location: str
    tokenizer: str | None = None
    template: str | None = None
    base: str | None = None

    def __str__(self) -> str:
        options = [f"{name}={quoted(value)}" for name in _OPTIONS if (value := getattr(self, name)) is not None]
        return f"with({', '.join([quoted(self.location), *options])})" if options else self.location

    def at(self, location: str) -> str:
        """Returns the name of another location with the same options."""
        return str(replace(self, location=location))

    def with_locations(self, changed: Callable[[str], str]) -> Override:
        """Returns it with its location, and those in its options, in changed form."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return replace(self, **{name: changed(value) for name, value in given.items()})


_OPTIONS = tuple(field.name for field in fields(Override))[1:]


def quoted(location: str) -> str:
    """Returns a location as it is written within a name."""
    return "".join(_RESERVED.get(letter, letter) for letter in location)


def unquoted(text: str) -> str:
    """Returns the location that is written so within a name."""
    return _QUOTED.sub(lambda matched: chr(int(matched[0][1:], 16)), text)


def override_of(location: str) -> Override | None:
    """Returns location and options of a name; None for all other locations. Raises BadInput for a misspelt name."""
    if not _NAME.fullmatch(location.strip()):
        return None
    own, *options = (part.strip() for part in location.strip()[len("with(") : -1].split(","))
    named = [(name.strip(), unquoted(value.strip())) for name, _, value in (part.partition("=") for part in options)]
    names = [name for name, _ in named]
    if not own or not named or names != [name for name in _OPTIONS if name in names] or not all(dict(named).values()):
        raise BadInput(
            expected="with(LOCATION, tokenizer=FOLDER, template=FILE, base=LOCATION), some options left out",
            found=location,
            remedy="write it so; in paths, %2C for a comma, %28 and %29",
        )
    return Override(unquoted(own), **dict(named))


def without_options(location: str) -> str:
    """Returns the location alone, if it is a name with options; else itself."""
    override = override_of(location)
    return override.location if override else location
