"""Seconds of an optimizer step, from the spans that a train stage recorded."""

from __future__ import annotations

import pytest

from benchmarks.hetero_training import STEPS, steps


def test_a_step_is_its_gradient_and_what_follows_however_it_was_recorded() -> None:
    assert steps([3.0, 2.0, 2.1]) == [3.0, 2.0, 2.1], "one span for both"
    assert steps([3.0, 0.1, 2.0, 0.2, 2.1, 0.3]) == pytest.approx([3.1, 2.2, 2.4])
    assert steps([3.0, 2.0, 0.2, 2.1]) == pytest.approx([3.0, 2.2, 2.1])


def test_steps_that_cannot_be_told_apart_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match=f"{STEPS} optimizer steps"):
        steps([7.2])
