"""Procedurally generated problems with their own graders: the datasets of ``reasoning-gym``.

The index of a problem determines it, so every process generates the same problems.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import Field

from rlinf.data.trajectory import Trajectory
from rlinf.envs.chat_problems import ChatProblem
from rlinf.envs.problem_set import ProblemSetConfig, ProblemSetEnvironment, Split
from rlinf.errors import ConfigError, did_you_mean, require_package
from rlinf.models.base import ModelSpec

TRAIN_SEED, TEST_SEED = 0, 1 << 30
"""Seeds of the training and the test problems. The number of a problem is its index plus the
seed."""
EVAL_FUNCTIONS = frozenset({"eval", "exec", "parse_expr", "sympify", "literal_eval", "compile"})
"""Functions that may execute a response, or build objects from it, if a grader calls them."""
HUGE_NUMBER = re.compile(r"[eE][-+]?\d[\d_]{3,}")
"""Matches the exponent of a number with about a thousand digits or more."""


class ReasoningGymConfig(ProblemSetConfig):
    """The dataset and its sizes."""

    dataset: str
    """A dataset of ``reasoning_gym``, such as ``letter_counting``."""
    dataset_kwargs: dict[str, Any] = {}
    """Keys of the dataset's own configuration: sizes and difficulties."""
    train_size: int = Field(default=4096, gt=0, le=TEST_SEED)
    """Number of training problems; those that are also test problems are left out."""
    test_size: int = Field(default=400, gt=0)
    """Number of test problems."""
    allow_eval_graders: bool = False
    """Allow datasets whose graders evaluate the response as an expression, which a model may
    exploit. Graders run in the process of the reward stage."""


class ReasoningGymEnvironment(ProblemSetEnvironment):
    """Problems of one dataset. A response is right if the dataset's grader gives it the full
    score."""

    Config = ReasoningGymConfig
    config: ReasoningGymConfig

    @classmethod
    def model_spec(cls, config: ReasoningGymConfig) -> ModelSpec:
        dataset = load_dataset(config, "train")
        if not config.allow_eval_graders and (name := find_eval_call(type(dataset))):
            raise ConfigError(
                f"task.dataset: the grader of {config.dataset!r} calls {name} on what the model "
                "wrote; set task.allow_eval_graders=true where that may happen, or take another one"
            )
        return {}

    @classmethod
    def load_problems(cls, config: ReasoningGymConfig, split: Split) -> list[ChatProblem]:
        seed = TRAIN_SEED if split == "train" else TEST_SEED
        problems = [
            ChatProblem(
                ({"role": "user", "content": question},),
                answer,
                f"{config.dataset}, {split} problem {index}",
                info={"number": seed + index},
            )
            for index, (question, answer) in enumerate(_entries(*_dataset_key(config, split)))
        ]
        if split == "test":
            return problems
        test_questions = {question for question, _ in _entries(*_dataset_key(config, "test"))}
        training = [p for p in problems if p.messages[0]["content"] not in test_questions]
        if not training:
            raise ConfigError(
                f"task.dataset_kwargs: all problems of {config.dataset!r} for training are also "
                "held out; these settings give too few different ones"
            )
        return training

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        tags, scores = self.reasoning_tags(), []
        for trajectory in trajectories:
            answer = tags.strip_reasoning(str(trajectory.text))
            if answer is None:
                counts["unfinished_thoughts"] += 1
            number = int(trajectory.extra["number"])
            scores.append(0.0 if answer is None else self._grade(answer, number, counts))
        return scores

    def _grade(self, answer: str, number: int, counts: Counter[str]) -> float:
        split: Split = "test" if number >= TEST_SEED else "train"
        dataset = load_dataset(self.config, split)
        entry = dataset[number - (TEST_SEED if split == "test" else TRAIN_SEED)]
        if HUGE_NUMBER.search(answer):
            # Graders that compute such a number would take hours, and cannot be interrupted.
            counts["parse_failures"] += 1
            return 0.0
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                score = float(dataset.score_answer(answer.strip(), entry))
        except Exception:
            # Graders raise anything for an answer that they cannot parse; it counts as wrong.
            counts["parse_failures"] += 1
            return 0.0
        return float(score >= 1)


def load_dataset(config: ReasoningGymConfig, split: Split) -> Any:
    """Return the problems of a split.

    Raises:
        MissingPackageError: reasoning-gym is not installed.
        ConfigError: the dataset does not exist, or its settings are wrong.
    """
    return _create_dataset(*_dataset_key(config, split))


def _dataset_key(config: ReasoningGymConfig, split: Split) -> tuple[str, str, int, int]:
    """Return name, settings, seed and size of a split's dataset, which determine its problems."""
    size = config.train_size if split == "train" else config.test_size
    settings = json.dumps(config.dataset_kwargs, sort_keys=True)
    return config.dataset, settings, TRAIN_SEED if split == "train" else TEST_SEED, size


@lru_cache(maxsize=8)
def _entries(name: str, settings: str, seed: int, size: int) -> tuple[tuple[str, str], ...]:
    """Return all questions and answers of a dataset. They are cached, because some datasets are
    slow to generate."""
    dataset = _create_dataset(name, settings, seed, size)
    return tuple((str(entry["question"]).strip(), str(entry["answer"])) for entry in dataset)


@lru_cache(maxsize=8)
def _create_dataset(name: str, settings: str, seed: int, size: int) -> Any:
    # Settings are passed as text, because their values may be lists, which are not hashable.
    kwargs = json.loads(settings)
    require_package("reasoning_gym", "reasoning", "task.name: reasoning_gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(f"task.dataset: no dataset {name!r}{did_you_mean(name, DATASETS)}")
    valid = set(inspect.signature(DATASETS[name][1]).parameters) - {"seed", "size"}
    for key in kwargs:
        if key not in valid:
            raise ConfigError(
                f"task.dataset_kwargs.{key}: {name!r} has no such key{did_you_mean(key, valid)}"
            )
    try:
        return create_dataset(name, seed=seed, size=size, **kwargs)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.dataset_kwargs: {name!r} refuses them: {error}") from None


def find_eval_call(dataset_class: type) -> str | None:
    """Return the first function of :data:`EVAL_FUNCTIONS` that the dataset's module calls; None if
    it calls none."""
    tree = ast.parse(inspect.getsource(sys.modules[dataset_class.__module__]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if name in EVAL_FUNCTIONS and not _is_re_function(function):
                return name
    return None


def _is_re_function(function: ast.expr) -> bool:
    """Return whether a function is one of ``re``: ``re.compile`` does not compile Python."""
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
    )
