"""Several sets of problems, each with a protocol of its own: how it is asked, sampled and graded.
The score is the mean over the sets.

For evaluation only. A sample is one attempt at one problem. Samples of different sets are mixed, so
that every process of the stage gets a share of each set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from rlinf.config import NamedComponent, SamplingSection, Section
from rlinf.data.record import Scalar
from rlinf.data.trajectory import Trajectory
from rlinf.envs import environments
from rlinf.envs.base import RolloutRequest, TaskSize
from rlinf.envs.problem_set import ProblemSetEnvironment
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import ModelSpec
from rlinf.registry import PROMPTS, REFERENCE_ANSWERS


class SuiteSet(Section):
    """One set of problems and its protocol."""

    task: NamedComponent
    """A task with a fixed set of problems, such as ``jsonl`` or ``multiple_choice``. Its test
    problems are asked."""
    max_problems: int | None = Field(default=None, gt=0)
    """Ask only the first problems; None: all."""
    samples_per_problem: int = Field(default=1, gt=0)
    """Number of attempts at each problem."""
    horizon: int = Field(gt=0)
    """Maximum number of tokens of a response. A longer response is truncated."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    sampling: SamplingSection = SamplingSection()
    """Other sampling settings."""

    @model_validator(mode="after")
    def _check_temperature(self) -> SuiteSet:
        if self.samples_per_problem > 1 and self.temperature == 0:
            raise ValueError(
                "temperature 0 makes all samples of a problem equal; set temperature above 0, or "
                "samples_per_problem=1"
            )
        return self

    def sampling_settings(self) -> dict[str, Scalar]:
        """Return the sampling settings as requests carry them."""
        settings = self.sampling.non_default_settings()
        return {"horizon": self.horizon, "temperature": self.temperature, **settings}


class SuiteConfig(Section):
    """The sets of problems."""

    sets: dict[str, SuiteSet]
    """The sets by name."""

    @field_validator("sets")
    @classmethod
    def _check_sets(cls, value: dict[str, SuiteSet]) -> dict[str, SuiteSet]:
        if not value:
            raise ValueError("name at least one set of problems")
        return value


@dataclass(frozen=True)
class Attempt:
    """One sample of the suite."""

    set_name: str
    problem: int
    """Index of the problem in its set."""
    number: int
    """Index of the attempt at this problem."""


class SuiteEnvironment(PromptEnvironment):
    """Problems of several sets. Metrics and trajectories have the name of the set as their task."""

    Config = SuiteConfig
    config: SuiteConfig
    provides = frozenset({PROMPTS, REFERENCE_ANSWERS})
    uses_chat_template = True
    KEY: ClassVar[str] = "task.sets"
    """Key of the sets in the configuration, for error messages."""

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._sets: dict[str, ProblemSetEnvironment] = {}
        for name, settings in self.config.sets.items():
            key = f"{self.KEY}.{name}"
            cls, options = set_class(key, settings)
            self._sets[name] = environment = _create_set(key, cls, options, processor)
            num_problems, total = (
                environment.num_problems("test"),
                len(cls.load_problems(options, "test")),
            )
            if num_problems < total:
                raise DataError(
                    f"{key}: the prompts of {total - num_problems} of {total} problems "
                    f"are longer than max_prompt_length={options.max_prompt_length}, so they would "
                    f"be left out; raise {key}.task.max_prompt_length"
                )

    @classmethod
    def model_spec(cls, config: SuiteConfig) -> ModelSpec:
        spec: ModelSpec = {}
        for name, settings in config.sets.items():
            set_cls, options = set_class(f"{cls.KEY}.{name}", settings)
            spec = {**spec, **set_cls.model_spec(options)}
        return spec

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        environment = cls(config, processor)
        horizons = {name: settings.horizon for name, settings in environment.config.sets.items()}
        prompts = environment.longest_prompts
        longest = max(prompts[name] + horizon for name, horizon in horizons.items())
        # With the longest response of all sets, this is the length of the longest sample. The
        # longest prompt may belong to a set with shorter responses.
        return TaskSize(0, len(environment.attempts), longest - max(horizons.values()))

    @property
    def longest_prompts(self) -> dict[str, int]:
        """Number of tokens of the longest prompt of each set."""
        return {name: environment.longest_prompt for name, environment in self._sets.items()}

    def check_lengths(self, positions: int | None, key: str | None = None) -> None:
        """Check that prompts and responses of each set fit the model.

        Args:
            positions: maximum number of tokens of the model; None if unlimited.
            key: key of the sets in messages; by default :attr:`KEY`.

        Raises:
            ConfigError: those of a set do not fit.
        """
        prefix = self.KEY if key is None else key
        for name, longest in self.longest_prompts.items():
            horizon = self.config.sets[name].horizon
            if positions is not None and longest + horizon > positions:
                set_key = f"{prefix}.{name}" if prefix else name
                raise ConfigError(
                    f"{set_key}.horizon: prompts of up to {longest} tokens and {horizon} new ones "
                    f"do not fit into the {positions} positions of the model; set "
                    f"{set_key}.horizon={max(1, positions - longest)} or less"
                )

    def num_eval_samples(self, requested: int) -> int:
        return len(self.attempts)

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int | None:
        contexts = []
        for name, settings in config.sets.items():
            set_cls, options = set_class(f"{cls.KEY}.{name}", settings)
            contexts.append(set_cls.max_context(options, settings.horizon))
        return max(context for context in contexts if context is not None)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, in the order of their sample numbers."""
        placed = []
        for name, environment in self._sets.items():
            settings = self.config.sets[name]
            num_problems = min(environment.num_problems("test"), settings.max_problems or 1 << 62)
            size = settings.samples_per_problem
            # Each set is spread evenly over the sample numbers, and so over the processes.
            placed += [
                ((i + 0.5) / (num_problems * size), Attempt(name, *divmod(i, size)))
                for i in range(num_problems * size)
            ]
        placed.sort(key=lambda pair: pair[0])
        return [attempt for _, attempt in placed]

    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        attempts = [self.attempts[group] for group in request.group_ids]
        prompts: dict[int, Prompt] = {}
        for name, environment in self._sets.items():
            rows = [row for row, attempt in enumerate(attempts) if attempt.set_name == name]
            problems = [attempts[row].problem for row in rows]
            set_request = replace(request, split="test", group_ids=problems)
            sampling = self.config.sets[name].sampling_settings()
            for row, prompt in zip(rows, environment.prompts(set_request), strict=True):
                info: dict[str, Scalar] = {
                    "task": name,
                    "problem": attempts[row].problem,
                    "attempt": attempts[row].number,
                    # As one text, because all records of a channel have the same fields.
                    "problem_info": json.dumps(dict(prompt.info)),
                }
                prompts[row] = replace(prompt, info=info, sampling=sampling)
        return [prompts[row] for row in range(len(attempts))]

    def sample_weights(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the weights of samples in the mean score: the sets have equal weights."""
        sizes = Counter(attempt.set_name for attempt in self.attempts)
        return [1 / sizes[str(trajectory.task)] for trajectory in trajectories]

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        scores = [0.0] * len(trajectories)
        for name, environment in self._sets.items():
            rows = [row for row, t in enumerate(trajectories) if t.task == name]
            set_counts = Counter[str]()
            own = [_without_suite(trajectories[row]) for row in rows]
            for row, score in zip(rows, environment.score(own, set_counts), strict=True):
                # A truncated response is wrong, even if an answer stands in it.
                scores[row] = 0.0 if trajectories[row].stop_reason == "length" else score
            counts.update({f"{name}/{count}": number for count, number in set_counts.items()})
        return scores

    def final_answer(self, trajectory: Trajectory) -> str | None:
        """Return the normalised final answer of a response; see :class:`ProblemSetEnvironment`."""
        return self._sets[str(trajectory.task)].final_answer(_without_suite(trajectory))

    def close(self) -> None:
        for environment in self._sets.values():
            environment.close()


class EvaluationSuite(SuiteEnvironment):
    """The sets on which a run that trains is evaluated (``evaluate.sets``)."""

    KEY = "evaluate.sets"


def set_class(key: str, settings: SuiteSet) -> tuple[type[ProblemSetEnvironment], Any]:
    """Return the class of a set's task, and its validated options.

    Args:
        key: key of the set in the configuration.

    Raises:
        ConfigError: there is no such task, it has no fixed set of problems, or an option is wrong.
    """
    task_key = f"{key}.task"
    cls = environments.get(settings.task.name, f"{task_key}.name")
    if not issubclass(cls, ProblemSetEnvironment):
        raise ConfigError(
            f"{task_key}.name: {settings.task.name!r} has no fixed set of problems; use jsonl, "
            "multiple_choice, reasoning_gym, or a subclass of ProblemSetEnvironment"
        )
    return cls, settings.task.validate_options(cls.Config, task_key)


def _create_set(
    key: str, cls: type[ProblemSetEnvironment], options: Any, processor: Any
) -> ProblemSetEnvironment:
    try:
        return cls(options, processor)
    except DataError as error:
        raise DataError(f"{key}: {error}") from None


def _without_suite(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory as the task of its set has it."""
    return replace(trajectory, extra=json.loads(str(trajectory.extra["problem_info"])))
