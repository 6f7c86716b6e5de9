"""What a chat template writes around the messages of a turn, apart from what they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlinf.errors import DataError
from rlinf.models.chat import Message

MARK = "\u2402"
"""Stands in the place of words while a template is rendered around them."""
BEFORE = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})

Render = Callable[[Sequence[Sequence[Message]]], list[str]]


def around(render: Render, replies: Sequence[Sequence[Message]]) -> list[list[str]]:
    """Of each reply to the assistant the text behind the assistant's words: by turns what the
    template writes and what a message says, as the template has it (trimmed, or quoted).

    Whatever is said, it is not taken for a part of the template.

    Raises:
        DataError: the template leaves messages out.
    """
    marked = [
        [{**message, "content": f"{MARK}{n}{MARK}"} for n, message in enumerate(reply)]
        for reply in replies
    ]
    asked: list[Sequence[Message]] = []
    for reply, marks in zip(replies, marked, strict=True):
        asked.append([*BEFORE, *marks])
        for n, message in enumerate(reply):
            asked.append([*BEFORE, *marks[:n], message, *marks[n + 1 :]])
    texts = iter(render(asked))
    found = []
    for reply in replies:
        gaps, with_words = _gaps(next(texts), len(reply)), [next(texts) for _ in reply]
        pieces = [gaps[0][1]]
        for n, (message, text) in enumerate(zip(reply, with_words, strict=True)):
            head, tail = _joined(gaps[: n + 1], 0), _joined(gaps[n + 1 :], n + 1)
            ends = text.startswith(head) and text.endswith(tail)
            fits = ends and len(text) >= len(head) + len(tail)
            # A template that writes something else around these words has them as they are.
            words = text[len(head) : len(text) - len(tail)] if fits else str(message["content"])
            pieces += [words, gaps[n + 1][0]]
        found.append(pieces)
    return found


def _gaps(text: str, count: int) -> list[tuple[str, str]]:
    """The text up to the first message and that part of it which is behind the assistant's words,
    then, in both places, what is behind each message."""
    head, found, tail = text.partition(MARK)
    parts = re.split(f"{MARK}(\\d+){MARK}", tail)
    if not found or parts[1::2] != [str(n) for n in range(count)]:
        raise DataError(
            "model.path: the chat template leaves out, or puts elsewhere, what is said in turns of "
            "dialogues"
        )
    return [(head + MARK + parts[0], parts[0]), *((part, part) for part in parts[2::2])]


def _joined(gaps: Sequence[tuple[str, str]], first: int) -> str:
    """The gaps with the marks between them, the first of which is of message ``first``."""
    text = gaps[0][0]
    for n, (gap, _) in enumerate(gaps[1:], first):
        text += f"{MARK}{n}{MARK}{gap}"
    return text
