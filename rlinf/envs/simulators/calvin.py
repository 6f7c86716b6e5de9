"""CALVIN (arXiv 2112.03227): a Panda arm at a desk with drawer, sliding door, lights and blocks.

An episode is a chain of subtasks in scene D, on which the benchmark evaluates. The reward is 1 at
the step that solves a subtask, which the benchmark's own task oracle decides: it compares the step
at which the subtask began with the current step. The next subtask begins in the state where this
one ended. So the return of an episode is the number of solved subtasks, and the mean return is the
average length that evaluations report. An episode is truncated if a subtask is not solved within
``steps`` (360, as in the benchmark); it ends with success when its last subtask is solved.

Initial state ``n`` is the one of chain ``n`` in the benchmark's evaluation: numpy's legacy
generator draws the poses of the blocks, seeded by FNV-1 of the state's text (mees/calvin,
``calvin_agent/evaluation/utils.py``).

The state consists of the robot's state (15: position and Euler angles of the hand, gripper width,
seven joints, last gripper action), the scene's state (24: two doors, button, switch, two lights,
position and Euler angles of the red, blue and pink block) and a one-hot vector of the subtask (34);
with ``state: robot``, it is only the robot's state. An action is a change of position (3) and Euler
angles (3), in units of 2 cm and 0.05 rad, and the gripper: a positive value opens it. Cameras:
``static``, ``gripper``, rendered by PyBullet's software renderer.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PACKAGES = ("pybullet", "gym", "hydra", "omegaconf", "cv2", "git", "quaternion", "scipy")
ASSETS = {
    "folder": "a clone of the repository mees/calvin_env, with its folders calvin_env, conf, data",
    "chains": "a JSON file of chains and their first states (docs/howto/simulators.md says which)",
}
"""Files and folders that no package contains, by their key of ``kwargs``."""
OPTIONAL = {
    "annotations": "a YAML file of sentences by subtask, such as CALVIN's "
    "calvin_models/conf/annotations/new_playtable_validation.yaml; left out, the instruction is "
    "the name of the subtask",
}
ALL_CHAINS = "chains"
"""The ``id`` of a task with all chains."""
DEFAULT_STEPS = 360
"""Maximum number of steps of a subtask, as in the benchmark."""
STATE_KEYS = (
    "led",
    "lightbulb",
    "slider",
    "drawer",
    "red_block",
    "blue_block",
    "pink_block",
    "grasped",
)
"""Fields of a chain's initial state. The seed of the block poses depends on their order."""
INITIAL_JOINTS = (
    -1.21779124,
    1.03987629,
    2.11978254,
    -2.34205014,
    -0.87015899,
    1.64119093,
    0.55344928,
)
"""Joints of the arm at the beginning of a chain, radians."""
INITIAL_HAND_POSE = (0.02586889, -0.2313129, 0.5712808, 3.09045411, -0.02908596, 1.50013585)
"""Position (meters) and Euler angles (radians)."""
INITIAL_GRIPPER_WIDTH = 0.07999963
SHELF_POSITIONS = {
    "slider_left": (-2.40851662e-01, 9.24044687e-02, 4.60990009e-01),
    "slider_right": (7.03416330e-02, 9.24044687e-02, 4.60990009e-01),
}
TABLE_POSITIONS = (
    (5.00000896e-02, -1.20000177e-01, 4.59990009e-01),
    (2.29995412e-01, -1.19995140e-01, 4.59990010e-01),
)
"""Positions of blocks on the shelf and on the table, meters."""


class SubtaskChain(NamedTuple):
    """Successive subtasks, and the initial state: values of :data:`STATE_KEYS`."""

    initial: tuple[Any, ...]
    tasks: tuple[str, ...]


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is ``chains``, or a subtask. A subtask selects the chains that begin with it, and an
    episode is then only this subtask.

    ``kwargs``: ``folder`` and ``chains``, see :data:`ASSETS`; ``annotations``, a YAML file of
    sentences by subtask, the first of which is the instruction (without the file, the subtask's
    name); ``steps``, the maximum of a subtask; ``state``: all or robot;
    ``fingerprint``, the beginning of :func:`fingerprint` that the chains must have.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    valid_keys = {"folder", "chains", "annotations", "steps", "state", "fingerprint"}
    if unknown := sorted(kwargs.keys() - valid_keys):
        raise ValueError(f"kwargs.{unknown[0]}: there are {', '.join(sorted(valid_keys))}")
    if (state_mode := kwargs.get("state", "all")) not in ("all", "robot"):
        raise ValueError(f"kwargs.state: {state_mode!r}; expected all or robot")
    folder = _existing_path(kwargs, "folder", "calvin_env/envs/play_table_env.py")
    chains = _load_chains(_existing_path(kwargs, "chains"))
    expected, actual = str(kwargs.get("fingerprint", "")), fingerprint(chains)
    if not actual.startswith(expected):
        raise ValueError(
            f"kwargs.chains: {kwargs['chains']}: its {len(chains)} chains have the fingerprint "
            f"{actual[: len(expected)]}, not {expected} of the benchmark's 1,000; write those of "
            "CALVIN's get_sequences(1000)"
        )
    if id != ALL_CHAINS:
        first_tasks = sorted({chain.tasks[0] for chain in chains})
        if id not in first_tasks:
            near = difflib.get_close_matches(id, [ALL_CHAINS, *first_tasks], 3, 0.3)
            raise ValueError(
                f"no chain of CALVIN begins with {id!r}; near it: {', '.join(near) or ALL_CHAINS}"
            )
        chains = [SubtaskChain(c.initial, c.tasks[:1]) for c in chains if c.tasks[0] == id]
    sentences = {}
    if kwargs.get("annotations") is not None:
        sentences = _load_sentences(_existing_path(kwargs, "annotations"))
    return CalvinEnv(
        folder, chains, sentences, int(kwargs.get("steps", DEFAULT_STEPS)), state_mode == "robot"
    )


def _existing_path(kwargs: dict[str, Any], key: str, required_file: str = "") -> Path:
    description = {**ASSETS, **OPTIONAL}[key]
    if kwargs.get(key) is None:
        raise ValueError(f"kwargs.{key}: is not set; expected {description}")
    path = Path(str(kwargs[key])).expanduser()
    if not (path / required_file).exists():
        raise ValueError(
            f"kwargs.{key}: there is no {path / required_file}; expected {description}"
        )
    return path


def _load_chains(path: Path) -> list[SubtaskChain]:
    try:
        content = json.loads(path.read_text())
        keys, rows = tuple(content["state_keys"]), content["chains"]
        chains = [SubtaskChain(tuple(row["initial"]), tuple(row["tasks"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"kwargs.chains: {path} holds no chains ({error!r})") from None
    if keys != STATE_KEYS or any(len(c.initial) != len(STATE_KEYS) or not c.tasks for c in chains):
        raise ValueError(
            f"kwargs.chains: {path}: expected state_keys {', '.join(STATE_KEYS)}, and of each "
            "chain as many values and one subtask at least"
        )
    return chains


def fingerprint(chains: list[SubtaskChain]) -> str:
    """Return the SHA-256 of the subtasks of all chains: commas between the subtasks of a chain, and
    newlines between chains."""
    text = "\n".join(",".join(chain.tasks) for chain in chains)
    return hashlib.sha256(text.encode()).hexdigest()


def _load_sentences(path: Path) -> dict[str, str]:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(content, dict) or not all(
        isinstance(v, list) and v for v in content.values()
    ):
        raise ValueError(f"kwargs.annotations: {path}: expected a list of sentences by subtask")
    return {str(task): str(sentences[0]) for task, sentences in content.items()}


class CalvinEnv:
    """Chains of subtasks at one desk."""

    cameras = ("static", "gripper")

    def __init__(
        self,
        folder: Path,
        chains: list[SubtaskChain],
        sentences: dict[str, str],
        steps: int,
        robot_only: bool,
    ) -> None:
        config = _load_config(folder)
        self._desk, self._oracle = _create_desk(folder, config), _instantiate(config.oracle)
        self._tasks = tuple(self._oracle.tasks)
        unknown = sorted({task for chain in chains for task in chain.tasks} - set(self._tasks))
        if unknown:
            raise ValueError(f"kwargs.chains: the task oracle has no subtask {unknown[0]!r}")
        self._chains, self._sentences, self._max_steps = chains, sentences, steps
        self._robot_only = robot_only
        self._cameras: dict[str, Any] = {}
        self._camera_config = config.cameras
        # Each reset restores this state: contacts that the solver remembers from the last episode
        # would change the beginning of the next one.
        self._initial_physics = self._desk.p.saveState()
        self._chain, self._num_solved, self._steps = chains[0], 0, 0
        self.num_initial_states = len(chains)
        spaces = importlib.import_module("gym.spaces")
        size = 15 if robot_only else 15 + 24 + len(self._tasks)
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)

    @property
    def subtask(self) -> str:
        """The current subtask; the last one after the chain was solved."""
        return self._chain.tasks[min(self._num_solved, len(self._chain.tasks) - 1)]

    @property
    def instruction(self) -> str:
        return self._sentences.get(self.subtask, self.subtask.replace("_", " "))

    def reset(self, seed: int | None = None, initial_state: int | None = None) -> Any:
        if initial_state is None:
            initial_state = int(np.random.default_rng(seed).integers(self.num_initial_states))
        self._chain, self._num_solved, self._steps = self._chains[initial_state], 0, 0
        self._desk.p.restoreState(self._initial_physics)
        self._desk.robot.gripper_action = 1
        robot, scene = decode_initial_state(self._chain.initial)
        observation = self._desk.reset(robot_obs=robot, scene_obs=scene)
        for button in self._desk.scene.buttons:
            button.prev_is_pressed = button._is_pressed
        self._subtask_initial_info = self._desk.get_info()
        return self._state(observation), {}

    def step(self, action: Any) -> Any:
        desk_action = np.array(action, np.float64)
        desk_action[-1] = 1 if desk_action[-1] > 0 else -1
        observation, _, _, info = self._desk.step(desk_action)
        self._steps += 1
        initial_info, subtasks = self._subtask_initial_info, {self.subtask}
        solved = bool(self._oracle.get_task_info_for_set(initial_info, info, subtasks))
        solved = solved and self._num_solved < len(self._chain.tasks)
        if solved:
            self._num_solved, self._steps = self._num_solved + 1, 0
            self._subtask_initial_info = info
        is_chain_solved = self._num_solved == len(self._chain.tasks)
        return (
            self._state(observation),
            float(solved),
            is_chain_solved,
            self._steps >= self._max_steps,
            {"success": is_chain_solved},
        )

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return the image of a camera, uint8 ``[H, W, 3]``."""
        if camera not in self._cameras:
            self._cameras[camera] = _instantiate(
                self._camera_config[camera],
                cid=self._desk.cid,
                robot_id=self._desk.robot.robot_uid,
                objects=self._desk.scene.get_objects(),
            )
        renderer = self._cameras[camera]
        renderer.height, renderer.width = height, width
        return np.array(renderer.render()[0], np.uint8)

    def close(self) -> None:
        self._desk.close()

    def _state(self, observation: Any) -> np.ndarray:
        if self._robot_only:
            return np.asarray(observation["robot_obs"], np.float32)
        one_hot = np.zeros(len(self._tasks))
        one_hot[self._tasks.index(self.subtask)] = 1
        return np.concatenate([observation["robot_obs"], observation["scene_obs"], one_hot]).astype(
            np.float32
        )


def decode_initial_state(initial: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the robot's state ``[15]`` and the scene's state ``[24]``, float64, from values of
    :data:`STATE_KEYS`."""
    values = dict(zip(STATE_KEYS, initial))  # noqa: B905 - Python 3.9
    random = np.random.RandomState(_fnv1(str(values.values())))
    order = [0, 1]
    random.shuffle(order)
    first, second = (TABLE_POSITIONS[index] for index in order)
    scene = np.zeros(24)
    scene[0] = 0.28 * (values["slider"] == "left")
    scene[1] = 0.22 * (values["drawer"] == "open")
    scene[3] = 0.088 * values["lightbulb"]
    scene[4:6] = values["lightbulb"], values["led"]
    # At most two blocks are on the table.
    table = {"red_block": first, "pink_block": second}
    table["blue_block"] = second if values["red_block"] == "table" else first
    for row, block in zip((6, 12, 18), ("red_block", "blue_block", "pink_block")):  # noqa: B905
        scene[row : row + 3] = SHELF_POSITIONS.get(values[block], table[block])
        scene[row + 5] = random.uniform(math.pi * 3 / 8, math.pi * 5 / 8)
    return np.array([*INITIAL_HAND_POSE, INITIAL_GRIPPER_WIDTH, *INITIAL_JOINTS, 1.0]), scene


def _fnv1(text: str) -> int:
    """Return the FNV-1 hash (Fowler, Noll and Vo), 32 bits."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = value * 0x01000193 % 2**32 ^ byte
    return value


def _load_config(folder: Path) -> Any:
    """Return the parts of CALVIN's configuration that define a desk and its oracle."""
    from omegaconf import OmegaConf

    conf = folder / "conf"
    robot = OmegaConf.merge(
        OmegaConf.load(conf / "robot" / "panda.yaml"),
        OmegaConf.load(conf / "robot" / "panda_longer_finger.yaml"),
    )
    return OmegaConf.create(
        {
            "data_path": str(folder.resolve() / "data"),
            "robot": robot,
            "scene": OmegaConf.load(conf / "scene" / "calvin_scene_D.yaml"),
            "oracle": OmegaConf.load(conf / "tasks" / "new_playtable_tasks.yaml"),
            "cameras": {
                name: OmegaConf.load(conf / "cameras" / "cameras" / f"{name}.yaml")
                for name in CalvinEnv.cameras
            },
        }
    )


def _instantiate(config: Any, **kwargs: Any) -> Any:
    from hydra.utils import instantiate

    return instantiate(config, **kwargs)


def _create_desk(folder: Path, config: Any) -> Any:
    """Return CALVIN's environment, with its own physics server."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # CALVIN queries git for the commit of its folder, which may not be a repository.
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    with contextlib.redirect_stderr(io.StringIO()):  # gym prints that it is unmaintained
        table_module: Any = importlib.import_module("calvin_env.envs.play_table_env")
    robot_module: Any = importlib.import_module("calvin_env.robot.robot")
    table_module.get_git_commit_hash = lambda path: "unknown"

    class CalvinTable(table_module.PlayTableSimEnv):
        cid: int

        def load(self) -> None:
            # The robot's module has a global physics client, which would be the one of the first
            # desk of the process.
            global_client, robot_module.p = robot_module.p, self.p
            try:
                super().load()
            finally:
                robot_module.p = global_client

        def close(self) -> None:
            if self.cid >= 0:
                self.p.disconnect()
                self.cid = -1

    return CalvinTable(
        robot_cfg=config.robot,
        scene_cfg=config.scene,
        cameras={},
        seed=0,
        use_vr=False,
        bullet_time_step=240.0,
        show_gui=False,
        use_scene_info=True,
        use_egl=False,
    )
