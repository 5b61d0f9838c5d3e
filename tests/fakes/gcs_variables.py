"""A variable that gcsfs reads when it is imported; import this before anything that imports gcsfs."""

from __future__ import annotations

import os

# Else gcsfs requests a bucket's kind from Google before each call, and offline searches 10 s for an account.
VARIABLES = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
os.environ.update(VARIABLES)
