"""Conversations from JSON-lines files, for fine-tuning on the assistant's messages or as prompts.

A conversation becomes tokens by the tokenizer's chat template (:mod:`rlinf.models.chat_format`).
Each span, prompt or answer, is tokenized separately. So the assistant's tokens, and the tokens
before them, are the same as in a rollout, where the prompt is tokenized without the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rlinf.data.json_lines import JsonLinesFile
from rlinf.data.record import RecordId
from rlinf.data.trajectory import Trajectory
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
from rlinf.registry import EVAL_DEMONSTRATIONS
from rlinf.seeding import generator

log = logging.getLogger("rlinf")
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == "
    "'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, for small models that the configuration creates."""
BEGIN, END = "<|im_start|>", "<|im_end|>"


class ConversationsConfig(ProblemSetConfig):
    """The data files, and which messages are learnt."""

    train: Path
    """JSON-lines file of training conversations."""
    test: Path
    """JSON-lines file of test conversations."""
    messages_field: str = "messages"
    """Field with a list of messages: ``role`` (system, user, assistant) and ``content``. The last
    message is the assistant's."""
    train_on: Literal["all", "last"] = "all"
    """Train on all of the assistant's messages, or on the last one only."""
    max_length: int = Field(default=4096, gt=0)
    """Longer conversations are left out, tokens."""


@dataclass(frozen=True)
class ConversationSpan:
    """A part of a conversation's text, and whether it is in the loss."""

    text: str
    in_loss: bool


class ConversationsEnvironment(ProblemSetEnvironment):
    """Prompts are conversations up to the assistant's last message. An answer is right if it equals
    that message, apart from reasoning and surrounding white space."""

    Config = ConversationsConfig
    config: ConversationsConfig
    provides = ProblemSetEnvironment.provides | {EVAL_DEMONSTRATIONS}

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._learnt: dict[Split, RenderedDataset[Trajectory]] = {}
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
            # A small model will be created: its tokenizer has every character, and a template.
            train, test = (len(cls.load_problems(config, split)) for split in ("train", "test"))
            return TaskSize(train - config.num_fewshot, test)
        environment = cls(config, processor)
        environment._training_trajectories("train")
        environment._training_trajectories("test")
        return super().task_size(config, processor)

    def grade(self, response: str, answer: str) -> float:
        marks = self.chat_format.thinking_marks
        return float(split_thought(response, marks)[1] == split_thought(answer, marks)[1])

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return conversations without replacement, in a new order for each epoch."""
        learnt = self._training_trajectories("train")
        chosen = []
        for i in range(count):
            epoch, place = divmod(step * count + i, len(learnt))
            chosen.append(int(self._order_of(seed, epoch, len(learnt))[place]))
        return [
            replace(trajectory, identity=RecordId(step, i))
            for i, trajectory in enumerate(learnt.take(chosen))
        ]

    def test_demonstrations(self, count: int) -> list[Trajectory]:
        learnt = self._training_trajectories("test")
        chosen = learnt.take(range(min(count, len(learnt))))
        return [replace(trajectory, identity=RecordId(0, i)) for i, trajectory in enumerate(chosen)]

    def _order_of(self, seed: int, epoch: int, count: int) -> np.ndarray:
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            order = generator(seed, "conversations", "epoch", epoch).permutation(count)
            self._drawn = ((seed, epoch), order)
        return self._drawn[1]

    def _training_trajectories(self, split: Split) -> RenderedDataset[Trajectory]:
        """Return all conversations of a split for training; each is tokenized on use."""
        if split not in self._learnt:
            problems = self.load_problems(self.config, split)
            problems = problems[self.config.num_fewshot :] if split == "train" else problems
            dataset = RenderedDataset(problems, self._trajectories, _tokens)
            key, most = f"task.{split}", f"task.max_length={self.config.max_length}"
            with name_key_in_memory_errors(key):
                dataset.filter_by_length(self.config.max_length, self._address(problems, dataset))
            if not len(dataset):
                raise DataError(f"{key}: all {dataset.total} conversations are longer than {most}")
            if len(dataset) < dataset.total:
                left = dataset.total - len(dataset)
                log.warning("%s: %d of %d are longer than %s", key, left, dataset.total, most)
            self._learnt[split] = dataset
        return self._learnt[split]

    def _trajectories(self, problems: Sequence[ChatProblem]) -> list[tuple[int, Trajectory]]:
        """Return trajectories, each with the index of its conversation in the argument.

        If the template renders an answer differently once a message follows (without its reasoning,
        for instance), the conversation continues in a new trajectory. So each answer follows the
        prompt that a rollout would use.

        Raises:
            DataError: the template drops an answer, or does not write what it promises.
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
        rows = [(i, row) for i, talk in enumerate(turns) for row in self._spans(talk)]
        encoded = iter(self.encode([piece.text for _, row in rows for piece in row]))
        return [
            (number, self._trajectory([(next(encoded), piece.in_loss) for piece in row]))
            for number, row in rows
        ]

    def _trajectory(self, pieces: Sequence[tuple[np.ndarray, bool]]) -> Trajectory:
        (prompt, _), *rest = pieces
        actions = [ids for ids, _ in rest]
        masks = [np.full(len(ids), learnt, np.float32) for ids, learnt in rest]
        if actions[-1].tolist()[-1:] != [self.chat_format.end_of_turn_token_id]:
            # Nothing of the template ends the last message: without it none would ever end.
            actions[-1], masks[-1] = (
                self.append_end_token(actions[-1]),
                np.append(masks[-1], np.float32(1)),
            )
        return Trajectory(
            identity=RecordId(0, 0),
            actions=np.concatenate(actions),
            mask=np.concatenate(masks),
            prompt=prompt,
        )

    def _spans(self, turns: Sequence[AssistantTurn]) -> list[list[ConversationSpan]]:
        """Return the spans of one conversation: a new row for each prompt that does not extend the
        last."""
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


def _tokens(trajectory: Trajectory) -> int:
    return len(trajectory.require("prompt")) + len(trajectory)
