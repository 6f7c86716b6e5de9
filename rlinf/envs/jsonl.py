"""Prompts and answers from a JSON-lines file, graded as mathematics: GSM8K, MATH and similar
sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from rlinf.config import Section
from rlinf.data.trajectory import Trajectory, accepted_answers
from rlinf.envs.chat_problems import ChatProblem, read_problems
from rlinf.envs.problem_set import ProblemSet, ProblemSetConfig, ProblemSetEnvironment, Split
from rlinf.envs.text_environment import RESERVED_INFO_KEYS
from rlinf.errors import require_package
from rlinf.models.base import ModelSpec
from rlinf.rewards.math_equivalence import canonical_text
from rlinf.rewards.math_grader import MathGrader, count_outcomes
from rlinf.rewards.math_normalization import UnparsableAnswerError
from rlinf.rewards.math_parsing import extract_answer

SET_NAME = r"^[A-Za-z0-9_-]+$"
"""Pattern of the names of training sets, which are parts of metrics and keys."""


class TrainingSetConfig(Section):
    """One of several files with training problems."""

    train: Path
    """The file, as for ``task.train``."""
    weight: float = Field(default=1.0, gt=0)
    """Relative frequency of its problems."""


class JsonlConfig(ProblemSetConfig):
    """The data files and their fields."""

    train: Path | None = None
    """JSON-lines file, Parquet file or saved Hugging Face data set with training problems. None:
    those of ``train_sets``, or the task is only for evaluation."""
    train_sets: dict[Annotated[str, Field(pattern=SET_NAME)], TrainingSetConfig] = {}
    """Several files with training problems, by name, instead of ``train``. Problems are drawn by
    the weights of their files. Each set has metrics of its own: ``reward/score/NAME`` and
    ``reward/mean/NAME``."""
    test: Path
    """The same with test problems."""
    prompt_field: str | None = None
    """Field that holds a text, or a list of messages with ``role`` and ``content``. Null: the first
    row of a file decides. It must have one of ``question``, ``prompt`` and ``problem``, or else
    ``messages``."""
    answer_field: str | None = None
    """Field that holds the reference answer, or a list of answers, each of which is right. ``a.b``
    is the field ``b`` of the mapping in the field ``a``. Null: the first row of a file decides. It
    must have one of ``answer``, ``reward_model.ground_truth`` and ``ground_truth``, or else
    ``solution``, or else ``completion``."""
    info_fields: tuple[str, ...] = ()
    """Further fields of each row that the reward receives in ``extra`` of a trajectory. Texts
    and numbers stay as they are; other values become JSON. If a field is not a number in some of
    the first 10,000 rows of the file, it is JSON in all rows."""
    grader_workers: int = Field(default=2, gt=0)
    """Number of grading processes."""
    timeout_s: float = Field(default=5.0, gt=0)
    """CPU seconds to grade one response, rounded up to whole seconds. A response that takes longer
    counts as wrong and is reported. After 64 such responses in a row the rest of the batch is
    skipped."""

    @model_validator(mode="after")
    def _check_training_sets(self) -> JsonlConfig:
        if self.train is not None and self.train_sets:
            raise ValueError("train_sets replaces train; leave one of them out")
        return self

    @field_validator("info_fields")
    @classmethod
    def _check_info_fields(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if reserved := RESERVED_INFO_KEYS.intersection(value):
            raise ValueError(
                f"every trajectory has a {min(reserved)!r} of its own; rename the field"
            )
        return value


def _read_file(config: JsonlConfig, path: Path, key: str) -> Sequence[ChatProblem]:
    """Return the problems of a file that a key names."""
    fields = config.prompt_field, config.answer_field
    return read_problems(path, *fields, key, config.info_fields)


class JsonlEnvironment(ProblemSetEnvironment):
    """Problems of JSON-lines files, graded by ``math_verify``."""

    Config = JsonlConfig
    config: JsonlConfig
    _grader: MathGrader | None = None

    @classmethod
    def load_problems(cls, config: JsonlConfig, split: Split) -> Sequence[ChatProblem]:
        path = config.train if split == "train" else config.test
        return () if path is None else _read_file(config, path, f"task.{split}")

    @classmethod
    def training_sets(cls, config: JsonlConfig) -> dict[str, ProblemSet]:
        if not config.train_sets:
            return super().training_sets(config)
        keys = {name: f"task.train_sets.{name}.train" for name in config.train_sets}
        return {
            name: ProblemSet(_read_file(config, part.train, keys[name]), keys[name], part.weight)
            for name, part in config.train_sets.items()
        }

    @classmethod
    def model_spec(cls, config: JsonlConfig) -> ModelSpec:
        require_package("math_verify", "math", "task.name: jsonl")
        return {}

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        answers = [accepted_answers(str(t.answer)) for t in trajectories]
        pairs = [
            (str(t.text), answer)
            for t, accepted in zip(trajectories, answers, strict=True)
            for answer in accepted
        ]
        grades = iter(self._math_grader().grade(pairs))
        # Of several accepted answers, the one that fits best counts.
        best = [
            max((next(grades) for _ in accepted), key=lambda grade: grade.score)
            for accepted in answers
        ]
        counts.update(count_outcomes(best))
        return [grade.score for grade in best]

    def final_answer(self, trajectory: Trajectory) -> str | None:
        text = self.reasoning_tags().strip_reasoning(str(trajectory.text))
        try:
            return None if text is None else canonical_text(extract_answer(text))
        except UnparsableAnswerError:
            return None

    def _math_grader(self) -> MathGrader:
        if self._grader is None:
            workers, timeout_s = self.config.grader_workers, self.config.timeout_s
            self._grader = MathGrader(workers, timeout_s, reasoning_tags=self.reasoning_tags())
        return self._grader

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()
            self._grader = None
