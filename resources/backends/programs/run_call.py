"""Executes one pickled call in the job's own interpreter.

python run_call.py <pickle of (function, args, kwargs)> [folder for sys.path …]
"""

from __future__ import annotations

import gc
import pickle
import sys
from pathlib import Path

_OURS = {"cloudpickle", "pydantic", "pydantic_settings"}  # for callables sent whole, and modules of ours


def main(arguments: list[str]) -> None:
    """Unpickles and calls; exceptions of the call pass through, so its traceback ends the log."""
    call_file, *import_folders = arguments
    sys.path[:1] = import_folders  # in place of this file's folder
    gc.disable()  # a fifth of the time of the imports would go to looking for garbage that is not there
    try:
        function, args, kwargs = pickle.loads(Path(call_file).read_bytes())
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OURS:
            sys.exit(f"{sys.executable} lacks {missing}, which this callable needs. Add it to that environment.")
        raise
    gc.freeze()
    gc.enable()
    function(*args, **kwargs)


if __name__ == "__main__":
    main(sys.argv[1:])
