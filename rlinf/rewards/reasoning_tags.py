"""Marks of thinking: which part of a response is its answer."""

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
"""Marks of published chat templates, and those that prompts of the field ask for."""
_BARE_CHANNELS = re.compile(r"\Aanalysis(?:(?=[^\s:]).*assistantfinal|(?=[\w\\$]))", re.DOTALL)
"""The channels of gpt-oss in a text whose special tokens were dropped by the decoder: the thought
follows without a space, where prose goes on with a space or a comma."""


@dataclass(frozen=True)
class ReasoningTags:
    """How a model marks its thoughts.

    Args:
        pairs: opening and closing marks.
        starts_open: whether the prompt ends inside the reasoning, because the chat template's
            generation prompt opens it. The response then has only the closing tag.
    """

    tags: tuple[ThinkingMarks, ...] = DEFAULT_TAGS
    starts_open: bool = False

    def strip_reasoning(self, response: str) -> str | None:
        """Return the text behind the last thought, or None if a thought is unfinished."""
        if found := _BARE_CHANNELS.match(response):
            return response[found.end() :] if found[0].endswith("assistantfinal") else None
        start = max((mark.end() for mark in self._closing.finditer(response)), default=None)
        if start is None and self.starts_open:
            return None
        rest = response[start:]
        return None if self._opening.search(rest) else rest

    def ends_with_open_tag(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opening mark."""
        return prompt.rstrip().endswith(tuple(marks.begin.rstrip() for marks in self.tags))

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Openings of thoughts: where a line or a sentence begins, special tokens anywhere. An
        answer that mentions a mark has it inside a sentence."""
        begins = [marks.begin.rstrip() for marks in self.tags]
        tokens = _any(begin for begin in begins if begin.startswith("<|"))
        return re.compile(rf"(?:\A|[\n.!?])\s*(?:{_any(begins)})|{tokens or '(?!)'}")

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(_any(marks.end for marks in self.tags))


def _any(marks: Iterable[str]) -> str:
    return "|".join(map(re.escape, marks))
