"""Builds an environment into an image, in Assay's folder for it: `python build.py MODULE NAME [KEY]`.

Runs before Assay's code is copied, so that code changes do not rebuild environments.
"""

from __future__ import annotations

import sys
from importlib import import_module

from resources.environments.environments import ensure_environment

module, name, *keys = sys.argv[1:]
spec = getattr(import_module(module), name)
for key in keys:
    spec = spec[key]
ensure_environment(spec, on_progress=print)
