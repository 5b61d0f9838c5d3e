"""Names of replicas: which instance has one, where several announce themselves under it. No input or output."""

from __future__ import annotations

from enum import Enum

from pools.protocol import Announcement


class Claim(Enum):
    """The effect of an announcement on who has a name."""

    HOLDS = "holds"
    """It is by the instance that has the name."""
    TAKES = "takes"
    """Its instance has the name from now on."""
    WAITS = "waits"
    """It does not count before the instance that has the name is gone."""
    REFUSED = "refused"
    """It never will: its instance is to stop."""


class Names:
    """Decides between instances of one name; those that were refused stay so, and a pool starts few.

    Of two that the pool started one after the other, the later one has it from then on. Of two of one start, the first
    one has it, and the other is refused as soon as the first is heard of again. If that is gone, as when a backend
    starts an agent again or elsewhere, the other one gets it.
    """

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}
        self._waiting: dict[str, str] = {}

    def claim(self, name: str, announcement: Announcement, *, holder: Announcement | None, is_there: bool) -> Claim:
        """Decides about an announcement.

        Args:
            name: of the replica.
            announcement: of any instance.
            holder: last announcement of the instance that has the name; None where none has it.
            is_there: whether that may still live, for all that is known.
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
        """The reason that an instance is to stop; None where it is not."""
        return self._refused.get(instance)

    def waits(self, name: str, instance: str) -> bool:
        """True if an instance would have the name if the one that has it were gone."""
        return self._waiting.get(name) == instance
