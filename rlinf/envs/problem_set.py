"""Tasks with a fixed set of problems: questions or conversations, each with an answer.

A task defines where problems come from (:meth:`ProblemSetEnvironment.load_problems`) and how a
response is scored. This module reads problems from JSON-lines files and renders the prompts:
template, few-shot examples, system message, and the tokenizer's chat template.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, field_validator

from rlinf.config import Section
from rlinf.data.json_lines import JsonLinesFile, count_overlap
from rlinf.data.record import RecordId, Scalar
from rlinf.data.trajectory import ANSWER_SEPARATOR, Trajectory, accepted_answers
from rlinf.envs.base import ProblemSetSize, RolloutRequest, TaskSize
from rlinf.envs.problem_mixture import ProblemMixture
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import ConfigError, DataError, did_you_mean, name_key_in_memory_errors
from rlinf.models.chat_format import split_thought
from rlinf.models.chat_template import ChatMessage
from rlinf.rewards.math_extraction import ReasoningTags
from rlinf.seeding import generator

ROLES = ("system", "user", "assistant")
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "developer": "system", "model": "assistant"}
"""Roles by their names in other dialects of chat data, such as ShareGPT's."""
ROLE_FIELDS, CONTENT_FIELDS = ("role", "from"), ("content", "value")
"""Names of the fields of a message, by dialect."""
MESSAGES_FIELDS = ("messages", "conversations", "conversation")
"""Names of the field with the messages of a conversation, by dialect."""
PROMPT_PLACEHOLDER = "{prompt}"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages that may hold the assistant's reasoning."""


@dataclass(frozen=True)
class ChatProblem:
    """A question or conversation, with a reference answer."""

    messages: tuple[Mapping[str, str], ...]
    """Roles and contents; the last message is the user's. A plain question is a single message."""
    answer: str
    """The reference answer, or several; see :func:`rlinf.data.trajectory.accepted_answers`."""
    location: str
    """File and line, for error messages."""
    demonstration: str | None = None
    """The assistant's last message; None: the row of the file does not end with one."""
    info: Mapping[str, Scalar] = field(default_factory=dict)
    """Extra fields for the reward, which reads them from ``extra`` of the trajectory."""

    @property
    def reply(self) -> str:
        """The reply that a model learns: the demonstration, or the first reference answer."""
        return self.demonstration or accepted_answers(self.answer)[0]

    def with_template(self, template: str) -> ChatProblem:
        """Return the problem with its last message inserted into a template."""
        *context, last = self.messages
        content = template.replace(PROMPT_PLACEHOLDER, last["content"])
        return replace(self, messages=(*context, {**last, "content": content}))


PROMPT_FIELDS = (("question", "prompt", "problem"), ("messages",))
"""Names of the field with the prompt, in groups. The first group that a row has names of decides; a
row with several names of that group is ambiguous."""
ANSWER_FIELDS = (
    ("answer", "reward_model.ground_truth", "ground_truth"),
    ("solution",),
    ("completion",),
)
"""The same for the reference answer. Fields that often hold a whole solution come last."""
KIND_ROWS = 10_000
"""Number of rows that decide whether an info field is a number."""


def read_problems(
    path: Path,
    prompt_field: str | None,
    answer_field: str | None,
    key: str,
    info_fields: Sequence[str] = (),
) -> JsonLinesFile[ChatProblem]:
    """Return the problems of a JSON-lines file, each read when it is used.

    The prompt is a text or a list of messages (``role`` and ``content``). If the last message is
    the assistant's, it is the demonstration, and in rows without ``answer_field`` also the answer.

    Args:
        prompt_field, answer_field: names of the fields with the prompt and the reference answer.
            None: those of :data:`PROMPT_FIELDS` and :data:`ANSWER_FIELDS` that the first row has.
        key: configuration key that names the file. Error messages begin with a ``prefix``: key,
            file and line.
        info_fields: names of further fields, for :attr:`ChatProblem.info`. If one is not a number
            in some of the first :data:`KIND_ROWS` rows, it is JSON in all rows.

    Raises:
        DataError: missing or empty file, not UTF-8, or the first row has no or several such fields.
            On use of a row: it is not JSON, or a field is missing, empty or of another type; names
            the line.
    """
    items = JsonLinesFile(path, key, lambda prefix, item: (prefix, item))
    prefix, first = items[0]
    prompt = prompt_field or find_field(first, PROMPT_FIELDS, "prompt_field", prefix)
    answer = answer_field or _find_answer_field(first, prompt, prefix)
    # The records of a channel have one schema, so a field is a number in all rows or in none.
    text_fields = {
        name
        for prefix, item in (items[:KIND_ROWS] if info_fields else ())
        for name in info_fields
        if isinstance(_scalar(_field(item, name, "info_fields", prefix), prefix, name), str)
    }

    def parse(prefix: str, item: dict[str, Any]) -> ChatProblem:
        info: dict[str, Scalar] = {}
        for name in info_fields:
            value = _scalar(_field(item, name, "info_fields", prefix), prefix, name)
            if isinstance(value, str) and name not in text_fields:
                raise DataError(
                    f"{prefix}: {name!r} is {value!r:.40}, but a number in the first {KIND_ROWS:,} "
                    "rows; make it a number in all rows or in none"
                )
            is_number = not isinstance(value, str)
            info[name] = json.dumps(value) if is_number and name in text_fields else value
        return _parse_problem(item, prompt, answer, prefix, prefix.removeprefix(f"{key}: "), info)

    settings = f"problems {prompt!r} {answer!r} {[*info_fields]!r}"
    return JsonLinesFile(path, key, parse, settings=settings, row_text=question_text)


def find_field(
    item: dict[str, Any], names: Sequence[Sequence[str]], option: str, prefix: str
) -> str:
    """Return the name of a field of a row, from the first group of ``names`` that has one.

    Args:
        option: key of ``task`` that names the field otherwise.

    Raises:
        DataError: the row has none of the names, or several of one group.
    """
    for group in names:
        present = [name for name in group if _has_field(item, name)]
        if len(present) > 1:
            raise DataError(
                f"{prefix}: {' and '.join(map(repr, present))} could both be meant; set "
                f"task.{option} to one of the columns: {', '.join(item)}"
            )
        if present:
            return present[0]
    searched = ", ".join(name for group in names for name in group)
    raise DataError(
        f"{prefix}: no field {searched}; set task.{option} to one of the columns: "
        f"{', '.join(item) or 'there are none'}"
    )


def _find_answer_field(item: dict[str, Any], prompt_field: str, prefix: str) -> str:
    """Return the name of the field with the answer. If the prompt ends with a message of the
    assistant, none is needed."""
    try:
        return find_field(item, ANSWER_FIELDS, "answer_field", prefix)
    except DataError:
        messages = item.get(prompt_field)
        if not isinstance(messages, list) or not messages:
            raise
        if _parse_messages(messages, prefix, prompt_field)[-1]["role"] != "assistant":
            raise
    return ANSWER_FIELDS[0][0]


def _has_field(item: Any, name: str) -> bool:
    """Return whether a row has a field; see :func:`_field`."""
    outer, _, inner = name.partition(".")
    return isinstance(item, dict) and (
        name in item or bool(inner and _has_field(item.get(outer), inner))
    )


def read_conversations(path: Path, field: str | None, key: str) -> JsonLinesFile[ChatProblem]:
    """Return the conversations of a JSON-lines file, each read when it is used. The last message of
    a conversation is its answer and its demonstration.

    Args:
        field: name of the field with the messages. None: the one of :data:`MESSAGES_FIELDS` that
            a row has, or the fields ``prompt`` and ``completion`` together, as in TRL.

    Raises:
        DataError: as :func:`read_problems`, or a conversation does not end with a message of the
            user and one of the assistant; names the line.
    """

    def parse(prefix: str, item: dict[str, Any]) -> ChatProblem:
        messages, name = _conversation(item, field, prefix)
        if [m["role"] for m in messages[-2:]] != ["user", "assistant"]:
            raise DataError(
                f"{prefix}: {name!r} does not end with the assistant answering the user, so there "
                "is no last answer to learn"
            )
        last = messages.pop()["content"]
        return ChatProblem(tuple(messages), last, prefix.removeprefix(f"{key}: "), last)

    return JsonLinesFile(
        path, key, parse, settings=f"conversations {field!r}", row_text=question_text
    )


def _conversation(
    item: dict[str, Any], field: str | None, prefix: str
) -> tuple[list[Mapping[str, str]], str]:
    """Return the messages of a row, and the name of the field that they end in."""
    option = "messages_field"
    if field is None and "prompt" in item and "completion" in item:
        completion = item["completion"]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        messages = _parse_messages(_field(item, "prompt", option, prefix), prefix, "prompt")
        return messages + _parse_messages(completion, prefix, "completion"), "completion"
    name = field or next((name for name in MESSAGES_FIELDS if name in item), MESSAGES_FIELDS[0])
    return _parse_messages(_field(item, name, option, prefix), prefix, name), name


def question_text(problem: ChatProblem) -> str:
    """Return the text by which problems are compared: all user messages, one per line.

    White space is ignored. So are system and assistant messages, because a model that trains on a
    question in another context still trains on the question.
    """
    questions = (message["content"] for message in problem.messages if message["role"] == "user")
    return "\n".join(map(collapse_whitespace, questions))


def collapse_whitespace(text: str) -> str:
    """Return the text with each run of white space replaced by one space, and none at the ends."""
    return " ".join(text.split())


def text_field(item: dict[str, Any], name: str, option: str, prefix: str) -> str:
    """Return a field that is a text or a number, as text. ``option`` is the key of ``task`` that
    has the field's name; for ``prefix`` see :func:`read_problems`.

    Raises:
        DataError: the field is missing, empty or of another type.
    """
    return _text(_field(item, name, option, prefix), prefix, name)


def _text(value: Any, prefix: str, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{prefix}: {name!r} is {_excerpt(value)}; expected a text or a number")
    return _check_not_empty(str(value), prefix, name)


def _parse_problem(
    item: dict[str, Any],
    prompt_field: str,
    answer_field: str,
    prefix: str,
    location: str,
    info: Mapping[str, Scalar],
) -> ChatProblem:
    messages = _parse_messages(
        _field(item, prompt_field, "prompt_field", prefix), prefix, prompt_field
    )
    demonstration = None
    if messages[-1]["role"] == "assistant":
        demonstration = messages.pop()["content"]
    if not messages or messages[-1]["role"] != "user":
        raise DataError(f"{prefix}: {prompt_field!r} holds no message of the user to answer")
    if answer_field not in item and "." not in answer_field and demonstration is not None:
        return ChatProblem(tuple(messages), demonstration, location, demonstration, info)
    value = _field(item, answer_field, "answer_field", prefix)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        (reply,) = _parse_messages(value[-1:], prefix, answer_field)
        return ChatProblem(tuple(messages), reply["content"], location, reply["content"], info)
    values = value if isinstance(value, list) else [value]
    answers = [_text(answer, prefix, answer_field) for answer in values]
    if not answers:
        raise DataError(f"{prefix}: {answer_field!r} is an empty list")
    answer = ANSWER_SEPARATOR.join(answers)
    return ChatProblem(tuple(messages), answer, location, demonstration, info)


def _scalar(value: Any, prefix: str, field: str) -> Scalar:
    """Return a field as a record can store it; values other than texts and numbers become JSON."""
    if isinstance(value, str):
        return _check_unicode(value, prefix, field)
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
    return value if is_number else json.dumps(value, sort_keys=True)


def _field(item: dict[str, Any], name: str, option: str, prefix: str) -> Any:
    """Return a field of a row. ``a.b`` is the field ``b`` of the mapping in the field ``a``, unless
    a field has this name itself."""
    if name not in item:
        outer, _, inner = name.partition(".")
        if inner and isinstance(item.get(outer), dict):
            return _field(item[outer], inner, option, f"{prefix}: {outer!r}")
        raise DataError(
            f"{prefix}: no field {name!r}{did_you_mean(name, item)} (set task.{option})"
        )
    return item[name]


def _parse_messages(value: Any, prefix: str, field: str) -> list[Mapping[str, str]]:
    """Return the messages of a field, which is a question or a list of messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": _check_not_empty(value, prefix, field)}]
    if not isinstance(value, list):
        raise DataError(f"{prefix}: {field!r} is {_excerpt(value)}; expected a text or messages")
    if not value:
        raise DataError(f"{prefix}: {field!r} is empty")
    messages: list[Mapping[str, str]] = []
    for i, message in enumerate(value):
        name = f"{field}[{i}]"
        keys = [
            next((key for key in keys if isinstance(message, dict) and key in message), None)
            for keys in (ROLE_FIELDS, CONTENT_FIELDS)
        ]
        if None in keys:
            raise DataError(f"{prefix}: {name!r} is {_excerpt(message)}; expected role and content")
        role, content = (message[key] for key in keys)
        role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES or (role == "system" and i):
            raise DataError(
                f"{prefix}: {name!r} has the role {_excerpt(role)}; expected user or assistant, or "
                "system for the first"
            )
        content = _join_text_parts(content)
        if not isinstance(content, str):
            raise DataError(f"{prefix}: the content of {name!r} is {_excerpt(content)}, not a text")
        content = _prepend_reasoning({**message, "role": role}, content, prefix, name)
        messages.append({"role": role, "content": _check_not_empty(content, prefix, name)})
    return messages


def _join_text_parts(content: Any) -> Any:
    """Return the text of a list of text parts (``{"type": "text", "text": ...}``); any other
    content unchanged."""
    is_list_of_texts = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
    return "".join(part["text"] for part in content) if is_list_of_texts else content


def _prepend_reasoning(message: Mapping[str, Any], content: str, prefix: str, name: str) -> str:
    """Return a message's content, after reasoning in ``<think>`` tags if a field has it."""
    fields = [field for field in REASONING_FIELDS if message.get(field)]
    if message["role"] != "assistant" or not fields:
        return content
    reasoning = message[fields[0]]
    if not isinstance(reasoning, str):
        raise DataError(f"{prefix}: {fields[0]!r} of {name!r} is {_excerpt(reasoning)}, not a text")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"


def _check_not_empty(value: str, prefix: str, field: str) -> str:
    """Return a text of a field; raise DataError if it is blank or invalid Unicode."""
    if not value.strip():
        raise DataError(f"{prefix}: {field!r} is empty")
    return _check_unicode(value, prefix, field)


def _check_unicode(value: str, prefix: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{prefix}: {field!r} has half of a surrogate pair, which is no character"
        ) from None
    return value


def _excerpt(value: Any) -> str:
    return json.dumps(value)[:40]


def format_transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation as a transcript; a single message without its role."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


log = logging.getLogger(__name__)
T = TypeVar("T")

Split = Literal["train", "test"]
RENDER_CHUNK, RENDER_CHUNK_CHARACTERS = 2048, 8 << 20
"""Maximum number of problems, and approximate maximum of characters, that are rendered at once."""
MEASURED_PROBLEMS = 4096
"""Number of problems whose tokens are counted before a run. It decides which problems are drawn,
so a change of it changes results."""
MAX_CACHED_PROBLEMS = 4096
"""Maximum number of rendered problems that stay in memory."""
MAX_REDRAWS = 1000
"""Maximum number of problems that are drawn instead of one whose prompt is too long."""


class ProblemSetConfig(Section):
    """The settings that turn problems into prompts."""

    prompt_template: str = "{prompt}"
    """Text of the user's (last) message; ``{prompt}`` is replaced by the problem."""
    system_prompt: str = ""
    """System message of conversations without one, for tokenizers with a chat template."""
    num_fewshot: int = Field(default=0, ge=0)
    """Number of training problems that precede each question, with their answers, as few-shot
    turns. They are always the same, and are not trained on. For tokenizers with a chat template."""
    max_prompt_length: int = Field(default=1024, gt=0)
    """Maximum number of tokens of a prompt; longer prompts are left out. Another problem is drawn
    instead."""
    allow_train_test_overlap: bool = False
    """Train even if every test problem is a training problem too."""

    @field_validator("prompt_template")
    @classmethod
    def _check_prompt_template(cls, value: str) -> str:
        if PROMPT_PLACEHOLDER not in value:
            raise ValueError("does not contain {prompt}, so no problem would be in the prompt")
        return value


@dataclass(frozen=True)
class RenderedProblem(Prompt):
    """A problem and its rendered prompt."""

    rendered: str
    """The text that the model receives."""
    demonstration: str
    """The answer for supervised fine-tuning: the assistant's message in the row, or the first
    reference answer."""
    num_tokens: int
    """Number of tokens of ``rendered``."""
    conversation: tuple[ChatMessage, ...]
    """The messages that ``rendered`` was built from."""
    location: str
    """File and line, for error messages."""

    @property
    def model_input(self) -> str:
        return self.rendered


@dataclass(frozen=True)
class LengthLimit:
    """The maximum number of tokens of an item, and the key that sets it."""

    key: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.key}={self.tokens}"


class RenderedDataset(Generic[T]):
    """Items (prompts or whole conversations) that are rendered from problems on use.

    The tokens of the first :data:`MEASURED_PROBLEMS` problems are counted at once, and their items
    above the limit are left out. Further problems are rendered when they are drawn. If one is then
    above the limit, another is drawn instead. The last :data:`MAX_CACHED_PROBLEMS` rendered
    problems stay in memory.
    """

    def __init__(
        self,
        problems: Sequence[ChatProblem],
        key: str,
        render: Callable[[Sequence[ChatProblem]], list[tuple[int, T]]],
        num_tokens: Callable[[T], int],
        limit: LengthLimit,
    ) -> None:
        """
        Args:
            key: configuration key that names the set of problems.
            render: renders problems to items, each with the index of its problem in the argument. A
                problem may become several consecutive items.
            num_tokens: returns the number of tokens of an item.

        Raises:
            DataError: all of the first problems are above the limit.
        """
        self.problems, self.key, self.limit = problems, key, limit
        self._render, self._num_tokens = render, num_tokens
        self._cache: OrderedDict[int, list[T]] = OrderedDict()
        """Items within the limit by index of their problem."""
        self._places = list[tuple[int, int]]()
        """For each item of a measured problem within the limit: the index of its problem, and its
        index among the items of that problem."""
        self.num_measured = 0
        """Number of problems whose tokens were counted, from the first on."""
        self.num_omitted = 0
        """Number of them that have an item above the limit."""
        self.longest = 0
        """Number of tokens of the longest of their items within the limit."""
        self._has_warned = False
        first_omitted = self._measure(min(MEASURED_PROBLEMS, len(problems)))
        self._num_known, self._first_unknown = len(self._places), self.num_measured
        first = "" if self.is_measured else "first "
        if not self._places:
            raise DataError(
                f"{key}: all {first}{self.num_measured} problems, from {problems[0].location} on, "
                f"are longer than {limit}"
            )
        if first_omitted is not None:
            log.warning(
                "%s: %d of %s%d problems are left out, because they are longer than %s; the first "
                "is %s with %d tokens",
                key,
                self.num_omitted,
                first and f"the {first}",
                self.num_measured,
                limit,
                problems[first_omitted[0]].location,
                first_omitted[1],
            )

    def __len__(self) -> int:
        """Return the number of items to draw from. A problem that was not measured at first counts
        as one."""
        return self._num_known + len(self.problems) - self._first_unknown

    @property
    def is_measured(self) -> bool:
        """Whether the tokens of all problems were counted."""
        return self.num_measured == len(self.problems)

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens of an item within the limit."""
        return self.longest if self.is_measured else self.limit.tokens

    def count(self) -> int:
        """Return the number of items within the limit, after counting the tokens of all."""
        self._measure(len(self.problems))
        return len(self._places)

    def first(self, indices: Sequence[int]) -> list[T]:
        """Return items by index among those within the limit, in the order of the file. Beyond the
        last item they begin again."""
        while len(self._places) <= max(indices, default=0) and not self.is_measured:
            self._measure(self.num_measured + RENDER_CHUNK)
        places = [self._places[index % len(self._places)] for index in indices]
        items = self._items([row for row, _ in places])
        return [items[row][part] for row, part in places]

    def draw(self, indices: Mapping[int, int], seed: int) -> dict[int, T]:
        """Return the item of each draw.

        If a drawn problem has no item within the limit, others are drawn instead, at random by
        ``seed`` and the number of the draw. If it has several, the number chooses one.

        Args:
            indices: index of the item, below ``len(self)``, by number of the draw.

        Raises:
            DataError: too many problems in a row are above the limit.
        """
        found, skipped = dict[int, T](), list[int]()
        pending = dict(indices)
        for attempt in range(MAX_REDRAWS):
            places = {draw: self._place(index) for draw, index in pending.items()}
            items = self._items([row for row, _ in places.values()])
            for draw, (row, part) in places.items():
                if items[row]:
                    found[draw] = items[row][draw % len(items[row]) if part is None else part]
                else:
                    skipped.append(row)
            pending = {
                draw: int(generator(seed, "redraw", self.key, draw, attempt).integers(len(self)))
                for draw in pending
                if draw not in found
            }
            if not pending:
                self._warn_of_skipped(skipped, len(indices))
                return found
        raise DataError(
            f"{self.key}: {MAX_REDRAWS} problems were drawn one after the other, and all are longer"
            f" than {self.limit}; raise it, or remove long problems from the file"
        )

    def _place(self, index: int) -> tuple[int, int | None]:
        """Return the problem of an item, and its index among the items of that problem. None: it is
        not known before the problem is rendered."""
        if index < self._num_known:
            return self._places[index]
        return self._first_unknown + index - self._num_known, None

    def _warn_of_skipped(self, rows: Sequence[int], num_draws: int) -> None:
        """Warn of skipped problems, once."""
        if rows and not self._has_warned:
            log.warning(
                "%s: %d problems are skipped in %d draws and others drawn instead, because they are"
                " longer than %s; the first is %s. Later ones are skipped without a warning",
                self.key,
                len(rows),
                num_draws,
                self.limit,
                self.problems[rows[0]].location,
            )
            self._has_warned = True

    def _measure(self, end: int) -> tuple[int, int] | None:
        """Count the tokens of the problems before ``end``. Returns the first problem that has an
        item above the limit, and its number of tokens; None: there is none."""
        first_omitted = None
        for rows, problems in _chunks(self.problems, self.num_measured, end):
            rendered = self._render_rows(rows, problems)
            for row, items in rendered.items():
                lengths = [self._num_tokens(item) for item in items]
                fitting = [length for length in lengths if length <= self.limit.tokens]
                self._places += [(row, part) for part in range(len(fitting))]
                self.longest = max(self.longest, *fitting, 0)
                if len(fitting) < len(lengths):
                    self.num_omitted += 1
                    first_omitted = first_omitted or (row, max(lengths))
            self._add_to_cache(rendered)
            self.num_measured = rows[-1] + 1
        return first_omitted

    def _items(self, rows: Sequence[int]) -> dict[int, list[T]]:
        """Return the items within the limit of each problem."""
        cached = {row: self._cache[row] for row in rows if row in self._cache}
        missing = [row for row in dict.fromkeys(rows) if row not in cached]
        rendered = self._render_rows(missing, [self.problems[row] for row in missing])
        return cached | self._add_to_cache(rendered)

    def _render_rows(
        self, rows: Sequence[int], problems: Sequence[ChatProblem]
    ) -> dict[int, list[T]]:
        """Return all items of some problems by index of the problem."""
        rendered: dict[int, list[T]] = {row: [] for row in rows}
        for index, item in self._render(problems) if problems else ():
            rendered[rows[index]].append(item)
        return rendered

    def _add_to_cache(self, rendered: Mapping[int, Sequence[T]]) -> dict[int, list[T]]:
        """Keep the items within the limit, and return them."""
        items = {
            row: [i for i in items if self._num_tokens(i) <= self.limit.tokens]
            for row, items in rendered.items()
        }
        self._cache.update(items)
        while len(self._cache) > MAX_CACHED_PROBLEMS:
            self._cache.popitem(last=False)
        return items


def _chunks(
    problems: Sequence[ChatProblem], start: int, end: int
) -> Iterator[tuple[list[int], list[ChatProblem]]]:
    """Yield the problems from ``start`` to ``end`` in chunks, with their indices."""
    chunk, size = list[ChatProblem](), 0
    end = min(end, len(problems))
    for row, problem in enumerate(problems[start:end], start):
        chunk.append(problem)
        size += sum(len(message["content"]) for message in problem.messages)
        if len(chunk) == RENDER_CHUNK or size > RENDER_CHUNK_CHARACTERS or row + 1 == end:
            yield list(range(row + 1 - len(chunk), row + 1)), chunk
            chunk, size = [], 0


@dataclass(frozen=True)
class ProblemSet:
    """One of the sets that training problems are drawn from."""

    problems: Sequence[ChatProblem]
    key: str
    """Configuration key that names the set."""
    weight: float = 1.0
    """Relative frequency of its problems."""


class ProblemSetEnvironment(PromptEnvironment):
    """A task with a fixed set of problems."""

    Config: ClassVar[type[ProblemSetConfig]] = ProblemSetConfig
    config: ProblemSetConfig
    uses_chat_template = True

    def __init__(self, config: Any, processor: Any) -> None:
        super().__init__(config, processor)
        training = self.training_sets(config)
        first = next(iter(training), "")
        examples = training[first].problems[: config.num_fewshot] if training else ()
        self._fewshot_messages = [
            message
            for problem in examples
            for message in (
                *problem.with_template(config.prompt_template).messages,
                {"role": "assistant", "content": problem.reply},
            )
        ]
        self._training: dict[str, RenderedDataset[RenderedProblem]] = {}
        """Training problems by the name of their set."""
        for name, training_set in training.items():
            problems = training_set.problems
            if name == first:
                problems = problems[config.num_fewshot :]
            if len(training_set.problems) or config.num_fewshot:
                self._training[name] = self._load(problems, training_set.key)
        self._mixture: ProblemMixture | None = None
        """The order of training problems; None: the task is only for evaluation."""
        if self._training:
            sizes = {name: len(dataset) for name, dataset in self._training.items()}
            self._mixture = ProblemMixture(sizes, {n: part.weight for n, part in training.items()})
        self._test = self._load(self.load_problems(config, "test"), "task.test")

    @classmethod
    def training_sets(cls, config: Any) -> dict[str, ProblemSet]:
        """Return the sets of training problems by name; by default one without a name. A task that
        is only for evaluation has none, or an empty one.

        Raises:
            DataError: as :meth:`load_problems`.
        """
        return {"": ProblemSet(cls.load_problems(config, "train"), "task.train")}

    @classmethod
    @abstractmethod
    def load_problems(cls, config: Any, split: Split) -> Sequence[ChatProblem]:
        """Return all problems of a split, in a fixed order. A task that is only for evaluation has
        no training problems.

        Raises:
            DataError: there are no test problems, or a problem is malformed.
        """

    @classmethod
    def train_test_overlap(cls, config: Any) -> tuple[int, int]:
        training = [training_set.problems for training_set in cls.training_sets(config).values()]
        return count_overlap(training, cls.load_problems(config, "test"), question_text)

    @classmethod
    def task_size(cls, config: Any, processor: Any) -> TaskSize:
        environment = cls(config, processor)
        return TaskSize(
            sum(map(len, environment._training.values())),
            len(environment._test),
            environment.longest_prompt,
            environment.problem_set_sizes(),
        )

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int | None:
        return int(config.max_prompt_length) + horizon

    def num_test_problems(self) -> int:
        """Return the number of test problems whose prompts are within the limit."""
        return self._test.count()

    @property
    def longest_prompt(self) -> int:
        """Upper bound of the number of tokens of a prompt: that of the longest one, or the limit if
        not all were counted."""
        return max(prompts.max_tokens for prompts in (*self._training.values(), self._test))

    def prompt_sets(self) -> list[RenderedDataset[RenderedProblem]]:
        """Return the sets of problems, training sets first."""
        return [*self._training.values(), self._test]

    def problem_set_sizes(self) -> tuple[ProblemSetSize, ...]:
        """Return the sizes of :meth:`prompt_sets`."""
        shares = self._mixture.shares() if self._mixture is not None else {}
        return tuple(
            ProblemSetSize(
                dataset.key,
                len(dataset.problems),
                share,
                dataset.num_measured,
                dataset.num_omitted,
                dataset.longest,
            )
            for dataset, share in zip(self.prompt_sets(), [*shares.values(), None], strict=True)
        )

    def final_answer(self, trajectory: Trajectory) -> str | None:
        """Return the final answer of a response in a normalised form, so that equal answers are
        equal texts and responses can vote. None: the response has no answer, or the task has no
        such form."""
        return None

    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        """Return training problems without replacement, in a new order for each epoch of their set
        (:class:`rlinf.envs.problem_mixture.ProblemMixture`), or the first test problems."""
        if request.split == "test":
            return self._test.first(request.group_ids)
        start = request.iteration * request.num_groups
        return self._draw(request.seed, [start + group for group in request.group_ids])

    def _draw(self, seed: int, draws: Sequence[int]) -> list[RenderedProblem]:
        """Return the training problems of some draws (see :meth:`ProblemMixture.locate`). If there
        are several sets, ``info`` has the name of the problem's set, ``task``."""
        assert self._mixture is not None, "a run without training problems is rejected"
        places = {draw: self._mixture.locate(seed, draw) for draw in draws}
        problems: dict[int, RenderedProblem] = {}
        for name, dataset in self._training.items():
            indices = {draw: index for draw, (chosen, index) in places.items() if chosen == name}
            for draw, problem in dataset.draw(indices, seed).items():
                info = {**problem.info, "task": name} if name else problem.info
                problems[draw] = replace(problem, info=info)
        return [problems[draw] for draw in draws]

    def reasoning_tags(self) -> ReasoningTags:
        """Return the tags of reasoning in responses. The chat template may already have written the
        opening tag."""
        tags = ReasoningTags()
        prompt = self._test.first([0])[0].rendered
        return replace(tags, starts_open=tags.ends_with_open_tag(prompt))

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        draws = range(step * count, (step + 1) * count)
        if "" in self._training:
            problems = self._training[""]
            # The address is "jsonl" for all tasks, so that older runs give the same results.
            random = generator(seed, "jsonl", "demonstration", step)
            indices = random.integers(len(problems), size=count).tolist()
            found = problems.draw(dict(zip(draws, indices, strict=True)), seed)
            prompts = [found[draw] for draw in draws]
        else:
            prompts = self._draw(seed, draws)
        questions = self.encode_prompts([prompt.model_input for prompt in prompts])
        replies = self.encode(self._demonstration_texts(prompts))
        end_token = self.chat_format.end_of_turn_token_id
        actions = [
            ids if len(ids) and ids[-1] == end_token else self.append_end_token(ids)
            for ids in replies
        ]
        return [
            Trajectory(identity=RecordId(step, i), actions=reply, prompt=question)
            for i, (question, reply) in enumerate(zip(questions, actions, strict=True))
        ]

    def _demonstration_texts(self, prompts: Sequence[RenderedProblem]) -> list[str]:
        """Return the demonstrations of the prompts, as the chat template renders them."""
        if self.chat_format.template is None:
            return [prompt.demonstration for prompt in prompts]
        conversations = [
            [*prompt.conversation, {"role": "assistant", "content": prompt.demonstration}]
            for prompt in prompts
        ]
        turns = self.chat_format.assistant_turns(
            conversations, [prompt.location for prompt in prompts], last_only=True
        )
        return [turn.completion for (turn,) in turns]

    def _load(self, problems: Sequence[ChatProblem], key: str) -> RenderedDataset[RenderedProblem]:
        """Return the prompts of problems.

        Raises:
            DataError: no prompt is within the limit; a problem or setting needs a chat template;
                the template fails, or drops a message.
        """
        if not problems:
            raise DataError(
                f"{key}: no problem is left beside task.num_fewshot={self.config.num_fewshot}"
            )
        with name_key_in_memory_errors(key):
            return RenderedDataset(
                problems,
                key,
                lambda chunk: list(enumerate(self._render_problems(chunk, key))),
                lambda prompt: prompt.num_tokens,
                LengthLimit("task.max_prompt_length", self.config.max_prompt_length),
            )

    def _render_problems(self, problems: Sequence[ChatProblem], key: str) -> list[RenderedProblem]:
        """Render the prompts of problems.

        Raises:
            DataError: a prompt has no tokens, or as :meth:`_load`.
        """
        problems = [problem.with_template(self.config.prompt_template) for problem in problems]
        model_inputs = self._model_inputs(problems, key)
        encoded = self.encode(model_inputs)
        for problem, ids in zip(problems, encoded, strict=True):
            if not len(ids):
                raise DataError(f"{key}: {problem.location}: the prompt has no tokens")
        lengths = [len(ids) for ids in self.begin_prompts(encoded)]
        return [
            RenderedProblem(
                format_transcript(problem.messages),
                problem.answer,
                text,
                problem.reply,
                length,
                tuple(self._prompt_messages(problem)),
                problem.location,
                info=problem.info,
            )
            for problem, text, length in zip(problems, model_inputs, lengths, strict=True)
        ]

    def _model_inputs(self, problems: Sequence[ChatProblem], key: str) -> list[str]:
        """Return the texts that the model receives."""
        if self.chat_format.template is None:
            if self.config.system_prompt or self.config.num_fewshot:
                system = "system_prompt", "a system message"
                name, content = system if self.config.system_prompt else ("num_fewshot", "turns")
                raise ConfigError(
                    f"task.{name}: the tokenizer of model.path has no chat template to put "
                    f"{content} into; write it into task.prompt_template"
                )
            for problem in problems:
                if len(problem.messages) > 1:
                    raise DataError(
                        f"{key}: {problem.location}: several messages need a tokenizer with a chat "
                        "template, and that of model.path has none"
                    )
            return [problem.messages[0]["content"] for problem in problems]
        conversations = [self._prompt_messages(problem) for problem in problems]
        texts = self.chat_format.render_prompts(conversations)
        for problem, messages, text in zip(problems, conversations, texts, strict=True):
            # Templates may trim messages, and drop the reasoning of earlier answers.
            for message in messages:
                if self._required_text(message) not in text:
                    raise DataError(
                        f"model.path: the chat template leaves out the {message['role']} message "
                        f"of {problem.location}; use a checkpoint (or a tokenizer_config.json) "
                        "whose template keeps it"
                    )
        return texts

    def _required_text(self, message: ChatMessage) -> str:
        """Return the part of a message that must appear in a prompt."""
        if message["role"] != "assistant":
            return message["content"].strip()
        return split_thought(message["content"], self.chat_format.thinking_marks)[1]

    def _prompt_messages(self, problem: ChatProblem) -> list[ChatMessage]:
        """Return the messages of a prompt: system message, few-shot examples, and the problem."""
        opening, messages = list[ChatMessage](), problem.messages
        if messages[0]["role"] == "system":
            opening = [{"role": "system", "content": messages[0]["content"]}]
            messages = messages[1:]
        elif self.config.system_prompt:
            opening = [{"role": "system", "content": self.config.system_prompt}]
        return [*opening, *self._fewshot_messages, *messages]
