"""Behavior cloning: of two actions in one state both are learned, and runs do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from pipeline.commands.experiment import run_experiment
from pipeline.metrics import read_metrics
from pipeline.validate_config import validate_config
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, DataError
from rlinf.models.flow_policy import FlowConfig, FlowPolicy

Compose = Callable[..., dict[str, Any]]


def written(path: Path, width: int = 3) -> Path:
    """One state's component moves both modes; which of the two is done is a matter of chance."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        seen = random.uniform(-1, 1, size=(2000, width))
        mode = np.where(random.random((2000, 1)) < 0.5, -1.0, 1.0)
        file["observations"], file["next_observations"] = seen, seen
        file["actions"] = mode + 0.5 * seen[:, :1] + 0.02 * random.normal(size=(2000, 1))
        file["rewards"], file["terminals"] = np.zeros(2000), np.ones(2000)
    return path


def composed(compose: Compose, *words: str) -> dict[str, Any]:
    return compose(*words, experiment="pendulum_bc")


def given(path: Path) -> list[str]:
    return [f"algorithm.offline_data={path}", "evaluate.every=0", "evaluate.samples=2"]


@pytest.mark.usefixtures("undrawn")
def test_a_flow_clones_two_ways_of_doing_it(compose: Compose, tmp_path: Path) -> None:
    words = [*given(written(tmp_path / "data.hdf5")), "iterations=3", "run.name=cloned"]
    words += ["algorithm.gradient_steps=300", "model.denoising_steps=10", "optimizer.lr=3e-3"]
    run_experiment(composed(compose, *words))
    run = tmp_path / "cloned"
    losses = [row["train/bc_loss"] for row in read_metrics(run)]
    assert losses[-1] < losses[0]
    (folder,) = run.glob("it/0002/sync/data-*/weights")
    policy = FlowPolicy.load(folder, FlowConfig())
    seen = torch.zeros(400, 3)
    seen[:, 0] = torch.linspace(-1, 1, 400)
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(0), 400))
    with torch.inference_mode():
        # At a small temperature the chain is all but that of the differential equation.
        action = policy.act({"observation": seen}, noise, 0.05)["action"][:, 0]
    mode = action - 0.5 * seen[:, 0]
    assert 0.35 < float((mode > 0).float().mean()) < 0.65
    # A normal distribution of any kind has most of its mass elsewhere.
    assert float(((mode.abs() - 1).abs() < 0.3).float().mean()) > 0.8


def test_the_loss_is_that_of_conditional_flow_matching() -> None:
    settings = {
        "observation": 3,
        "action": {"kind": "box", "size": 2},
        **FlowConfig(hidden=(8,), action_scale=2.0).model_dump(mode="json"),
    }
    policy = FlowPolicy(FlowPolicy.Network(settings), settings)
    seen, actions, noise = torch.randn(5, 3), torch.randn(5, 2), torch.randn(5, 2)
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.99])
    batch = {"observations": seen, "actions": actions, "noise": noise, "uniform": uniform}
    found = policy.imitation_loss(batch)
    for row in range(5):
        tau = 1 - float(uniform[row])
        point = tau * noise[row] + (1 - tau) * actions[row]
        velocity, _, _ = policy.module(seen[row], point[None], torch.tensor([[tau]]))
        wanted = ((velocity[0] - (noise[row] - actions[row])) ** 2).mean()
        torch.testing.assert_close(found[row], wanted)


@pytest.mark.usefixtures("undrawn")
def test_a_policy_with_a_density_is_cloned_by_its_log_probability(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["model=mlp_q", "model.action_scale=2", "run.name=cloned", "iterations=2"]
    words += [*given(written(tmp_path / "data.hdf5")), "algorithm.gradient_steps=50"]
    run_experiment(composed(compose, *words))
    first, second = (row["train/bc_loss"] for row in read_metrics(tmp_path / "cloned"))
    assert second < first


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["++flow=off_policy"], r"'bc' needs a flow that collects nothing \(flow=offline\)"),
        (["model=mlp"], r"'bc' needs a loss of imitating actions.*"),
        (["algorithm.batch_sice=3"], "algorithm.batch_sice: unknown key.*batch_size"),
        (["task=cartpole"], "model.name: flow makes vectors"),
    ],
)
def test_what_does_not_fit_is_refused(
    compose: Compose, tmp_path: Path, words: list[str], match: str
) -> None:
    values = composed(compose, *given(written(tmp_path / "data.hdf5")), *words)
    with pytest.raises(ConfigError, match=match):
        validate_config(validate(RunConfig, values))


def test_data_of_another_kind_are_refused(compose: Compose, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no readable HDF5 file"):
        validate_config(validate(RunConfig, composed(compose, *given(tmp_path / "none.hdf5"))))
    words = [*given(written(tmp_path / "wide.hdf5", width=4))]
    with pytest.raises(DataError, match=r"wide.hdf5: does not fit .* field 'observations'"):
        run_experiment(composed(compose, *words))
