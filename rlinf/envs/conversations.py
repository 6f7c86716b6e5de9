"""Conversations from JSON-lines files, for fine-tuning on the assistant's messages or as prompts.

The tokenizer's chat template renders conversations (:mod:`rlinf.models.chat_format`). Prompts and
answers are tokenized separately. So the assistant's tokens, and the tokens before them, are the
same as in a rollout, where the prompt is tokenized without the answer.
"""

from __future__ import annotations

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
from rlinf.envs.chat_problems import ChatProblem, read_conversations
from rlinf.envs.problem_set import ProblemSetConfig, ProblemSetEnvironment, Split
from rlinf.envs.rendered_dataset import LengthLimit, RenderedDataset
from rlinf.errors import ConfigError, name_key_in_memory_errors
from rlinf.models.base import ModelSpec
from rlinf.models.chat_format import AssistantTurn, split_thought
from rlinf.registry import EVAL_DEMONSTRATIONS
from rlinf.seeding import generator

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == "
    "'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, for small models that the configuration creates."""
BEGIN, END = "<|im_start|>", "<|im_end|>"
"""ChatML's tokens around a message."""


class ConversationsConfig(ProblemSetConfig):
    """The data files, and the messages that are trained on."""

    train: Path
    """JSON-lines file of training conversations."""
    test: Path
    """JSON-lines file of test conversations."""
    messages_field: str | None = None
    """Field with a list of messages: ``role`` and ``content``, or ``from`` and ``value`` as in
    ShareGPT. The last message is the assistant's. Null: ``messages``, ``conversations`` or
    ``conversation``, or ``prompt`` and ``completion`` together as in TRL, whichever a row has."""
    train_on: Literal["all", "last"] = "all"
    """Train on all of the assistant's messages, or on the last one only."""
    max_length: int = Field(default=4096, gt=0)
    """Maximum number of tokens of a conversation; longer ones are left out."""


@dataclass(frozen=True)
class ConversationSpan:
    """A part of a conversation's text, and whether the loss includes it."""

    text: str
    in_loss: bool


class ConversationsEnvironment(ProblemSetEnvironment):
    """Prompts are conversations up to the assistant's last message. A response is right if it
    equals this message, except for reasoning and surrounding white space."""

    Config = ConversationsConfig
    config: ConversationsConfig
    provides = ProblemSetEnvironment.provides | {EVAL_DEMONSTRATIONS}

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._datasets: dict[Split, RenderedDataset[Trajectory]] = {}
        self._sft_epoch: tuple[tuple[int, int], np.ndarray] | None = None
        """The current epoch of SFT, as (seed, epoch), and its order of conversations."""

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
            # A small model will be created, whose tokenizer has all characters and a template.
            train, test = (len(cls.load_problems(config, split)) for split in ("train", "test"))
            return TaskSize(train - config.num_fewshot, test)
        environment = cls(config, processor)
        # Check the conversations for SFT, too.
        environment._sft_dataset("train")
        environment._sft_dataset("test")
        return super().task_size(config, processor)

    def grade(self, response: str, answer: str) -> float:
        marks = self.chat_format.thinking_marks
        return float(split_thought(response, marks)[1] == split_thought(answer, marks)[1])

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        """Return conversations without replacement, in a new order for each epoch."""
        dataset, first = self._sft_dataset("train"), step * count
        indices = {}
        for draw in range(first, first + count):
            epoch, position = divmod(draw, len(dataset))
            indices[draw] = int(self._sft_order(seed, epoch, len(dataset))[position])
        trajectories = dataset.draw(indices, seed)
        return [
            replace(trajectories[draw], identity=RecordId(step, draw - first)) for draw in indices
        ]

    def test_demonstrations(self, count: int) -> list[Trajectory]:
        dataset = self._sft_dataset("test")
        trajectories = dataset.first(range(min(count, len(dataset))))
        return [replace(t, identity=RecordId(0, i)) for i, t in enumerate(trajectories)]

    def _sft_order(self, seed: int, epoch: int, count: int) -> np.ndarray:
        if self._sft_epoch is None or self._sft_epoch[0] != (seed, epoch):
            order = generator(seed, "conversations", "epoch", epoch).permutation(count)
            self._sft_epoch = ((seed, epoch), order)
        return self._sft_epoch[1]

    def _sft_dataset(self, split: Split) -> RenderedDataset[Trajectory]:
        """Return the conversations of a split for SFT; each is tokenized on use."""
        if split not in self._datasets:
            problems = self.load_problems(self.config, split)
            problems = problems[self.config.num_fewshot :] if split == "train" else problems
            key, limit = f"task.{split}", LengthLimit("task.max_length", self.config.max_length)
            with name_key_in_memory_errors(key):
                self._datasets[split] = RenderedDataset(
                    problems, key, self._trajectories, _num_tokens, limit
                )
        return self._datasets[split]

    def _trajectories(self, problems: Sequence[ChatProblem]) -> list[tuple[int, Trajectory]]:
        """Return trajectories, each with the index of its conversation in ``problems``.

        If the template renders an answer differently when another message follows (for instance
        without its reasoning), the conversation continues in a new trajectory. So each answer
        follows the prompt that a rollout would use.

        Raises:
            DataError: the template drops an answer, or renders a conversation inconsistently.
            ConfigError: the tokenizer has no template.
        """
        if self.chat_format.template is None:
            raise ConfigError(
                "task.name: conversations needs a chat template, and the tokenizer of model.path "
                "has none"
            )
        problems = [problem.with_template(self.config.prompt_template) for problem in problems]
        chats = [
            [*self._prompt_messages(p), {"role": "assistant", "content": p.answer}]
            for p in problems
        ]
        locations, last_only = [p.location for p in problems], self.config.train_on == "last"
        all_turns = self.chat_format.assistant_turns(chats, locations, last_only=last_only)
        indexed = [(i, spans) for i, turns in enumerate(all_turns) for spans in self._spans(turns)]
        encoded = iter(self.encode([span.text for _, spans in indexed for span in spans]))
        return [
            (index, self._trajectory([(next(encoded), span.in_loss) for span in spans]))
            for index, spans in indexed
        ]

    def _trajectory(self, spans: Sequence[tuple[np.ndarray, bool]]) -> Trajectory:
        """Return the trajectory of spans, each as its token ids and whether it is in the loss."""
        (prompt, _), *rest = spans
        actions = [ids for ids, _ in rest]
        masks = [np.full(len(ids), in_loss, np.float32) for ids, in_loss in rest]
        if actions[-1].tolist()[-1:] != [self.chat_format.end_of_turn_token_id]:
            # The template does not end the last message, so the model would not learn to end it.
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
        """Return the spans of one conversation, one list for each trajectory. A prompt that does
        not begin with the text so far starts a new trajectory."""
        per_trajectory, text = list[list[ConversationSpan]](), ""
        for turn in turns:
            spans = per_trajectory[-1] if per_trajectory and turn.prompt.startswith(text) else []
            between = turn.prompt[len(text) :] if spans else turn.prompt
            if spans and between.startswith(self.chat_format.end_of_turn_text):
                # The template writes the token that ends an answer only when a message follows.
                end = self.chat_format.end_of_turn_text
                spans[-1] = ConversationSpan(spans[-1].text + end, True)
                between = between.removeprefix(end)
            if not spans:
                per_trajectory.append(spans)
            spans += [ConversationSpan(between, False), ConversationSpan(turn.completion, True)]
            text = turn.prompt + turn.completion
        return per_trajectory


def _num_tokens(trajectory: Trajectory) -> int:
    return len(trajectory.require("prompt")) + len(trajectory)
