"""Measuring inside a job: same work every time, and times told apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.commands.experiment import prepare_run, run_sft
from pipeline.planning.profile.measurement import ProfileTask, Trial, load_trial
from pipeline.planning.profile.stage_bench import (
    OFFLOAD_REPEATS,
    StageBench,
    config_for_batch_size,
    run_task,
    span_seconds,
)
from pipeline.validate_config import validate_config
from rlinf.artifacts import Manifest
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import RunConfig, validate
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
from stages.layout import CONFIG_FILE, setup_stage_folder

Compose = Callable[..., dict[str, Any]]


def manifest(*spans: tuple[str, int, float, float]) -> Manifest:
    entries = [{"name": n, "rank": r, "start": a, "end": b} for n, r, a, b in spans]
    return Manifest("train", 0, "", "", "", {}, {}, {}, {"spans": entries}, "", "")


def test_the_slowest_rank_counts_with_all_its_spans_of_a_name() -> None:
    made = manifest(
        ("update", 0, 0, 1), ("update", 0, 2, 4), ("update", 1, 0, 2), ("train", 0, 0, 9)
    )
    assert span_seconds(made) == {"update": 3}


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9), st.floats(0, 9)), min_size=1))
def test_parts_are_never_negative_even_if_a_clock_steps_back(
    found: list[tuple[int, float, float]],
) -> None:
    assert span_seconds(manifest(*(("load", *span) for span in found)))["load"] >= 0


@pytest.mark.parametrize("experiment", ["arithmetic_grpo", "cartpole_ppo"])
def test_a_measurement_changes_the_size_and_stills_the_weights_alone(
    compose: Compose, experiment: str
) -> None:
    config = validate(RunConfig, compose("run.name=x", experiment=experiment))
    made = config_for_batch_size(config, 16)
    validate_config(made)
    assert made.rollout.batch_size == 16
    assert made.optimizer.lr < 1e-20
    before, after = config.semantic_values(), made.semantic_values()
    assert {key for key in before if before[key] != after[key]} <= {
        "rollout",
        "optimizer",
    }
    assert before["rollout"] == {
        **after["rollout"],
        "batch_size": before["rollout"]["batch_size"],
    }
    changed = {k for k in after["optimizer"] if after["optimizer"][k] != before["optimizer"][k]}
    assert changed <= {"lr", "lr_warmup_iterations", "lr_scheduler_type"}
    assert after["optimizer"]["lr_scheduler_type"] == "constant"


@pytest.mark.parametrize("gib", ["null", "0.0003"])
def test_what_a_stage_moves_is_measured_apart_from_its_work(
    compose: Compose, tmp_path: Path, gib: str
) -> None:
    """Also where the run's own budget moves things all the time."""
    run = prepare_run(compose(f"device_memory_gib={gib}", "algorithm.kl_loss_coef=0.1"))
    run_sft(run)
    task = ProfileTask(
        config=run.folder / CONFIG_FILE,
        initial=setup_stage_folder(run.folder, "sft"),
        key="key",
        kind="cpu",
        folder=tmp_path / "task",
        nodes=1,
        processes=1,
        batch_sizes=(4,),
        seconds=0.1,
        submitted=time.time(),
    )
    task.folder.mkdir()
    (task.folder / "task.json").write_text(task.model_dump_json())
    run_task(task.folder / "task.json", time.time(), time.time())
    trial = load_trial(task.trial_path)
    assert trial is not None
    for name in ("offload", "onload"):
        assert len(trial.overheads_s[name]) == OFFLOAD_REPEATS
        assert min(trial.overheads_s[name]) > 0


def test_what_a_tool_said_is_no_part_of_a_response() -> None:
    mask = np.array([1, 1, 0, 0, 0, 1], np.int8)
    trajectories = [
        Trajectory(identity=RecordId(0, 0), actions=np.zeros(6), mask=mask, stop_reason="length"),
        Trajectory(identity=RecordId(0, 1), actions=np.zeros(4), stop_reason="stop"),
    ]
    bench: Any = object.__new__(StageBench)
    bench.world = ProcessGroupInfo(1, 2)
    bench.trial = Trial(key="key", nodes=1, processes=2)
    bench.record_lengths(trajectories)
    assert bench.trial.lengths == ((3, 4),)
