"""Problems of a JSON-lines file: a question or a conversation, and a reference answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.data.record import Scalar
from rlinf.data.row_file import RowFile
from rlinf.errors import DataError, nearest

ROLES = ("system", "user", "assistant")
PROMPT = "{prompt}"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which messages have what the assistant thought."""


@dataclass(frozen=True)
class Problem:
    """A row of a file."""

    messages: tuple[Mapping[str, str], ...]
    """Roles and contents; the last one is the user's. Of a plain question that is all there is."""
    answer: str
    place: str
    """Where it is from, for messages: file and line."""
    demonstration: str | None = None
    """What the assistant said last, where the row goes on so far."""
    info: Mapping[str, Scalar] = field(default_factory=dict)
    """Further fields, for the reward."""

    def asked(self, template: str) -> Problem:
        """The same, with the last message put into a template."""
        *before, last = self.messages
        content = template.replace(PROMPT, last["content"])
        return replace(self, messages=(*before, {**last, "content": content}))


def read_problems(
    path: Path, prompt_field: str, answer_field: str, key: str, info_fields: Sequence[str] = ()
) -> RowFile[Problem]:
    """Return the problems of a JSON-lines file, each read when it is used.

    The prompt is a text or a list of messages (``role`` and ``content``). Where that ends with the
    assistant, what it says is a demonstration, and the answer of rows without ``answer_field``.

    Raises:
        DataError: missing or empty file, not UTF-8, a line that is not JSON, a field that is not
            there, empty or of another type; names the line.
    """

    def parse(where: str, item: dict[str, Any], texts: np.ndarray) -> Problem:
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
    return RowFile(
        path, key, parse, settings=settings, same=question_text, note=note, flags=len(info_fields)
    )


def read_conversations(path: Path, field: str, key: str) -> RowFile[Problem]:
    """Return the conversations of a JSON-lines file, each read when it is used; the last message of
    each is answer and demonstration.

    Raises:
        DataError: as :func:`read_problems`, or a conversation does not end with the assistant
            answering the user; names the line.
    """

    def parse(where: str, item: dict[str, Any], flags: np.ndarray) -> Problem:
        messages = _messages(_field(item, field, "messages_field", where), where, field)
        if [m["role"] for m in messages[-2:]] != ["user", "assistant"]:
            raise DataError(
                f"{where}: {field!r} does not end with the assistant answering the user, so there "
                "is no last answer to learn"
            )
        last = messages.pop()["content"]
        return Problem(tuple(messages), last, where.removeprefix(f"{key}: "), last)

    return RowFile(path, key, parse, settings=f"conversations {field!r}", same=question_text)


def question_text(problem: Problem) -> str:
    """Return the text by which two problems are the same: all messages of the user, one a line.

    White space does not count, and neither do the system message and the assistant's messages:
    with others in their place the model still trains on the question.
    """
    asked = (message["content"] for message in problem.messages if message["role"] == "user")
    return "\n".join(map(join_words, asked))


def join_words(text: str) -> str:
    """Return the text with one space for each run of white space, and none at its ends."""
    return " ".join(text.split())


def text_of(item: dict[str, Any], name: str, option: str, where: str) -> str:
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
) -> Problem:
    messages = _messages(_field(item, prompt_field, "prompt_field", where), where, prompt_field)
    demonstration = None
    if messages[-1]["role"] == "assistant":
        demonstration = messages.pop()["content"]
    if not messages or messages[-1]["role"] != "user":
        raise DataError(f"{where}: {prompt_field!r} holds no message of the user to answer")
    if answer_field not in item and demonstration is not None:
        return Problem(tuple(messages), demonstration, place, demonstration)
    answer = text_of(item, answer_field, "answer_field", where)
    return Problem(tuple(messages), answer, place, demonstration)


def _scalar(value: Any, where: str, field: str) -> Scalar:
    """A field as a record can carry it."""
    if isinstance(value, str):
        return _whole(value, where, field)
    plain = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
    return value if plain else json.dumps(value, sort_keys=True)


def _field(item: dict[str, Any], name: str, option: str, where: str) -> Any:
    if name not in item:
        raise DataError(f"{where}: no field {name!r}{nearest(name, item)} (set task.{option})")
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
    named = [name for name in THOUGHTS if message.get(name)]
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


def shown(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as a transcript; a single message is its text."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
