"""Procedurally generated problems with their own graders: the datasets of ``reasoning-gym``.

Problem ``n`` of a dataset follows from its number, so every process generates the same problems.
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
from rlinf.envs.problem_set import ChatProblem, ProblemSetConfig, ProblemSetEnvironment, Split
from rlinf.errors import ConfigError, did_you_mean, require_package
from rlinf.models.base import ModelSpec

TRAIN_SEED, TEST_SEED = 0, 1 << 30
"""Seeds of the training and the test problems; problem numbers count from them."""
EVAL_FUNCTIONS = frozenset({"eval", "exec", "parse_expr", "sympify", "literal_eval", "compile"})
"""Functions by which a grader may execute a response, or build objects from it."""

HUGE_NUMBER = re.compile(r"[eE][-+]?\d[\d_]{3,}")
"""A number of more than a thousand digits in a few characters."""


class ReasoningGymConfig(ProblemSetConfig):
    """The dataset and its sizes."""

    dataset: str
    """A dataset of ``reasoning_gym``, such as ``letter_counting``."""
    dataset_kwargs: dict[str, Any] = {}
    """Keys of the dataset's own configuration: sizes and difficulties."""
    train_size: int = Field(default=4096, gt=0, le=TEST_SEED)
    """Training problems; those that are also test problems are left out."""
    test_size: int = Field(default=400, gt=0)
    """Test problems."""
    allow_eval_graders: bool = False
    """Allow datasets whose graders evaluate the response as an expression, which a model may
    exploit. They run in the process of the reward stage."""


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
        first = TRAIN_SEED if split == "train" else TEST_SEED
        problems = [
            ChatProblem(
                ({"role": "user", "content": question},),
                answer,
                f"{config.dataset}, {split} problem {number}",
                info={"number": first + number},
            )
            for number, (question, answer) in enumerate(_entries(*_address(config, split)))
        ]
        if split == "test":
            return problems
        test_questions = {question for question, _ in _entries(*_address(config, "test"))}
        kept = [p for p in problems if p.messages[0]["content"] not in test_questions]
        if not kept:
            raise ConfigError(
                f"task.dataset_kwargs: all problems of {config.dataset!r} for training are also "
                "held out; these settings give too few different ones"
            )
        return kept

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
            # Graders that compute with it exactly would take hours, and nothing can end them.
            counts["parse_failures"] += 1
            return 0.0
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                score = float(dataset.score_answer(answer.strip(), entry))
        except Exception:
            # Graders are written for answers that can be read; any other is a wrong one.
            counts["parse_failures"] += 1
            return 0.0
        return float(score >= 1)


def load_dataset(config: ReasoningGymConfig, split: Split) -> Any:
    """Return the problems of a split.

    Raises:
        MissingPackageError: reasoning-gym is not installed.
        ConfigError: the dataset does not exist, or its settings are wrong.
    """
    return _dataset(*_address(config, split))


def _address(config: ReasoningGymConfig, split: Split) -> tuple[str, str, int, int]:
    """Return name, settings, seed and size of a split's dataset, which determine its problems."""
    size = config.train_size if split == "train" else config.test_size
    settings = json.dumps(config.dataset_kwargs, sort_keys=True)
    return config.dataset, settings, TRAIN_SEED if split == "train" else TEST_SEED, size


@lru_cache(maxsize=8)
def _entries(name: str, settings: str, seed: int, size: int) -> tuple[tuple[str, str], ...]:
    """Return all questions and answers of a dataset. They are cached, because some are slow to
    generate."""
    dataset = _dataset(name, settings, seed, size)
    return tuple((str(entry["question"]).strip(), str(entry["answer"])) for entry in dataset)


@lru_cache(maxsize=8)
def _dataset(name: str, settings: str, seed: int, size: int) -> Any:
    # As text: values may be lists, which are no keys of a cache.
    values = json.loads(settings)
    require_package("reasoning_gym", "reasoning", "task.name: reasoning_gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(f"task.dataset: no dataset {name!r}{did_you_mean(name, DATASETS)}")
    known = set(inspect.signature(DATASETS[name][1]).parameters) - {"seed", "size"}
    for key in values:
        if key not in known:
            raise ConfigError(
                f"task.dataset_kwargs.{key}: {name!r} has no such key{did_you_mean(key, known)}"
            )
    try:
        return create_dataset(name, seed=seed, size=size, **values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.dataset_kwargs: {name!r} refuses them: {error}") from None


def find_eval_call(kind: type) -> str | None:
    """Return the first function of :data:`EVAL_FUNCTIONS` that the dataset's module calls; None:
    none."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name in EVAL_FUNCTIONS and not _of_re(called):
                return name
    return None


def _of_re(called: ast.expr) -> bool:
    """Return whether the call is ``re.compile``, which compiles no Python."""
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id == "re"
    )
