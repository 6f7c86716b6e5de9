"""Questions and conversations with reference answers, and their JSON-lines files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.data.json_lines import JsonLinesFile
from rlinf.data.record import Scalar
from rlinf.data.trajectory import ANSWER_SEPARATOR, accepted_answers
from rlinf.errors import DataError, did_you_mean

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
