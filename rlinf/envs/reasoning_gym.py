"""Procedurally generated problems with graders of their own: the tasks of ``reasoning-gym``.

Problem ``n`` of a dataset follows from its number alone, so every process makes the same ones.
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

from rlinf.data.record import Record
from rlinf.envs.problem_set import ProblemSet, ProblemSetConfig, Split
from rlinf.envs.problems import Problem
from rlinf.errors import ConfigError, nearest, require
from rlinf.models.base import Spec

TRAIN, TEST = 0, 1 << 30
"""Numbers of the first problem for training, and of the first one held out."""
EVALUATES = frozenset({"eval", "exec", "parse_expr", "sympify", "literal_eval", "compile"})
"""Functions by which a grader may run, or build objects from, what the model wrote."""

HUGE = re.compile(r"[eE][-+]?\d[\d_]{3,}")
"""A number of more than a thousand digits in a few characters."""


class ReasoningGymConfig(ProblemSetConfig):
    """Which problems, and how many."""

    dataset: str
    """A dataset of ``reasoning_gym``, such as ``letter_counting``."""
    settings: dict[str, Any] = {}
    """Keys of the dataset's own configuration: sizes and difficulties."""
    train_size: int = Field(default=4096, gt=0, le=TEST)
    """Problems for training; those that are also held out are left out."""
    test_size: int = Field(default=400, gt=0)
    """Held-out problems."""
    evaluates_answers: bool = False
    """Admit datasets whose graders evaluate the model's text as an expression, which a model may
    abuse; they run in the process of the reward stage."""


class ReasoningGym(ProblemSet):
    """See the module. A response is right if the dataset's grader gives it the full score."""

    Config = ReasoningGymConfig
    config: ReasoningGymConfig

    @classmethod
    def describe(cls, config: ReasoningGymConfig) -> Spec:
        made = dataset(config, "train")
        if not config.evaluates_answers and (name := evaluating(type(made))):
            raise ConfigError(
                f"task.dataset: the grader of {config.dataset!r} calls {name} on what the model "
                "wrote; set task.evaluates_answers=true where that may happen, or take another one"
            )
        return {}

    @classmethod
    def read(cls, config: ReasoningGymConfig, split: Split) -> list[Problem]:
        first = TRAIN if split == "train" else TEST
        problems = [
            Problem(
                ({"role": "user", "content": question},),
                answer,
                f"{config.dataset}, {split} problem {number}",
                info={"number": first + number},
            )
            for number, (question, answer) in enumerate(_entries(*_address(config, split)))
        ]
        if split == "test":
            return problems
        held_out = {question for question, _ in _entries(*_address(config, "test"))}
        kept = [p for p in problems if p.messages[0]["content"] not in held_out]
        if not kept:
            raise ConfigError(
                f"task.settings: all problems of {config.dataset!r} for training are also held "
                "out; these settings give too few different ones"
            )
        return kept

    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        return [
            self._grade(str(t.info["text"]), int(t.info["number"]), counts) for t in trajectories
        ]

    def _grade(self, response: str, number: int, counts: Counter[str]) -> float:
        split: Split = "test" if number >= TEST else "train"
        made = dataset(self.config, split)
        entry = made[number - (TEST if split == "test" else TRAIN)]
        if HUGE.search(response):
            # Graders that compute with it exactly would take hours, and nothing can end them.
            counts["parse_failures"] += 1
            return 0.0
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                score = float(made.score_answer(response.strip(), entry))
        except Exception:
            # Graders are written for answers that can be read; any other is a wrong one.
            counts["parse_failures"] += 1
            return 0.0
        return float(score >= 1)


def dataset(config: ReasoningGymConfig, split: Split) -> Any:
    """The problems of a split.

    Raises:
        MissingPackageError: reasoning-gym is not installed.
        ConfigError: there is no such dataset, or its settings are wrong.
    """
    return _dataset(*_address(config, split))


def _address(config: ReasoningGymConfig, split: Split) -> tuple[str, str, int, int]:
    """Name, settings, seed and size of a split's dataset; what problems follow from."""
    size = config.train_size if split == "train" else config.test_size
    settings = json.dumps(config.settings, sort_keys=True)
    return config.dataset, settings, TRAIN if split == "train" else TEST, size


@lru_cache(maxsize=8)
def _entries(name: str, settings: str, seed: int, size: int) -> tuple[tuple[str, str], ...]:
    """All questions and answers of a dataset; made once, for some take long to make."""
    made = _dataset(name, settings, seed, size)
    return tuple((str(entry["question"]).strip(), str(entry["answer"])) for entry in made)


@lru_cache(maxsize=8)
def _dataset(name: str, settings: str, seed: int, size: int) -> Any:
    # As text: values may be lists, which are no keys of a cache.
    values = json.loads(settings)
    require("reasoning_gym", "reasoning", "task.name: reasoning_gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(f"task.dataset: no dataset {name!r}{nearest(name, DATASETS)}")
    known = set(inspect.signature(DATASETS[name][1]).parameters) - {"seed", "size"}
    for key in values:
        if key not in known:
            raise ConfigError(f"task.settings.{key}: {name!r} has no such key{nearest(key, known)}")
    try:
        return create_dataset(name, seed=seed, size=size, **values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.settings: {name!r} refuses them: {error}") from None


def evaluating(kind: type) -> str | None:
    """The first function of :data:`EVALUATES` that the module of a dataset calls."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name in EVALUATES and not _of_re(called):
                return name
    return None


def _of_re(called: ast.expr) -> bool:
    """``re.compile`` compiles no Python."""
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id == "re"
    )
