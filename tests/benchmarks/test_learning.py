"""Learning curves: every row is a run that would begin, and the table says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.learning import cell, goal_of, table, words_of, write_prior
from benchmarks.learning_rows import ROWS
from pipeline.commands.experiment import compose, run_experiment
from pipeline.validate_config import validate_config
from rlinf.config import RunConfig, validate
from rlinf.hydra_config import force_add
from tests.conftest import QUIET


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transition of the pendulum."""
    path = tmp_path_factory.mktemp("prior") / "prior.hdf5"
    with h5py.File(path, "w") as file:
        for name, size in (("observations", 3), ("next_observations", 3), ("actions", 1)):
            file[name] = np.zeros((1, size))
        file["rewards"], file["terminated"] = np.zeros(1), np.ones(1)
    return path


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("metaworld")])
def test_every_row_would_begin(name: str, prior: Path) -> None:
    words = [force_add(word) for word in words_of(name, 3, prior)]
    config = validate(RunConfig, compose(words))
    validate_config(config)
    row = ROWS[name]
    assert row.algorithm == config.algorithm.name
    assert row.column.removesuffix("_numbered") == config.model.name
    assert config.seed == 3
    assert config.run.name == f"{name}-3"


def test_the_table_says_what_was_reached_and_what_was_not() -> None:
    def run(*scores: float, complete: bool = True) -> dict[str, object]:
        curve = [{"steps": 1000.0 * n, "score": score} for n, score in enumerate(scores)]
        return {"ours": {"curve": curve, "minutes": 1.0, "complete": complete}}

    known = {
        "cartpole_ppo": {"1": run(20, 300), "0": run(20, 480, 470), "2": run(9, complete=False)}
    }
    known["sums_grpo"] = {"0": run(0.3, 0.9)}
    lines = {line.split("|")[3].strip(): line for line in table(known).splitlines()}
    assert (
        "| 470 / 300 / 9 (cut off) | 1,000 / not reached / not reached environment steps |"
        in (lines["`cartpole_ppo`"])
    )
    assert "| 0.9 | 1,000 tokens |" in lines["`sums_grpo`"]
    assert "| not measured | |" in lines["`pendulum_iql`"]


def test_a_cell_says_what_all_seeds_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = tmp_path / "results.json"
    gains.write_text(json.dumps({"rows": []}))
    monkeypatch.setattr("benchmarks.learning.RESULTS", gains)

    def run(*scores: float) -> dict[str, object]:
        return {"ours": {"curve": [{"steps": 0.0, "score": score} for score in scores]}}

    known = {"sums_grpo": {"0": run(0.3, 0.9), "1": run(0.3, 0.86, 0.78)}}
    held = "goal reached, not held: one-digit sums 0.88 at best, 0.84 at the end"
    assert cell("grpo", "causal_lm", known) == held
    known["sums_grpo"]["1"] = run(0.3, 0.86, 0.84)
    assert cell("grpo", "causal_lm", known) == "learns: one-digit sums 0.87"
    known["sums_grpo"]["2"] = run(0.2, 0.4)
    assert cell("grpo", "causal_lm", known) == "goal not reached: one-digit sums 0.7133"
    assert cell("rloo", "causal_lm", known) == "runs"
    known["pendulum_iql"] = {"0": run(-1200, -300, -400), "1": run(-1000, -150)}
    wanted = "goal not reached: Pendulum-v1 -275"
    assert cell("iql", "mlp_q", known) == wanted, "what its data come from was not measured"
    known["pendulum_sac"] = {"0": run(-1300, -200)}
    wanted += " (at least 80% of its source policy: 80%, 106%)"
    assert cell("iql", "mlp_q", known) == wanted
    known["pendulum_iql"]["2"] = run(-1000, -600)
    assert "(not 80% of its source policy: 80%, 106%, 50%)" in cell("iql", "mlp_q", known)
    assert "source" not in cell("sac", "mlp_q", known)
    both = {"theirs": run(0, 500)["ours"]}
    known["hopper_ppo"] = {"0": {**run(0, 400), **both}, "1": {**run(0, 700), **both}}
    assert goal_of("hopper_ppo", known) == 500
    assert "learns: Hopper-v5 550" in cell("ppo", "mlp", known)
    known["hopper_ppo"]["1"] = {**run(0, 550), **both}
    assert "goal not reached: Hopper-v5 475" in cell("ppo", "mlp", known)
    rows = [
        {"name": "first_model_gain_points", "value": 20, "goal": 10},
        {"name": "first_model_gain_lower", "value": 4, "goal": 0},
        {"name": "vla_gain_points", "value": 20, "goal": 15},
        {"name": "vla_gain_lower", "value": -1, "goal": 0},
    ]
    gains.write_text(json.dumps({"rows": rows}))
    assert cell("grpo", "causal_lm", {}) == "learns: names in texts +20 points"
    assert cell("grpo", "openvla_oft", {}) == "goal not reached: drawer-close-v3 +20 points"


@pytest.mark.usefixtures("undrawn")
def test_prior_data_are_the_newest_transitions_of_a_run(tmp_path: Path) -> None:
    words = ["experiment=pendulum_sac", "iterations=2", "rollout.horizon=20", "run.name=before"]
    words += ["evaluate.every=0", "evaluate.samples=1", f"run.root={tmp_path}"]
    run_experiment(compose([*map(force_add, words), *QUIET]))
    write_prior(tmp_path / "before", tmp_path / "newest.hdf5", 25)
    with h5py.File(tmp_path / "newest.hdf5") as file:
        assert file["observations"].shape == (25, 3)
        seen, after, cut = (file[n][:] for n in ("observations", "next_observations", "truncated"))
        pushed, rewards = file["actions"][:, 0], file["rewards"][:]
    angle, turning = np.arctan2(seen[:, 1], seen[:, 0]), seen[:, 2]
    costs = angle**2 + 0.1 * turning**2 + 0.001 * pushed**2
    np.testing.assert_allclose(rewards, -costs, rtol=1e-3, err_msg="as the simulator gave them")
    same = (seen[1:] == after[:-1]).all(1)
    assert same.tolist() == (cut[:-1] == 0).tolist()
    assert cut.sum() == 2
    with pytest.raises(SystemExit, match="no transitions in"):
        write_prior(tmp_path / "none", tmp_path / "none.hdf5", 1)
