"""Lists run entries of HELM as JSON, with the interpreter of the HELM environment.

python list_helm.py              HELM's own, with the arguments they need and take
python list_helm.py <file>       the descriptions in a file of run entries (HOCON)
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

from helm.benchmark.presentation.run_entry import read_run_entries
from helm.benchmark.run_expander import RUN_EXPANDERS
from helm.benchmark.run_spec import _REGISTERED_RUN_SPEC_FUNCTIONS, discover_run_spec_functions


def main(arguments: list[str]) -> None:
    """Prints a line of JSON."""
    if arguments:
        print(json.dumps([entry.description for entry in read_run_entries(arguments).entries]))
    else:
        print(json.dumps(_known_entries()))


def _known_entries() -> dict[str, Any]:
    discover_run_spec_functions()
    entries = {}
    for name, function in _REGISTERED_RUN_SPEC_FUNCTIONS.items():
        parameters = inspect.signature(function).parameters.values()
        named = [item for item in parameters if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)]
        entries[name] = {
            "needed": [item.name for item in named if item.default is item.empty],
            "optional": [item.name for item in named if item.default is not item.empty],
            "any": any(item.kind is item.VAR_KEYWORD for item in parameters),
        }
    return {"entries": entries, "expanders": sorted(RUN_EXPANDERS)}


if __name__ == "__main__":
    main(sys.argv[1:])
