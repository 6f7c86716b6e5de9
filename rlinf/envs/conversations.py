"""Conversations from JSON-lines files: what the assistant said in them is learnt, or asked for.

A conversation becomes tokens by the tokenizer's chat template. Its text is cut where the assistant
begins and ends to speak, and each piece is tokenised for itself: what it says is then the same
tokens, behind the same ones, as in a rollout, where the prompt is tokenised without the answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rlinf.data.record import Identity, Record
from rlinf.data.row_file import RowFile, overlap
from rlinf.envs.base import Extent
from rlinf.envs.problem_set import ProblemSet, ProblemSetConfig, Rendered, Split
from rlinf.envs.problems import Problem, read_conversations
from rlinf.errors import ConfigError, DataError, naming
from rlinf.fit import HELD_OUT_DEMONSTRATIONS
from rlinf.models.base import Spec
from rlinf.models.chat import Message, render
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
    allow_overlap: bool = False
    """Train although every held-out conversation is a training conversation too."""
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
    right where it is that message, but for white space around it."""

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
    def held_out_overlap(cls, config: ConversationsConfig) -> tuple[int, int]:
        return overlap(cls.read(config, "train"), cls.read(config, "test"))

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
        return float(response.strip() == answer.strip())

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
        return learnt.take(range(min(count, len(learnt))))

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
            made = Rendered(problems, self._numbered, _tokens)
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

    def _numbered(self, problems: Sequence[Problem]) -> list[tuple[int, Record]]:
        """Records to learn, each with the number of its conversation among those given."""
        asked = [problem.asked(self.config.template) for problem in problems]
        return [(record.identity.sample, record) for record in self._records(asked)]

    def _records(self, problems: Sequence[Problem]) -> list[Record]:
        pieces = self._pieces(problems)
        encoded = iter(self.encode([piece.text for row in pieces for piece in row]))
        records = []
        for number, row in enumerate(pieces):
            prompt, *rest = ((next(encoded), piece.learnt) for piece in row)
            actions = [ids for ids, _ in rest]
            masks = [np.full(len(ids), learnt, np.float32) for ids, learnt in rest]
            if not self._ends(row[-1].text):
                # Nothing of the template ends the last message: without it none would ever end.
                actions.append(np.array([self.tokenizer.eos_token_id], np.int64))
                masks.append(np.ones(1, np.float32))
            steps = {"actions": np.concatenate(actions), "mask": np.concatenate(masks)}
            records.append(Record(Identity(0, number), steps, {"prompt": prompt[0]}))
        return records

    def _pieces(self, problems: Sequence[Problem]) -> list[list[Piece]]:
        """The texts of conversations, cut where the assistant begins and ends to speak.

        Raises:
            DataError: the template writes earlier messages otherwise once more follow, or the
                beginning of an answer otherwise than it asks for one.
            ConfigError: the tokenizer has none.
        """
        template = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str):
            raise ConfigError(
                "task.name: conversations needs one chat template, and the tokenizer of model.path "
                f"has {'several' if template else 'none'}"
            )
        talks = [[*self._messages(p), {"role": "assistant", "content": p.answer}] for p in problems]
        begun, ended = list[list[Message]](), list[list[Message]]()
        counts = []
        for talk in talks:
            own = [i for i, message in enumerate(talk) if message["role"] == "assistant"]
            own = own[-1:] if self.config.learn == "last" else own
            begun += [talk[:i] for i in own]
            ended += [talk[: i + 1] for i in own]
            counts.append(len(own))
        names = {str(k): str(v) for k, v in self.tokenizer.special_tokens_map.items()}
        before = iter(render(template, begun, names, "model.path"))
        after = iter(render(template, ended, names, "model.path", answering=False))
        return [
            self._cut(problem, talk, [(next(before), next(after)) for _ in range(count)])
            for problem, talk, count in zip(problems, talks, counts, strict=True)
        ]

    def _cut(
        self, problem: Problem, talk: Sequence[Message], turns: Sequence[tuple[str, str]]
    ) -> list[Piece]:
        """The pieces of one conversation.

        Args:
            turns: the text up to each answer and up to its end.
        """
        hint = "" if self.config.learn == "last" else ", or learn the last one (task.learn=last)"
        for one, other in pairwise(text for turn in turns for text in turn):
            if not other.startswith(one):
                raise DataError(
                    f"{problem.place}: the chat template of model.path does not write a "
                    f"conversation as a continuation of its beginning, so that what the assistant "
                    f"learnt would not be what it is asked for; use another template{hint}"
                )
        own = [m["content"].strip() for m in talk if m["role"] == "assistant"][-len(turns) :]
        pieces, done, whole = list[Piece](), 0, turns[-1][1]
        for (before, after), content in zip(turns, own, strict=True):
            said = after[len(before) :]
            said = said[: self._end_of(said, content, problem)]
            pieces += [Piece(whole[done : len(before)], False), Piece(said, True)]
            done = len(before) + len(said)
        return pieces

    def _end_of(self, said: str, content: str, problem: Problem) -> int:
        """Where a turn ends: with the first special token behind its content, which ends it in a
        rollout too; where the template has none, with all that it puts there."""
        places = sorted(
            (match.start(), match.end())
            for special in self._specials()
            for match in re.finditer(re.escape(special), said)
        )
        for start, end in places:
            if content in said[:start]:
                return end
        if content not in said:
            raise DataError(
                f"{problem.place}: the chat template of model.path leaves out or changes what the "
                "assistant said"
            )
        return len(said)

    def _ends(self, text: str) -> bool:
        return any(text.endswith(special) for special in self._specials())

    def _specials(self) -> list[str]:
        """Special tokens, as text."""
        known: Mapping[int, Any] = getattr(self.tokenizer, "added_tokens_decoder", {})
        added = {token.content for token in known.values() if token.special}
        return sorted({*self.tokenizer.all_special_tokens, *added}, key=len, reverse=True)


def _tokens(record: Record) -> int:
    return len(record.context["prompt"]) + len(record)
