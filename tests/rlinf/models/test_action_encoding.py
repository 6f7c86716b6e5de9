"""One scaling between a policy's own coordinates and the simulator's units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory, step_fields
from rlinf.errors import ConfigError
from rlinf.models.action_encoding import ActionBox
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.flow_policy import FlowConfig, FlowPolicy
from rlinf.models.tanh_normal_q import MLPQConfig, MLPQPolicy

BOUNDS = st.tuples(st.floats(-1e3, 1e3), st.floats(1e-2, 1e3))


def spec(low: Any, high: Any, **more: Any) -> dict[str, Any]:
    action = {"kind": "box", "size": len(low), "low": low, "high": high, **more}
    return {"observation": 3, "action": action}


@given(st.lists(BOUNDS, min_size=1, max_size=4), st.randoms())
def test_both_ends_of_every_component_are_reached_and_taken_back(
    sides: list[tuple[float, float]], random: Any
) -> None:
    low = np.array([low for low, _ in sides])
    high = np.array([low + width for low, width in sides])
    box = ActionBox.from_spec(spec(low.tolist(), high.tolist())["action"], None)
    own = torch.tensor([[-1.0] * len(sides), [1.0] * len(sides), [0.0] * len(sides)])
    actions = box.unnormalize(own).numpy()
    np.testing.assert_allclose(actions, [low, high, (low + high) / 2], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(box.normalize(actions), own.numpy(), atol=1e-9)


def test_components_without_two_bounds_have_the_units_of_the_simulator() -> None:
    low, high = [None, 0.0, -4.0, 3.0], [None, None, 4.0, 3.0]
    box = ActionBox.from_spec(spec(low, high)["action"], None)
    actions = box.unnormalize(torch.full((1, 4), 0.5)).numpy()
    np.testing.assert_allclose(actions, [[0.5, 0.5, 2.0, 3.5]])
    np.testing.assert_allclose(box.clip_to_bounds(-actions), [[-0.5, 0.0, -2.0, 3.0]])


def test_the_box_from_minus_one_to_one_changes_no_bit() -> None:
    box = ActionBox.from_spec(spec([-1.0] * 2, [1.0] * 2)["action"], None)
    tensor, array = torch.randn(5, 2), np.ones((5, 2), np.float32)
    assert box.unnormalize(tensor) is tensor
    assert box.normalize(array) is array


MAKERS: list[tuple[Any, Any]] = [
    (MLPQPolicy, MLPQConfig(hidden=(8,), critic_hidden=(8,))),
    (MLPPolicy, MLPConfig(hidden=(8,))),
    (FlowPolicy, FlowConfig(hidden=(8,))),
]


@pytest.mark.parametrize(("cls", "config"), MAKERS)
def test_policies_fill_a_box_that_is_not_around_zero(cls: Any, config: Any, tmp_path: Path) -> None:
    """A third of standard normal actions is beyond it, a half on each side of its middle; what is
    judged of what was recorded is what was said when it was drawn."""
    cls.create(config, spec([100.0, -3.0], [104.0, 1.0]), 0, tmp_path)
    policy = cls.load(tmp_path, config)
    seen = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    noise = torch.tensor(policy.draw_noise(np.random.default_rng(1), 500))
    with torch.no_grad():
        acted = policy.act({"observation": torch.from_numpy(seen)}, noise, 1.0)
    actions = acted["action"].double().numpy()
    low, high = np.array([100, -3]), np.array([104, 1])
    carried = np.clip(actions, low, high)
    assert (carried.min(0) < low + 0.3).all()
    assert (carried.max(0) > high - 0.3).all()
    assert 0.4 < ((actions - (low + high) / 2) > 0).mean() < 0.6
    steps = {"observations": seen, "actions": acted["action"].numpy()}
    steps |= {name: acted[name].numpy() for name in ("chain",) if name in acted}
    record = Trajectory(identity=RecordId(0, 0), **step_fields(steps))
    with torch.no_grad():
        outputs = policy.evaluate(policy.collate([record]), 1.0)
    torch.testing.assert_close(outputs.logprobs[0], acted["logprob"], atol=2e-4, rtol=1e-4)
    learned = policy.to_policy_actions(actions)
    assert abs(learned).max() <= 1
    np.testing.assert_allclose(learned, np.clip((actions - [102, -1]) / 2, -1, 1), atol=1e-9)


def test_integers_are_learned_as_they_were_rounded() -> None:
    box = ActionBox.from_spec(spec([0, 0], [4, 4], dtype="int64")["action"], None)
    done = np.array([[2.7, 9.0], [-3.0, 0.5]], np.float32)
    np.testing.assert_array_equal(box.clip_to_bounds(done), [[3, 4], [0, 0]])
    np.testing.assert_array_equal(box.normalize(box.clip_to_bounds(done)), [[0.5, 1], [-1, -1]])


@pytest.mark.parametrize(("cls", "config"), MAKERS)
def test_an_interval_beyond_the_bounds_is_refused(cls: Any, config: Any) -> None:
    wide = config.model_copy(update={"action_scale": 50.0})
    for bounds in (spec([-2.0], [2.0]), spec([0.0], [60.0])):
        with pytest.raises(ConfigError, match=r"action_scale: actions between -50 and 50 do"):
            cls.check_spec(wide, bounds)
    cls.check_spec(wide, spec([-50.0], [None]))


def test_a_squashed_policy_needs_two_bounds_or_a_number(tmp_path: Path) -> None:
    half = spec([0.0, None], [1.0, None])
    with pytest.raises(ConfigError, match=r"model\.action_scale: .* component 1 .*no two bounds"):
        MLPQPolicy.check_spec(MLPQConfig(), half)
    MLPQPolicy.check_spec(MLPQConfig(action_scale=1.0), spec([None], [None]))
    MLPPolicy.check_spec(MLPConfig(), half)
    FlowPolicy.check_spec(FlowConfig(), half)
