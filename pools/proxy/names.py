"""Names of replicas: decides which instance has a name that several announce. No input or output."""

from __future__ import annotations

from enum import Enum

from pools.protocol import Announcement


class Claim(Enum):
    """The effect of an announcement on the ownership of a name."""

    HOLDS = "holds"
    """The announcing instance has the name already."""
    TAKES = "takes"
    """The announcing instance has the name from now on."""
    WAITS = "waits"
    """The announcement does not count until the instance that has the name is gone."""
    REFUSED = "refused"
    """The announcement never counts: its instance must stop."""


class Names:
    """Decides between instances with the same name; refused instances stay refused (a pool starts few).

    Of two instances from different starts of the pool, the later has the name. Of two instances of the same start, the
    first has it, and the other is refused as soon as the first announces itself again. If the first is gone, as when a
    backend restarts or moves an agent, the other gets the name.
    """

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}
        self._waiting: dict[str, str] = {}

    def claim(self, name: str, announcement: Announcement, *, holder: Announcement | None, is_there: bool) -> Claim:
        """Decides about an announcement of any instance of the name.

        `holder` is the last announcement of the instance that has the name; `is_there` is True if it may still live.
        """
        instance = announcement.instance
        if holder is not None and announcement.start < holder.start:
            self._refused[instance] = f"a later start of {name} has its name"
        if instance in self._refused:
            return Claim.REFUSED
        if holder is not None and holder.instance == instance:
            if (other := self._waiting.pop(name, None)) is not None:
                self._refused[other] = f"another instance has the name {name} and is there"
            return Claim.HOLDS
        if holder is not None and holder.start == announcement.start and is_there:
            self._waiting[name] = instance
            return Claim.WAITS
        self._waiting.pop(name, None)
        if holder is not None:
            self._refused[holder.instance] = f"another instance has taken over the name {name}"
        return Claim.TAKES

    def refusal(self, instance: str) -> str | None:
        return self._refused.get(instance)

    def waits(self, name: str, instance: str) -> bool:
        """Returns True if an instance gets the name as soon as its current holder is gone."""
        return self._waiting.get(name) == instance
