"""A world model predicts the frames of a simple simulator, and is stepped like one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.commands.experiment import compose_words
from rlinf.config import RunConfig, validate
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators.world_model import REWARD_SCALE, make
from rlinf.envs.simulators.world_model_network import (
    RecordedEpisode,
    WorldModel,
    WorldModelSpec,
    fit_world_model,
    load_world_model,
    measure_world_model,
    save_world_model,
    to_float,
)
from rlinf.envs.subprocess_env import SimulatorError, SubprocessVectorEnv
from rlinf.errors import ConfigError
from stages.identity import CodeSnapshot
from tests.rlinf.envs import moving_square

SIDE = 16
"""Small, because learning takes a while."""
SPEC = WorldModelSpec("square", "front", SIDE, SIDE, state_size=2, max_steps=12)
STARTS = np.stack([moving_square.frame(position, SIDE) for position in (4, 5, 6)])
BOUNDS = (-np.ones(1, np.float32), np.ones(1, np.float32))


def episode(seed: int, length: int = 12) -> RecordedEpisode:
    """Return an episode of random actions that drift to the right."""
    random = np.random.default_rng(seed)
    actions = np.clip(random.normal(0.5, 0.7, (length, 1)), -1, 1).astype(np.float32)
    positions = [moving_square.start(random, SIDE)]
    for action in actions[:, 0].tolist():
        positions.append(moving_square.moved(positions[-1], action, SIDE))
    frames = np.stack([frame(position) for position in positions[:-1]])
    solved = [moving_square.is_solved(position, SIDE) for position in positions[1:]]
    return RecordedEpisode(frames, actions, np.array(solved))


def frame(position: float) -> np.ndarray:
    return moving_square.frame(position, SIDE)


def fitted(steps: int, seed: int = 0, losses: list[dict[str, float]] | None = None) -> WorldModel:
    rows = [] if losses is None else losses
    episodes = [episode(number) for number in range(40)]
    return fit_world_model(
        SPEC, BOUNDS, episodes, steps=steps, seed=seed, report=lambda step, row: rows.append(row)
    )


def biased(model: WorldModel, bias: float) -> WorldModel:
    """Return a copy whose classifier calls all frames solved (10) or none (-10)."""
    changed = copy.deepcopy(model)
    changed.classifier[-1].weight.data.zero_()
    changed.classifier[-1].bias.data.fill_(bias)
    return changed


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a world model that has begun to learn the square."""
    path = tmp_path_factory.mktemp("world") / "square.safetensors"
    save_world_model(str(path), fitted(2), SPEC, STARTS, STARTS[1:])
    return path


def config_of(file: Path, **changed: Any) -> GymConfig:
    return GymConfig.model_validate(
        {
            **{"simulator": "world_model", "id": "square", "images": {"front": [SIDE, SIDE]}},
            **{"observation": 2, "action": {"kind": "box", "size": 1, "low": -1.0, "high": 1.0}},
            **{"kwargs": {"model": str(file)}, "score_by_success": True, **changed},
        }
    )


@pytest.fixture
def process(file: Path) -> Iterator[SubprocessVectorEnv]:
    with contextlib.closing(create_simulator_process(config_of(file))) as found:
        yield found


def test_it_learns_to_predict_new_episodes_and_their_success() -> None:
    losses: list[dict[str, float]] = []
    model = fitted(100, losses=losses)
    metrics = measure_world_model(model, [episode(number) for number in range(90, 96)])
    assert metrics["frame_rmse"] < 0.8 * metrics["still_rmse"]
    for name in ("frames", "success"):
        first, last = (np.mean([row[name] for row in part]) for part in (losses[:5], losses[-20:]))
        assert last < 0.7 * first, name


@pytest.mark.parametrize(("bias", "share"), [(10.0, 1.0), (-10.0, 0.0)])
def test_success_is_counted_on_real_and_on_predicted_frames(
    file: Path, bias: float, share: float
) -> None:
    model, example = biased(load_world_model(str(file))[0], bias), episode(90)
    never, always = (
        measure_world_model(model, [replace(example, success=np.full(12, solved))])
        for solved in (False, True)
    )
    for name in ("false_positive_share", "predicted_false_positive_share"):
        assert never[name] == always[name] == share, "the first frame is never solved"
    for name in ("true_positive_share", "predicted_true_positive_share"):
        assert np.isnan(never[name])
        assert always[name] == share


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    first, again, other = (fitted(3, seed).state_dict() for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


def test_an_episode_depends_on_its_seed_and_actions_alone(process: SubprocessVectorEnv) -> None:
    seen = process.reset([0, 1, 2], [5, 5, 9])
    assert (seen["front"][0] == seen["front"][1]).all()
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 1)).astype(np.float32)
    together = [process.step([0, 1, 2], action[None].repeat(3, 0))[0] for action in actions]
    process.reset([1], [5])
    for expected, action in zip(together, actions, strict=True):
        alone, errors = process.step([1], action[None])
        assert not errors
        assert (expected["seen.front"][0] == alone["seen.front"][0]).all()
        assert expected["reward"][0] == alone["reward"][0] == expected["reward"][1]
    assert (together[-1]["seen.state"] == 0).all()


def test_held_out_starts_are_those_of_the_file(process: SubprocessVectorEnv) -> None:
    seen = process.reset([0, 1, 2], [0, 0, 0], [0, 1, 2])["front"]
    np.testing.assert_array_equal(seen, np.stack([frame(5), frame(6), frame(5)]))


def test_reward_is_the_increase_of_the_probability_until_the_longest_episode_ends(
    file: Path, process: SubprocessVectorEnv
) -> None:
    model = load_world_model(str(file))[0]

    def probability(image: np.ndarray) -> float:
        return float(torch.sigmoid(model.success_logits(to_float(image[None])))[0])

    before = probability(process.reset([0], [0], [0])["front"][0])
    for step in range(SPEC.max_steps):
        came, _ = process.step([0], np.ones((1, 1), np.float32))
        after = probability(came["seen.front"][0])
        assert came["reward"][0] == pytest.approx(REWARD_SCALE * (after - before), abs=1e-5)
        assert came["truncated"][0] == (step == SPEC.max_steps - 1)
        assert not came["terminated"][0]
        before = after


def test_a_solved_frame_ends_the_episode(file: Path, tmp_path: Path) -> None:
    solved = tmp_path / "solved.safetensors"
    save_world_model(
        str(solved), biased(load_world_model(str(file))[0], 10.0), SPEC, STARTS, STARTS
    )
    with contextlib.closing(create_simulator_process(config_of(solved))) as process:
        process.reset([0], [0])
        came, _ = process.step([0], np.ones((1, 1), np.float32))
    assert [came[name][0] for name in ("success", "terminated", "truncated")] == [1, 1, 0]


def test_the_content_of_its_file_is_part_of_the_identity_of_a_run(
    file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes(file.read_bytes())
    words = ["experiment=metaworld_world_model", f"task.kwargs.model={model}", "model.path=weak"]
    config = validate(RunConfig, compose_words(words))
    before = CodeSnapshot.current(config, "rollout")
    model.write_bytes(file.read_bytes() + b"\0")
    after = CodeSnapshot.current(config, "rollout")
    assert before.digest("rollout") != after.digest("rollout")
    assert before.changed_names(after) == ["file:task.kwargs.model"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "circle"}, r"task\.id: .*square\.safetensors imitates 'square', not 'circle'"),
        ({"observation": 3}, r"task\.observation: 3 is not what square has; set it to 2"),
        ({"images": {"top": [16, 16]}}, r"task\.images\.top: no such camera; there are front"),
        ({"kwargs": {"model": __file__}}, r"task\.kwargs\.model: .* is not a world model"),
        ({"kwargs": {"modle": "a"}}, r"task\.kwargs\.modle: there is no such key, but model"),
    ],
)
def test_what_does_not_fit_is_refused(file: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.verify_spec(config_of(file, **changed))


def test_frames_of_another_size_are_refused(file: Path) -> None:
    config = config_of(file, images={"front": [48, 48]})
    with (
        contextlib.closing(create_simulator_process(config)) as process,
        pytest.raises(SimulatorError, match=r"images\.front: its frames are \[16, 16\]"),
    ):
        process.reset([0], [0])


def test_a_size_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images\.front: height and width must be multiples of 8"):
        fit_world_model(
            replace(SPEC, height=12), BOUNDS, [episode(0)], steps=1, seed=0, report=print
        )


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"kwargs\.model: none\.safetensors is not a world model"):
        make("square", {"model": "none.safetensors"})
