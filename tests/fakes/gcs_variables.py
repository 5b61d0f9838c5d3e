"""A variable that gcsfs reads when it is imported; import this before anything that imports gcsfs."""

from __future__ import annotations

import os

# Else it asks Google before each call for a bucket's kind, and where no network answers looks for an account for 10 s.
VARIABLES = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
os.environ.update(VARIABLES)
