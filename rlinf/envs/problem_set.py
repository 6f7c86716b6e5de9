"""Tasks that have their problems beforehand: a question or a conversation each, and an answer.

A task says where problems come from (:meth:`ProblemSet.read`) and how a response is scored. What a
model is given is made here: template, examples, system message, the tokenizer's chat template.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Episodes, Extent
from rlinf.envs.problems import PROMPT, Problem, shown
from rlinf.envs.prompts import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError
from rlinf.models.chat import Message
from rlinf.models.chat_format import split_thought
from rlinf.seeding import generator

log = logging.getLogger(__name__)

Split = Literal["train", "test"]


class ProblemSetConfig(Section):
    """How problems are asked."""

    template: str = "{prompt}"
    """Text of the user's (last) message; ``{prompt}`` stands for the problem."""
    system: str = ""
    """System message of conversations without one, for tokenizers with a chat template."""
    shots: int = Field(default=0, ge=0)
    """So many training problems stand before each question as turns with their answers, the same
    ones each time; they are asked no more. For tokenizers with a chat template."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer prompts are left out."""

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
    conversation: tuple[Message, ...]
    """The messages that ``rendered`` is made of."""
    place: str
    """Where it is from, for messages: file and line."""

    @property
    def given(self) -> str:
        return self.rendered


class ProblemSet(PromptEnvironment):
    """See the module."""

    Config: ClassVar[type[ProblemSetConfig]] = ProblemSetConfig
    config: ProblemSetConfig
    renders = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._epoch: tuple[tuple[int, int], list[int]] | None = None
        training = self.read(config, "train")
        examples, training = training[: config.shots], training[config.shots :]
        self._examples = [
            message
            for problem in examples
            for message in (
                *problem.asked(config.template).messages,
                {"role": "assistant", "content": problem.demonstration or problem.answer},
            )
        ]
        self._problems = {
            "train": self._load(training, "task.train"),
            "test": self._load(self.read(config, "test"), "task.test"),
        }

    @classmethod
    @abstractmethod
    def read(cls, config: Any, split: Split) -> list[Problem]:
        """All problems of a split, in an order that stays.

        Raises:
            DataError: there is none, or one is malformed.
        """

    @classmethod
    def extent(cls, config: Any, processor: Any) -> Extent:
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
        # The name is part of the address of what is drawn; runs begun earlier had this one.
        chosen = generator(seed, "jsonl", "demonstration", step).integers(len(problems), size=count)
        prompts = [problems[int(i)] for i in chosen]
        questions = self.contexts([prompt.given for prompt in prompts])
        replies = self.encode(self._answers(prompts))
        ended = self.chat_format.end_token_id
        actions = [ids if len(ids) and ids[-1] == ended else self.closed(ids) for ids in replies]
        return [
            Record(Identity(step, i), {"actions": reply}, {"prompt": question})
            for i, (question, reply) in enumerate(zip(questions, actions, strict=True))
        ]

    def _answers(self, prompts: Sequence[Asked]) -> list[str]:
        """Demonstrations as the model is to write them behind its prompts."""
        if self.chat_format.template is None:
            return [prompt.demonstration for prompt in prompts]
        talks = [
            [*prompt.conversation, {"role": "assistant", "content": prompt.demonstration}]
            for prompt in prompts
        ]
        turns = self.chat_format.turns(talks, [prompt.place for prompt in prompts], last=True)
        return [turn.answer for (turn,) in turns]

    def _load(self, problems: Sequence[Problem], key: str) -> list[Asked]:
        """The problems whose prompts are short enough.

        Raises:
            DataError: none is; a problem or setting needs a chat template; the template fails, or
                leaves out what it was given.
        """
        if not problems:
            raise DataError(f"{key}: no problem is left beside task.shots={self.config.shots}")
        most = self.config.max_prompt_tokens
        problems = [problem.asked(self.config.template) for problem in problems]
        given = self._given(problems, key)
        empty = next((i for i, ids in enumerate(self.encode(given)) if not len(ids)), None)
        lengths = [len(ids) for ids in self.contexts(given)]
        kept = [
            Asked(
                shown(problem.messages),
                problem.answer,
                text,
                problem.demonstration or problem.answer,
                length,
                tuple(self._messages(problem)),
                problem.place,
                info=problem.info,
            )
            for problem, text, length in zip(problems, given, lengths, strict=True)
            if length <= most
        ]
        if not kept:
            raise DataError(
                f"{key}: all {len(problems)} prompts, from {problems[0].place} on, are longer than "
                f"task.max_prompt_tokens={most}"
            )
        if len(kept) < len(problems):
            log.warning(
                "%s: %d of %d problems are left out: their prompts are longer than "
                "task.max_prompt_tokens=%d",
                key,
                len(problems) - len(kept),
                len(problems),
                most,
            )
        if empty is not None:
            raise DataError(f"{key}: {problems[empty].place}: the prompt has no tokens")
        return kept

    def _given(self, problems: Sequence[Problem], key: str) -> list[str]:
        """What the model gets to read."""
        if self.chat_format.template is None:
            if self.config.system or self.config.shots:
                system = "system", "a system message"
                name, what = system if self.config.system else ("shots", "turns")
                raise ConfigError(
                    f"task.{name}: the tokenizer of model.path has no chat template to put {what} "
                    "into; write it into task.template"
                )
            several = next((problem for problem in problems if len(problem.messages) > 1), None)
            if several is not None:
                raise DataError(
                    f"{key}: {several.place}: several messages need a tokenizer with a chat "
                    "template, and that of model.path has none"
                )
            return [problem.messages[0]["content"] for problem in problems]
        conversations = [self._messages(problem) for problem in problems]
        texts = self.chat_format.prompts(conversations)
        for problem, messages, text in zip(problems, conversations, texts, strict=True):
            # Templates may trim what they are given, and drop the thoughts of earlier answers.
            lost = next((m["role"] for m in messages if self._words(m) not in text), None)
            if lost is not None:
                raise DataError(
                    f"model.path: the chat template leaves out the {lost} message of "
                    f"{problem.place}; use a checkpoint (or a tokenizer_config.json) whose "
                    "template keeps it"
                )
        return texts

    def _words(self, message: Message) -> str:
        """What of a message must be in a prompt."""
        if message["role"] != "assistant":
            return message["content"].strip()
        return split_thought(message["content"], self.chat_format.thinking)[1]

    def _order(self, seed: int, epoch: int) -> list[int]:
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            count = len(self._problems["train"])
            order = generator(seed, "jsonl", "epoch", epoch).permutation(count).tolist()
            self._epoch = ((seed, epoch), order)
        return self._epoch[1]

    def _messages(self, problem: Problem) -> list[Message]:
        first, *rest = problem.messages
        own = first["role"] == "system"
        system = [first["content"]] if own else [self.config.system] if self.config.system else []
        opening: list[Message] = [{"role": "system", "content": text} for text in system]
        return [*opening, *self._examples, *(rest if own else problem.messages)]
