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

from rlinf.capabilities import EVAL_DEMONSTRATIONS
from rlinf.data.json_lines import JsonLinesFile
from rlinf.data.record import Record, RecordId
from rlinf.envs.base import TaskSize
from rlinf.envs.problem_set import (
    ChatProblem,
    ProblemSetConfig,
    ProblemSetEnvironment,
    RenderedDataset,
    Split,
    read_conversations,
)
from rlinf.errors import ConfigError, DataError, name_key_in_memory_errors
from rlinf.models.base import ModelSpec
from rlinf.models.chat_format import AssistantTurn, split_thought
from rlinf.seeding import generator

log = logging.getLogger("rlinf")
CHATML_TEMPLATE = (
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
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's messages are learnt."""
    max_length: int = Field(default=4096, gt=0)
    """Longer conversations are not learnt from."""


@dataclass(frozen=True)
class ConversationSpan:
    """Part of the text of a conversation, and whether the assistant is to learn it."""

    text: str
    in_loss: bool


class ConversationsEnvironment(ProblemSetEnvironment):
    """See the module. A prompt is a conversation up to the assistant's last message; an answer is
    right where it is that message, but for thoughts and white space around it."""

    Config = ConversationsConfig
    config: ConversationsConfig
    provides = ProblemSetEnvironment.provides | {EVAL_DEMONSTRATIONS}

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._learnt: dict[Split, RenderedDataset[Record]] = {}
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None

    @classmethod
    def load_problems(cls, config: ConversationsConfig, split: Split) -> JsonLinesFile[ChatProblem]:
        path = config.train if split == "train" else config.test
        return read_conversations(path, config.messages_field, f"task.{split}")

    @classmethod
    def model_spec(cls, config: ConversationsConfig) -> ModelSpec:
        characters = set(f"system user assistant\n{config.system_prompt}")
        for split in ("train", "test"):
            for problem in cls.load_problems(config, split):
                characters.update(problem.answer, *(m["content"] for m in problem.messages))
        return {
            "alphabet": "".join(sorted(characters)),
            "chat_template": CHATML_TEMPLATE,
            "special_tokens": [BEGIN, END],
        }

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        if processor is None:
            # A small model to be made: its tokenizer has every character, and a template.
            train, test = (len(cls.load_problems(config, split)) for split in ("train", "test"))
            return TaskSize(train - config.num_fewshot, test)
        made = cls(config, processor)
        made._all("train")
        made._all("test")
        return super().task_size(config, processor)

    def grade(self, response: str, answer: str) -> float:
        marks = self.chat_format.thinking_marks
        return float(split_thought(response, marks)[1] == split_thought(answer, marks)[1])

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        """Conversations without replacement, in an order drawn anew for each epoch."""
        learnt = self._all("train")
        chosen = []
        for i in range(count):
            epoch, place = divmod(step * count + i, len(learnt))
            chosen.append(int(self._order_of(seed, epoch, len(learnt))[place]))
        return [
            Record(RecordId(step, i), record.steps, record.context)
            for i, record in enumerate(learnt.take(chosen))
        ]

    def test_demonstrations(self, count: int) -> list[Record]:
        learnt = self._all("test")
        chosen = learnt.take(range(min(count, len(learnt))))
        return [
            Record(RecordId(0, i), record.steps, record.context) for i, record in enumerate(chosen)
        ]

    def _order_of(self, seed: int, epoch: int, count: int) -> np.ndarray:
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            order = generator(seed, "conversations", "epoch", epoch).permutation(count)
            self._drawn = ((seed, epoch), order)
        return self._drawn[1]

    def _all(self, split: Split) -> RenderedDataset[Record]:
        """All conversations of a split as they are learnt; each is made into tokens on use."""
        if split not in self._learnt:
            problems = self.load_problems(self.config, split)
            problems = problems[self.config.num_fewshot :] if split == "train" else problems
            made = RenderedDataset(problems, self._records, _tokens)
            key, most = f"task.{split}", f"task.max_length={self.config.max_length}"
            with name_key_in_memory_errors(key):
                made.filter_by_length(self.config.max_length, self._address(problems, made))
            if not len(made):
                raise DataError(f"{key}: all {made.total} conversations are longer than {most}")
            if len(made) < made.total:
                left = made.total - len(made)
                log.warning("%s: %d of %d are longer than %s", key, left, made.total, most)
            self._learnt[split] = made
        return self._learnt[split]

    def _records(self, problems: Sequence[ChatProblem]) -> list[tuple[int, Record]]:
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
        problems = [problem.with_template(self.config.prompt_template) for problem in problems]
        talks = [[*self._messages(p), {"role": "assistant", "content": p.answer}] for p in problems]
        places, last = [problem.location for problem in problems], self.config.train_on == "last"
        turns = self.chat_format.assistant_turns(talks, places, last_only=last)
        rows = [(i, row) for i, talk in enumerate(turns) for row in self._pieces(talk)]
        encoded = iter(self.encode([piece.text for _, row in rows for piece in row]))
        return [
            (number, self._record([(next(encoded), piece.in_loss) for piece in row]))
            for number, row in rows
        ]

    def _record(self, pieces: Sequence[tuple[np.ndarray, bool]]) -> Record:
        (prompt, _), *rest = pieces
        actions = [ids for ids, _ in rest]
        masks = [np.full(len(ids), learnt, np.float32) for ids, learnt in rest]
        if actions[-1].tolist()[-1:] != [self.chat_format.end_of_turn_token_id]:
            # Nothing of the template ends the last message: without it none would ever end.
            actions[-1], masks[-1] = (
                self.append_end_token(actions[-1]),
                np.append(masks[-1], np.float32(1)),
            )
        steps = {"actions": np.concatenate(actions), "mask": np.concatenate(masks)}
        return Record(RecordId(0, 0), steps, {"prompt": prompt})

    def _pieces(self, turns: Sequence[AssistantTurn]) -> list[list[ConversationSpan]]:
        """The texts of one conversation: a row for each prompt that does not continue the last."""
        rows, text = list[list[ConversationSpan]](), ""
        for turn in turns:
            row = rows[-1] if rows and turn.prompt.startswith(text) else []
            between = turn.prompt[len(text) :] if row else turn.prompt
            if row and between.startswith(self.chat_format.end_of_turn_text):
                # The next turn begins with the token that ends this one.
                end = self.chat_format.end_of_turn_text
                row[-1] = ConversationSpan(row[-1].text + end, True)
                between = between.removeprefix(end)
            if not row:
                rows.append(row)
            row += [ConversationSpan(between, False), ConversationSpan(turn.completion, True)]
            text = turn.prompt + turn.completion
        return rows


def _tokens(record: Record) -> int:
    return len(record.context["prompt"]) + len(record)
