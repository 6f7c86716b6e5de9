"""Prompts and answers from a JSON-lines file, graded as mathematics: GSM8K, MATH and the like."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Episodes
from rlinf.envs.prompts import Prompt, PromptEnvironment
from rlinf.errors import DataError, nearest
from rlinf.models.base import Spec
from rlinf.rewards.math_workers import MathGrader, counted
from rlinf.seeding import generator


class JsonlConfig(Section):
    """Where the problems are and how they are asked."""

    train: Path
    """JSON-lines file of training problems."""
    test: Path
    """JSON-lines file of held-out problems."""
    prompt_field: str = "question"
    answer_field: str = "answer"
    template: str = "{prompt}"
    """Text of the user's message; ``{prompt}`` stands for the problem."""
    system: str = ""
    """System message, for tokenizers with a chat template."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer prompts are left out."""
    workers: int = Field(default=2, gt=0)
    """Grading processes."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Processor time to grade one response, to a second; then it counts as wrong, and is
    reported. After 64 such responses in a row the rest of the batch is not tried."""


class JsonlEnvironment(PromptEnvironment):
    """See the module."""

    Config = JsonlConfig
    config: JsonlConfig

    def __init__(self, config: JsonlConfig, processor: Any) -> None:
        super().__init__(config, processor)
        self._epoch: tuple[tuple[int, int], list[int]] | None = None
        self._problems = {
            "train": self._load(config.train, "task.train"),
            "test": self._load(config.test, "task.test"),
        }
        self._grader: MathGrader | None = None

    @classmethod
    def describe(cls, config: JsonlConfig) -> Spec:
        for key, path in (("train", config.train), ("test", config.test)):
            read_problems(path, config.prompt_field, config.answer_field, f"task.{key}")
        return {}

    def prompts(self, episodes: Episodes) -> list[Prompt]:
        """Training problems without replacement, in an order drawn anew for each epoch; the first
        test problems."""
        problems = self._problems[episodes.split]
        if episodes.split == "test":
            return [problems[start % len(problems)] for start in episodes.starts]
        chosen = []
        for start in episodes.starts:
            epoch, place = divmod(episodes.iteration * episodes.batch + start, len(problems))
            chosen.append(problems[self._order(episodes.seed, epoch)[place]])
        return chosen

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not getattr(self.tokenizer, "chat_template", None):
            return super().encode(texts)
        rendered = [
            self.tokenizer.apply_chat_template(
                self._messages(text), tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
        return super().encode(rendered)

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        problems = self._problems["train"]
        chosen = generator(seed, "jsonl", "demonstration", step).integers(len(problems), size=count)
        prompts = [problems[int(i)] for i in chosen]
        stop = self.tokenizer.eos_token_id
        questions = self.contexts([prompt.text for prompt in prompts])
        replies = super().encode([prompt.answer for prompt in prompts])
        return [
            Record(Identity(step, i), {"actions": np.append(reply, stop)}, {"prompt": question})
            for i, (question, reply) in enumerate(zip(questions, replies, strict=True))
        ]

    def score(self, trajectories: Sequence[Record], counts: Counter[str]) -> list[float]:
        pairs = [(str(t.info["text"]), str(t.info["answer"])) for t in trajectories]
        grades = self._math_grader().grade(pairs)
        counts.update(counted(grades))
        return [grade.score for grade in grades]

    def grade(self, response: str, answer: str) -> float:
        return self._math_grader().grade([(response, answer)])[0].score

    def _math_grader(self) -> MathGrader:
        if self._grader is None:
            self._grader = MathGrader(self.config.workers, self.config.timeout_s)
        return self._grader

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()
            self._grader = None

    def _load(self, path: Path, key: str) -> list[Prompt]:
        """The problems whose prompts are short enough.

        Raises:
            DataError: none is.
        """
        config = self.config
        problems = read_problems(path, config.prompt_field, config.answer_field, key)
        problems = [
            Prompt(config.template.replace("{prompt}", problem.text), problem.answer)
            for problem in problems
        ]
        lengths = [len(ids) for ids in self.encode([problem.text for problem in problems])]
        kept = [
            problem
            for problem, length in zip(problems, lengths, strict=True)
            if length <= config.max_prompt_tokens
        ]
        if not kept:
            raise DataError(
                f"{key}: all {len(problems)} prompts of {path} are longer than "
                f"task.max_prompt_tokens={config.max_prompt_tokens}"
            )
        return kept

    def _order(self, seed: int, epoch: int) -> list[int]:
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            count = len(self._problems["train"])
            order = generator(seed, "jsonl", "epoch", epoch).permutation(count).tolist()
            self._epoch = ((seed, epoch), order)
        return self._epoch[1]

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return [*system, {"role": "user", "content": text}]


def read_problems(path: Path, prompt_field: str, answer_field: str, key: str) -> list[Prompt]:
    """All problems of a JSON-lines file.

    Raises:
        DataError: missing or empty file, a line that is not JSON, a field that is not there; names
            the line.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{key}: cannot read {path}: {error.strerror}") from None
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise DataError(f"{key}: {path}, line {number}: not JSON ({error})") from None
        if not isinstance(item, dict):
            raise DataError(f"{key}: {path}, line {number}: expected an object")
        for name, option in ((prompt_field, "prompt_field"), (answer_field, "answer_field")):
            if name not in item:
                raise DataError(
                    f"{key}: {path}, line {number}: no field {name!r}{nearest(name, item)} "
                    f"(set task.{option})"
                )
        answer = item[answer_field]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(
                f"{key}: {path}, line {number}: {answer_field!r} is {json.dumps(answer)[:40]}; "
                "expected a text or a number"
            )
        prompt, answer = str(item[prompt_field]), str(answer)
        for name, value in ((prompt_field, prompt), (answer_field, answer)):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise DataError(
                    f"{key}: {path}, line {number}: {name!r} has half of a surrogate pair, which "
                    "is no character"
                )
        problems.append(Prompt(prompt, answer))
    if not problems:
        raise DataError(f"{key}: {path} is empty")
    return problems
