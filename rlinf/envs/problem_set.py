"""Tasks that have their problems beforehand: a question or a conversation each, and an answer.

A task says where problems come from (:meth:`ProblemSet.read`) and how a response is scored. What a
model is given is made here: template, examples, system message, the tokenizer's chat template.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.record import Identity, Record
from rlinf.data.row_cache import cached_arrays
from rlinf.data.row_file import RowFile, overlap
from rlinf.envs.base import Episodes, Extent
from rlinf.envs.problems import PROMPT, Problem, question_text, shown
from rlinf.envs.prompts import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError, naming
from rlinf.models.chat import Message
from rlinf.models.chat_format import split_thought
from rlinf.seeding import generator

log = logging.getLogger(__name__)
T = TypeVar("T")

Split = Literal["train", "test"]
CHUNK, CHUNK_CHARACTERS = 2048, 8 << 20
"""Problems, and about so much of their text, that are rendered at once."""
HELD = 4096
"""Prompts that stay in memory."""
CACHED_FROM = 20_000
"""Problems whose tokens are counted once for all processes."""
PROBES = 8


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
    allow_overlap: bool = False
    """Train although every held-out problem is a training problem too."""

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


class Rendered(Generic[T]):
    """What a model gets of some problems, made when it is used: prompts, or whole conversations.

    The newest :data:`HELD` stay in memory; of all others it is known how many tokens they have.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        render: Callable[[Sequence[Problem]], list[tuple[int, T]]],
        size: Callable[[T], int],
    ) -> None:
        """
        Args:
            render: makes items of problems, each with the number of its problem among those given;
                a problem may become several, one after the other.
            size: tokens of an item.
        """
        self._problems, self.render, self._size = problems, render, size
        self._held: OrderedDict[tuple[int, int], T] = OrderedDict()
        self._places = np.zeros((0, 2), np.int64)
        self.longest = 0
        """Tokens of the longest item that is short enough."""
        self.every = 0
        """Items, however long."""

    def __len__(self) -> int:
        return len(self._places)

    def measure(self, most: int, address: str | None = None) -> None:
        """Find the items of at most so many tokens.

        Args:
            address: text of what lengths follow from, for the cache; None: they are not kept there.
        """
        known = (
            self._measured()
            if address is None
            else cached_arrays("tokens", address, self._measured, large=True)
        )
        tokens = known["tokens"]
        self._places, self.every = known["places"][tokens <= most], len(tokens)
        self.longest = int(tokens[tokens <= most].max(initial=0))

    def take(self, numbers: Sequence[int]) -> list[T]:
        """Return the items of these numbers, of those that are short enough."""
        places = [(int(row), int(part)) for row, part in self._places[list(numbers)]]
        lacking = [row for row, part in places if (row, part) not in self._held]
        rows = list(dict.fromkeys(lacking))
        made = self._made(rows, [self._problems[row] for row in rows]) if rows else {}
        found = [made[place] if place in made else self._held[place] for place in places]
        self._hold(made)
        return found

    def __getitem__(self, number: int) -> T:
        return self.take([number])[0]

    def _measured(self) -> dict[str, np.ndarray]:
        """Tokens of every item, and its problem and number within that."""
        places, tokens = list[np.ndarray](), list[np.ndarray]()
        for rows, problems in _chunks(self._problems):
            made = self._made(rows, problems)
            places.append(np.array(list(made), np.int64).reshape(-1, 2))
            tokens.append(np.array([self._size(item) for item in made.values()], np.int64))
            self._hold(made)
        return {"places": np.concatenate(places), "tokens": np.concatenate(tokens)}

    def _made(self, rows: Sequence[int], problems: Sequence[Problem]) -> dict[tuple[int, int], T]:
        made: dict[tuple[int, int], T] = {}
        parts: Counter[int] = Counter()
        for number, item in self.render(problems):
            row = rows[number]
            made[row, parts[row]] = item
            parts[row] += 1
        return made

    def _hold(self, made: Mapping[tuple[int, int], T]) -> None:
        self._held.update(made)
        while len(self._held) > HELD:
            self._held.popitem(last=False)


def _chunks(problems: Sequence[Problem]) -> Iterator[tuple[list[int], list[Problem]]]:
    """All problems and their numbers, a few thousand or some megabytes of text at a time."""
    some, size = list[Problem](), 0
    for row, problem in enumerate(problems):
        some.append(problem)
        size += sum(len(message["content"]) for message in problem.messages)
        if len(some) == CHUNK or size > CHUNK_CHARACTERS or row + 1 == len(problems):
            yield list(range(row + 1 - len(some), row + 1)), some
            some, size = [], 0


class ProblemSet(PromptEnvironment):
    """See the module."""

    Config: ClassVar[type[ProblemSetConfig]] = ProblemSetConfig
    config: ProblemSetConfig
    renders = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._epoch: tuple[tuple[int, int], np.ndarray] | None = None
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
        self._problems: dict[str, Rendered[Asked]] = {
            "train": self._load(training, "task.train"),
            "test": self._load(self.read(config, "test"), "task.test"),
        }

    @classmethod
    @abstractmethod
    def read(cls, config: Any, split: Split) -> Sequence[Problem]:
        """Return all problems of a split, in an order that stays.

        Raises:
            DataError: there is none, or one is malformed.
        """

    @classmethod
    def held_out_overlap(cls, config: Any) -> tuple[int, int]:
        return overlap(cls.read(config, "train"), cls.read(config, "test"), question_text)

    @classmethod
    def extent(cls, config: Any, processor: Any) -> Extent:
        made = cls(config, processor)
        longest = max(prompts.longest for prompts in made._problems.values())
        return Extent(len(made._problems["train"]), len(made._problems["test"]), longest)

    def prompts(self, episodes: Episodes) -> Sequence[Prompt]:
        """Training problems without replacement, in an order drawn anew for each epoch; the first
        test problems."""
        problems = self._problems[episodes.split]
        if episodes.split == "test":
            return problems.take([start % len(problems) for start in episodes.starts])
        chosen = []
        for start in episodes.starts:
            epoch, place = divmod(episodes.iteration * episodes.batch + start, len(problems))
            chosen.append(int(self._order(episodes.seed, epoch)[place]))
        return problems.take(chosen)

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        problems = self._problems["train"]
        # The name is part of the address of what is drawn; runs begun earlier had this one.
        chosen = generator(seed, "jsonl", "demonstration", step).integers(len(problems), size=count)
        prompts = problems.take(chosen.tolist())
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

    def _load(self, problems: Sequence[Problem], key: str) -> Rendered[Asked]:
        """The problems whose prompts are short enough. All are rendered once, some at a time.

        Raises:
            DataError: none is; a problem or setting needs a chat template; the template fails, or
                leaves out what it was given.
        """
        if not problems:
            raise DataError(f"{key}: no problem is left beside task.shots={self.config.shots}")
        most = self.config.max_prompt_tokens
        made = Rendered(
            problems,
            lambda chosen: list(enumerate(self._asked(chosen, key))),
            lambda prompt: prompt.tokens,
        )
        with naming(key):
            made.measure(most, self._address(problems, made))
        if not len(made):
            raise DataError(
                f"{key}: all {len(problems)} prompts, from {problems[0].place} on, are longer than "
                f"task.max_prompt_tokens={most}"
            )
        if len(made) < len(problems):
            log.warning(
                "%s: %d of %d problems are left out: their prompts are longer than "
                "task.max_prompt_tokens=%d",
                key,
                len(problems) - len(made),
                len(problems),
                most,
            )
        return made

    def _address(self, problems: Sequence[Problem], rendered: Rendered[Any]) -> str | None:
        """Text of what the lengths of items follow from; None where they are soon counted again.

        How the tokenizer and its template write the first problems tells settings of theirs apart.
        """
        if not isinstance(problems, RowFile) or len(problems) < CACHED_FROM:
            return None
        tokenizer = self.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        parts = (
            (problems.digest, len(problems)),
            self.config.model_dump_json(exclude={"workers", "timeout_s"}),
            type(tokenizer).__name__,
            fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items()),
            (self.chat_format.template, dict(self.chat_format.arguments)),
            [repr(item) for item in rendered.render(problems[:PROBES])],
        )
        return repr(parts)

    def _asked(self, problems: Sequence[Problem], key: str) -> list[Asked]:
        """Problems as the model gets them.

        Raises:
            DataError: a prompt has no tokens, or as :meth:`_load`.
        """
        problems = [problem.asked(self.config.template) for problem in problems]
        given = self._given(problems, key)
        empty = next((i for i, ids in enumerate(self.encode(given)) if not len(ids)), None)
        if empty is not None:
            raise DataError(f"{key}: {problems[empty].place}: the prompt has no tokens")
        lengths = [len(ids) for ids in self.contexts(given)]
        return [
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
        ]

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

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            count = len(self._problems["train"])
            order = generator(seed, "jsonl", "epoch", epoch).permutation(count)
            self._epoch = ((seed, epoch), order)
        return self._epoch[1]

    def _messages(self, problem: Problem) -> list[Message]:
        first, *rest = problem.messages
        own = first["role"] == "system"
        system = [first["content"]] if own else [self.config.system] if self.config.system else []
        opening: list[Message] = [{"role": "system", "content": text} for text in system]
        return [*opening, *self._examples, *(rest if own else problem.messages)]
