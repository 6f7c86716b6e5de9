"""Gymnasium environments, MuJoCo's included, stepped together as one vector.

Every iteration starts fresh episodes, seeded by (seed, iteration, start, episode): nothing is
carried from one job to the next, so any driver collects the same experience. With
``task.carry_over_episodes`` episodes go on over iterations, by states that are data of the run. The samples
of a group share their start's episode and differ in their actions alone.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.capabilities import DEMONSTRATIONS, OBSERVATIONS, STEP_REWARDS
from rlinf.channels.channel import Channel
from rlinf.data.record import Record, RecordId
from rlinf.envs.base import VIDEO_PREFIX, Environment, RolloutRequest, TaskSize
from rlinf.envs.episode_runner import (
    EPISODE_METRICS,
    EpisodeLoop,
    check_not_all_failed,
    collect_demonstrations,
    run_episodes,
    run_interleaved,
)
from rlinf.envs.factory import create_task_env, module_flag, resolve_factory
from rlinf.envs.gym_config import NUMERIC_KINDS, ActionConfig, GymConfig
from rlinf.envs.observations import NO_STATE_MESSAGE, STATE, InvalidEnvConfig, ObservationSelection
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
from rlinf.seeding import generator

if TYPE_CHECKING:
    from rlinf.models.base import ModelSpec

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0
"""For a robot to come to rest."""
COUNTED_STEP_INFO = ("intervened", "late")
"""Of what a world may tell of its steps: how many there were is said."""


class GymEnvironment(Environment):
    """A start is an environment, a sample the experience of one of them.

    An episode in which the simulator raises is lost, and that alone: its steps do not count, and
    the next one has a new simulator; so are those of a process that dies or hangs, and one that
    cannot begin. A simulator that fails :data:`MAX_FAILED_EPISODES` times in a sample is broken, or, where
    samples are of one episode, in all of as many starts. An open episode that it fails to save is
    lost to the next iteration alone: its steps were done, and count.

    On the training split a sample is ``horizon`` steps in which ended episodes are followed by new
    ones; on the test split, and in groups of several samples, it is one episode, or as much of it
    as fits.

    Actions are in the simulator's own units: a policy scales what it makes by the bounds that
    :meth:`describe` names. An action beyond them is clipped on its way in. Trajectories keep what
    the policy drew, to which its log-probability belongs, and the bounds; what was carried out
    follows from both (:func:`rlinf.data.transitions.executed_actions`).
    """

    Config = GymConfig
    provides = frozenset({OBSERVATIONS, STEP_REWARDS, DEMONSTRATIONS})

    def __init__(self, config: GymConfig, processor: Any) -> None:
        self.config = config
        count = config.num_processes or int(_apart(config))
        self._worlds: SyncVectorEnv | MultiProcessVectorEnv = (
            MultiProcessVectorEnv(functools.partial(create_simulator_process, config), count)
            if count
            else _here(config)
        )
        every = {**config.images, **config.video}
        filming = config.model_copy(update={"images": every, "video": {}})
        self._filming = MultiProcessVectorEnv(
            functools.partial(create_simulator_process, filming), max(count, 1)
        )
        self._shown: list[Record] = []

    @classmethod
    def model_spec(cls, config: GymConfig) -> ModelSpec:
        """``observation``: length of a vector; ``action``: ``kind`` discrete or box, ``size``, and
        of a box ``low`` and ``high`` ``[size]`` (None: no bound) and ``dtype``, where they are
        known.

        Raises:
            ConfigError: the configuration does not say them.
        """
        if config.observation is None or config.action is None:
            key = "observation" if config.observation is None else "action"
            raise ConfigError(
                f"task.{key}: is not set; a policy is made for task.observation (a length) and "
                "task.action (kind, size and bounds), which are read from the simulator when a run "
                "is made"
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
            ConfigError: a file or folder that the simulator needs is not there.
        """
        needs = get_requirements(config.simulator)
        for text in needs.missing_assets(config.kwargs):
            raise ConfigError(text)
        if needs.batched and config.double_buffer > 1:
            raise ConfigError(
                f"task.double_buffer: {config.double_buffer}, but {config.simulator} steps all environments "
                "together; set 1"
            )
        several = len(task_ids(config))
        if needs.batched and (several > 1 or config.ignore_terminations):
            key = "id" if several > 1 else "ignore_terminations"
            raise ConfigError(
                f"task.{key}: {config.simulator} steps all environments together, of one task, whose "
                f"ends are its own; {'name one' if several > 1 else 'set it to false'}"
            )
        if config.append_task_one_hot and several == 1:
            raise ConfigError("task.append_task_one_hot: there is one task; set it to false")
        if several > 1 and not (config.append_task_one_hot or config.instruction or config.images):
            raise ConfigError(
                f"task.append_task_one_hot: there are {several} tasks, and nothing says to the policy which "
                f"one it is in; set it to true, and task.observation to {several} more"
            )
        if needs.single and (config.num_processes > 1 or config.double_buffer > 1 or config.video):
            key = "video" if config.video else "halves" if config.double_buffer > 1 else "processes"
            raise ConfigError(
                f"task.{key}: {config.simulator} has one world at a time; leave it out"
            )
        if config.carry_over_episodes and not needs.saves:
            raise ConfigError(NO_STATE_MESSAGE)
        return TaskSize()

    @classmethod
    def has_deterministic_reset(cls, config: GymConfig) -> bool:
        return not get_requirements(config.simulator).unseeded

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
        for text in cls.spec_mismatches(config, cls.read_spec(config)):
            raise ConfigError(text)
        if config.carry_over_episodes:
            with contextlib.closing(create_simulator_process(config)) as process:
                process.reset([0], [0])
                try:
                    states, errors = process.save([0])
                    errors = errors or process.restore([0], states)[1]
                except InputError as error:
                    raise ConfigError(str(error)) from None
                for said in errors.values():
                    raise ConfigError(
                        f"task.carry_over_episodes: {exception_line(said)}; set it to false"
                    )

    @classmethod
    def spec_mismatches(cls, config: GymConfig, found: ModelSpec) -> list[str]:
        """Of each key that is not what :meth:`measured` found, what to set it to."""
        wrong: list[tuple[str, Any]] = []
        if config.observation != found["observation"]:
            wrong.append(("observation", config.observation))
        if config.action is None or not _agree(config.action, ActionConfig(**found["action"])):
            wrong.append(("action", None if config.action is None else config.action.spec))
        return [
            f"task.{name}: {said} is not what {config.id} has; set it to "
            f"{json.dumps(found[name])}, or leave it out to have it read from the simulator"
            for name, said in wrong
        ]

    @classmethod
    def infer_config(cls, config: GymConfig, *, check_given: bool) -> ModelSpec:
        needs = get_requirements(config.simulator)
        action = config.action
        bounded = action is not None and (action.kind == "discrete" or action.bounds is not None)
        lacking = [] if config.observation else ["task.observation"]
        lacking += [] if action else ["task.action"]
        lacking += [] if bounded or not action else ["task.action.low", "task.action.high"]
        # Of what is given, only what can be built anywhere is compared: a robot stands still.
        anywhere = not (needs.gpu or needs.single or needs.batched)
        if not lacking and not (check_given and anywhere):
            return {}
        if lacking and needs.single:
            raise ConfigError(
                f"{lacking[0]}: is not set, and {config.simulator} is not connected to before a run "
                f"is made; set {', '.join(lacking)}"
            )
        try:
            found = cls.read_spec(config)
        except SimulatorError as error:
            if lacking:
                raise ConfigError(
                    f"{lacking[0]}: is not set, and the simulator cannot be built here to read it "
                    f"({exception_line(str(error))}); set {', '.join(lacking)}"
                ) from None
            log.warning("task: the simulator cannot be built here: %s", exception_line(str(error)))
            return {}
        except InputError as error:
            if lacking:
                raise ConfigError(f"{error}; or set {', '.join(lacking)}") from None
            # Stages may run where there is what this machine lacks.
            if isinstance(error, MissingPackageError) or str(error).startswith("task.renderer"):
                return {}
            raise
        given = ActionConfig(**found["action"]) if action is None else action
        seen = found["observation"] if config.observation is None else config.observation
        whole = config.model_copy(update={"observation": seen, "action": given})
        for text in cls.spec_mismatches(whole, found):
            raise ConfigError(text)
        more = {} if config.observation else {"observation": found["observation"]}
        return more if bounded else {**more, "action": found["action"]}

    @classmethod
    def read_spec(cls, config: GymConfig) -> ModelSpec:
        """What :meth:`describe` should say, by building a simulator.

        Raises:
            ConfigError: the environment is unknown, or its spaces are of another kind.
        """
        found = create_simulator_process(config) if _apart(config) else _here(config)
        try:
            with _naming_users_code(config), contextlib.closing(found):
                spaces = found.spaces()
        except InputError as error:
            if type(error) is not InputError:
                raise
            raise ConfigError(str(error)) from None
        seen, act = spaces["observation"], spaces["action"]
        if config.instruction is True and spaces["instruction"] is None:
            raise ConfigError(
                f"task.instruction: {config.id} asks for nothing in words; write what policies are "
                "to be told, or set it to false"
            )
        if seen["kind"] != "dict":
            seen = {"parts": {STATE: seen}, **seen}
        state = seen["parts"].get(STATE)
        if state is None or state["kind"] != "box" or len(state["shape"]) != 1:
            raise ConfigError(f"task.id: {config.id} has no vector observations ({seen['text']})")
        if act["kind"] == "discrete":
            action = {"kind": "discrete", "size": act["size"]}
        elif (
            act["kind"] == "box"
            and len(act["shape"]) == 1
            and np.dtype(act["dtype"]).kind in NUMERIC_KINDS
        ):
            bounds = {name: act[name] for name in ("low", "high", "dtype")}
            action = {"kind": "box", "size": act["shape"][0], **bounds}
        else:
            raise ConfigError(
                f"task.id: {config.id} has actions {act['text']}, which no policy here takes"
            )
        return {"observation": state["shape"][0], "action": action}

    def simulate(
        self, episodes: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Record]:
        """One request per time step, of all environments of a part still running.

        Trajectories have all columns of the replies and ``observations`` ``[T, D]``, ``rewards``,
        ``terminated``, ``truncated``, and what was seen after each cut as context
        (:mod:`rlinf.data.transitions`). Where the policy gives ``values``, ``bootstrap`` is the
        value of the state after a step at which an episode was cut off, 0 at all others.
        """
        samples = episodes.sample_ids()

        def put(request: Record) -> None:
            observations.put(request)

        single = get_requirements(self.config.simulator).single
        records, raised = [], list[str]()
        try:
            each = 1 if single else self.config.max_parallel_envs or len(samples) or 1
            for first in range(0, len(samples), each):
                parts = self._parts(episodes, samples[first : first + each], raised)
                with _naming_users_code(self.config):
                    records += run_interleaved(parts, put, actions.get)
        except BaseException as error:
            # What processes were about to say belongs to this attempt, not to the next one.
            self.close()
            if isinstance(error, InvalidEnvConfig):
                raise InputError(str(error)) from None
            raise
        held_out = episodes.split == "test"
        if held_out or episodes.group_size > 1:
            check_not_all_failed(records, raised, held_out=held_out)
        if single:
            # The next stage may be another process, and there is one robot for all.
            self.close()
        observations.close()
        ids = task_ids(self.config)
        for record in records if len(ids) > 1 else ():
            turn = episodes.task_indices(np.array(int(record.info["group"])))
            record.info["task"] = ids[int(turn) % len(ids)]
        yield from records

    @property
    def pids(self) -> list[int]:
        """Of the simulator processes that run."""
        own = self._worlds.pids if isinstance(self._worlds, MultiProcessVectorEnv) else []
        return [*own, *self._filming.pids]

    def _parts(
        self, episodes: RolloutRequest, samples: np.ndarray, raised: list[str]
    ) -> list[EpisodeLoop]:
        """The time loops of ``samples``: one or two, and one of those that are filmed."""
        filmed = samples < (episodes.num_videos if self.config.video else 0)
        rest = samples[~filmed]
        each = -(-len(rest) // self.config.double_buffer) or 1
        action = self.config.action
        box = None if action is None else action.bounds
        told = (self.config.instruction, self._measure, box, raised)
        parts = [
            run_episodes(episodes, rest[first : first + each], self._worlds, first, (), *told)
            for first in range(0, len(rest), each)
        ]
        if filmed.any():
            film = self.config.video
            parts.append(run_episodes(episodes, samples[filmed], self._filming, 0, film, *told))
        return parts

    @property
    def _measure(self) -> str:
        """Which one is an episode's score."""
        return "success_once" if self.config.score_by_success else "return"

    @classmethod
    def check_demonstrations(cls, config: GymConfig) -> None:
        if not config.demonstrations:
            raise ConfigError(
                "warm_start.max_steps: there is nothing to learn from; set task.demonstrations to "
                "a number of episodes by the simulator's own expert, or warm_start.max_steps to 0"
            )

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """Whole episodes: ``observations``, pictures, instruction, ``actions`` and ``rewards`` of
        every step; those of a step are drawn by (seed, step).

        Raises:
            ConfigError: the simulator has no expert, or it solves nothing.
        """
        if self.config.demonstrations and not self._shown:
            own = self._worlds if isinstance(self._worlds, SyncVectorEnv) else None
            worlds = own or create_simulator_process(self.config)
            try:
                with _naming_users_code(self.config):
                    self._shown = collect_demonstrations(
                        worlds, seed, self.config.demonstrations, self.config.instruction
                    )
            finally:
                if own is None:
                    worlds.close()
        if not self._shown:
            return []
        random = generator(seed, "demonstrations", step)
        chosen = random.choice(len(self._shown), count, replace=count > len(self._shown))
        return [
            Record(RecordId(step, number), self._shown[int(episode)].steps)
            for number, episode in enumerate(chosen)
        ]

    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        """Of the episodes that a trajectory completed (of the open one, if none) the mean return,
        or the share that had success; NaN where the simulator failed in all of them."""
        counts["failed_episodes"] += sum(
            int(trajectory.info["failed"]) for trajectory in trajectories
        )
        for name in COUNTED_STEP_INFO:
            told = [t.steps[name] for t in trajectories if name in t.steps]
            if told:
                counts[f"{name}_steps"] += sum(int(np.count_nonzero(steps)) for steps in told)
        return [
            float(t.info[self._measure]) if t.info.get("scored", True) else float("nan")
            for t in trajectories
        ]

    def episode_metrics(self, trajectories: Sequence[Record]) -> dict[str, float]:
        scored = [t.info for t in trajectories if t.info.get("scored", True)]
        names = (
            *EPISODE_METRICS[:2],
            *(EPISODE_METRICS[2:] if self.config.score_by_success else ()),
        )
        return {name: float(np.mean([info[name] for info in scored])) for name in names if scored}

    def close(self) -> None:
        self._worlds.close()
        self._filming.close()


def task_ids(config: GymConfig) -> list[str]:
    """The tasks of a run: one, or several that starts are shared out among."""
    if isinstance(config.id, list):
        return config.id
    return list(get_requirements(config.simulator).sets.get(config.id, (config.id,)))


def create_simulator_process(config: GymConfig) -> SubprocessVectorEnv:
    """One that steps worlds of a configuration."""
    python = None if config.python is None else resolve_interpreter(config.python, "task.python")
    return SubprocessVectorEnv(
        _target(config),
        _values(config),
        python,
        config.timeout_s,
        _shown(config),
        config.renderer,
        CLOSE_TIMEOUT_S if get_requirements(config.simulator).single else 0.0,
        config.ignore_terminations,
        user_modules(config),
    )


def _here(config: GymConfig) -> SyncVectorEnv:
    """Worlds in this process."""
    once, endless = get_requirements(config.simulator).single, config.ignore_terminations
    own = user_modules(config)
    return SyncVectorEnv(
        functools.partial(create_local_env, config), once=once, endless=endless, own=own
    )


@contextlib.contextmanager
def _naming_users_code(config: GymConfig) -> Iterator[None]:
    """Raise what the user's simulator raises in this process as a process of its own does."""
    try:
        yield
    except (RlinfError, InvalidEnvConfig):
        raise
    except Exception as error:
        text = format_error(error, user_modules(config))
        if USER_CODE_PREFIX not in text:
            raise
        raise SimulatorCodeError(text) from None


def user_modules(config: GymConfig) -> tuple[str, ...]:
    """Return the modules of the user that a configuration names: in ``task.simulator``, and where that
    is ``gymnasium`` before the colon of ``task.id``."""
    if config.simulator not in simulators.names():
        return (_target(config).rpartition(":")[0],)
    ids = task_ids(config) if config.simulator == "gymnasium" else []
    return tuple({id.partition(":")[0] for id in ids if ":" in id})


def _apart(config: GymConfig) -> bool:
    """Whether it cannot be stepped in the stage's own process."""
    return (
        config.python is not None
        or bool(config.images)
        or get_requirements(config.simulator).batched
    )


def create_local_env(config: GymConfig) -> Any:
    """One world in this process.

    Raises:
        MissingPackageError: Gymnasium is not installed.
        ConfigError: the simulator is not installed, does not know it, or cannot make it so.
    """
    if config.simulator == "gymnasium" and importlib.util.find_spec("gymnasium") is None:
        raise MissingPackageError("gymnasium", "sims", "task.name: gym")
    try:
        make = resolve_factory(_target(config))
        if module_flag(make, "BATCHED"):
            raise ConfigError(
                f"task.num_processes: {config.num_processes}, but {config.simulator} steps many environments "
                "in a process of its own; set 1"
            )
        return create_task_env(make, _values(config), _shown(config))
    except InvalidEnvConfig as error:
        raise ConfigError(str(error)) from None


def _shown(config: GymConfig) -> ObservationSelection:
    return ObservationSelection(
        dict(config.images), config.ignore_observations, tuple(config.video)
    )


def _agree(said: ActionConfig, found: ActionConfig) -> bool:
    """Whether a configured action is that of a simulator, in all that is given of it."""
    if (said.kind, said.size) != (found.kind, found.size):
        return False
    if said.dtype not in (None, found.dtype):
        return False
    pairs = zip(said.bounds or (), found.bounds or (), strict=False)
    return all(np.allclose(ours, theirs, rtol=1e-6, atol=1e-9) for ours, theirs in pairs)


def _target(config: GymConfig) -> str:
    """What makes a world, as a process of another interpreter finds it: ours by its file."""
    target = simulators.target(config.simulator, "task.simulator")
    module, _, name = target.partition(":")
    if config.simulator not in simulators.names():
        return target
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return f"{spec.origin}:{name}"


def _values(config: GymConfig) -> dict[str, Any]:
    ids = task_ids(config)
    if len(ids) == 1:
        return {"id": ids[0], "kwargs": config.kwargs}
    return {"id": ids, "kwargs": config.kwargs, "one_hot": config.append_task_one_hot}


if __name__ == "__main__":
    for name, value in GymEnvironment.read_spec(GymConfig(id=sys.argv[1])).items():
        sys.stdout.write(f"task.{name}: {json.dumps(value)}\n")
