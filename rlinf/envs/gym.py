"""Simulators as environments: Gymnasium, MuJoCo, and those of :mod:`rlinf.envs.simulators`.

Every iteration starts new episodes, seeded by (seed, iteration, group, episode). Nothing is carried
over between jobs, so runs in one process, in jobs and in pools collect the same trajectories. With
``task.carry_over_episodes`` episodes continue in the next iteration, from states that are saved as
data of the run. The samples of a group begin in the same state and differ only in their actions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from rlinf.channels.channel import Channel
from rlinf.config import Section
from rlinf.data.record import VIDEO_PREFIX, Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import Environment, RolloutRequest, TaskSize, demonstration_keys
from rlinf.envs.episode_runner import (
    EPISODE_METRICS,
    EpisodeLoop,
    check_not_all_failed,
    collect_demonstrations,
    run_episodes,
    run_interleaved,
)
from rlinf.envs.factory import create_task_env, module_flag, resolve_factory
from rlinf.envs.observations import (
    NO_STATE_MESSAGE,
    STATE,
    InvalidEnvConfig,
    ObservationSelection,
    encode_instruction,
)
from rlinf.envs.simulator_errors import USER_CODE_PREFIX, format_error
from rlinf.envs.simulators import simulators
from rlinf.envs.simulators.requirements import get_requirements
from rlinf.envs.subprocess_env import (
    MultiProcessVectorEnv,
    SimulatorCodeError,
    SimulatorError,
    SubprocessVectorEnv,
)
from rlinf.envs.vector_env import SyncVectorEnv
from rlinf.errors import ConfigError, InputError, MissingPackageError, RlinfError, exception_line
from rlinf.interpreters import resolve_interpreter
from rlinf.registry import DEMONSTRATIONS, OBSERVATIONS, STEP_REWARDS, RunComponents
from rlinf.seeding import generator

if TYPE_CHECKING:
    from rlinf.envs.dataset_demonstrations import LeRobotDemonstrations
    from rlinf.models.base import ModelSpec

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0
"""Seconds that a robot has to come to rest."""
COUNTED_STEP_INFO = ("intervened", "late")
"""Keys of step info that are flags; metrics count the steps at which they are set."""
TaskId = Annotated[str, Field(min_length=1)]
NUMERIC_KINDS = "iuf"
"""Kinds of numpy types that actions may have."""
ActionBounds = float | Annotated[tuple[float | None, ...], Field(min_length=1)]
"""One bound for all components of an action, or a list with one for each (null: no bound)."""


class ActionConfig(Section):
    """The action space: one of ``size`` choices, or a vector of that length."""

    kind: Literal["discrete", "box"]
    size: int = Field(gt=0)
    low: ActionBounds | None = None
    """Lower bound of each component of a vector; null: read from the simulator."""
    high: ActionBounds | None = None
    """Upper bound of each component."""
    dtype: str | None = None
    """Type of a vector's components; actions are rounded if it is an integer type. Null: read from
    the simulator with the bounds, else floating point."""

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: str | None) -> str | None:
        """Return numpy's name of the type: ``float32`` for ``f4``."""
        if value is None:
            return None
        try:
            dtype = np.dtype(value)
        except (TypeError, ValueError, SyntaxError):
            dtype = np.dtype(object)
        if dtype.kind not in NUMERIC_KINDS or dtype.shape:
            raise ValueError(
                "it is not a numeric type; set it to float32, float64 or int64, for example"
            )
        return dtype.name

    @model_validator(mode="after")
    def _check_bounds(self) -> ActionConfig:
        if self.kind == "discrete" and self.dtype is not None:
            raise ValueError("dtype: it is the type of a vector's components; leave it out")
        if self.low is None and self.high is None:
            return self
        if self.kind == "discrete":
            raise ValueError("low: discrete actions have no bounds; leave low and high out")
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is None:
                raise ValueError(f"{name}: give both low and high, or none of them")
            if isinstance(value, tuple) and len(value) != self.size:
                raise ValueError(f"{name}: {len(value)} bounds, and size is {self.size}")
        low, high = self.bounds or (np.zeros(0), np.zeros(0))
        if (low > high).any():
            raise ValueError("low: a bound is above that of high")
        return self

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the lower and upper bounds ``[size]`` of a vector; None: unknown. A missing bound
        is infinite. The type is integer if actions are rounded."""
        if self.low is None or self.high is None:
            return None
        low = _bounds_array(self.low, self.size, unbounded=-np.inf)
        high = _bounds_array(self.high, self.size, unbounded=np.inf)
        if self.dtype is not None and np.dtype(self.dtype).kind in "iu":
            low, high = (np.clip(bound, -(2.0**62), 2.0**62) for bound in (low, high))
            return low.astype(np.int64), high.astype(np.int64)
        return low, high

    @property
    def spec(self) -> dict[str, Any]:
        """Return the action space for policies; bounds are lists, with None for no bound."""
        spec = self.model_dump(exclude_none=True)
        for name in ("low", "high"):
            bounds = getattr(self, name)
            if bounds is not None:
                spec[name] = list(bounds) if isinstance(bounds, tuple) else [bounds] * self.size
        return spec


def _bounds_array(bounds: ActionBounds, size: int, *, unbounded: float) -> np.ndarray:
    per_component = bounds if isinstance(bounds, tuple) else (bounds,) * size
    return np.array([unbounded if b is None else b for b in per_component], np.float64)


class GymConfig(Section):
    """A simulator with vector observations."""

    simulator: str = "gymnasium"
    """The simulator: a name of :mod:`rlinf.envs.simulators`, or a ``module:function`` of yours."""
    id: TaskId | Annotated[list[TaskId], Field(min_length=1)]
    """The environment's id. For Gymnasium ``CartPole-v1``, or ``module:Name-v0`` to import the
    module that registers it. For several tasks with the same spaces: a list, or a name that the
    simulator has for a set (``MT10``). Groups are assigned to tasks in rotation."""
    append_task_one_hot: bool = False
    """Append a one-hot vector of the task to observations."""
    observation: int | None = Field(default=None, gt=0)
    """Length of an observation vector (the state, beside images); null: read from the simulator
    when a run is created. An observation of several parts is flattened into one vector."""
    ignore_observations: tuple[str, ...] = ()
    """Names of parts of a structured observation that are left out. Every other part is used; if a
    policy cannot read it, the run is rejected."""
    images: dict[str, tuple[PositiveInt, PositiveInt]] = {}
    """Cameras that are rendered at each step, by name, with height and width of their images;
    docs/howto/simulators.md lists their names. They need at least one process. An image that is
    part of the observation itself is listed here too."""
    video: dict[str, tuple[PositiveInt, PositiveInt]] = {}
    """Cameras that record the first ``evaluate.videos`` evaluation episodes, with height and width
    of their images; the policy does not see them. Cameras of ``images`` record in any case."""
    renderer: Literal["egl", "osmesa"] = "egl"
    """MuJoCo's renderer: egl on a GPU (or in software by Mesa), osmesa in software."""
    action: ActionConfig | None = None
    """The action space. If ``observation`` or ``action`` is not set, it is read from the simulator
    when a run is created, and stored in its configuration. If the machine that creates the run
    cannot build the simulator, both must be set. The first stage checks them."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the simulator's factory."""
    instruction: bool | str = False
    """Include the simulator's instruction in observations, for policies that read text; or your own
    text in its place, up to 256 bytes."""
    demonstrations: int = Field(default=0, ge=0)
    """Number of episodes by the simulator's own expert, from which SFT learns; unsolved ones are
    left out."""
    demonstration_data: Path | None = None
    """A LeRobot data set (version 2.0 to 3.0) from which SFT learns: all of its episodes, with
    states, actions and images as in the task."""
    demonstration_camera_map: dict[str, str] = {}
    """Maps cameras of the data set to cameras of the task (``{image: agentview}``); other cameras
    of the data set are not used. Empty: cameras have equal names."""
    score_by_success: bool = False
    """Score an episode by whether the task was solved at any step, as the simulator's ``info``
    says; otherwise by its return."""
    num_processes: int = Field(default=0, ge=0)
    """Number of processes that step the environments while the policy computes. 0: the stage's own
    process steps them. This is faster for small simulators without images, but if the simulator
    crashes or hangs, so does the stage."""
    max_parallel_envs: int | None = Field(default=None, gt=0)
    """Maximum number of environments that a stage process has at once, for simulators that fill the
    memory. Other samples wait; results do not change. Null: no limit."""
    python: str | None = None
    """Interpreter of the simulator processes: a path, or the name of an environment that ``make
    env`` has created or the site file defines. It needs only numpy and Gymnasium. If it is set,
    there is at least one process."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Maximum wait for an answer of a simulator process, its start included. After that the process
    counts as hung and is replaced. Environments in the stage's own process have no time limit."""
    carry_over_episodes: bool = False
    """A training sample begins where the same sample of the last iteration ended: an episode that
    its horizon truncated continues, with its return and length so far; otherwise a new one begins.
    So episodes may be longer than ``rollout.horizon``. False: every iteration starts new episodes.
    Only for simulators that can save their state (docs/howto/simulators.md)."""
    ignore_terminations: bool = False
    """Continue an episode after the task terminated it, until the simulator's time limit or
    ``rollout.horizon`` truncates it. Success is still counted."""
    double_buffer: bool = False
    """Step one half of the environments while the policy answers the other."""

    @field_validator("instruction")
    @classmethod
    def _check_instruction(cls, value: bool | str) -> bool | str:
        if isinstance(value, str):
            try:
                encode_instruction(value)
            except InvalidEnvConfig as error:
                raise ValueError(str(error).partition(": ")[2]) from None
        return value

    @model_validator(mode="after")
    def _check_demonstrations(self) -> GymConfig:
        if self.demonstrations and self.demonstration_data is not None:
            raise ValueError(
                "demonstration_data: demonstrations are the expert's or those of a data set; set "
                "one of both keys"
            )
        if self.demonstration_camera_map and self.demonstration_data is None:
            raise ValueError("demonstration_camera_map needs demonstration_data")
        return self

    @model_validator(mode="after")
    def _check_video(self) -> GymConfig:
        for name in self.video.keys() & self.images.keys():
            raise ValueError(
                f"video.{name}: it is in images too, so it is recorded in any case; leave it out"
            )
        return self


class GymEnvironment(Environment):
    """A simulator as an environment. A group is an initial state, and a sample is the steps of one
    environment.

    If the simulator raises, only the current episode is lost: its steps are masked, and the next
    episode has a new simulator. The same holds for an episode that cannot begin, and for episodes
    of a process that dies or hangs. The stage fails after ``n`` failures in one sample, where ``n``
    is :data:`rlinf.envs.episode_runner.MAX_FAILED_EPISODES`. If a sample is one episode, the stage
    fails if all episodes failed and there are at least ``n`` groups. If an open episode cannot be
    saved, the next iteration does not continue it, but its steps are complete and are not masked.

    On the training split a sample has ``horizon`` steps; when an episode ends, a new one begins. On
    the test split, and in groups of several samples, a sample is one episode, truncated at the
    horizon.

    Actions are in the simulator's own units; a policy scales its outputs by the bounds of
    :meth:`model_spec`. An action beyond the bounds is clipped before the simulator executes it.
    Trajectories keep the bounds and the action that the policy sampled, to which its
    log-probability belongs; :mod:`rlinf.data.transitions` computes the executed action.
    """

    Config = GymConfig
    provides = frozenset({OBSERVATIONS, STEP_REWARDS, DEMONSTRATIONS})

    def __init__(self, config: GymConfig, processor: Any) -> None:
        self.config = config
        count = config.num_processes or int(_needs_process(config))
        self._envs: SyncVectorEnv | MultiProcessVectorEnv = (
            MultiProcessVectorEnv(functools.partial(create_simulator_process, config), count)
            if count
            else _create_local_envs(config)
        )
        cameras = {**config.images, **config.video}
        video_config = config.model_copy(update={"images": cameras, "video": {}})
        self._video_envs = MultiProcessVectorEnv(
            functools.partial(create_simulator_process, video_config), max(count, 1)
        )
        """Environments that also render ``task.video``; their processes start at the first use."""
        self._demonstrations: Sequence[Trajectory] | LeRobotDemonstrations = (
            load_demonstration_data(config) or []
        )

    @classmethod
    def model_spec(cls, config: GymConfig) -> ModelSpec:
        """Return ``observation``, the length of a vector, and ``action``: ``kind`` discrete or box,
        ``size``, and for a box ``low`` and ``high`` ``[size]`` (None: no bound) and ``dtype``, if
        known.

        Raises:
            ConfigError: the configuration does not set them.
        """
        if config.observation is None or config.action is None:
            key = "observation" if config.observation is None else "action"
            raise ConfigError(
                f"task.{key}: is not set; a policy needs task.observation (a length) and "
                "task.action (kind, size and bounds), which are read from the simulator when a run "
                "is created"
            )
        spec = {"observation": config.observation, "action": config.action.spec}
        if config.images:
            spec["images"] = {name: list(size) for name, size in config.images.items()}
        if config.instruction:
            spec["instruction"] = True
        return spec

    @classmethod
    def required_modules(cls, config: GymConfig) -> tuple[str, ...]:
        return ("numpy", *get_requirements(config.simulator).packages)

    @classmethod
    def task_size(cls, config: GymConfig, processor: Any) -> TaskSize:
        """
        Raises:
            ConfigError: a file or folder that the simulator needs does not exist.
        """
        requirements = get_requirements(config.simulator)
        for message in requirements.missing_assets(config.kwargs):
            raise ConfigError(message)
        if requirements.batched and config.double_buffer:
            raise ConfigError(
                f"task.double_buffer: true, but {config.simulator} steps all environments "
                "together; set it to false"
            )
        num_tasks = len(task_ids(config))
        if requirements.batched and (num_tasks > 1 or config.ignore_terminations):
            key, fix = "ignore_terminations", "set it to false"
            if num_tasks > 1:
                key, fix = "id", "name one"
            raise ConfigError(
                f"task.{key}: {config.simulator} steps all environments together, of one task, "
                f"and decides when episodes end; {fix}"
            )
        if config.append_task_one_hot and num_tasks == 1:
            raise ConfigError("task.append_task_one_hot: there is one task; set it to false")
        is_task_visible = config.append_task_one_hot or config.instruction or config.images
        if num_tasks > 1 and not is_task_visible:
            raise ConfigError(
                f"task.append_task_one_hot: there are {num_tasks} tasks, and the policy cannot "
                "tell which one it is in; set it to true, and task.observation to "
                f"{num_tasks} more"
            )
        needs_several = config.num_processes > 1 or config.double_buffer or config.video
        if requirements.single_instance and needs_several:
            key = "double_buffer" if config.double_buffer else "num_processes"
            key = "video" if config.video else key
            raise ConfigError(
                f"task.{key}: {config.simulator} has one environment at a time; leave it out"
            )
        if config.carry_over_episodes and not requirements.supports_state_saving:
            raise ConfigError(NO_STATE_MESSAGE)
        return TaskSize()

    @classmethod
    def has_deterministic_reset(cls, config: GymConfig) -> bool:
        return not get_requirements(config.simulator).nondeterministic

    @classmethod
    def num_tasks(cls, config: GymConfig) -> int:
        return len(task_ids(config))

    @classmethod
    def max_step_bytes(cls, config: GymConfig) -> int:
        pixels = sum(height * width for height, width in config.images.values())
        return np.dtype(np.float32).itemsize * (config.observation or 0) + 3 * pixels

    @classmethod
    def video_columns(cls, config: GymConfig) -> tuple[str, ...]:
        return (
            *(f"images.{n}" for n in config.images),
            *(f"{VIDEO_PREFIX}{n}" for n in config.video),
        )

    @classmethod
    def verify_spec(cls, config: GymConfig) -> None:
        for message in cls.spec_mismatches(config, cls.read_spec(config)):
            raise ConfigError(message)
        if config.carry_over_episodes:
            with contextlib.closing(create_simulator_process(config)) as process:
                process.reset([0], [0])
                try:
                    states, errors = process.save([0])
                    errors = errors or process.restore([0], states)[1]
                except InputError as error:
                    raise ConfigError(str(error)) from None
                for traceback in errors.values():
                    raise ConfigError(
                        f"task.carry_over_episodes: {exception_line(traceback)}; set it to false"
                    )

    @classmethod
    def spec_mismatches(cls, config: GymConfig, actual: ModelSpec) -> list[str]:
        """Return a message for each key that differs from ``actual``, the spec of the simulator."""
        mismatches: list[tuple[str, Any]] = []
        if config.observation != actual["observation"]:
            mismatches.append(("observation", config.observation))
        if config.action is None or not _spaces_match(
            config.action, ActionConfig(**actual["action"])
        ):
            mismatches.append(("action", None if config.action is None else config.action.spec))
        return [
            f"task.{name}: {value} is not what {config.id} has; set it to "
            f"{json.dumps(actual[name])}, or leave it out to have it read from the simulator"
            for name, value in mismatches
        ]

    @classmethod
    def infer_config(cls, config: GymConfig, *, check_given: bool) -> ModelSpec:
        requirements = get_requirements(config.simulator)
        action = config.action
        # Discrete actions need no bounds.
        has_bounds = action is not None and (action.kind == "discrete" or action.bounds is not None)
        missing = [] if config.observation else ["task.observation"]
        missing += [] if action else ["task.action"]
        missing += [] if has_bounds or not action else ["task.action.low", "task.action.high"]
        # Keys that are set are checked only if any machine can build the simulator; a robot must
        # not move for a check.
        is_portable = not (requirements.gpu or requirements.single_instance or requirements.batched)
        if not missing and not (check_given and is_portable):
            return {}
        if missing and requirements.single_instance:
            raise ConfigError(
                f"{missing[0]}: is not set, and {config.simulator} is not connected before a run "
                f"is created; set {', '.join(missing)}"
            )
        try:
            actual = cls.read_spec(config)
        except SimulatorError as error:
            if missing:
                raise ConfigError(
                    f"{missing[0]}: is not set, and the simulator cannot be built here to read it "
                    f"({exception_line(str(error))}); set {', '.join(missing)}"
                ) from None
            log.warning("task: the simulator cannot be built here: %s", exception_line(str(error)))
            return {}
        except InputError as error:
            if missing:
                raise ConfigError(f"{error}; or set {', '.join(missing)}") from None
            # The machines of the stages may have what this machine lacks.
            if isinstance(error, MissingPackageError) or str(error).startswith("task.renderer"):
                return {}
            raise
        action_config = ActionConfig(**actual["action"]) if action is None else action
        observation = actual["observation"] if config.observation is None else config.observation
        full_config = config.model_copy(
            update={"observation": observation, "action": action_config}
        )
        for message in cls.spec_mismatches(full_config, actual):
            raise ConfigError(message)
        inferred = {} if config.observation else {"observation": actual["observation"]}
        return inferred if has_bounds else {**inferred, "action": actual["action"]}

    @classmethod
    def read_spec(cls, config: GymConfig) -> ModelSpec:
        """Build a simulator, and return its ``observation`` and ``action`` for :meth:`model_spec`.

        Raises:
            ConfigError: the environment is unknown, or no policy supports its spaces.
        """
        env = (
            create_simulator_process(config)
            if _needs_process(config)
            else _create_local_envs(config)
        )
        try:
            with _translate_user_errors(config), contextlib.closing(env):
                spaces = env.spaces()
        except InputError as error:
            if type(error) is not InputError:
                raise
            raise ConfigError(str(error)) from None
        observation_space, action_space = spaces["observation"], spaces["action"]
        if config.instruction is True and spaces["instruction"] is None:
            raise ConfigError(
                f"task.instruction: {config.id} has no instruction; write one for the policy, or "
                "set it to false"
            )
        if observation_space["kind"] != "dict":
            observation_space = {"parts": {STATE: observation_space}, **observation_space}
        state = observation_space["parts"].get(STATE)
        if state is None or state["kind"] != "box" or len(state["shape"]) != 1:
            raise ConfigError(
                f"task.id: {config.id} has no vector observations ({observation_space['text']})"
            )
        if action_space["kind"] == "discrete":
            action = {"kind": "discrete", "size": action_space["size"]}
        elif (
            action_space["kind"] == "box"
            and len(action_space["shape"]) == 1
            and np.dtype(action_space["dtype"]).kind in NUMERIC_KINDS
        ):
            bounds = {name: action_space[name] for name in ("low", "high", "dtype")}
            action = {"kind": "box", "size": action_space["shape"][0], **bounds}
        else:
            raise ConfigError(
                f"task.id: {config.id} has actions {action_space['text']}, which no policy "
                "here supports"
            )
        return {"observation": state["shape"][0], "action": action}

    def simulate(
        self, request: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Trajectory]:
        """Send one request per time step, for all running environments of an episode loop.

        Trajectories have all columns of the replies, and ``observations``, ``rewards``,
        ``terminated``, ``truncated``, and ``final_observations`` after each truncation. If the
        policy returns values, they have ``bootstrap_values``.
        """
        samples = request.sample_ids()

        def put(message: Record) -> None:
            observations.put(message)

        has_one_env = get_requirements(self.config.simulator).single_instance
        trajectories, tracebacks = list[Trajectory](), list[str]()
        try:
            num_parallel = 1 if has_one_env else self.config.max_parallel_envs or len(samples) or 1
            for first in range(0, len(samples), num_parallel):
                loops = self._loops(request, samples[first : first + num_parallel], tracebacks)
                with _translate_user_errors(self.config):
                    trajectories += run_interleaved(loops, put, actions.get)
        except BaseException as error:
            # Processes may still send answers to this attempt; the next attempt must not read them.
            self.close()
            if isinstance(error, InvalidEnvConfig):
                raise InputError(str(error)) from None
            raise
        is_test = request.split == "test"
        if is_test or request.group_size > 1:
            check_not_all_failed(trajectories, tracebacks, is_test=is_test)
        if has_one_env:
            # The next stage may run in another process, which needs the same robot.
            self.close()
        observations.close()
        ids = task_ids(self.config)
        for trajectory in trajectories if len(ids) > 1 else ():
            ordinal = request.group_ordinals(np.array(trajectory.group))
            trajectory.task = ids[int(ordinal) % len(ids)]
        yield from trajectories

    @property
    def pids(self) -> list[int]:
        pids = self._envs.pids if isinstance(self._envs, MultiProcessVectorEnv) else []
        return [*pids, *self._video_envs.pids]

    def _loops(
        self, request: RolloutRequest, samples: np.ndarray, tracebacks: list[str]
    ) -> list[EpisodeLoop]:
        """Return the episode loops of ``samples``: one or two, and one for those with a video."""
        has_video = samples < (request.num_videos if self.config.video else 0)
        others = samples[~has_video]
        size = -(-len(others) // (2 if self.config.double_buffer else 1)) or 1
        action = self.config.action
        bounds = None if action is None else action.bounds
        options = (self.config.instruction, self._score_metric, bounds, tracebacks)
        loops = [
            run_episodes(request, others[first : first + size], self._envs, first, (), *options)
            for first in range(0, len(others), size)
        ]
        if has_video.any():
            samples, cameras = samples[has_video], self.config.video
            loops.append(run_episodes(request, samples, self._video_envs, 0, cameras, *options))
        return loops

    @property
    def _score_metric(self) -> str:
        """The metric that is an episode's score."""
        return "success_once" if self.config.score_by_success else "return"

    @classmethod
    def check(cls, options: GymConfig, run: RunComponents) -> None:
        super().check(options, run)
        has_demonstrations = options.demonstrations or options.demonstration_data is not None
        if (keys := demonstration_keys(run)) and not has_demonstrations:
            raise ConfigError(
                f"{keys[0]}: there is nothing to learn from; set task.demonstrations to "
                "a number of episodes by the simulator's own expert, task.demonstration_data to a "
                f"LeRobot data set, or {keys[0]} to 0"
            )
        if (data := load_demonstration_data(options)) is not None:
            data.check(cls.model_spec(options))

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return whole episodes, which have ``observations``, images, instruction, ``actions`` and
        ``rewards`` of every step. (seed, step) determines which episodes are drawn.

        Raises:
            ConfigError: the simulator has no expert, or the expert solves no episode.
        """
        if self.config.demonstrations and not self._demonstrations:
            local_envs = self._envs if isinstance(self._envs, SyncVectorEnv) else None
            envs = local_envs or create_simulator_process(self.config)
            try:
                with _translate_user_errors(self.config):
                    self._demonstrations = collect_demonstrations(
                        envs, seed, self.config.demonstrations, self.config.instruction
                    )
            finally:
                if local_envs is None:
                    envs.close()
        if not self._demonstrations:
            return []
        random = generator(seed, "demonstrations", step)
        episodes = random.choice(
            len(self._demonstrations), count, replace=count > len(self._demonstrations)
        )
        return [
            replace(self._demonstrations[int(episode)], identity=RecordId(step, index))
            for index, episode in enumerate(episodes)
        ]

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        """Return each trajectory's mean return or success rate over its completed episodes (if none
        is completed, of the open one); NaN if the simulator failed in all of them."""
        counts["failed_episodes"] += sum(t.num_failed_episodes or 0 for t in trajectories)
        for name in COUNTED_STEP_INFO:
            columns = [c for t in trajectories if (c := getattr(t, name)) is not None]
            if columns:
                counts[f"{name}_steps"] += sum(int(np.count_nonzero(steps)) for steps in columns)
        return [
            _episode_metric(t, self._score_metric) if _is_scored(t) else float("nan")
            for t in trajectories
        ]

    def episode_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        scored = [t for t in trajectories if _is_scored(t)]
        # Without success, there are the return and the length only.
        names = EPISODE_METRICS if self.config.score_by_success else EPISODE_METRICS[:2]
        return {
            name: float(np.mean([_episode_metric(t, name) for t in scored]))
            for name in names
            if scored
        }

    def close(self) -> None:
        self._envs.close()
        self._video_envs.close()


def load_demonstration_data(config: GymConfig) -> LeRobotDemonstrations | None:
    """Return the episodes of ``task.demonstration_data``; None if it is not set.

    Raises:
        DataError: the folder is not a LeRobot data set.
        MissingPackageError: pyarrow is not installed.
    """
    if config.demonstration_data is None:
        return None
    from rlinf.envs.dataset_demonstrations import LeRobotDemonstrations  # few runs have data

    folder = config.demonstration_data.expanduser()
    return LeRobotDemonstrations(folder, config.demonstration_camera_map, config.instruction)


def _is_scored(trajectory: Trajectory) -> bool:
    return trajectory.is_scored is None or bool(trajectory.is_scored)


def _episode_metric(trajectory: Trajectory, name: str) -> float:
    """Return one of :data:`EPISODE_METRICS`."""
    return float(trajectory.require(Trajectory.INFO[name]))


def task_ids(config: GymConfig) -> list[str]:
    """Return the ids of the run's tasks. If there are several, groups are assigned in rotation."""
    if isinstance(config.id, list):
        return config.id
    return list(get_requirements(config.simulator).task_sets.get(config.id, (config.id,)))


def create_simulator_process(config: GymConfig) -> SubprocessVectorEnv:
    """Create a process that steps environments of a configuration."""
    python = None if config.python is None else resolve_interpreter(config.python, "task.python")
    return SubprocessVectorEnv(
        _factory_target(config),
        _factory_kwargs(config),
        python,
        config.timeout_s,
        _observation_selection(config),
        config.renderer,
        CLOSE_TIMEOUT_S if get_requirements(config.simulator).single_instance else 0.0,
        config.ignore_terminations,
        user_modules(config),
    )


def _create_local_envs(config: GymConfig) -> SyncVectorEnv:
    return SyncVectorEnv(
        functools.partial(create_local_env, config),
        single_instance=get_requirements(config.simulator).single_instance,
        ignore_terminations=config.ignore_terminations,
        user_modules=user_modules(config),
    )


@contextlib.contextmanager
def _translate_user_errors(config: GymConfig) -> Iterator[None]:
    """Convert errors of the user's simulator in this process to SimulatorCodeError."""
    try:
        yield
    except (RlinfError, InvalidEnvConfig):
        raise
    except Exception as error:
        traceback = format_error(error, user_modules(config))
        if USER_CODE_PREFIX not in traceback:
            raise
        raise SimulatorCodeError(traceback) from None


def user_modules(config: GymConfig) -> tuple[str, ...]:
    """Return the user's modules that a configuration names: the module of ``task.simulator``, and
    for ``gymnasium`` the module before the colon of ``task.id``."""
    if config.simulator not in simulators.names():
        return (_factory_target(config).rpartition(":")[0],)
    ids = task_ids(config) if config.simulator == "gymnasium" else []
    return tuple({id.partition(":")[0] for id in ids if ":" in id})


def _needs_process(config: GymConfig) -> bool:
    return (
        config.python is not None
        or bool(config.images)
        or get_requirements(config.simulator).batched
    )


def create_local_env(config: GymConfig) -> Any:
    """Create one environment in this process.

    Raises:
        MissingPackageError: Gymnasium is not installed.
        ConfigError: the simulator is not installed, does not know the id, or cannot create it.
    """
    if config.simulator == "gymnasium" and importlib.util.find_spec("gymnasium") is None:
        raise MissingPackageError("gymnasium", "sims", "task.name: gym")
    try:
        factory = resolve_factory(_factory_target(config))
        if module_flag(factory, "BATCHED"):
            raise ConfigError(
                f"task.num_processes: {config.num_processes}, but {config.simulator} steps many "
                "environments in a process of its own; set 1"
            )
        return create_task_env(factory, _factory_kwargs(config), _observation_selection(config))
    except InvalidEnvConfig as error:
        raise ConfigError(str(error)) from None


def _observation_selection(config: GymConfig) -> ObservationSelection:
    return ObservationSelection(
        dict(config.images), config.ignore_observations, tuple(config.video)
    )


def _spaces_match(configured: ActionConfig, actual: ActionConfig) -> bool:
    """Return whether a configured action space equals the simulator's in every key that is set."""
    if (configured.kind, configured.size) != (actual.kind, actual.size):
        return False
    if configured.dtype not in (None, actual.dtype):
        return False
    pairs = zip(configured.bounds or (), actual.bounds or (), strict=False)
    return all(np.allclose(bound, other, rtol=1e-6, atol=1e-9) for bound, other in pairs)


def _factory_target(config: GymConfig) -> str:
    """Return the target of the simulator's factory for :func:`resolve_factory`. Modules of rlinf
    are given by file, because another interpreter cannot import them by name."""
    target = simulators.target(config.simulator, "task.simulator")
    module, _, name = target.partition(":")
    if config.simulator not in simulators.names():
        return target
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return f"{spec.origin}:{name}"


def _factory_kwargs(config: GymConfig) -> dict[str, Any]:
    ids = task_ids(config)
    if len(ids) == 1:
        return {"id": ids[0], "kwargs": config.kwargs}
    return {"id": ids, "kwargs": config.kwargs, "one_hot": config.append_task_one_hot}


if __name__ == "__main__":
    for name, value in GymEnvironment.read_spec(GymConfig(id=sys.argv[1])).items():
        sys.stdout.write(f"task.{name}: {json.dumps(value)}\n")
