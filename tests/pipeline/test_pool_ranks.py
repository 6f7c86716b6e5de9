"""Stages that have some of the processes of their pool, side by side, and training on all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.commands.experiment import run_experiment, validate_experiment
from pipeline.metrics import stage_manifest
from rlinf.errors import RlinfError
from tests.pipeline.test_driver import weights
from tests.pipeline.test_layouts import samples

Compose = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("undrawn")
STAGES = ["rollout", "reward", "inference", "train"]
ALL = {"processes": 3}


def plan(**ranks: list[int]) -> dict[str, Any]:
    return {
        "num_chunks": 2,
        "stages": dict.fromkeys(("rollout", "inference", "train"), ALL),
        "pools": [{"stages": STAGES, "devices": {"local": 3}, "stage_ranks": ranks}],
    }


def workers(run: Path, stage: str, iteration: int) -> list[int]:
    """The ranks that computed a stage."""
    manifest = stage_manifest(run, stage, iteration)
    assert manifest is not None
    names = {span["worker"] for span in manifest.timing["spans"]}
    return sorted(int(name.rpartition("-r")[2]) for name in names)


@pytest.mark.timeout(600)
def test_stages_side_by_side_end_as_in_one_process(
    tiny_run: Path, compose: Compose, tmp_path: Path
) -> None:
    values = compose("run.name=hybrid", "cluster=local", "iterations=2")
    values["plan"] = plan(rollout=[0, 2], reward=[1], evaluate=[1])
    run_experiment(values)
    run = tmp_path / "hybrid"
    for iteration in range(2):
        assert workers(run, "rollout", iteration) == [0, 2]
        assert workers(run, "reward", iteration) == workers(run, "evaluate", iteration) == [1]
        assert workers(run, "train", iteration) == [0, 1, 2]
        assert samples(run, iteration) == samples(tiny_run, iteration)
        for name, tensor in weights(tiny_run, iteration).items():
            torch.testing.assert_close(weights(run, iteration)[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ({"train": [0, 1]}, r"ranks\.train: all processes .* only rollout, reward, evaluate may"),
        ({"sft": [0]}, r"ranks\.sft: all processes of the pool share the model"),
        ({"rollout": [0, 3]}, r"ranks\.rollout: \[0, 3\]; use distinct ranks of 0 to 2"),
        ({"rollout": [1, 0]}, r"ranks\.rollout: \[1, 0\]; use distinct ranks of 0 to 2, ascending"),
        ({"rollout": []}, r"ranks\.rollout: \[\]; use distinct"),
        ({"rolout": [0]}, r"ranks\.rolout: this pool does not run it.*did you mean 'rollout'"),
        ({"rollout": [-1]}, r"ranks\.rollout\.0: .*greater than or equal to 0"),
    ],
)
def test_processes_that_a_stage_cannot_have_are_refused(
    ranks: dict[str, list[int]], text: str, compose: Compose
) -> None:
    with pytest.raises(RlinfError, match=text) as error:
        validate_experiment({**compose("cluster=local"), "plan": plan(**ranks)})
    assert error.value.exit_code == 65


def test_an_elastic_pool_has_none(compose: Compose) -> None:
    pools = [
        {
            "stages": ["rollout"],
            "devices": {"local": 2},
            "workers": 2,
            "stage_ranks": {"rollout": [0]},
        },
        {"stages": STAGES[1:], "devices": {"local": 1}},
    ]
    with pytest.raises(
        RlinfError, match=r"pools\[0\]\.stage_ranks: each worker is a job of one process"
    ):
        validate_experiment({**compose("cluster=local"), "plan": {"pools": pools}})
