"""Conversations from JSON-lines files: what the assistant said in them is learnt, or asked for.

A conversation becomes tokens by the tokenizer's chat template (:mod:`rlinf.models.chat_format`).
Each piece, prompts and answers, is tokenised for itself: what the assistant says is then the same
tokens, behind the same ones, as in a rollout, where the prompt is tokenised without the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rlinf.data.record import Identity, Record
from rlinf.data.row_file import RowFile
from rlinf.envs.base import Extent
from rlinf.envs.problem_set import ProblemSet, ProblemSetConfig, Rendered, Split
from rlinf.envs.problems import Problem, read_conversations
from rlinf.errors import ConfigError, DataError, naming
from rlinf.fit import HELD_OUT_DEMONSTRATIONS
from rlinf.models.base import Spec
from rlinf.models.chat_format import Turn, split_thought
from rlinf.seeding import generator

log = logging.getLogger("rlinf")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == "
    "'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, for small models that the configuration makes."""
BEGIN, END = "<|im_start|>", "<|im_end|>"


class ConversationsConfig(ProblemSetConfig):
    """Where the conversations are, and what of them is learnt."""

    train: Path
    """JSON-lines file of conversations to learn from."""
    test: Path
    """JSON-lines file of held-out ones."""
    messages_field: str = "messages"
    """Holds a list of messages with ``role`` (system, user, assistant) and ``content``; the last
    one is the assistant's."""
    learn: Literal["all", "last"] = "all"
    """Which of the assistant's messages are learnt."""
    max_tokens: int = Field(default=4096, gt=0)
    """Longer conversations are not learnt from."""


@dataclass(frozen=True)
class Piece:
    """Part of the text of a conversation, and whether the assistant is to learn it."""

    text: str
    learnt: bool


class ConversationsEnvironment(ProblemSet):
    """See the module. A prompt is a conversation up to the assistant's last message; an answer is
    right where it is that message, but for thoughts and white space around it."""

    Config = ConversationsConfig
    config: ConversationsConfig
    offers = ProblemSet.offers | {HELD_OUT_DEMONSTRATIONS}

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._learnt: dict[Split, Rendered[Record]] = {}
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None

    @classmethod
    def read(cls, config: ConversationsConfig, split: Split) -> RowFile[Problem]:
        path = config.train if split == "train" else config.test
        return read_conversations(path, config.messages_field, f"task.{split}")

    @classmethod
    def describe(cls, config: ConversationsConfig) -> Spec:
        characters = set(f"system user assistant\n{config.system}")
        for split in ("train", "test"):
            for problem in cls.read(config, split):
                characters.update(problem.answer, *(m["content"] for m in problem.messages))
        return {
            "alphabet": "".join(sorted(characters)),
            "chat_template": TEMPLATE,
            "special_tokens": [BEGIN, END],
        }

    @classmethod
    def extent(cls, config: Any, processor: Any) -> Extent:
        if processor is None:
            # A small model to be made: its tokenizer has every character, and a template.
            train, test = (len(cls.read(config, split)) for split in ("train", "test"))
            return Extent(train - config.shots, test)
        made = cls(config, processor)
        made._all("train")
        made._all("test")
        return super().extent(config, processor)

    def grade(self, response: str, answer: str) -> float:
        marks = self.chat_format.thinking
        return float(split_thought(response, marks)[1] == split_thought(answer, marks)[1])

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """Conversations without replacement, in an order drawn anew for each epoch."""
        learnt = self._all("train")
        chosen = []
        for i in range(count):
            epoch, place = divmod(step * count + i, len(learnt))
            chosen.append(int(self._order_of(seed, epoch, len(learnt))[place]))
        return [
            Record(Identity(step, i), record.steps, record.context)
            for i, record in enumerate(learnt.take(chosen))
        ]

    def held_out_demonstrations(self, count: int) -> list[Record]:
        learnt = self._all("test")
        chosen = learnt.take(range(min(count, len(learnt))))
        return [
            Record(Identity(0, i), record.steps, record.context) for i, record in enumerate(chosen)
        ]

    def _order_of(self, seed: int, epoch: int, count: int) -> np.ndarray:
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            order = generator(seed, "conversations", "epoch", epoch).permutation(count)
            self._drawn = ((seed, epoch), order)
        return self._drawn[1]

    def _all(self, split: Split) -> Rendered[Record]:
        """All conversations of a split as they are learnt; each is made into tokens on use."""
        if split not in self._learnt:
            problems = self.read(self.config, split)
            problems = problems[self.config.shots :] if split == "train" else problems
            made = Rendered(problems, self._records, _tokens)
            key, most = f"task.{split}", f"task.max_tokens={self.config.max_tokens}"
            with naming(key):
                made.measure(self.config.max_tokens, self._address(problems, made))
            if not len(made):
                raise DataError(f"{key}: all {made.every} conversations are longer than {most}")
            if len(made) < made.every:
                left = made.every - len(made)
                log.warning("%s: %d of %d are longer than %s", key, left, made.every, most)
            self._learnt[split] = made
        return self._learnt[split]

    def _records(self, problems: Sequence[Problem]) -> list[tuple[int, Record]]:
        """Return records to learn, each with the number of its conversation among those given.

        Where the template writes an answer otherwise once a message follows (without its thought,
        say), the conversation goes on in a record of its own: each answer stands behind the prompt
        that it is asked for by.

        Raises:
            DataError: the template leaves an answer out, or does not write what it asks for.
            ConfigError: the tokenizer has no template.
        """
        if self.chat_format.template is None:
            raise ConfigError(
                "task.name: conversations needs a chat template, and the tokenizer of model.path "
                "has none"
            )
        problems = [problem.asked(self.config.template) for problem in problems]
        talks = [[*self._messages(p), {"role": "assistant", "content": p.answer}] for p in problems]
        places, last = [problem.place for problem in problems], self.config.learn == "last"
        turns = self.chat_format.turns(talks, places, last=last)
        rows = [(i, row) for i, talk in enumerate(turns) for row in self._pieces(talk)]
        encoded = iter(self.encode([piece.text for _, row in rows for piece in row]))
        return [
            (number, self._record([(next(encoded), piece.learnt) for piece in row]))
            for number, row in rows
        ]

    def _record(self, pieces: Sequence[tuple[np.ndarray, bool]]) -> Record:
        (prompt, _), *rest = pieces
        actions = [ids for ids, _ in rest]
        masks = [np.full(len(ids), learnt, np.float32) for ids, learnt in rest]
        if actions[-1].tolist()[-1:] != [self.chat_format.end_token_id]:
            # Nothing of the template ends the last message: without it none would ever end.
            actions[-1], masks[-1] = self.closed(actions[-1]), np.append(masks[-1], np.float32(1))
        steps = {"actions": np.concatenate(actions), "mask": np.concatenate(masks)}
        return Record(Identity(0, 0), steps, {"prompt": prompt})

    def _pieces(self, turns: Sequence[Turn]) -> list[list[Piece]]:
        """The texts of one conversation: a row for each prompt that does not continue the last."""
        rows, text = list[list[Piece]](), ""
        for turn in turns:
            row = rows[-1] if rows and turn.prompt.startswith(text) else []
            between = turn.prompt[len(text) :] if row else turn.prompt
            if row and between.startswith(self.chat_format.end_text):
                # The next turn begins with the token that ends this one.
                end = self.chat_format.end_text
                row[-1] = Piece(row[-1].text + end, True)
                between = between.removeprefix(end)
            if not row:
                rows.append(row)
            row += [Piece(between, False), Piece(turn.answer, True)]
            text = turn.prompt + turn.answer
        return rows


def _tokens(record: Record) -> int:
    return len(record.context["prompt"]) + len(record)
