"""Reasoning tags: which part of a response is reasoning and which is the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from rlinf.models.chat_format import KNOWN_THINKING_MARKS, ThinkingMarks

DEFAULT_TAGS = (
    *KNOWN_THINKING_MARKS,
    ThinkingMarks("<thinking>", "</thinking>"),
    ThinkingMarks("<thought>", "</thought>"),
    ThinkingMarks("<reasoning>", "</reasoning>"),
    ThinkingMarks("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Tags of published chat templates, and tags that prompts commonly ask for."""
_BARE_CHANNELS = re.compile(r"\Aanalysis(?:(?=[^\s:]).*assistantfinal|(?=[\w\\$]))", re.DOTALL)
"""Channels of gpt-oss in a text whose special tokens the decoder dropped. The reasoning follows
without a space, whereas prose continues with a space or a comma."""


@dataclass(frozen=True)
class ReasoningTags:
    """The tags with which a model marks its reasoning.

    Args:
        tags: opening and closing tags.
        starts_open: whether the prompt ends inside the reasoning, because the chat template's
            generation prompt opens it. The response then has only the closing tag.
    """

    tags: tuple[ThinkingMarks, ...] = DEFAULT_TAGS
    starts_open: bool = False

    def strip_reasoning(self, response: str) -> str | None:
        """Return the text after the last reasoning, or None if the reasoning is unfinished."""
        if match := _BARE_CHANNELS.match(response):
            return response[match.end() :] if match[0].endswith("assistantfinal") else None
        start = max((mark.end() for mark in self._closing.finditer(response)), default=None)
        if start is None and self.starts_open:
            return None
        rest = response[start:]
        return None if self._opening.search(rest) else rest

    def ends_with_open_tag(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opening tag."""
        return prompt.rstrip().endswith(tuple(marks.begin.rstrip() for marks in self.tags))

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Pattern of opening tags: where a line or a sentence begins, special tokens anywhere. An
        answer that mentions a tag has it inside a sentence."""
        begins = [marks.begin.rstrip() for marks in self.tags]
        tokens = _any(begin for begin in begins if begin.startswith("<|"))
        return re.compile(rf"(?:\A|[\n.!?])\s*(?:{_any(begins)})|{tokens or '(?!)'}")

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(_any(marks.end for marks in self.tags))


def _any(marks: Iterable[str]) -> str:
    return "|".join(map(re.escape, marks))
