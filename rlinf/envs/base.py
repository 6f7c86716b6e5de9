"""The environment interface.

Rollout is two parts with a channel each way: an environment puts observations and takes actions,
an engine takes observations and puts actions. A language task is an environment whose episodes are
one step long; a simulator exchanges one record per time step. Neither side knows the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rlinf.capabilities import Component
from rlinf.channels.channel import Channel
from rlinf.config import Section
from rlinf.data.record import Record, Scalar
from rlinf.errors import InputError

if TYPE_CHECKING:
    # A simulator process loads no torch.
    from rlinf.models.base import ModelSpec

VIDEO_PREFIX = "video."
"""Begins the columns of pictures that no policy sees."""
UNFINISHED = "unfinished"
"""Stop reason of a sample that another engine is to go on with."""


@dataclass(frozen=True)
class RolloutRequest:
    """Which experience to collect. A sample's number fixes its start and its randomness."""

    seed: int
    iteration: int
    split: Literal["train", "test"]
    group_ids: Sequence[int]
    """Numbers of the starts (prompts, environments) this worker does, out of the whole batch."""
    num_groups: int
    """Starts of the whole batch, over all workers."""
    group_size: int
    """Samples per start: sample ``start * group_size + k``."""
    horizon: int
    temperature: float
    partial_samples: Mapping[int, Record] | None = None
    """Of samples that another engine gave up: what there is of them. Only these are done."""
    open_episodes: Mapping[int, Record] | None = None
    """Of samples, the episodes to go on with (:mod:`rlinf.data.episodes`); those of others begin
    anew. What is open at the end is left likewise. None: all begin anew, and nothing is left."""
    groups_per_batch: int | None = None
    """Starts of one batch, where a batch may be drawn several times in an iteration; None: all."""
    num_videos: int = 0
    """Samples below this number are to have the columns of :meth:`Environment.video_columns`."""
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    """Further settings of :class:`rlinf.data.sampling_params.SamplingParams`, as requests carry them."""

    @property
    def request_info(self) -> dict[str, Scalar]:
        """How samples are drawn: for the ``info`` of requests."""
        return {"horizon": self.horizon, "temperature": self.temperature, **self.sampling}

    def task_indices(self, starts: np.ndarray) -> np.ndarray:
        """Running numbers of starts, by which the tasks of a run take turns: in training over all
        iterations, so that each has its share also where a batch has fewer starts than there are
        tasks. Where episodes go on over iterations, a start is of the same task in each."""
        if self.split == "test" or self.open_episodes is not None:
            return starts
        return self.iteration * (self.groups_per_batch or self.num_groups) + starts

    def sample_ids(self) -> np.ndarray:
        """The numbers of all samples to do, int64."""
        starts = np.asarray(self.group_ids, dtype=np.int64)[:, None]
        samples = (starts * self.group_size + np.arange(self.group_size)).ravel()
        return (
            samples
            if self.partial_samples is None
            else samples[np.isin(samples, list(self.partial_samples))]
        )


@dataclass(frozen=True)
class TaskSize:
    """How much there is of a task; None: no end of it."""

    train: int | None = None
    """Starts for training that differ."""
    test: int | None = None
    max_prompt_tokens: int = 0
    """Tokens."""


def score_trajectories(
    environment: Environment, trajectories: Sequence[Record], counts: Counter[str]
) -> list[float]:
    """The task's score of each trajectory, NaN where there is none.

    Raises:
        InputError: :meth:`Environment.score` returned another count, or what are no numbers.
    """
    found = environment.score(trajectories, counts)
    name = f"task: {type(environment).__name__}.score"
    try:
        numbers = np.asarray(found)
    except ValueError:  # lists of unlike lengths
        numbers = np.asarray("")
    if numbers.size and numbers.dtype.kind not in "biuf":
        raise InputError(f"{name} returned {found!r:.60}; it must return a list of numbers")
    if numbers.shape != (len(trajectories),):
        raise InputError(
            f"{name} returned scores of shape {list(numbers.shape)} for {len(trajectories)} "
            "trajectories; it must return one number for each"
        )
    return [float(number) for number in numbers]


class Environment(Component, ABC):
    """What the policy acts in."""

    Config: ClassVar[type[Section]] = Section
    supports_resume: ClassVar[bool] = False
    """Whether :meth:`simulate` goes on with samples that another engine gave up."""

    @abstractmethod
    def __init__(self, config: Any, processor: Any) -> None:
        """``processor`` is what the policy brings to read observations (a tokenizer), or None."""

    @classmethod
    @abstractmethod
    def model_spec(cls, config: Any) -> ModelSpec:
        """What a policy must know to be created for this environment.

        From the configuration and data files alone: the machine that starts a run need not be able
        to build a simulator.

        Raises:
            DataError: a data file of the task is missing, empty or malformed.
        """

    @classmethod
    def infer_config(cls, config: Any, *, check_given: bool) -> ModelSpec:
        """Keys of the task that the configuration leaves open and the environment itself can tell,
        such as sizes of observations and actions; they are frozen with the run. None by default.

        Asked before a run is made, on the machine that makes it.

        Args:
            compare: also see that the keys which are given are right, if that can be done here.

        Raises:
            ConfigError: a key is wrong, or cannot be told here.
        """
        return {}

    @classmethod
    def train_test_overlap(cls, config: Any) -> tuple[int, int]:
        """Return how many held-out problems of the task are training problems too, and how many
        held-out ones there are; ``(0, 0)`` for a task that has no list of problems.

        Raises:
            DataError: a file is missing, empty or malformed.
        """
        return 0, 0

    @classmethod
    def verify_spec(cls, config: Any) -> None:
        """See that :meth:`describe` is right; asked where the run computes, before it makes
        anything of it.

        Raises:
            ConfigError: it is not, or the simulator cannot be built.
        """

    @classmethod
    def required_modules(cls, config: Any) -> tuple[str, ...]:
        """What an interpreter named in ``task.python`` must be able to import."""
        return ()

    @classmethod
    def max_step_bytes(cls, config: Any) -> int:
        """Bytes of one step in the largest column of its trajectories, as far as the configuration
        tells.

        From :data:`rlinf.data.record.LARGE_ROW_BYTES` on trajectories are read from files, of which
        each process takes the steps that it computes with, unless a plan says otherwise.
        """
        return 0

    @classmethod
    def has_deterministic_reset(cls, config: Any) -> bool:
        """Whether the samples of a start begin alike; asked before a run with groups of them."""
        return True

    @classmethod
    def num_tasks(cls, config: Any) -> int:
        """Among how many tasks starts are shared out in turns, held-out ones too."""
        return 1

    @classmethod
    def video_columns(cls, config: Any) -> tuple[str, ...]:
        """Columns of pictures in trajectories that are filmed (``evaluate.videos``); none by
        default."""
        return ()

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        """How much there is of the task, after a look at all of it; asked before a run begins.

        Args:
            processor: as for the constructor; None while the policy has not been created.

        Raises:
            DataError: a problem cannot be asked.
        """
        return TaskSize()

    @abstractmethod
    def simulate(
        self, episodes: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Record]:
        """Collect trajectories: one record per sample, as soon as it is complete.

        Every trajectory has ``steps["actions"]`` and ``steps["logprobs"]`` (behaviour policy), and
        ``info`` with ``group``, ``policy_version`` and ``stop_reason``; ``steps["versions"]`` where
        the weights may change on the way; ``steps["mask"]``, 0 where a step does not count (see
        :mod:`rlinf.data.loss_mask`), where not all do. Closes ``observations`` when no more are
        coming. Where the environment :attr:`resumes`, what an engine gives up has the stop reason
        :data:`UNFINISHED` and is gone on with from ``episodes.begun``.
        """

    @abstractmethod
    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        """The task's own measure of each finished trajectory: what evaluation averages; NaN where
        it could not be taken, which evaluation leaves out.

        Args:
            counts: takes what could not be scored as meant, by kind (time-outs, for instance); a
                metric of the stage each.
        """

    def episode_metrics(self, trajectories: Sequence[Record]) -> dict[str, float]:
        """Means over trajectories that are metrics of a stage beside the score; by default none."""
        return {}

    @classmethod
    def check_demonstrations(cls, config: Any) -> None:
        """See that there are demonstrations, of tasks that offer
        :data:`rlinf.capabilities.DEMONSTRATIONS`; asked before a run with a warm start begins.

        Raises:
            ConfigError: the configuration asks for none.
        """

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """Trajectories of an expert for supervised fine-tuning; none by default."""
        return []

    def test_demonstrations(self, count: int) -> list[Record]:
        """The first ``count`` of what an expert does in the test split, or as many as there are.

        Of tasks that offer :data:`rlinf.capabilities.EVAL_DEMONSTRATIONS`.
        """
        return []

    def close(self) -> None:
        """Release simulators and worker processes."""
