"""Measuring inside a job: same work every time, and times told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.check import check
from pipeline.profile.bench import adapted, spans
from pipeline.profile.trial import Case
from rlinf.artifacts import Manifest
from rlinf.config import RunConfig, validate
from stages.parts import make_algorithm

Compose = Callable[..., dict[str, Any]]


def manifest(*spans: tuple[str, int, float, float]) -> Manifest:
    entries = [{"name": n, "rank": r, "start": a, "end": b} for n, r, a, b in spans]
    return Manifest("train", 0, "", "", "", {}, {}, {}, {"spans": entries}, "", "")


def test_the_slowest_rank_counts_with_all_its_spans_of_a_name() -> None:
    made = manifest(
        ("update", 0, 0, 1), ("update", 0, 2, 4), ("update", 1, 0, 2), ("train", 0, 0, 9)
    )
    assert spans(made) == {"update": 3}


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9), st.floats(0, 9)), min_size=1))
def test_parts_are_never_negative_even_if_a_clock_steps_back(
    found: list[tuple[int, float, float]],
) -> None:
    assert spans(manifest(*(("load", *span) for span in found)))["load"] >= 0


@pytest.mark.parametrize("experiment", ["arithmetic_grpo", "cartpole_ppo"])
def test_a_case_changes_the_size_and_stills_the_weights_alone(
    compose: Compose, experiment: str
) -> None:
    config = validate(RunConfig, compose("run.name=x", experiment=experiment))
    made = adapted(config, Case(starts=16, token_budget=100))
    check(made)
    assert made.rollout.batch == 16
    assert make_algorithm(made).config.lr < 1e-20
    before, after = config.semantic(), made.semantic()
    assert {key for key in before if before[key] != after[key]} <= {
        "rollout",
        "trainer",
        "algorithm",
    }
    assert after["trainer"] == {**before["trainer"], "token_budget": 100}
    assert before["rollout"] == {**after["rollout"], "batch": before["rollout"]["batch"]}
    changed = {k for k in after["algorithm"] if after["algorithm"][k] != before["algorithm"].get(k)}
    assert changed <= {"lr", "lr_warmup", "schedule"}
