"""What HELM can be told beyond the run entries."""

from __future__ import annotations

from typing import Any

from resources.config import Config


class HelmOptions(Config):
    """How HELM runs."""

    def what_is_measured(self) -> dict[str, Any]:
        """What of this can change a score."""
        return self.model_dump(mode="json")
