"""The identity of a stage's work: what changes it, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlinf.config import RunConfig, validate
from stages.identity import stage_key

Compose = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("evaluate.every=7", True),
        ("log.trackers=[]", True),
        ("evaluate.samples=7", False),
        ("sft.lr=0.5", False),
    ],
)
def test_the_evaluation_interval_is_no_part_of_the_key_of_sft(
    compose: Compose, override: str, same: bool
) -> None:
    """A run may be evaluated more often when it goes on, and loses nothing for it."""
    plain = stage_key(validate(RunConfig, compose()), "sft", 0, {}, "")
    other = stage_key(validate(RunConfig, compose(override)), "sft", 0, {}, "")
    assert (plain == other) is same
