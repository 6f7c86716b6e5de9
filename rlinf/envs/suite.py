"""Several sets of problems, each with a protocol of its own: how it is asked, sampled and graded.
The score is the mean over the sets.

For evaluation only (``evaluate.sets``). A sample is one attempt at one problem. Samples of
different sets are mixed, so that every process of the stage gets a share of each set. A run that
only evaluates has no task of its own; see :class:`NoTask`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlinf.config import EvaluateSection, SuiteSet
from rlinf.data.record import Scalar
from rlinf.data.trajectory import Trajectory
from rlinf.envs import environments
from rlinf.envs.base import RolloutRequest, TaskSize
from rlinf.envs.problem_set import ProblemSetEnvironment
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import ModelSpec
from rlinf.registry import PROMPTS, REFERENCE_ANSWERS, RunComponents


@dataclass(frozen=True)
class Attempt:
    """One sample of the suite."""

    set_name: str
    problem: int
    """Index of the problem in its set."""
    number: int
    """Index of the attempt at this problem."""


SETS_KEY = "evaluate.sets"
"""Key of the sets in the configuration."""
FINAL_ANSWER = "final_answer"
"""Name in ``extra`` of a trajectory of its normalised final answer; empty: it has none."""


class EvaluationSuite(PromptEnvironment):
    """Problems of several sets. Metrics and trajectories have the name of the set as their task."""

    Config = EvaluateSection
    config: EvaluateSection
    provides = frozenset({PROMPTS, REFERENCE_ANSWERS})
    uses_chat_template = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._sets: dict[str, ProblemSetEnvironment] = {}
        for name, settings in self.config.sets.items():
            key = f"{SETS_KEY}.{name}"
            cls, options = set_class(key, settings)
            self._sets[name] = environment = _create_set(key, cls, options, processor)
            num_problems, total = (
                environment.num_test_problems(),
                len(cls.load_problems(options, "test")),
            )
            if num_problems < total:
                raise DataError(
                    f"{key}: the prompts of {total - num_problems} of {total} problems "
                    f"are longer than max_prompt_length={options.max_prompt_length}, so they would "
                    f"be left out; raise {key}.task.max_prompt_length"
                )

    @classmethod
    def model_spec(cls, config: EvaluateSection) -> ModelSpec:
        spec: ModelSpec = {}
        for name, settings in config.sets.items():
            set_cls, options = set_class(f"{SETS_KEY}.{name}", settings)
            spec = {**spec, **set_cls.model_spec(options)}
        return spec

    @property
    def longest_prompts(self) -> dict[str, int]:
        """Number of tokens of the longest prompt of each set."""
        return {name: environment.longest_prompt for name, environment in self._sets.items()}

    def check_lengths(self, positions: int | None) -> None:
        """Check that prompts and responses of each set fit the model.

        Args:
            positions: maximum number of tokens of the model; None if unlimited.

        Raises:
            ConfigError: those of a set do not fit.
        """
        for name, longest in self.longest_prompts.items():
            horizon = self.config.sets[name].horizon
            if positions is not None and longest + horizon > positions:
                key = f"{SETS_KEY}.{name}.horizon"
                raise ConfigError(
                    f"{key}: prompts of up to {longest} tokens and {horizon} new ones do not fit "
                    f"into the {positions} positions of the model; set "
                    f"{key}={max(1, positions - longest)} or less"
                )

    def num_eval_samples(self, requested: int) -> int:
        return len(self.attempts)

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int | None:
        contexts = []
        for name, settings in config.sets.items():
            set_cls, options = set_class(f"{SETS_KEY}.{name}", settings)
            contexts.append(set_cls.max_context(options, settings.horizon))
        return max(context for context in contexts if context is not None)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, in the order of their sample numbers."""
        placed = []
        for name, environment in self._sets.items():
            settings = self.config.sets[name]
            num_problems = min(environment.num_test_problems(), settings.max_problems or 1 << 62)
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

    def evaluation_info(self, trajectory: Trajectory) -> Mapping[str, Scalar]:
        environment = self._sets[str(trajectory.task)]
        return {FINAL_ANSWER: environment.final_answer(_without_suite(trajectory)) or ""}

    def close(self) -> None:
        for environment in self._sets.values():
            environment.close()


class NoTask(PromptEnvironment):
    """The task of a run that only evaluates sets of problems (``evaluate.sets``)."""

    provides = frozenset({PROMPTS, REFERENCE_ANSWERS})

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        config = run.config
        if config.iterations or config.sft.max_steps or not config.evaluate.sets:
            raise ConfigError(
                f"task.name: {config.task.name!r} has no problems, so it is only for the evaluation"
                f" of {SETS_KEY}, with iterations=0 and sft.max_steps=0; choose a task"
            )
        super().check(options, run)

    @classmethod
    def model_spec(cls, config: Any) -> ModelSpec:
        return {}

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        return TaskSize(train=0, test=0)

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int:
        return 0

    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        return []  # check() rejects a run that would request any


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
