"""What the native evaluation can be told beyond the benchmarks."""

from __future__ import annotations

from typing import Any

from resources.config import Config


class LevanterOptions(Config):
    """How Levanter evaluates a checkpoint itself."""

    def what_is_measured(self) -> dict[str, Any]:
        """What of this can change a score."""
        return self.model_dump(mode="json")
