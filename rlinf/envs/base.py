"""The environment interface.

A rollout has two sides, the environment and the engine, connected by a channel in each direction.
The environment sends observations and receives actions; the engine receives observations and sends
actions. Neither side knows the other. A language task is an environment with one-step episodes. A
simulator exchanges one record per time step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rlinf.channels.channel import Channel
from rlinf.config import Section
from rlinf.data.record import Record, Scalar
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, InputError, require_package
from rlinf.registry import (
    DEMONSTRATIONS,
    EVAL_DEMONSTRATIONS,
    SAMPLE_GROUPS,
    Component,
    RunComponents,
)

if TYPE_CHECKING:
    # A simulator process loads no torch.
    from rlinf.models.base import ModelSpec

UNFINISHED = "unfinished"
"""Stop reason of a sample that another engine continues."""


@dataclass(frozen=True)
class RolloutRequest:
    """A request for trajectories. A sample's id fixes its initial state and its random numbers."""

    seed: int
    iteration: int
    split: Literal["train", "test"]
    group_ids: Sequence[int]
    """Ids of the groups (prompts or initial states) of the batch that this worker collects."""
    num_groups: int
    """Number of groups that all workers together may collect in this iteration."""
    group_size: int
    """Samples per group; group ``g`` has the sample ids ``g * group_size + k``."""
    horizon: int
    """Maximum number of steps (tokens or actions) of a sample."""
    temperature: float
    partial_samples: Mapping[int, Trajectory] | None = None
    """Samples that another engine started, with their tokens so far. If set, only these are
    collected."""
    open_episodes: Mapping[int, Record] | None = None
    """Unfinished episodes of the last iteration, by sample (:mod:`rlinf.data.episodes`). Other
    samples start new episodes, and episodes that are unfinished at the end are saved. None: all
    samples start new episodes, and no episode is saved."""
    groups_per_batch: int | None = None
    """Groups per batch, if an iteration may draw several batches; None: ``num_groups``."""
    num_videos: int = 0
    """Samples with an id below this number record :meth:`Environment.video_columns`."""
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    """Further sampling settings: fields of :class:`rlinf.engines.token_sampling.SamplingParams`."""

    @property
    def request_info(self) -> dict[str, Scalar]:
        """Return the sampling settings, for the ``info`` of requests."""
        return {"horizon": self.horizon, "temperature": self.temperature, **self.sampling}

    def group_ordinals(self, groups: np.ndarray) -> np.ndarray:
        """Return the running number of each group: its remainder modulo the number of tasks is the
        index of the group's task. In training, numbers continue from iteration to iteration, so
        that each task has an equal share even if a batch has fewer groups than there are tasks. In
        evaluation, and if episodes continue over iterations, a group keeps its task."""
        if self.split == "test" or self.open_episodes is not None:
            return groups
        return self.iteration * (self.groups_per_batch or self.num_groups) + groups

    def sample_ids(self) -> np.ndarray:
        """Return the ids of all samples to collect, int64."""
        groups = np.asarray(self.group_ids, dtype=np.int64)[:, None]
        samples = (groups * self.group_size + np.arange(self.group_size)).ravel()
        return (
            samples
            if self.partial_samples is None
            else samples[np.isin(samples, list(self.partial_samples))]
        )


@dataclass(frozen=True)
class ProblemSetSize:
    """The size of a set of problems, as far as it was measured before the run."""

    key: str
    """Configuration key that names the set."""
    num_problems: int
    share: float | None
    """Share of the training problems that are drawn from this set; None: test problems."""
    num_measured: int
    """Number of problems whose prompts were measured, from the first on."""
    num_too_long: int
    """Number of them that are left out, because their prompts are too long."""
    longest_prompt: int
    """Number of tokens of the longest of the other prompts."""


@dataclass(frozen=True)
class TaskSize:
    """The size of a task; None: unlimited."""

    train: int | None = None
    """Number of distinct training groups."""
    test: int | None = None
    """Number of distinct test groups."""
    max_prompt_tokens: int = 0
    """Upper bound of the number of tokens of a prompt; 0: unknown, or there are no prompts."""
    problem_sets: tuple[ProblemSetSize, ...] = ()
    """The sets of problems, training sets first; empty: the task has none."""


def score_trajectories(
    environment: Environment, trajectories: Sequence[Trajectory], counts: Counter[str]
) -> list[float]:
    """Return the task's score of each trajectory; NaN if a trajectory could not be scored.

    Args:
        counts: as for :meth:`Environment.score`.

    Raises:
        InputError: :meth:`Environment.score` returned a wrong number of scores, or values that are
            not numbers.
    """
    scores = environment.score(trajectories, counts)
    name = f"task: {type(environment).__name__}.score"
    try:
        numbers = np.asarray(scores)
    except ValueError:  # lists of different lengths
        numbers = np.asarray("")
    if numbers.size and numbers.dtype.kind not in "biuf":
        raise InputError(f"{name} returned {scores!r:.60}; it must return a list of numbers")
    if numbers.shape != (len(trajectories),):
        raise InputError(
            f"{name} returned scores of shape {list(numbers.shape)} for {len(trajectories)} "
            "trajectories; it must return one number for each"
        )
    return [float(number) for number in numbers]


class Environment(Component, ABC):
    """The environment that a policy acts in."""

    Config: ClassVar[type[Section]] = Section
    supports_resume: ClassVar[bool] = False
    """Whether :meth:`simulate` continues samples that another engine started."""

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        _check_demonstrations(run)
        _check_groups(run, has_equal_starts=cls.has_deterministic_reset(options))
        config, num_tasks = run.config, cls.num_tasks(options)
        if config.evaluate.samples % num_tasks:
            nearest = max(config.evaluate.samples // num_tasks, 1) * num_tasks
            raise ConfigError(
                f"evaluate.samples: {config.evaluate.samples} cannot be divided equally among "
                f"{num_tasks} tasks; set it to {nearest}"
            )
        if config.evaluate.videos:
            if not cls.video_columns(options):
                raise ConfigError(
                    f"evaluate.videos: task {config.task.name!r} has no cameras; set task.video "
                    "({CAMERA: [HEIGHT, WIDTH]}), or evaluate.videos=0"
                )
            require_package("av", "video", "evaluate.videos")

    @abstractmethod
    def __init__(self, config: Any, processor: Any) -> None:
        """Create the environment. ``processor`` is the policy's tokenizer or processor, or None."""

    @classmethod
    @abstractmethod
    def model_spec(cls, config: Any) -> ModelSpec:
        """Return what a policy needs to know to be created for this environment.

        It follows from the configuration and data files alone, because the machine that starts a
        run may be unable to build a simulator.

        Raises:
            DataError: a data file of the task is missing, empty or malformed.
        """

    @classmethod
    def infer_config(cls, config: Any, *, check_given: bool) -> ModelSpec:
        """Return keys of the task that the configuration does not set and the environment can
        determine, such as the sizes of observations and actions. They are stored in the run's
        configuration.

        Called before a run is created, on the machine that creates it.

        Args:
            check_given: also check the keys that are set, if this machine can.

        Raises:
            ConfigError: a key is wrong, or this machine cannot determine it.
        """
        return {}

    @classmethod
    def train_test_overlap(cls, config: Any) -> tuple[int, int]:
        """Return the number of test problems that are also training problems, and the number of
        test problems; ``(0, 0)`` for a task without a list of problems.

        Raises:
            DataError: a file is missing, empty or malformed.
        """
        return 0, 0

    @classmethod
    def verify_spec(cls, config: Any) -> None:
        """Check that :meth:`model_spec` is right. Stages call it on their machines before they use
        the spec.

        Raises:
            ConfigError: the spec is wrong, or the simulator cannot be built.
        """

    @classmethod
    def required_modules(cls, config: Any) -> tuple[str, ...]:
        """Return the modules that the interpreter of ``task.python`` must be able to import."""
        return ()

    @classmethod
    def max_step_bytes(cls, config: Any) -> int:
        """Return an estimate of the bytes of one step in the largest trajectory column, from the
        configuration alone.

        If it is at least :data:`rlinf.data.record.LARGE_ROW_BYTES`, trajectories are read from
        files: each process reads only the steps that it computes with, unless the plan says
        otherwise.
        """
        return 0

    @classmethod
    def has_deterministic_reset(cls, config: Any) -> bool:
        """Return whether all samples of a group begin in the same state. Called before a run with
        groups."""
        return True

    def num_eval_samples(self, requested: int) -> int:
        """Return the number of held-out samples, if ``evaluate.samples`` is ``requested``."""
        return requested

    def evaluation_info(self, trajectory: Trajectory) -> Mapping[str, Scalar]:
        """Return further fields for ``extra`` of a scored held-out trajectory; none by default."""
        return {}

    def sample_weights(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the weight of each held-out sample in the mean score; equal by default."""
        return [1.0] * len(trajectories)

    @classmethod
    def num_tasks(cls, config: Any) -> int:
        """Return the number of tasks. Groups are assigned to them in rotation, also in
        evaluation."""
        return 1

    @classmethod
    def video_columns(cls, config: Any) -> tuple[str, ...]:
        """Return the image columns of trajectories that record videos (``evaluate.videos``)."""
        return ()

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int | None:
        """Return the largest number of tokens of prompt and response together; None: unknown.

        Args:
            horizon: maximum number of tokens of a response, of training or evaluation.
        """
        return None

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        """Return the size of the task, after a check of all problems. Called before a run begins.

        Args:
            processor: as for the constructor; None if the policy has not been created.

        Raises:
            DataError: a problem cannot be used.
        """
        return TaskSize()

    @abstractmethod
    def simulate(
        self, request: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Trajectory]:
        """Collect trajectories: yield one per sample, as soon as it is complete.

        Every trajectory has ``actions`` and ``logprobs`` (of the behaviour policy), ``group``,
        ``policy_version`` and ``stop_reason``. It has ``versions`` if weights may change during a
        sample, and ``mask`` if some steps are masked (see :mod:`rlinf.data.trajectory`). The
        environment closes ``observations`` after the last request. With :attr:`supports_resume`, a
        sample that the engine aborts has the stop reason :data:`UNFINISHED`; another call continues
        it from ``request.partial_samples``.
        """

    @abstractmethod
    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        """Return the task's own score of each finished trajectory, which evaluation averages. NaN
        marks a trajectory that could not be scored; evaluation leaves it out.

        Args:
            counts: is increased by the number of failures of each kind, such as time-outs; each
                kind is a metric of the stage.
        """

    def episode_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return means over trajectories that become metrics of a stage in addition to the score;
        none by default."""
        return {}

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return ``count`` expert trajectories for update ``step`` of SFT; none by default."""
        return []

    def test_demonstrations(self, count: int) -> list[Trajectory]:
        """Return the first ``count`` expert trajectories of the test split, or as many as there
        are.

        For tasks that provide :data:`rlinf.registry.EVAL_DEMONSTRATIONS`.
        """
        return []

    def close(self) -> None:
        """Release simulators and worker processes."""


def demonstration_keys(run: RunComponents) -> list[str]:
    """Return the keys that are set and need demonstrations for training."""
    coefficient = getattr(run.options["algorithm"], "sft_loss_coef", 0)
    keys = {"sft.max_steps": run.config.sft.max_steps, "algorithm.sft_loss_coef": coefficient}
    return [key for key, value in keys.items() if value]


def _check_demonstrations(run: RunComponents) -> None:
    """Check that the task has demonstrations, and the policy a loss of them, if they are needed."""
    task, model = run.config.task.name, run.config.model.name
    needed = dict.fromkeys(demonstration_keys(run), DEMONSTRATIONS)
    if run.config.sft.eval_samples:
        needed["sft.eval_samples"] = EVAL_DEMONSTRATIONS
    for key, capability in needed.items():
        if capability not in run.provided:
            raise ConfigError(f"{key}: task {task!r} has no {capability}; set it to 0")
        if run.config.sft.demonstration_steps and not run.classes["model"].has_independent_steps:
            raise ConfigError(
                f"sft.demonstration_steps: the steps of model {model!r} depend on earlier ones; "
                "leave it out"
            )
        if not run.classes["model"].has_sft_loss:
            raise ConfigError(f"{key}: model {model!r} has no loss of demonstrations; set it to 0")


def _check_groups(run: RunComponents, *, has_equal_starts: bool) -> None:
    """Check that the samples of a group start in the same state, so that they can be compared."""
    group_size = run.config.rollout.group_size
    if group_size > 1 and not has_equal_starts:
        needs_groups = SAMPLE_GROUPS in run.classes["algorithm"].requires
        raise ConfigError(
            f"rollout.group_size: {group_size}, but the samples of a group would start in "
            "different states and could not be compared: in this simulator a seed does not "
            "determine the initial state; set rollout.group_size=1"
            + ("; algorithm=ppo needs no groups" if needs_groups else "")
        )
