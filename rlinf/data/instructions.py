"""Instructions in requests and trajectories: a step column of text, uint8 ``[T, N]``."""

from __future__ import annotations

import numpy as np

INSTRUCTION = "instruction"
"""Name of the column: UTF-8, filled up with zeros. A simulator may ask for another thing at any
step."""


def decoded(row: np.ndarray) -> str:
    """The text of a row of the column, uint8 ``[N]``."""
    return np.asarray(row, np.uint8).tobytes().rstrip(b"\0").decode()
