"""Chat formats: a tokenizer's chat template, its arguments and its thinking marks.

Rollout, supervised fine-tuning and evaluation render with the same :class:`ChatFormat`. Templates
of reasoning models rewrite earlier messages: they drop the thoughts of earlier answers, or open a
thought in the generation prompt. Training and generation must use equal prompts. Therefore the
prompt of an answer is always what the template renders with ``add_generation_prompt``.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rlinf.errors import ConfigError, DataError, did_you_mean
from rlinf.models.chat_template import ChatMessage, render_conversations, template_variables

log = logging.getLogger(__name__)
PATH_KEY = "model.path"
KWARGS_KEY = "model.chat_template_kwargs"
"""Configuration keys in error messages."""
RESERVED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of a template that are never arguments."""
CONTENT_PLACEHOLDER, NEXT_MESSAGE_PLACEHOLDER = "\u2402", "\u2403"
"""Placeholders of a message's content, such as an answer, and of the user message that follows it,
while a template is rendered."""


class ThinkingMarks(NamedTuple):
    """The marks before and after the thought of a reasoning model."""

    begin: str
    end: str


DEFAULT_THINKING_MARKS = ThinkingMarks("<think>", "</think>")
"""The marks in data sets: ``reasoning_content`` of a row becomes content between these marks."""
KNOWN_THINKING_MARKS = (
    DEFAULT_THINKING_MARKS,
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ThinkingMarks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ThinkingMarks("<|channel>thought\n", "<channel|>"),
)
"""The marks of published chat templates."""


class AssistantTurn(NamedTuple):
    """One answer of the assistant, as text."""

    prompt: str
    """All text before the answer."""
    completion: str
    """The answer, with the end-of-turn text if the template has one."""


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of one tokenizer, with its arguments and special tokens."""

    tokenizer: Any = field(repr=False)
    template: str | None
    """The chat template; None: texts are used without a template."""
    template_kwargs: Mapping[str, Any]
    """Arguments of the template besides the messages (``chat_template_kwargs``)."""
    eos_token_ids: frozenset[int]
    """Ids of tokens that end a response, independent of the template."""

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        eos_token_ids: Iterable[int] | None = None,
    ) -> ChatFormat:
        """Return the chat format of a tokenizer: its existing one, or a new one.

        Args:
            template_kwargs: Arguments of the template.
            eos_token_ids: Ids from the model folder; default: the tokenizer's.

        Raises:
            ConfigError: The template does not use one of the arguments.
            DataError: The tokenizer has several templates without a default.
        """
        existing = getattr(tokenizer, "chat_format", None)
        template = select_chat_template(getattr(tokenizer, "chat_template", None), PATH_KEY)
        if isinstance(existing, ChatFormat) and template_kwargs is None and eos_token_ids is None:
            if template == existing.template:
                return existing
            template_kwargs, eos_token_ids = existing.template_kwargs, existing.eos_token_ids
        if eos_token_ids is None:
            eos_token_ids = {tokenizer.eos_token_id}
        created = cls(tokenizer, template, dict(template_kwargs or {}), frozenset(eos_token_ids))
        check_template_kwargs(created.template_kwargs, created.template)
        return created

    def render_prompts(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """Return the text of each conversation with the generation prompt.

        Raises:
            DataError: As :func:`rlinf.models.chat_template.render_conversations`.
        """
        return self._render(conversations, add_generation_prompt=True)

    def render_completed(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """Return the text of conversations that end with the assistant; raises as
        :meth:`render_prompts`."""
        return self._render(conversations, add_generation_prompt=False)

    def assistant_turns(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        sources: Sequence[str],
        *,
        last_only: bool = False,
    ) -> list[list[AssistantTurn]]:
        """Return the answers of the assistant in conversations, each with its own prompt.

        Args:
            conversations: Conversations that end with the assistant.
            sources: The source of each conversation, for error messages.
            last_only: Return only the last answer of each conversation.

        Raises:
            DataError: The template omits an answer, or the text before it differs from its
                generation prompt.
        """
        counts, without_answer = [], list[Sequence[ChatMessage]]()
        with_answer = list[Sequence[ChatMessage]]()
        for conversation in conversations:
            roles = [message["role"] for message in conversation]
            answers = [i for i, role in enumerate(roles) if role == "assistant"]
            answers = answers[-1:] if last_only else answers
            counts.append(len(answers))
            without_answer += [conversation[:i] for i in answers]
            with_answer += [conversation[: i + 1] for i in answers]
        prompts = iter(self.render_prompts(without_answer))
        completed = iter(self.render_completed(with_answer))
        contents = (conversation[-1]["content"] for conversation in with_answer)
        return [
            [self._turn(next(prompts), next(completed), next(contents), src) for _ in range(count)]
            for src, count in zip(sources, counts, strict=True)
        ]

    def _turn(self, prompt: str, rendered: str, content: str, source: str) -> AssistantTurn:
        """Return one answer as the template renders it, with its thought even if the template drops
        thoughts.

        Args:
            prompt: The rendered messages before the answer, with the generation prompt.
            rendered: The rendered messages up to the answer.
            content: The content of the answer.
            source: The source of the conversation, for error messages.
        """
        thought, answer = split_thought(content, self.thinking_marks)
        # If the template has no thinking marks, those in the content are ordinary text.
        if self.thinking_marks is None and thought is not None:
            thought, answer = None, content.strip()
        shared = self._shared_prefix_length(prompt, rendered)
        end = _answer_end(rendered, shared, thought, answer)
        if end is not None and not prompt[shared:].strip():  # only white space differs
            return AssistantTurn(prompt, rendered[shared : self._turn_end_position(rendered, end)])
        if thought is not None and self._closes_thought(prompt):
            if end is None or self.template_kwargs:
                raise DataError(
                    f"{source}: the answer has a thought, and the prompt closes it before the "
                    f"answer; set {KWARGS_KEY} so that the chat template thinks, or leave the "
                    "thoughts out"
                )
            _warn_of_closed_thoughts()
            return AssistantTurn(
                rendered[:shared], rendered[shared : self._turn_end_position(rendered, end)]
            )
        completion = self._complete_prompt(prompt, rendered, thought, answer, source)
        return AssistantTurn(prompt, completion)

    def _complete_prompt(
        self, prompt: str, rendered: str, thought: str | None, answer: str, source: str
    ) -> str:
        """Return the completion of a prompt, for templates that rewrite the prompt once the answer
        follows."""
        shared, marks = self._shared_prefix_length(prompt, rendered), self.thinking_marks
        end, rest = _answer_end(rendered, shared, None, answer), prompt[shared:]
        if end is None:
            raise DataError(
                f"{source}: the chat template of {PATH_KEY} omits or changes the assistant's answer"
            )
        if rest.strip() and (marks is None or not _consists_of_marks(rest, marks)):
            raise DataError(
                f"{source}: the chat template of {PATH_KEY} does not render a conversation as a "
                "continuation of its generation prompt, so training and generation would use "
                "different prompts; use another template"
            )
        tail = rendered[end : self._turn_end_position(rendered, end)]
        if marks is None or (thought is None and not self.opens_thought(prompt)):
            return answer + tail
        return self._answer_with_thought(prompt, thought, answer) + tail

    def _shared_prefix_length(self, prompt: str, rendered: str) -> int:
        """Return the length of the common prefix of two texts, without cutting a thinking mark.

        For example, if the prompt continues with ``<think>`` and the answer with ``<answer>``, both
        share ``<``, which must not be cut off from the mark.
        """
        shared = _common_prefix_length(prompt, rendered)
        for mark in (mark.strip() for mark in self.thinking_marks or ()):
            start = prompt.rfind(mark, 0, shared + len(mark) - 1)
            if 0 <= start < shared < start + len(mark):
                return start
        return shared

    def _answer_with_thought(self, prompt: str, thought: str | None, answer: str) -> str:
        marks = self.thinking_marks
        assert marks is not None
        begin = "" if self.opens_thought(prompt) else f"{marks.begin}\n"
        reasoning = "" if thought is None else thought
        line = "" if not reasoning and prompt.endswith("\n") else "\n"
        return f"{begin}{reasoning}{line}{marks.end}\n\n{answer}"

    def _turn_end_position(self, rendered: str, end: int) -> int:
        """Return the index after the turn whose answer ends before index ``end``."""
        turn_end = self._template_turn_end
        position = rendered.find(turn_end, end) if turn_end else -1
        if position >= 0 and turn_end is not None:
            return position + len(turn_end)
        others = [p + len(s) for s in self.special_tokens if (p := rendered.find(s, end)) >= 0]
        return min(others, default=len(rendered))

    def opens_thought(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark before a thought."""
        return self.thinking_marks is not None and prompt.rstrip().endswith(
            self.thinking_marks.begin.rstrip()
        )

    def _closes_thought(self, prompt: str) -> bool:
        return self.thinking_marks is not None and prompt.rstrip().endswith(self.thinking_marks.end)

    def _render(
        self, conversations: Sequence[Sequence[ChatMessage]], *, add_generation_prompt: bool
    ) -> list[str]:
        assert self.template is not None
        return render_conversations(
            self.template,
            [[self._separate_thought(m) for m in messages] for messages in conversations],
            self._variables,
            PATH_KEY,
            add_generation_prompt=add_generation_prompt,
        )

    def _separate_thought(self, message: ChatMessage) -> ChatMessage:
        """Return a message with its thought as separate fields, for templates that read these."""
        if self.thinking_marks in (None, DEFAULT_THINKING_MARKS) or message["role"] != "assistant":
            return message
        thought, answer = split_thought(message["content"], self.thinking_marks)
        if thought is None:
            return message
        fields = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
        return {**message, **fields, "content": answer}

    @property
    def argument_names(self) -> set[str]:
        """Names of the arguments that the template uses; none without a template."""
        if self.template is None:
            return set()
        known = RESERVED_VARIABLES | set(self.tokenizer.special_tokens_map)
        return template_variables(self.template, PATH_KEY) - known

    @property
    def _variables(self) -> dict[str, Any]:
        names = {str(k): str(v) for k, v in self.tokenizer.special_tokens_map.items()}
        return {**names, **self.template_kwargs}

    @cached_property
    def thinking_marks(self) -> ThinkingMarks | None:
        """The thinking marks in the template, or in the vocabulary if there is no template."""
        if self.template is not None:
            text = self.template.replace("\\n", "\n")
            return next((marks for marks in KNOWN_THINKING_MARKS if marks.end in text), None)
        vocab = self.tokenizer.get_added_vocab()
        return next((m for m in KNOWN_THINKING_MARKS if m.begin in vocab and m.end in vocab), None)

    @cached_property
    def special_tokens(self) -> list[str]:
        """The special tokens as text, longest first."""
        decoder: Mapping[int, Any] = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {token.content for token in decoder.values() if token.special}
        return sorted({*self.tokenizer.all_special_tokens, *special}, key=len, reverse=True)

    @cached_property
    def end_of_turn_token_id(self) -> int:
        """The id of the token that ends the assistant's turn, in training and in generation."""
        if self._template_turn_end is None:
            return int(self.tokenizer.eos_token_id)
        return int(self.tokenizer.convert_tokens_to_ids(self._template_turn_end))

    @property
    def end_of_turn_text(self) -> str:
        """The text of :attr:`end_of_turn_token_id`."""
        return str(self.tokenizer.convert_ids_to_tokens(self.end_of_turn_token_id))

    @cached_property
    def _template_turn_end(self) -> str | None:
        """The text with which the template ends an answer, or None.

        It is a special token after each answer, or else after the last answer (``<|return|>`` of
        harmony), or else at the start of the next message (GLM's ``<|user|>``). Of several tokens,
        it is the first one in ``eos_token_ids``, or else the first one.
        """
        if self.template is None:
            return None
        last, earlier = _texts_after_answer(
            self.template, json.dumps(self._variables, sort_keys=True, default=str)
        )
        common = last[: _common_prefix_length(last, earlier)]
        for tail in (common, last, earlier):
            for tokens in (self.special_tokens, self.tokenizer.get_added_vocab()):
                matches = sorted((tail.find(s), -len(s), s) for s in tokens if s in tail)
                texts = [text for _, _, text in matches]
                ends = [text for text in texts if self._id(text) in self.eos_token_ids]
                if texts:
                    return (ends or texts)[0]
        return None

    def _id(self, text: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(text))

    @cached_property
    def bos_token_ids(self) -> np.ndarray:
        """The ids of tokens that the tokenizer adds before a text, int64 ``[n]`` (often BOS)."""
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        starts = range(len(full) - len(plain) + 1)
        begin = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
        return np.asarray(full[:begin], np.int64)

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of the texts that are special tokens; other texts are ignored."""
        special = set(self.special_tokens)
        return {self._id(text) for text in texts if text in special}

    def undecoded_token_in(self, text: str) -> str | None:
        """Return a special token in a longer text that :meth:`decode` would omit, or None."""
        inside = (s for s in self.special_tokens if s in text and s != text)
        return next((s for s in inside if self._id(s) in self._undecoded_ids), None)

    @cached_property
    def _undecoded_ids(self) -> frozenset[int]:
        """Ids of special tokens that :meth:`decode` omits: all except thinking marks."""
        marks = "" if self.thinking_marks is None else "".join(self.thinking_marks)
        special = {self._id(s) for s in self.special_tokens if s not in marks}
        return frozenset(special | {self.end_of_turn_token_id})

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without special tokens except thinking marks."""
        visible = [int(token) for token in tokens if int(token) not in self._undecoded_ids]
        text: str = self.tokenizer.decode(visible, skip_special_tokens=False)
        return text

    def decode_stable(self, tokens: Sequence[int]) -> str:
        """Return the beginning of the text of an unfinished response that stays as it is.

        A character of several tokens is decoded as U+FFFD until it is complete. A token that is
        one byte can also change the text of the bytes before it.
        """
        visible = [token for token in tokens if token not in self._undecoded_ids]
        text = self.decode(visible)
        length = _common_prefix_length(self.decode(visible[:-1]), text)
        return text[:length].rstrip("\ufffd")


def split_thought(content: str, marks: ThinkingMarks | None) -> tuple[str | None, str]:
    """Return the thought (or None) and the answer of a message, both stripped.

    Args:
        content: The content of the message.
        marks: The marks of the template, or None. ``<think>`` and ``</think>`` also count.
    """
    for begin, end in filter(None, (marks, DEFAULT_THINKING_MARKS)):
        thought, mark, answer = content.partition(end)
        if mark:
            return thought.strip().removeprefix(begin).strip(), answer.strip()
    return None, content.strip()


def check_template_kwargs(arguments: Mapping[str, Any], template: str | None) -> None:
    """Check that a chat template uses all ``chat_template_kwargs``.

    Raises:
        ConfigError: The template does not use an argument, or there is no template.
        DataError: The template is malformed.
    """
    if not arguments:
        return
    if template is None:
        raise ConfigError(f"{KWARGS_KEY}: the tokenizer has no chat template; leave it out")
    names = template_variables(template, PATH_KEY) - RESERVED_VARIABLES
    for name in arguments:
        if name not in names:
            hint = did_you_mean(name, names) or f"; it uses {', '.join(sorted(names)) or 'none'}"
            raise ConfigError(f"{KWARGS_KEY}.{name}: the chat template does not use it{hint}")


def select_chat_template(template: Any, source: str) -> str | None:
    """Return the chat template; of several named templates, the default one.

    Args:
        template: A text, texts by name, or None.
        source: The key and the folder, for the error message.

    Raises:
        DataError: There are several templates without a default.
    """
    if not template or isinstance(template, str):
        return template or None
    if isinstance(template, list):  # as tokenizer_config.json has them
        template = {entry["name"]: entry["template"] for entry in template}
    if "default" not in template:
        raise DataError(
            f"{source}: its chat templates are {', '.join(sorted(template))}, and none is named "
            "default; write the one to use into the file chat_template.jinja of the folder"
        )
    return str(template["default"])


def _answer_end(rendered: str, start: int, thought: str | None, answer: str) -> int | None:
    """Return the index after an answer (and its thought) that begins at or after ``start``, or None
    if the text has no such answer."""
    if thought:
        position = rendered.find(thought, start)
        if position < 0:
            return None
        start = position + len(thought)
    position = rendered.find(answer, start)
    return None if position < 0 else position + len(answer)


def _common_prefix_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _consists_of_marks(text: str, marks: ThinkingMarks) -> bool:
    """Return whether a text consists of thinking marks, or is the end of a mark."""
    for mark in marks:
        text = text.replace(mark.strip(), "")
    return not text.strip() or any(mark.strip().endswith(text.strip()) for mark in marks)


@functools.cache
def _warn_of_closed_thoughts() -> None:
    log.warning(
        "the chat template disables thinking, but the training answers have thoughts; set %s (for "
        "example enable_thinking: true), so that rollouts think, too",
        KWARGS_KEY,
    )


@functools.lru_cache(64)
def _texts_after_answer(template: str, variables: str) -> tuple[str, str]:
    """Return two texts that a template renders after an answer: as the last message, and before
    another message."""
    question = {"role": "user", "content": "."}
    messages: list[ChatMessage] = [question, {"role": "assistant", "content": CONTENT_PLACEHOLDER}]
    tails = []
    for variant in (messages, [*messages, {"role": "user", "content": NEXT_MESSAGE_PLACEHOLDER}]):
        try:
            (text,) = render_conversations(
                template, [variant], json.loads(variables), PATH_KEY, add_generation_prompt=False
            )
        except DataError as error:
            log.warning("the chat template does not show the end-of-turn token: %s", error)
            text = ""
        tails.append(text.partition(CONTENT_PLACEHOLDER)[2].partition(NEXT_MESSAGE_PLACEHOLDER)[0])
    return tails[0], tails[1]


LEADING_MESSAGES = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": CONTENT_PLACEHOLDER},
)
"""A conversation that is rendered before each reply."""
RenderFunction = Callable[[Sequence[Sequence[ChatMessage]]], list[str]]
"""Returns the text of each conversation."""


def chat_template_affixes(
    render: RenderFunction, replies: Sequence[Sequence[ChatMessage]]
) -> list[list[str]]:
    """Return the pieces of text that a template renders for each reply to an assistant's answer.

    A reply is a list of messages. Its text begins after the answer. In the pieces, template text
    and message contents alternate. Contents are as the template renders them (for example trimmed
    or quoted), and are never interpreted as template text.

    Raises:
        DataError: The template omits messages.
    """
    placeholders = [
        [
            {**message, "content": f"{CONTENT_PLACEHOLDER}{n}{CONTENT_PLACEHOLDER}"}
            for n, message in enumerate(reply)
        ]
        for reply in replies
    ]
    variants: list[Sequence[ChatMessage]] = []
    for reply, masked in zip(replies, placeholders, strict=True):
        variants.append([*LEADING_MESSAGES, *masked])
        for n, message in enumerate(reply):
            variants.append([*LEADING_MESSAGES, *masked[:n], message, *masked[n + 1 :]])
    texts = iter(render(variants))
    pieces_by_reply = []
    for reply in replies:
        gaps = _template_gaps(next(texts), len(reply))
        with_contents = [next(texts) for _ in reply]
        pieces = [gaps[0][1]]
        for n, (message, text) in enumerate(zip(reply, with_contents, strict=True)):
            head, tail = _join_gaps(gaps[: n + 1], 0), _join_gaps(gaps[n + 1 :], n + 1)
            matches = text.startswith(head) and text.endswith(tail)
            # If the template renders other text around this content, the content is used unchanged.
            content = str(message["content"])
            if matches and len(text) >= len(head) + len(tail):
                content = text[len(head) : len(text) - len(tail)]
            pieces += [content, gaps[n + 1][0]]
        pieces_by_reply.append(pieces)
    return pieces_by_reply


def _template_gaps(text: str, count: int) -> list[tuple[str, str]]:
    """Return ``count + 1`` gaps: the template text before, between and after the messages.

    A gap is a pair: its full text, and the part after the assistant's answer. They differ only in
    the first gap, which has :data:`LEADING_MESSAGES`.
    """
    head, placeholder, tail = text.partition(CONTENT_PLACEHOLDER)
    parts = re.split(f"{CONTENT_PLACEHOLDER}(\\d+){CONTENT_PLACEHOLDER}", tail)
    if not placeholder or parts[1::2] != [str(n) for n in range(count)]:
        raise DataError(
            "model.path: the chat template omits or moves messages in the turns of dialogues"
        )
    return [
        (head + CONTENT_PLACEHOLDER + parts[0], parts[0]),
        *((part, part) for part in parts[2::2]),
    ]


def _join_gaps(gaps: Sequence[tuple[str, str]], first: int) -> str:
    """Join the gaps with placeholders between them, starting with message ``first``."""
    text = gaps[0][0]
    for n, (gap, _) in enumerate(gaps[1:], first):
        text += f"{CONTENT_PLACEHOLDER}{n}{CONTENT_PLACEHOLDER}{gap}"
    return text
