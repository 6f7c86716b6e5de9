"""Prompts and answers from a JSON-lines file, graded as mathematics: GSM8K, MATH and the like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Episodes, Extent
from rlinf.envs.chat import Message, render
from rlinf.envs.problems import PROMPT, Problem, read_problems, shown
from rlinf.envs.prompts import OWN, Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError, require
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
    """Holds a text, or a list of messages with ``role`` and ``content``."""
    answer_field: str = "answer"
    info_fields: tuple[str, ...] = ()
    """Further fields of each row that the reward gets, in the ``info`` of a trajectory: texts and
    numbers as they are, anything else as JSON."""
    template: str = "{prompt}"
    """Text of the user's (last) message; ``{prompt}`` stands for the problem."""
    system: str = ""
    """System message of conversations without one, for tokenizers with a chat template."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer prompts are left out."""
    workers: int = Field(default=2, gt=0)
    """Grading processes."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Processor time to grade one response, to a second; then it counts as wrong, and is
    reported. After 64 such responses in a row the rest of the batch is not tried."""

    @field_validator("info_fields")
    @classmethod
    def _names_are_free(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if taken := OWN.intersection(value):
            raise ValueError(f"every trajectory has a {min(taken)!r} of its own; rename the field")
        return value

    @field_validator("template")
    @classmethod
    def _asks(cls, value: str) -> str:
        if PROMPT not in value:
            raise ValueError("does not contain {prompt}, so no problem would be asked")
        return value


@dataclass(frozen=True)
class Asked(Prompt):
    """A problem as the model gets it."""

    rendered: str
    """What the model gets."""
    demonstration: str
    """An answer to learn from: what the assistant says in the row, or the reference answer."""
    tokens: int
    """Of ``rendered``."""

    @property
    def given(self) -> str:
        return self.rendered


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
        require("math_verify", "math", "task.name: jsonl")
        read = {}
        for key, path in (("train", config.train), ("test", config.test)):
            read[key] = _read(config, path, f"task.{key}")
        train, test = ({shown(p.messages) for p in read[split]} for split in ("train", "test"))
        if train == test:
            raise DataError(
                f"task.test: {config.test} has the same problems as task.train; held-out ones must "
                "be others"
            )
        return {}

    @classmethod
    def extent(cls, config: JsonlConfig, processor: Any) -> Extent:
        made = cls(config, processor)
        longest = max(p.tokens for problems in made._problems.values() for p in problems)
        return Extent(len(made._problems["train"]), len(made._problems["test"]), longest)

    def prompts(self, episodes: Episodes) -> Sequence[Prompt]:
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

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        problems = self._problems["train"]
        chosen = generator(seed, "jsonl", "demonstration", step).integers(len(problems), size=count)
        prompts = [problems[int(i)] for i in chosen]
        stop = self.tokenizer.eos_token_id
        questions = self.contexts([prompt.given for prompt in prompts])
        replies = self.encode([prompt.demonstration for prompt in prompts])
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

    def _load(self, path: Path, key: str) -> list[Asked]:
        """The problems whose prompts are short enough.

        Raises:
            DataError: none is; a problem or setting needs a chat template; the template fails, or
                leaves out what it was given.
        """
        config = self.config
        problems = [problem.asked(config.template) for problem in _read(config, path, key)]
        given = self._given(problems, path, key)
        lengths = [len(ids) for ids in self.encode(given)]
        kept = [
            Asked(
                shown(problem.messages),
                problem.answer,
                text,
                problem.demonstration or problem.answer,
                length,
                info=problem.info,
            )
            for problem, text, length in zip(problems, given, lengths, strict=True)
            if length <= config.max_prompt_tokens
        ]
        if not kept:
            raise DataError(
                f"{key}: all {len(problems)} prompts of {path} are longer than "
                f"task.max_prompt_tokens={config.max_prompt_tokens}"
            )
        empty = next((i for i, length in enumerate(lengths) if not length), None)
        if empty is not None:
            raise DataError(f"{key}: {path}, line {problems[empty].line}: the prompt has no tokens")
        return kept

    def _given(self, problems: Sequence[Problem], path: Path, key: str) -> list[str]:
        """What the model gets to read."""
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            if self.config.system:
                raise ConfigError(
                    "task.system: the tokenizer of model.path has no chat template to put a system "
                    "message into; write it into task.template"
                )
            several = next((problem for problem in problems if len(problem.messages) > 1), None)
            if several is not None:
                raise DataError(
                    f"{key}: {path}, line {several.line}: several messages need a tokenizer with a "
                    "chat template, and that of model.path has none"
                )
            return [problem.messages[0]["content"] for problem in problems]
        where = "model.path"
        if not isinstance(template, str):
            raise DataError(f"{where}: the tokenizer has several chat templates; keep one")
        names = {str(k): str(v) for k, v in self.tokenizer.special_tokens_map.items()}
        conversations = [self._messages(problem) for problem in problems]
        texts = render(template, conversations, names, where)
        for problem, messages, text in zip(problems, conversations, texts, strict=True):
            # Templates may trim what they are given.
            lost = next((m["role"] for m in messages if m["content"].strip() not in text), None)
            if lost is not None:
                raise DataError(
                    f"{where}: the chat template leaves out the {lost} message of {path}, line "
                    f"{problem.line}; use a checkpoint (or a tokenizer_config.json) whose template "
                    "keeps it"
                )
        return texts

    def _order(self, seed: int, epoch: int) -> list[int]:
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            count = len(self._problems["train"])
            order = generator(seed, "jsonl", "epoch", epoch).permutation(count).tolist()
            self._epoch = ((seed, epoch), order)
        return self._epoch[1]

    def _messages(self, problem: Problem) -> list[Message]:
        own = problem.messages[0]["role"] == "system"
        system = self.config.system if not own else ""
        return [*([{"role": "system", "content": system}] if system else []), *problem.messages]


def _read(config: JsonlConfig, path: Path, key: str) -> list[Problem]:
    return read_problems(path, config.prompt_field, config.answer_field, key, config.info_fields)
