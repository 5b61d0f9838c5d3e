"""Builds one environment into an image, where Assay looks for it: `python build.py MODULE NAME [KEY]`.

Runs before Assay's code is copied, so that a change to the code builds no environment anew.
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
