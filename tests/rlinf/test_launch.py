"""Which words of a command line are overrides, and what the points of a sweep are called."""

from __future__ import annotations

import pytest

from rlinf.composing import forced
from rlinf.launch import suffix


def test_the_points_of_a_sweep_are_named_after_what_varies() -> None:
    words = ["-m", "optimizer.lr=1e-4,3e-4", "task.digits=[1,2]", "rollout.batch=choice(2,4)"]
    assert suffix(words) == ["++run.suffix='-lr-${optimizer.lr}-batch-${rollout.batch}'"]
    assert suffix([*words, "run.name=mine"]) == suffix(words)
    assert suffix([*words, "run.name=lr-${optimizer.lr}"]) == []
    assert suffix([*words, "run.name=a,b"]) == []
    assert suffix([*words, "run.suffix=-mine"]) == []
    assert suffix(words[1:]) == []
    (named,) = suffix(["-m", "experiment=arithmetic_grpo,arithmetic_dapo"])
    assert named == "++run.suffix='-experiment-${hydra:runtime.choices.experiment}'"


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ("optimizer.lr=1", "++optimizer.lr=1"),
        ("iterations=3", "++iterations=3"),
        ("experiment=x", "experiment=x"),
        ("algorithm=dapo", "algorithm=dapo"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("~task.digits", "~task.digits"),
        ("-m", "-m"),
    ],
)
def test_keys_are_judged_by_our_own_validation(word: str, want: str) -> None:
    assert forced(word) == want
