"""OmniGibson of BEHAVIOR-1K, as far as the adapter calls it."""

from __future__ import annotations

import os
import sys

assert sys.argv[1:] == [], "it would read the arguments of the simulator process"
assert os.environ["OMNIGIBSON_HEADLESS"] == "1"
DATA = os.environ["OMNIGIBSON_DATA_PATH"]


def shutdown() -> None:
    pass
