"""Tasks that have their problems beforehand: a question or a conversation each, and an answer.

A task says where problems come from (:meth:`ProblemSetEnvironment.read`) and how a response is scored. What a
model is given is made here: template, examples, system message, the tokenizer's chat template.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.array_cache import cached_arrays
from rlinf.data.json_lines import JsonLinesFile, count_overlap
from rlinf.data.record import Record, RecordId, Scalar
from rlinf.envs.base import RolloutRequest, TaskSize
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError, did_you_mean, name_key_in_memory_errors
from rlinf.models.chat_format import split_thought
from rlinf.models.chat_template import ChatMessage
from rlinf.seeding import generator

ROLES = ("system", "user", "assistant")
PROMPT_PLACEHOLDER = "{prompt}"
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which messages have what the assistant thought."""


@dataclass(frozen=True)
class ChatProblem:
    """A row of a file."""

    messages: tuple[Mapping[str, str], ...]
    """Roles and contents; the last one is the user's. Of a plain question that is all there is."""
    answer: str
    location: str
    """Where it is from, for messages: file and line."""
    demonstration: str | None = None
    """What the assistant said last, where the row goes on so far."""
    info: Mapping[str, Scalar] = field(default_factory=dict)
    """Further fields, for the reward."""

    def with_template(self, template: str) -> ChatProblem:
        """The same, with the last message put into a template."""
        *before, last = self.messages
        content = template.replace(PROMPT_PLACEHOLDER, last["content"])
        return replace(self, messages=(*before, {**last, "content": content}))


def read_problems(
    path: Path, prompt_field: str, answer_field: str, key: str, info_fields: Sequence[str] = ()
) -> JsonLinesFile[ChatProblem]:
    """Return the problems of a JSON-lines file, each read when it is used.

    The prompt is a text or a list of messages (``role`` and ``content``). Where that ends with the
    assistant, what it says is a demonstration, and the answer of rows without ``answer_field``.

    Raises:
        DataError: missing or empty file, not UTF-8, a line that is not JSON, a field that is not
            there, empty or of another type; names the line.
    """

    def parse(where: str, item: dict[str, Any], texts: np.ndarray) -> ChatProblem:
        problem = _problem(item, prompt_field, answer_field, where, where.removeprefix(f"{key}: "))
        info = {}
        for name, is_text in zip(info_fields, texts, strict=True):
            value = _scalar(_field(item, name, "info_fields", where), where, name)
            info[name] = json.dumps(value) if is_text and not isinstance(value, str) else value
        return replace(problem, info=info)

    def note(item: dict[str, Any], texts: np.ndarray) -> None:
        # Numbers as JSON too where there are texts: the records of a channel have one schema.
        for i, name in enumerate(info_fields):
            texts[i] |= isinstance(_scalar(item[name], "", name), str)

    settings = f"problems {prompt_field!r} {answer_field!r} {[*info_fields]!r}"
    return JsonLinesFile(
        path,
        key,
        parse,
        settings=settings,
        row_text=question_text,
        observe=note,
        flags=len(info_fields),
    )


def read_conversations(path: Path, field: str, key: str) -> JsonLinesFile[ChatProblem]:
    """Return the conversations of a JSON-lines file, each read when it is used; the last message of
    each is answer and demonstration.

    Raises:
        DataError: as :func:`read_problems`, or a conversation does not end with the assistant
            answering the user; names the line.
    """

    def parse(where: str, item: dict[str, Any], flags: np.ndarray) -> ChatProblem:
        messages = _messages(_field(item, field, "messages_field", where), where, field)
        if [m["role"] for m in messages[-2:]] != ["user", "assistant"]:
            raise DataError(
                f"{where}: {field!r} does not end with the assistant answering the user, so there "
                "is no last answer to learn"
            )
        last = messages.pop()["content"]
        return ChatProblem(tuple(messages), last, where.removeprefix(f"{key}: "), last)

    return JsonLinesFile(
        path, key, parse, settings=f"conversations {field!r}", row_text=question_text
    )


def question_text(problem: ChatProblem) -> str:
    """Return the text by which two problems are the same: all messages of the user, one a line.

    White space does not count, and neither do the system message and the assistant's messages:
    with others in their place the model still trains on the question.
    """
    asked = (message["content"] for message in problem.messages if message["role"] == "user")
    return "\n".join(map(collapse_whitespace, asked))


def collapse_whitespace(text: str) -> str:
    """Return the text with one space for each run of white space, and none at its ends."""
    return " ".join(text.split())


def text_field(item: dict[str, Any], name: str, option: str, where: str) -> str:
    """A field that is a text or a number, as text; ``option`` is the key that names it.

    Raises:
        DataError: it is not there, empty or of another type.
    """
    value = _field(item, name, option, where)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: {name!r} is {_short(value)}; expected a text or a number")
    return _text(str(value), where, name)


def _problem(
    item: dict[str, Any], prompt_field: str, answer_field: str, where: str, place: str
) -> ChatProblem:
    messages = _messages(_field(item, prompt_field, "prompt_field", where), where, prompt_field)
    demonstration = None
    if messages[-1]["role"] == "assistant":
        demonstration = messages.pop()["content"]
    if not messages or messages[-1]["role"] != "user":
        raise DataError(f"{where}: {prompt_field!r} holds no message of the user to answer")
    if answer_field not in item and demonstration is not None:
        return ChatProblem(tuple(messages), demonstration, place, demonstration)
    answer = text_field(item, answer_field, "answer_field", where)
    return ChatProblem(tuple(messages), answer, place, demonstration)


def _scalar(value: Any, where: str, field: str) -> Scalar:
    """A field as a record can carry it."""
    if isinstance(value, str):
        return _whole(value, where, field)
    plain = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
    return value if plain else json.dumps(value, sort_keys=True)


def _field(item: dict[str, Any], name: str, option: str, where: str) -> Any:
    if name not in item:
        raise DataError(f"{where}: no field {name!r}{did_you_mean(name, item)} (set task.{option})")
    return item[name]


def _messages(value: Any, where: str, field: str) -> list[Mapping[str, str]]:
    """A question, or a conversation as it stands in a file, as messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": _text(value, where, field)}]
    if not isinstance(value, list):
        raise DataError(f"{where}: {field!r} is {_short(value)}; expected a text or messages")
    if not value:
        raise DataError(f"{where}: {field!r} is empty")
    messages: list[Mapping[str, str]] = []
    for i, message in enumerate(value):
        place = f"{field}[{i}]"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: {place!r} is {_short(message)}; expected role and content")
        role, content = message["role"], message["content"]
        if role not in ROLES or (role == "system" and i):
            raise DataError(
                f"{where}: {place!r} has the role {_short(role)}; expected user or assistant, or "
                "system for the first"
            )
        if not isinstance(content, str):
            raise DataError(f"{where}: the content of {place!r} is {_short(content)}, not a text")
        content = _with_thought(message, content, where, place)
        messages.append({"role": role, "content": _text(content, where, place)})
    return messages


def _with_thought(message: Mapping[str, Any], content: str, where: str, place: str) -> str:
    """A content with the thought that stands in a field of its own, as models write it."""
    named = [name for name in THOUGHT_FIELDS if message.get(name)]
    if message["role"] != "assistant" or not named:
        return content
    thought = message[named[0]]
    if not isinstance(thought, str):
        raise DataError(f"{where}: {named[0]!r} of {place!r} is {_short(thought)}, not a text")
    return f"<think>\n{thought.strip()}\n</think>\n\n{content}"


def _text(value: str, where: str, field: str) -> str:
    if not value.strip():
        raise DataError(f"{where}: {field!r} is empty")
    return _whole(value, where, field)


def _whole(value: str, where: str, field: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{where}: {field!r} has half of a surrogate pair, which is no character")
    return value


def _short(value: Any) -> str:
    return json.dumps(value)[:40]


def format_transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as a transcript; a single message is its text."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


log = logging.getLogger(__name__)
T = TypeVar("T")

Split = Literal["train", "test"]
RENDER_CHUNK, RENDER_CHUNK_CHARACTERS = 2048, 8 << 20
"""Problems, and about so much of their text, that are rendered at once."""
MAX_CACHED_PROMPTS = 4096
"""Prompts that stay in memory."""
DISK_CACHE_MIN_PROBLEMS = 20_000
"""Problems whose tokens are counted once for all processes."""
TOKENIZER_PROBES = 8


class ProblemSetConfig(Section):
    """How problems are asked."""

    prompt_template: str = "{prompt}"
    """Text of the user's (last) message; ``{prompt}`` stands for the problem."""
    system_prompt: str = ""
    """System message of conversations without one, for tokenizers with a chat template."""
    num_fewshot: int = Field(default=0, ge=0)
    """So many training problems stand before each question as turns with their answers, the same
    ones each time; they are asked no more. For tokenizers with a chat template."""
    max_prompt_length: int = Field(default=1024, gt=0)
    """Longer prompts are left out."""
    allow_train_test_overlap: bool = False
    """Train although every held-out problem is a training problem too."""

    @field_validator("prompt_template")
    @classmethod
    def _asks(cls, value: str) -> str:
        if PROMPT_PLACEHOLDER not in value:
            raise ValueError("does not contain {prompt}, so no problem would be asked")
        return value


@dataclass(frozen=True)
class RenderedProblem(Prompt):
    """A problem as the model gets it."""

    rendered: str
    """What the model gets."""
    demonstration: str
    """An answer to learn from: what the assistant says in the row, or the reference answer."""
    num_tokens: int
    """Of ``rendered``."""
    conversation: tuple[ChatMessage, ...]
    """The messages that ``rendered`` is made of."""
    location: str
    """Where it is from, for messages: file and line."""

    @property
    def model_input(self) -> str:
        return self.rendered


class RenderedDataset(Generic[T]):
    """What a model gets of some problems, made when it is used: prompts, or whole conversations.

    The newest :data:`HELD` stay in memory; of all others it is known how many tokens they have.
    """

    def __init__(
        self,
        problems: Sequence[ChatProblem],
        render: Callable[[Sequence[ChatProblem]], list[tuple[int, T]]],
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
        self.total = 0
        """Items, however long."""

    def __len__(self) -> int:
        return len(self._places)

    def filter_by_length(self, most: int, address: str | None = None) -> None:
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
        self._places, self.total = known["places"][tokens <= most], len(tokens)
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

    def _made(
        self, rows: Sequence[int], problems: Sequence[ChatProblem]
    ) -> dict[tuple[int, int], T]:
        made: dict[tuple[int, int], T] = {}
        parts: Counter[int] = Counter()
        for number, item in self.render(problems):
            row = rows[number]
            made[row, parts[row]] = item
            parts[row] += 1
        return made

    def _hold(self, made: Mapping[tuple[int, int], T]) -> None:
        self._held.update(made)
        while len(self._held) > MAX_CACHED_PROMPTS:
            self._held.popitem(last=False)


def _chunks(problems: Sequence[ChatProblem]) -> Iterator[tuple[list[int], list[ChatProblem]]]:
    """All problems and their numbers, a few thousand or some megabytes of text at a time."""
    some, size = list[ChatProblem](), 0
    for row, problem in enumerate(problems):
        some.append(problem)
        size += sum(len(message["content"]) for message in problem.messages)
        if len(some) == RENDER_CHUNK or size > RENDER_CHUNK_CHARACTERS or row + 1 == len(problems):
            yield list(range(row + 1 - len(some), row + 1)), some
            some, size = [], 0


class ProblemSetEnvironment(PromptEnvironment):
    """See the module."""

    Config: ClassVar[type[ProblemSetConfig]] = ProblemSetConfig
    config: ProblemSetConfig
    uses_chat_template = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        self._epoch: tuple[tuple[int, int], np.ndarray] | None = None
        training = self.load_problems(config, "train")
        examples, training = training[: config.num_fewshot], training[config.num_fewshot :]
        self._examples = [
            message
            for problem in examples
            for message in (
                *problem.with_template(config.prompt_template).messages,
                {"role": "assistant", "content": problem.demonstration or problem.answer},
            )
        ]
        self._problems: dict[str, RenderedDataset[RenderedProblem]] = {
            "train": self._load(training, "task.train"),
            "test": self._load(self.load_problems(config, "test"), "task.test"),
        }

    @classmethod
    @abstractmethod
    def load_problems(cls, config: Any, split: Split) -> Sequence[ChatProblem]:
        """Return all problems of a split, in an order that stays.

        Raises:
            DataError: there is none, or one is malformed.
        """

    @classmethod
    def train_test_overlap(cls, config: Any) -> tuple[int, int]:
        return count_overlap(
            cls.load_problems(config, "train"), cls.load_problems(config, "test"), question_text
        )

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        made = cls(config, processor)
        longest = max(prompts.longest for prompts in made._problems.values())
        return TaskSize(len(made._problems["train"]), len(made._problems["test"]), longest)

    def prompts(self, episodes: RolloutRequest) -> Sequence[Prompt]:
        """Training problems without replacement, in an order drawn anew for each epoch; the first
        test problems."""
        problems = self._problems[episodes.split]
        if episodes.split == "test":
            return problems.take([start % len(problems) for start in episodes.group_ids])
        chosen = []
        for start in episodes.group_ids:
            epoch, place = divmod(episodes.iteration * episodes.num_groups + start, len(problems))
            chosen.append(int(self._order(episodes.seed, epoch)[place]))
        return problems.take(chosen)

    def demonstrations(self, seed: int, step: int, count: int) -> list[Record]:
        problems = self._problems["train"]
        # The name is part of the address of what is drawn; runs begun earlier had this one.
        chosen = generator(seed, "jsonl", "demonstration", step).integers(len(problems), size=count)
        prompts = problems.take(chosen.tolist())
        questions = self.encode_prompts([prompt.model_input for prompt in prompts])
        replies = self.encode(self._answers(prompts))
        ended = self.chat_format.end_of_turn_token_id
        actions = [
            ids if len(ids) and ids[-1] == ended else self.append_end_token(ids) for ids in replies
        ]
        return [
            Record(RecordId(step, i), {"actions": reply}, {"prompt": question})
            for i, (question, reply) in enumerate(zip(questions, actions, strict=True))
        ]

    def _answers(self, prompts: Sequence[RenderedProblem]) -> list[str]:
        """Demonstrations as the model is to write them behind its prompts."""
        if self.chat_format.template is None:
            return [prompt.demonstration for prompt in prompts]
        talks = [
            [*prompt.conversation, {"role": "assistant", "content": prompt.demonstration}]
            for prompt in prompts
        ]
        turns = self.chat_format.assistant_turns(
            talks, [prompt.location for prompt in prompts], last_only=True
        )
        return [turn.completion for (turn,) in turns]

    def _load(self, problems: Sequence[ChatProblem], key: str) -> RenderedDataset[RenderedProblem]:
        """The problems whose prompts are short enough. All are rendered once, some at a time.

        Raises:
            DataError: none is; a problem or setting needs a chat template; the template fails, or
                leaves out what it was given.
        """
        if not problems:
            raise DataError(
                f"{key}: no problem is left beside task.num_fewshot={self.config.num_fewshot}"
            )
        most = self.config.max_prompt_length
        made = RenderedDataset(
            problems,
            lambda chosen: list(enumerate(self._asked(chosen, key))),
            lambda prompt: prompt.num_tokens,
        )
        with name_key_in_memory_errors(key):
            made.filter_by_length(most, self._address(problems, made))
        if not len(made):
            raise DataError(
                f"{key}: all {len(problems)} prompts, from {problems[0].location} on, are longer than "
                f"task.max_prompt_length={most}"
            )
        if len(made) < len(problems):
            log.warning(
                "%s: %d of %d problems are left out: their prompts are longer than "
                "task.max_prompt_length=%d",
                key,
                len(problems) - len(made),
                len(problems),
                most,
            )
        return made

    def _address(
        self, problems: Sequence[ChatProblem], rendered: RenderedDataset[Any]
    ) -> str | None:
        """Text of what the lengths of items follow from; None where they are soon counted again.

        How the tokenizer and its template write the first problems tells settings of theirs apart.
        """
        if not isinstance(problems, JsonLinesFile) or len(problems) < DISK_CACHE_MIN_PROBLEMS:
            return None
        tokenizer = self.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        parts = (
            (problems.digest, len(problems)),
            self.config.model_dump_json(exclude={"workers", "timeout_s"}),
            type(tokenizer).__name__,
            fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items()),
            (self.chat_format.template, dict(self.chat_format.template_kwargs)),
            [repr(item) for item in rendered.render(problems[:TOKENIZER_PROBES])],
        )
        return repr(parts)

    def _asked(self, problems: Sequence[ChatProblem], key: str) -> list[RenderedProblem]:
        """Problems as the model gets them.

        Raises:
            DataError: a prompt has no tokens, or as :meth:`_load`.
        """
        problems = [problem.with_template(self.config.prompt_template) for problem in problems]
        given = self._given(problems, key)
        empty = next((i for i, ids in enumerate(self.encode(given)) if not len(ids)), None)
        if empty is not None:
            raise DataError(f"{key}: {problems[empty].location}: the prompt has no tokens")
        lengths = [len(ids) for ids in self.encode_prompts(given)]
        return [
            RenderedProblem(
                format_transcript(problem.messages),
                problem.answer,
                text,
                problem.demonstration or problem.answer,
                length,
                tuple(self._messages(problem)),
                problem.location,
                info=problem.info,
            )
            for problem, text, length in zip(problems, given, lengths, strict=True)
        ]

    def _given(self, problems: Sequence[ChatProblem], key: str) -> list[str]:
        """What the model gets to read."""
        if self.chat_format.template is None:
            if self.config.system_prompt or self.config.num_fewshot:
                system = "system", "a system message"
                name, what = system if self.config.system_prompt else ("shots", "turns")
                raise ConfigError(
                    f"task.{name}: the tokenizer of model.path has no chat template to put {what} "
                    "into; write it into task.prompt_template"
                )
            several = next((problem for problem in problems if len(problem.messages) > 1), None)
            if several is not None:
                raise DataError(
                    f"{key}: {several.location}: several messages need a tokenizer with a chat "
                    "template, and that of model.path has none"
                )
            return [problem.messages[0]["content"] for problem in problems]
        conversations = [self._messages(problem) for problem in problems]
        texts = self.chat_format.render_prompts(conversations)
        for problem, messages, text in zip(problems, conversations, texts, strict=True):
            # Templates may trim what they are given, and drop the thoughts of earlier answers.
            lost = next((m["role"] for m in messages if self._words(m) not in text), None)
            if lost is not None:
                raise DataError(
                    f"model.path: the chat template leaves out the {lost} message of "
                    f"{problem.location}; use a checkpoint (or a tokenizer_config.json) whose "
                    "template keeps it"
                )
        return texts

    def _words(self, message: ChatMessage) -> str:
        """What of a message must be in a prompt."""
        if message["role"] != "assistant":
            return message["content"].strip()
        return split_thought(message["content"], self.chat_format.thinking_marks)[1]

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            count = len(self._problems["train"])
            order = generator(seed, "jsonl", "epoch", epoch).permutation(count)
            self._epoch = ((seed, epoch), order)
        return self._epoch[1]

    def _messages(self, problem: ChatProblem) -> list[ChatMessage]:
        first, *rest = problem.messages
        own = first["role"] == "system"
        system = (
            [first["content"]]
            if own
            else [self.config.system_prompt]
            if self.config.system_prompt
            else []
        )
        opening: list[ChatMessage] = [{"role": "system", "content": text} for text in system]
        return [*opening, *self._examples, *(rest if own else problem.messages)]
