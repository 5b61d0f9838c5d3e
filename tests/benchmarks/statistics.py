"""Simulates intervals, tests and gates: checks their promises with and without a difference.

    make bench NAME=statistics
    python tests/benchmarks/statistics.py [--trials 2000] [--seed 0]

- alarms: equal checkpoints with the same questions that differ by p < 0.05; 0.05 is promised
- coverage: 95 % intervals that hold the true value
- power: a group of 20 subjects, 2 points better, tested stratified and paired, and unpaired
- gates: runs of equal checkpoints with any NO-GO; 0.05 at most is promised; and GO for checkpoints worse by the margin;
  equal checkpoints with NO-GO against the previous checkpoint, the mean of 5 and the best of 30, 0.05 at most promised

Takes about 10 minutes with 2000 trials.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "statistics":  # a script of this folder imports Python's module of this name, which this file hides
    spec = spec_from_file_location(__name__, Path(sysconfig.get_path("stdlib")) / "statistics.py")
    assert spec is not None and spec.loader is not None
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])


def main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulations import everything

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = list(everything(trials=options.trials, seed=options.seed, say=lambda line: print(line, flush=True)))
    print(json.dumps({"trials": options.trials, "seed": options.seed, "figures": figures}))


if __name__ == "__main__":
    main()
