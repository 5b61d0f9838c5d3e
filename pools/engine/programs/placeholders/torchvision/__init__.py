"""Takes the place of torchvision in a CPU engine's environment: its names can be imported, and fail when called.

vLLM's models with images, and some of text alone, import it for the processing of images, which a text never meets.
The registry's build needs CUDA libraries, and cannot be imported with a torch for CPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

__version__ = "0"
PLACEHOLDERS = ["torchvision"]
"""Packages without a build here; their modules are made from nothing."""


class _Missing(type):
    def __getattr__(cls, name: str) -> Any:
        return missing(name)

    def __call__(cls, *given: object, **options: object) -> Any:
        raise ImportError(f"{cls.__name__} is in no package of this environment: engines here serve text alone")


def missing(name: str) -> Any:
    """Returns a class in place of anything in a package."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] in PLACEHOLDERS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = missing


__getattr__ = missing
sys.meta_path.append(_Finder())  # after the others, which find what is installed
