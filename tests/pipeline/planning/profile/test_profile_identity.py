"""What a profile belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.planning.profile.device_kinds import local_kind
from pipeline.planning.profile.schema import ProfileIdentity, kind_key
from pipeline.resume import create_run
from rlinf.config import RunConfig, validate

Compose = Callable[..., dict[str, Any]]


def identity(compose: Compose, *words: str) -> ProfileIdentity:
    return ProfileIdentity.of(validate(RunConfig, compose(*words)))


@pytest.mark.parametrize("word", ["seed=7", "iterations=9", "run.name=b", "evaluate.every=3"])
def test_what_costs_no_time_is_no_part_of_it(compose: Compose, word: str) -> None:
    assert identity(compose) == identity(compose, word)


@pytest.mark.parametrize(
    "word",
    [
        "rollout.batch_size=8",
        "trainer.max_tokens_per_microbatch=9",
        "sft.lr=0.1",
        "reward=digits",
    ],
)
def test_what_stages_depend_on_is(compose: Compose, word: str) -> None:
    one, other = identity(compose), identity(compose, word)
    assert one.model == other.model
    assert one.config != other.config


def test_another_model_is_told_by_its_settings_and_by_its_files(
    compose: Compose, tmp_path: Path
) -> None:
    assert identity(compose).model != identity(compose, "model.layers=3").model
    values = compose()
    values["model"] = {"name": "causal_lm", "path": str(tmp_path)}
    empty = ProfileIdentity.of(validate(RunConfig, values))
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert ProfileIdentity.of(validate(RunConfig, values)).model != empty.model


def test_a_run_that_has_begun_is_measured_for_its_like(compose: Compose, tmp_path: Path) -> None:
    values = compose("optimizer.lr_scheduler_type=cosine")
    values["run"]["root"] = str(tmp_path)
    begun = create_run(validate(RunConfig, values), {})
    assert begun.config.optimizer.lr_decay_iterations is not None
    assert ProfileIdentity.of(begun.config) == ProfileIdentity.of(validate(RunConfig, values))


def test_measurements_are_kept_by_hardware(compose: Compose) -> None:
    work, kind = identity(compose), local_kind()
    assert kind_key(work, kind) == kind_key(work, replace(kind, nodes=7))
    others = [replace(kind, gpu_type="a100"), replace(kind, duty_cycle=0.5)]
    assert len({kind_key(work, k) for k in (kind, *others)}) == 3
