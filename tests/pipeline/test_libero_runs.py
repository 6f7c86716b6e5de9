"""A task of LIBERO from end to end under the policies that read: pictures, sentence, chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.experiment import run_experiment
from rlinf.channels.record_files import RecordFileReader
from rlinf.data.episodes import INSTRUCTION_COLUMN, decode_instruction
from rlinf.safetensors_io import load_tensors
from tests.environments import need_environment
from tests.pipeline.helpers import output

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.slow
SMALL = [
    "iterations=1",
    "task.num_processes=1",
    "reward=environment",
    "rollout.batch_size=1",
    "rollout.group_size=2",
    "rollout.horizon=2",
    "algorithm.minibatches=1",
    "evaluate.samples=2",
    "evaluate.horizon=2",
]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("policy", ["openvla_oft", "smolvla", "pi05"])
def test_an_iteration_on_libero(compose: Compose, policy: str) -> None:
    need_environment("libero")
    values = compose(*SMALL, f"run.name={policy}", experiment=f"libero_{policy}")
    run_experiment(values)
    run = Path(values["run"]["root"]) / policy
    _, data = output(run, "it", "0000", "rollout")
    records = list(RecordFileReader(data.glob("*.h5")))
    assert len(records) == 2
    for record in records:
        steps = record.steps
        assert steps["images.agentview"].shape[1:] == (128, 128, 3)
        assert steps["images.robot0_eye_in_hand"].std() > 10, "a scene is seen"
        assert (steps["actions"].shape, len(record)) == ((2, 8, 7), 2)
        assert "black bowl" in decode_instruction(np.asarray(steps[INSTRUCTION_COLUMN])[0])
        assert (steps["executed"] == 8).all()
    gap = output(run, "it", "0000", "inference")[0].metrics["logprob_diff_max"]
    assert gap < 1e-4, "the trainer's log-probabilities are those that actions were drawn with"
    for place in (("sft",), ("it", "0000", "sync")):
        assert load_tensors(output(run, *place)[1] / "weights" / "model.safetensors")
    assert output(run, "evaluate", "0001")[0].metrics["score"] == 0
