"""Multiple-choice questions from a JSON-lines file, such as GPQA.

The options of each question are shuffled once, by a stored seed, so that every model sees the same
order. A response is right if it names the letter of the right option in the form that the prompt
asks for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from rlinf.data.json_lines import JsonLinesFile
from rlinf.data.trajectory import Trajectory
from rlinf.envs.chat_problems import ChatProblem, question_text, text_field
from rlinf.envs.problem_set import ProblemSetConfig, ProblemSetEnvironment, Split
from rlinf.errors import DataError
from rlinf.models.base import ModelSpec
from rlinf.seeding import generator

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class MultipleChoiceConfig(ProblemSetConfig):
    """The data files and their fields."""

    train: Path | None = None
    """JSON-lines file of training questions. None: the task is only for evaluation."""
    test: Path
    """JSON-lines file of test questions."""
    prompt_field: str = "Question"
    """Field with the question."""
    answer_field: str = "Correct Answer"
    """Field with the text of the right option."""
    wrong_answer_fields: tuple[str, ...] = Field(
        default=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"), min_length=1
    )
    """Fields with the texts of the wrong options."""
    options_field: str = ""
    """Field with a list of all options, instead of ``wrong_answer_fields``. ``answer_field`` then
    holds the text, the letter or the index of the right one. The options keep their order."""
    shuffle_seed: int = Field(default=0, ge=0)
    """Seed of the order of the options."""
    answer_pattern: str = r"(?i:answer\s*(?:is)?\s*:?\s*\**\$?\(?)([A-Z]\b|(?<=\()[a-z]\b)"
    """Regular expression whose last match in a response has the chosen letter as its group."""

    @field_validator("answer_pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError("needs exactly one group, which matches the letter")
        return value


class MultipleChoiceEnvironment(ProblemSetEnvironment):
    """Questions with lettered options; the response names a letter."""

    Config = MultipleChoiceConfig
    config: MultipleChoiceConfig

    @classmethod
    def load_problems(cls, config: MultipleChoiceConfig, split: Split) -> Sequence[ChatProblem]:
        path = config.train if split == "train" else config.test
        if path is None:
            return ()

        def parse(prefix: str, item: dict[str, Any]) -> ChatProblem:
            return _parse_question(config, item, prefix, prefix.removeprefix(f"task.{split}: "))

        settings = repr(config.model_dump(exclude={"train", "test", "answer_pattern"}))
        return JsonLinesFile(
            path, f"task.{split}", parse, settings=settings, row_text=question_text
        )

    @classmethod
    def model_spec(cls, config: MultipleChoiceConfig) -> ModelSpec:
        return {}

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        letters = [self.final_answer(trajectory) for trajectory in trajectories]
        counts["parse_failures"] += sum(letter is None for letter in letters)
        pairs = zip(trajectories, letters, strict=True)
        return [float(letter == trajectory.answer) for trajectory, letter in pairs]

    def final_answer(self, trajectory: Trajectory) -> str | None:
        text = self.reasoning_tags().strip_reasoning(str(trajectory.text))
        letters = [] if text is None else re.findall(self.config.answer_pattern, text)
        return letters[-1].upper() if letters else None


def _parse_question(
    config: MultipleChoiceConfig, item: dict[str, Any], prefix: str, location: str
) -> ChatProblem:
    question = text_field(item, config.prompt_field, "prompt_field", prefix)
    if config.options_field:
        options, right = _listed_options(config, item, prefix)
    else:
        right_option = text_field(item, config.answer_field, "answer_field", prefix)
        wrong = [
            text_field(item, name, "wrong_answer_fields", prefix)
            for name in config.wrong_answer_fields
        ]
        if right_option in wrong:
            raise DataError(f"{prefix}: {right_option!r:.60} is both the right and a wrong option")
        unshuffled = [right_option, *wrong]
        random = generator(config.shuffle_seed, "multiple_choice", question)
        order = random.permutation(len(unshuffled)).tolist()
        options, right = [unshuffled[i] for i in order], order.index(0)
    if len(options) > len(LETTERS):
        raise DataError(f"{prefix}: {len(options)} options; at most {len(LETTERS)} have a letter")
    lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, options, strict=False)]
    content = "\n".join([question, "", *lines])
    return ChatProblem(({"role": "user", "content": content},), LETTERS[right], location)


def _listed_options(
    config: MultipleChoiceConfig, item: dict[str, Any], prefix: str
) -> tuple[list[str], int]:
    """Return the options of a row that lists them, and the index of the right one."""
    options = item.get(config.options_field)
    if not isinstance(options, list) or not all(isinstance(o, str | int | float) for o in options):
        raise DataError(
            f"{prefix}: {config.options_field!r} is {json.dumps(options)[:40]}; expected a list of "
            "texts (set task.options_field)"
        )
    texts, answer = [str(option) for option in options], item.get(config.answer_field)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return texts, answer
    if isinstance(answer, str) and texts.count(answer) == 1:
        return texts, texts.index(answer)
    if isinstance(answer, str) and len(answer) == 1 and answer in LETTERS[: len(texts)]:
        return texts, LETTERS.index(answer)
    raise DataError(
        f"{prefix}: {config.answer_field!r} is {json.dumps(answer)[:40]}, which is neither the "
        f"letter, the index nor the text of one of {len(texts)} options (set task.answer_field)"
    )
