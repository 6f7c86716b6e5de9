"""Sizes and bounds of a simulator are read from it; what is given and wrong makes no run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.experiment import prepare_run, reopen_run, run_experiment
from pipeline.validate_config import complete_config, validate_config
from rlinf.config import RunConfig, validate
from rlinf.envs.gym import ActionConfig
from rlinf.errors import ConfigError

Compose = Callable[..., dict[str, Any]]
PENDULUM = {"kind": "box", "size": 1, "low": [-2.0], "high": [2.0], "dtype": "float32"}
ANY = ("task=gym", "task.id=Pendulum-v1")


def frozen(run: Path) -> dict[str, Any]:
    task: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())["task"]
    return task


def test_what_is_not_given_is_read_and_frozen(compose: Compose) -> None:
    values = compose(*ANY, "model.hidden=[8]", experiment="pendulum_sac")
    run = prepare_run(values)
    task = frozen(run.folder)
    assert task["observation"] == 3
    assert task["action"] == PENDULUM
    assert prepare_run(values).config.task == run.config.task, "the same words are the same run"


def test_what_was_read_is_read_again_for_another_environment(compose: Compose) -> None:
    words = ("task=gym", "task.id=CartPole-v1", "model.hidden=[8]")
    run = prepare_run(compose(*words, experiment="cartpole_ppo"))
    assert frozen(run.folder)["observation"] == 4
    reopen_run(run.folder, ["evaluate.every=7"])
    reopen_run(run.folder, ["task.id=Acrobot-v1"])
    task = frozen(run.folder)
    assert (task["observation"], task["action"]["size"]) == (6, 3)
    fresh = compose(*words, "task.id=Acrobot-v1", "run.name=fresh", experiment="cartpole_ppo")
    assert task == frozen(prepare_run(fresh).folder)


def test_what_was_read_stays_where_the_task_does(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that goes on with a run need not be able to build a simulator."""
    import sys

    run = prepare_run(compose(*ANY, "model.hidden=[8]", experiment="pendulum_sac"))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert reopen_run(run.folder, ["evaluate.every=7"]).config.task == run.config.task


@pytest.mark.parametrize("start", ["run", "resume"])
def test_sizes_that_were_given_are_compared_with_another_environment(
    start: str, compose: Compose
) -> None:
    run = prepare_run(compose("model.hidden=[8]", experiment="cartpole_ppo"))
    before = frozen(run.folder)
    with pytest.raises(ConfigError, match=r"task\.observation: 4 is not what Acrobot-v1 has"):
        if start == "resume":
            reopen_run(run.folder, ["task.id=Acrobot-v1"])
        else:
            prepare_run(
                compose("model.hidden=[8]", "task.id=Acrobot-v1", experiment="cartpole_ppo")
            )
    assert frozen(run.folder) == before


def test_the_simulator_is_asked_under_its_own_interpreter(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    values = compose(*ANY, f"task.python={sys.executable}", experiment="pendulum_sac")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    task = complete_config(validate(RunConfig, values)).task
    assert (task.model_extra or {})["action"] == PENDULUM


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("task=pendulum", "task.observation=5"), r"task\.observation: 5 is not .* set it to 3"),
        (("task=pendulum", "task.action={low: -1, high: 1}"), r"task\.action: .* is not what"),
        (("task=pendulum", "task.action.size=2"), r"task\.action: .* is not what"),
        (("task=pendulum", "task.action.dtype=int8"), r"task\.action: .* is not what"),
        (("task=gym", "task.id=Pendolum-v1"), r"task\.id: cannot make 'Pendolum-v1'"),
        ((*ANY, "task.observation=4"), r"task\.observation: 4 is not .* set it to 3"),
    ],
)
def test_what_is_wrong_is_refused_before_there_is_a_run(
    words: tuple[str, ...], message: str, compose: Compose
) -> None:
    values = compose(*words, experiment="pendulum_sac")
    with pytest.raises(ConfigError, match=message):
        prepare_run(values)
    assert not validate(RunConfig, values).run.folder.exists()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"low": [-2, -2]}, r"task\.action: low: 2 bounds, and size is 1"),
        ({"low": 3.0}, r"task\.action: low: a bound is above that of high"),
        ({"high": None}, r"task\.action: high: give both low and high"),
    ],
)
def test_bounds_that_are_none_are_refused(
    action: dict[str, Any], message: str, compose: Compose
) -> None:
    values = compose("task=pendulum", experiment="pendulum_sac")
    values["task"]["action"].update({"low": -2.0, "high": 2.0, **action})
    with pytest.raises(ConfigError, match=message):
        complete_config(validate(RunConfig, values))


@pytest.mark.parametrize("bounds", [{"low": -2.0, "high": 2.0}, {"low": None, "high": None}])
@pytest.mark.parametrize(
    "dtype", ["foo", "", "U3", "object", "bool", "complex64", "M8[s]", "(2,)f4", "f4,i4", "{"]
)
def test_a_type_that_is_of_no_numbers_is_refused(
    dtype: str, bounds: dict[str, Any], compose: Compose
) -> None:
    values = compose("task=pendulum", experiment="pendulum_sac")
    values["task"]["action"].update({**bounds, "dtype": dtype})
    with pytest.raises(ConfigError, match=r"^task\.action\.dtype: it is not a numeric type"):
        complete_config(validate(RunConfig, values))


def test_a_type_of_numbers_has_one_name_and_is_of_vectors() -> None:
    assert ActionConfig(kind="box", size=1, dtype="f4").dtype == "float32"
    whole = ActionConfig(kind="box", size=1, low=0, high=2, dtype="u1").bounds
    assert whole is not None
    assert whole[0].dtype == np.int64
    with pytest.raises(ValueError, match="dtype: it is the type of a vector's components"):
        ActionConfig(kind="discrete", size=2, dtype="int64")


def test_a_simulator_whose_actions_are_no_numbers_is_refused(compose: Compose) -> None:
    task = ["task=gym", "task.id=tests.rlinf.envs.structured_worlds:Sampled-v0"]
    task += ["task.kwargs={action: {low: 0, high: 1, shape: [2], dtype: bool}}"]
    with pytest.raises(
        ConfigError, match=r"^task\.id: .* has actions Box.* no policy here supports"
    ):
        complete_config(validate(RunConfig, compose(*task, experiment="pendulum_sac")))


def test_a_robot_is_not_connected_to_before_there_is_a_run(compose: Compose) -> None:
    """What is given of it is not compared, and what is not given is asked for."""
    words = ["task=franka", "task.kwargs.host=127.0.0.1", "task.kwargs.box=[[0,0,0],[1,1,1]]"]
    values = compose(*words, "task.python=null", experiment="pendulum_sac")
    config = validate(RunConfig, values)
    assert complete_config(config).task == config.task
    values["task"]["observation"] = None
    with pytest.raises(ConfigError, match=r"task\.observation: is not set, and franka is not con"):
        complete_config(validate(RunConfig, values))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("experiment", "least", "most"), [("cartpole_ppo", 0.1, 0.9), ("pendulum_sac", 0.0, 0.0)]
)
def test_a_run_says_how_many_actions_were_clipped(
    experiment: str, least: float, most: float, compose: Compose, tmp_path: Path
) -> None:
    from pipeline.metrics import read_metrics

    small = ["iterations=1", "rollout.horizon=30", "evaluate.horizon=10", "evaluate.samples=2"]
    task = ["task=gym", "task.id=tests.rlinf.envs.structured_worlds:Sampled-v0"]
    task += ["task.kwargs={action: {low: 100, high: 104, shape: [2]}}", "run.name=box"]
    run_experiment(compose(*task, *small, experiment=experiment))
    (row,) = read_metrics(tmp_path / "box")
    assert least <= row["rollout/action_clip_ratio"] <= most


def test_a_configuration_is_checked_without_a_simulator(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is given: stages may run elsewhere."""
    import sys

    monkeypatch.setitem(sys.modules, "gymnasium", None)
    values = compose("task.action={low: -2, high: 2}", experiment="pendulum_sac")
    config = validate(RunConfig, values)
    assert complete_config(config) == config
    validate_config(config)
