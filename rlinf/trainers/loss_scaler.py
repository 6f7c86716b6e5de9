"""Dynamic loss scaling for float16, so that gradients neither underflow nor overflow.

See Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.2.

Float16 has no numbers between 0 and 6e-8, and none above 65504. The loss is multiplied by a scale
before the backward pass, and the gradient is divided by it in float32. If a gradient still
overflows, the step is skipped and the scale is halved; after some steps without overflow it is
doubled, as in :class:`torch.amp.GradScaler`. The check uses the norm of the reduced gradient,
because it is the same on every process with any sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf.errors import StageError

log = logging.getLogger("rlinf")
LOSS_SCALE = "loss_scale"
MIN_LOSS_SCALE = 2.0**-24
"""Smallest float16 number. If the gradient overflows even then, it is itself not finite."""


class LossScaler:
    """Scale of the loss; constant if ``window`` is None."""

    def __init__(self, initial_scale: float = 1.0, window: int | None = None) -> None:
        """
        Args:
            initial_scale: a power of two, so that dividing by it is exact.
            window: number of steps without overflow after which the scale is doubled.
        """
        self._window = window
        self._state = torch.tensor([initial_scale, 0.0])
        """The scale, and the number of steps without overflow since it last changed."""

    @property
    def value(self) -> float:
        return float(self._state[0])

    @property
    def is_dynamic(self) -> bool:
        return self._window is not None

    def state(self) -> Mapping[str, Tensor]:
        """Return the scaler's part of a trainer's state, not copied; empty for a constant scale."""
        return {LOSS_SCALE: self._state} if self.is_dynamic else {}

    def record_step(self) -> None:
        """Count a step without overflow."""
        if self._window is None:
            return
        self._state[1] += 1
        if int(self._state[1]) >= self._window:
            doubled = 2 * self.value
            self._state[0] = doubled if doubled < torch.finfo(torch.float32).max else self.value
            self._state[1] = 0.0

    def record_overflow(self) -> None:
        """Halve the scale after an overflow.

        Raises:
            StageError: the scale is at its minimum.
        """
        if self.value <= MIN_LOSS_SCALE:
            raise StageError(
                f"the gradient is not finite in float16 even of a loss times {MIN_LOSS_SCALE:.1g}; "
                "the previous weights are untouched. Set trainer.param_dtype=bfloat16, or lower "
                "optimizer.lr"
            )
        self._state[0] /= 2
        self._state[1] = 0.0
        log.info("a gradient overflowed float16: no step; loss scale %g", self.value)
