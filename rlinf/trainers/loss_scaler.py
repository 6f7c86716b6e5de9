"""A scaled loss, so that gradients of float16 are neither zero nor infinite.

Of Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.2.

Float16 has no numbers between 0 and 6e-8, and none above 65504. The loss is multiplied before the
backward pass, and the gradient divided by as much in float32. Where a gradient is not finite all
the same, that step is left out and the scale halved; after some steps without any it is doubled:
the rule of :class:`torch.amp.GradScaler`. Here it is asked of the norm of the reduced gradient,
which is the same on every process, whatever shares the weights out.
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
"""Float16's smallest number: a gradient that has none even so is not finite itself."""


class LossScaler:
    """By what a loss is multiplied. Without ``steps`` that is 1 for good."""

    def __init__(self, first: float = 1.0, steps: int | None = None) -> None:
        """
        Args:
            first: a power of two, as dividing by it loses nothing.
            steps: without overflow, after which it is doubled.
        """
        self._steps = steps
        self._held = torch.tensor([first, 0.0])
        """The scale, and how many steps were without overflow since it last changed."""

    @property
    def value(self) -> float:
        return float(self._held[0])

    @property
    def is_dynamic(self) -> bool:
        return self._steps is not None

    def state(self) -> Mapping[str, Tensor]:
        """Part of a trainer's state, not copied; empty if it never changes."""
        return {LOSS_SCALE: self._held} if self.is_dynamic else {}

    def record_step(self) -> None:
        """Count a step without overflow."""
        if self._steps is None:
            return
        self._held[1] += 1
        if int(self._held[1]) >= self._steps:
            doubled = 2 * self.value
            self._held[0] = doubled if doubled < torch.finfo(torch.float32).max else self.value
            self._held[1] = 0.0

    def record_overflow(self) -> None:
        """Halve it after an overflow.

        Raises:
            StageError: it is as low as it goes.
        """
        if self.value <= MIN_LOSS_SCALE:
            raise StageError(
                f"the gradient is not finite in float16 even of a loss times {MIN_LOSS_SCALE:.1g}; "
                "the previous weights are untouched. Set trainer.param_dtype=bfloat16, or lower "
                "optimizer.lr"
            )
        self._held[0] /= 2
        self._held[1] = 0.0
        log.info("a gradient overflowed float16: no step; loss scale %g", self.value)
