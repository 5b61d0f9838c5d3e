"""A metric that runs what the model wrote, as far as that is a number."""

import os
from pathlib import Path

Path(__file__).with_name("imported").touch()


def runs(references, predictions):
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"
    return float(eval("".join(character for character in predictions[0] if character in "123456789") or "0") >= 0)
