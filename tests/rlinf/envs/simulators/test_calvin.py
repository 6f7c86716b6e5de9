"""CALVIN, really stepped and rendered, where its environment is made (``make env NAME=calvin``) and
its repository, which is on no registry, lies beside this one in ``shared``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from pipeline.commands.doctor import check_simulator
from rlinf import package_paths
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment, create_simulator_process
from rlinf.envs.simulators import calvin
from rlinf.envs.subprocess_env import SubprocessVectorEnv
from rlinf.errors import ConfigError
from rlinf.interpreters import resolve_interpreter
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from stages.rollout import local_rollout_iter
from tests.environments import need_environment

SHARED = package_paths.ROOT.parent / "shared"
FINGERPRINT = "411be9b4f05c65bf"
"""Of the subtasks of all chains, by the benchmark's own generator."""
OPEN = 1.0


@pytest.fixture(scope="module")
def kwargs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where CALVIN's files are."""
    archive = SHARED / "assets" / "calvin_env.tar.xz"
    if not archive.is_file():
        pytest.skip(f"there is no {archive}, the repository of calvin_env")
    folder = tmp_path_factory.mktemp("calvin")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return {
        "folder": str(folder / "calvin_env"),
        "chains": str(SHARED / "data" / "calvin_chains.json"),
        "annotations": str(SHARED / "data" / "calvin_annotations_validation.yaml"),
    }


@pytest.fixture(scope="module")
def task(kwargs: dict[str, Any]) -> dict[str, Any]:
    need_environment("calvin")
    return {
        "simulator": "calvin",
        "id": "chains",
        "python": "calvin",
        "observation": 73,
        "action": {"kind": "box", "size": 7},
        "images": {"static": [48, 64], "gripper": [32, 32]},
        "kwargs": kwargs,
    }


@pytest.fixture(scope="module")
def process(task: dict[str, Any]) -> Iterator[SubprocessVectorEnv]:
    with contextlib.closing(create_simulator_process(GymConfig.model_validate(task))) as found:
        yield found


def test_other_chains_than_the_benchmarks_are_refused_if_it_is_asked_for(
    kwargs: dict[str, Any], tmp_path: Path
) -> None:
    content = json.loads(Path(kwargs["chains"]).read_text())
    content["chains"] = content["chains"][:10]
    (tmp_path / "chains.json").write_text(json.dumps(content))
    options = {**kwargs, "fingerprint": FINGERPRINT}
    with pytest.raises(ValueError, match=r"kwargs\.chains: .*its 10 chains have the fingerprint"):
        calvin.make("chains", {**options, "chains": str(tmp_path / "chains.json")})
    with pytest.raises(ValueError, match="begins with 'none'"):
        calvin.make("none", options)


def test_chains_and_first_states_are_those_of_the_benchmark(kwargs: dict[str, Any]) -> None:
    chains = calvin._load_chains(Path(kwargs["chains"]))
    values = "\n".join(",".join(chain.tasks) for chain in chains)
    assert len(chains) == 1000
    assert hashlib.sha256(values.encode()).hexdigest().startswith(FINGERPRINT)
    result = dict(zip(calvin.STATE_KEYS, chains[0].initial, strict=True))
    assert calvin._fnv1(str(result.values())) == 4264316145
    robot, scene = calvin.decode_initial_state(chains[0].initial)
    assert robot.shape == (15,)
    # Slider left, drawer open, bulb and LED on; red on the left shelf, pink on the right one.
    assert scene[:6].tolist() == [0.28, 0.22, 0, 0.088, 1, 1]
    np.testing.assert_array_equal(scene[6:9], calvin.SHELF_POSITIONS["slider_left"])
    assert tuple(scene[12:15]) in calvin.TABLE_POSITIONS
    np.testing.assert_array_equal(scene[18:21], calvin.SHELF_POSITIONS["slider_right"])
    assert (abs(scene[[11, 17, 23]] - np.pi / 2) < np.pi / 8).all()
    for chain in chains:
        blocks = calvin.decode_initial_state(chain.initial)[1][6:].reshape(3, 6)[:, :3]
        assert len({tuple(block) for block in blocks}) == 3, "no two in one place"


def test_an_episode_begins_in_the_first_state_of_its_chain(
    process: SubprocessVectorEnv, kwargs: dict[str, Any]
) -> None:
    chains = calvin._load_chains(Path(kwargs["chains"]))
    seen = process.reset([0, 1], [0, 0], [7, 1008])["state"]
    for state, number in zip(seen, (7, 8), strict=True):
        robot, scene = calvin.decode_initial_state(chains[number].initial)
        np.testing.assert_allclose(state[:3], robot[:3], atol=0.01)
        np.testing.assert_allclose(state[7:14], robot[7:14], atol=0.01)
        np.testing.assert_allclose(state[15:39], scene, atol=0.02)
        assert state[39:].sum() == 1
    assert seen[0, 39:].argmax() != seen[1, 39:].argmax(), "other subtasks are asked"


def test_a_chain_is_the_same_to_the_bit_whatever_was_played_before_it(
    process: SubprocessVectorEnv,
) -> None:
    def episode(worlds: list[int]) -> list[dict[str, np.ndarray]]:
        random = np.random.default_rng(5)
        seen = [process.reset(worlds, [3] * len(worlds))]
        for _ in range(15):
            action = np.tile(random.uniform(-1, 1, 7), (len(worlds), 1))
            seen.append(process.step(worlds, action)[0])
        return seen

    alone = episode([0])
    process.reset([0], [4])
    for _ in range(20):
        process.step([0], np.array([[0, 0, -1.0, 0, 0, 0, -1]]))
    for moment, wanted in zip(episode([0, 1]), alone, strict=True):
        for name, column in wanted.items():
            for world in (0, 1):
                np.testing.assert_array_equal(moment[name][world], column[0], err_msg=name)


def test_an_action_moves_the_hand_and_pictures_follow(process: SubprocessVectorEnv) -> None:
    before = process.reset([0], [0])
    for _ in range(10):
        came, errors = process.step([0], np.array([[0, 1.0, 0, 0, 0, 0, -1]]))
    assert not errors
    moved = came["seen.state"][0] - before["state"][0]
    assert moved[1] > 0.05
    assert abs(moved[0]) < 0.03
    assert moved[6] < -0.02, "the gripper closes"
    for camera, size in (("static", (48, 64)), ("gripper", (32, 32))):
        assert came[f"seen.{camera}"].shape == (1, *size, 3)
        assert (came[f"seen.{camera}"] != before[camera]).mean() > 0.01
        assert before[camera].std() > 20, "a picture of something"


def test_a_chain_goes_on_from_subtask_to_subtask_to_its_end(
    task: dict[str, Any], tmp_path: Path
) -> None:
    """By the benchmark's own oracle, in a world that is changed by hand."""
    tasks = ["open_drawer", "move_slider_left", "turn_off_led", "turn_on_lightbulb"]
    initial = [0, 0, "right", "closed", "table", "slider_right", "slider_left", 0]
    chains = {"state_keys": calvin.STATE_KEYS, "chains": [{"initial": initial, "tasks": tasks}]}
    (tmp_path / "chains.json").write_text(json.dumps(chains))
    values = {**task["kwargs"], "chains": str(tmp_path / "chains.json")}
    assert calvin.__file__ is not None
    ran = subprocess.run(
        [
            *(
                resolve_interpreter("calvin", "task.python"),
                str(Path(__file__).with_name("calvin_solved.py")),
            ),
            *(calvin.__file__, json.dumps(values)),
        ],
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["starts"] == 1
    assert [row[1:] for row in result["steps"]] == [
        [0, 0, 0, False],
        [1, 0, 0, False],
        [0, 0, 0, False],
        [1, 0, 0, False],
        [1, 0, 0, False],
        [1, 1, 0, True],
    ]
    assert result["steps"][0][0] == "pull the handle to open the drawer"
    assert result["steps"][5][0] == "use the switch to turn on the light bulb"


def test_a_subtask_that_is_not_solved_in_time_cuts_the_chain_off(task: dict[str, Any]) -> None:
    values = {**task, "id": "open_drawer", "images": {}}
    values["kwargs"] = {**task["kwargs"], "steps": 3, "state": "robot"}
    with contextlib.closing(create_simulator_process(GymConfig.model_validate(values))) as process:
        assert process.reset([0], [0], [0])["state"].shape == (1, 15)
        ends = [process.step([0], np.array([[0.0] * 6 + [OPEN]]))[0] for _ in range(3)]
    assert [end["truncated"][0] for end in ends] == [0, 0, 1]
    assert not any(end["terminated"][0] or end["reward"][0] for end in ends)


def test_held_out_chains_are_scored_by_how_many_subtasks_were_solved(
    task: dict[str, Any], tmp_path: Path
) -> None:
    config = GymConfig.model_validate({**task, "images": {}})
    GymEnvironment.verify_spec(config)
    small = MLPConfig(hidden=(8,))
    MLPPolicy.create(small, GymEnvironment.model_spec(config), 0, tmp_path)
    engine = DirectEngine(DirectConfig(), MLPPolicy, small)
    engine.load(tmp_path, 0)
    with contextlib.closing(GymEnvironment(config, None)) as environment:
        episodes = RolloutRequest(0, 0, "test", range(2), 2, 1, 12, 0.0)
        records = list(local_rollout_iter(environment, engine, episodes, "evaluate"))
        scores = environment.score(records, Counter())
    requests = [record.observations[0, 39:].argmax() for record in records]
    assert requests[0] != requests[1], "another chain for each held-out start"
    assert scores == [0.0, 0.0]
    assert [len(record) for record in records] == [12, 12]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "open_drawers"}, "no chain of CALVIN begins with 'open_drawers'; near it: open_dr"),
        ({"images": {"top": [8, 8]}}, r"task\.images\.top: no such camera; there are static, gri"),
        ({"kwargs": {"chain": 1}}, r"task\.kwargs\.chain: there are annotations, chains, finger"),
        ({"kwargs": {"folder": "/"}}, r"task\.kwargs\.folder: there is no /calvin_env/envs/play"),
    ],
)
def test_what_cannot_be_is_refused(
    task: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    values = {**task, **changed, "kwargs": {**task["kwargs"], **changed.get("kwargs", {})}}
    with pytest.raises(ConfigError, match=message):
        GymEnvironment.read_spec(GymConfig.model_validate(values))


def test_a_file_that_holds_no_chains_is_refused(task: dict[str, Any], tmp_path: Path) -> None:
    for text in ("[", "{}", '{"state_keys": ["led"], "chains": []}'):
        (tmp_path / "chains.json").write_text(text)
        values = {**task, "kwargs": {**task["kwargs"], "chains": str(tmp_path / "chains.json")}}
        with pytest.raises(ConfigError, match=r"task\.kwargs\.chains: \S+/chains\.json"):
            GymEnvironment.read_spec(GymConfig.model_validate(values))


def test_doctor_finds_all_that_it_needs(task: dict[str, Any]) -> None:
    given = [f"task.kwargs.{key}={value}" for key, value in task["kwargs"].items()]
    found = list(check_simulator("calvin", given))
    assert {finding.level for finding in found} == {"ok"}, found
    assert "state [73]" in found[-1].detail
