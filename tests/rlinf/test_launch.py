"""Which words of a command line are overrides, and what the points of a sweep are called."""

from __future__ import annotations

import pytest

from rlinf.hydra_config import force_add
from rlinf.launch import sweep_suffix_override


def test_the_points_of_a_sweep_are_named_after_what_varies() -> None:
    words = ["-m", "optimizer.lr=1e-4,3e-4", "task.digits=[1,2]", "rollout.batch_size=choice(2,4)"]
    assert sweep_suffix_override(words) == [
        "++run.suffix='-lr-${optimizer.lr}-batch_size-${rollout.batch_size}'"
    ]
    assert sweep_suffix_override([*words, "run.name=mine"]) == sweep_suffix_override(words)
    assert sweep_suffix_override([*words, "run.name=lr-${optimizer.lr}"]) == []
    assert sweep_suffix_override([*words, "run.name=a,b"]) == []
    assert sweep_suffix_override([*words, "run.suffix=-mine"]) == []
    assert sweep_suffix_override(words[1:]) == []
    (named,) = sweep_suffix_override(["-m", "experiment=arithmetic_grpo,arithmetic_dapo"])
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
    assert force_add(word) == want
