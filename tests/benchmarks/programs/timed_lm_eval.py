"""Runs lm-eval, and writes the wall seconds of its model's calls. Executed by an environment's interpreter.

    python timed_lm_eval.py <file for the seconds> <folder with lm-eval's packages> lm_eval <arguments of its command>
    python timed_lm_eval.py <file for the seconds> <folder with lm-eval's packages> <program> <arguments of that>

The second form is for a program that drives lm-eval, as Assay's does. The seconds are those inside the model's
`loglikelihood` or `generate_until`: tokenizing, requests and parsing of answers, without imports, building prompts, and
scoring.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any


def time_asking(file: Path) -> None:
    """Makes each model that lm-eval evaluates write the seconds of its calls."""
    import lm_eval.evaluator as evaluator

    evaluate = evaluator.evaluate

    def timed(lm: Any, *arguments: Any, **options: Any) -> Any:
        for name in ("loglikelihood", "generate_until"):
            setattr(lm, name, partial(timed_call, getattr(lm, name)))
        return evaluate(lm, *arguments, **options)

    def timed_call(ask: Any, *arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        answers = ask(*arguments, **options)
        file.write_text(json.dumps({"seconds": time.monotonic() - began}))
        return answers

    evaluator.evaluate = timed


def main(file: str, packages: str, program: str, *arguments: str) -> None:
    sys.path.append(packages)  # after the environment's own packages, which may be an engine's
    time_asking(Path(file))
    sys.argv = [program, *arguments]
    if program == "lm_eval":
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
