"""Dialogues: the policy and an environment exchange messages in turns.

The author of an agent writes a :class:`Dialogue` (the other side's messages, with or without tools)
and a :class:`DialogueEnvironment` that creates it. This module records tokens, masks and
log-probabilities, and enforces budgets. A trajectory is one row of tokens, exactly as the policy
read them: its own tokens with mask 1, all others with mask 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import math
import re
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError

from rlinf.channels.channel import Channel
from rlinf.config import Section
from rlinf.data.record import Record, RecordId, Scalar
from rlinf.data.trajectory import STOP_REASON_ERROR, Trajectory, info_fields
from rlinf.envs.base import RolloutRequest
from rlinf.envs.text_environment import TextEnvironment
from rlinf.errors import InputError, UserCodeError
from rlinf.models.chat_format import ChatFormat, chat_template_affixes
from rlinf.models.chat_template import ChatMessage
from rlinf.progress import PROGRESS
from rlinf.registry import PROMPTS, STEP_REWARDS, TURNS
from rlinf.seeding import generator
from rlinf.user_code import to_user_code_error

log = logging.getLogger(__name__)
SLACK_S = 5.0
"""Time that a tool call may take beside its attempts and waits."""
TEST_SEED = 1234
"""Seed of evaluation dialogues; the run's seed does not change them."""

DialogueStep = tuple[Sequence[ChatMessage], float, bool]
"""Reply messages, the reward of the policy's message, and whether the dialogue is done."""


class ToolInputError(ValueError):
    """A tool rejects the policy's request: wrong arguments, a division by zero, no such file.

    The policy reads the message and can learn from it. Any other exception of a tool is an outage.
    """


class ToolLimits(NamedTuple):
    """The time limit of a tool call, and its retries after an outage."""

    timeout_s: float = 60.0
    """Time limit of one attempt."""
    retries: int = 2
    backoff_s: float = 1.0
    """Wait before the first retry; it doubles with each further retry."""

    @property
    def max_duration_s(self) -> float:
        """The maximum duration of all attempts of a call together."""
        waits = self.backoff_s * (2**self.retries - 1)
        return (self.retries + 1) * self.timeout_s + waits + SLACK_S


class Dialogue(ABC):
    """The other side of one conversation. Each conversation has its own object with its state."""

    info: Mapping[str, Scalar] = {}
    """Extra fields for the reward; they are in ``extra`` of the trajectory."""
    limits: ToolLimits = ToolLimits()
    """Limits of tool calls; the environment sets them from its configuration."""
    tool_errors: int = 0
    """Number of rejected tool calls so far."""
    tool_retries: int = 0
    """Number of retries after an outage so far."""

    @abstractmethod
    def init(self) -> Sequence[ChatMessage]:
        """Return the first messages: ``role`` (system, user) and ``content``."""

    @abstractmethod
    def step(self, message: str) -> DialogueStep | Awaitable[DialogueStep]:
        """Return the response to a message of the policy.

        May be ``async``; then all dialogues of a batch run concurrently.
        """

    def close(self) -> None:  # noqa: B027
        """Release resources; called once when the dialogue ends, also after an error."""


class ToolCall(NamedTuple):
    """A tool call by the policy."""

    name: str
    arguments: Mapping[str, Any]


class ToolDialogue(Dialogue):
    """A dialogue in which the policy calls tools until it sends a message without a call. That
    message is its answer, which :meth:`score_answer` scores.

    Calls are ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as in most chat
    templates with tools; override :meth:`parse_calls` for another form.

    The policy reads the errors that it caused: a malformed call, an unknown tool, arguments that do
    not fit the tool's signature, and a :class:`ToolInputError` of the tool. Any other exception is
    an outage, and so is an attempt that takes too long. The tool is then called again with the same
    arguments; if the last attempt fails too, :meth:`step` raises its error, which ends the
    dialogue.
    """

    tools: Mapping[str, Callable[..., Any]] = {}
    """Tools by name. Plain functions run in threads, ``async`` functions in the event loop."""

    @abstractmethod
    def score_answer(self, message: str) -> float:
        """Return the reward of the policy's answer."""

    def parse_calls(self, message: str) -> Sequence[ToolCall]:
        """Return the calls in a message.

        Raises:
            ValueError: a call is malformed; the policy reads the error.
        """
        calls = []
        for text in re.findall(r"<tool_call>(.*?)</tool_call>", message, re.DOTALL):
            try:
                call = json.loads(text)
            except RecursionError:
                raise ValueError("the call is nested too deeply") from None
            if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
                raise ValueError("a call is an object with name and arguments")
            calls.append(ToolCall(str(call.get("name")), call.get("arguments", {})))
        return calls

    async def step(self, message: str) -> DialogueStep:
        try:
            calls = self.parse_calls(message)
        except ValueError as error:
            return [{"role": "tool", "content": self._reject_call(error)}], 0.0, False
        if not calls:
            return [], self.score_answer(message), True
        results = await asyncio.gather(*map(self._call, calls))
        return [{"role": "tool", "content": text} for text in results], 0.0, False

    async def _call(self, call: ToolCall) -> str:
        tool = self.tools.get(call.name)
        if tool is None:
            names = ", ".join(sorted(self.tools))
            return self._reject_call(f"no tool {call.name!r}; there are {names}")
        try:
            arguments = convert_arguments(tool, call.arguments)
        except ToolInputError as error:
            return self._reject_call(error)
        for attempt in range(self.limits.retries + 1):
            try:
                async with asyncio.timeout(self.limits.timeout_s):
                    return str(await _call_tool(tool, arguments))
            except ToolInputError as error:
                return self._reject_call(error)
            except Exception as error:  # a tool may raise anything
                if attempt == self.limits.retries:
                    raise
                log.debug("tool %s: %s; calling it again", call.name, _describe_error(error))
            self.tool_retries += 1
            await asyncio.sleep(self.limits.backoff_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _reject_call(self, error: object) -> str:
        """Count a rejected call; return the text that the policy reads after it."""
        self.tool_errors += 1
        return f"error: {error}"


def convert_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments converted to the types of the tool's signature.

    Pydantic converts values, for example a text to a number. Types that pydantic does not know are
    not checked.

    Raises:
        ToolInputError: an argument does not fit; the message names it and says why.
    """
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        raise ToolInputError(str(error)) from None
    except ValueError:  # some built-in functions have no signature
        return dict(arguments)
    try:
        hints = get_type_hints(tool)
    except Exception:  # an undefined name, or a tool that is not a function
        return dict(arguments)
    return {name: _convert(name, value, hints.get(name, Any)) for name, value in arguments.items()}


def _convert(name: str, value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint)
    except PydanticUserError:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ToolInputError(f"{name}: {error.errors()[0]['msg']}") from None


async def _call_tool(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    call = functools.partial(tool, **arguments)
    if inspect.iscoroutinefunction(tool):
        return await call()
    result = await _run_in_thread(call)
    return await result if inspect.isawaitable(result) else result


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def check_step(dialogue: Dialogue, result: Any) -> DialogueStep:
    """Return the result of :meth:`Dialogue.step` if it is valid.

    Raises:
        InputError: it is invalid; the message names the class and the value.
    """
    subject = f"task: {type(dialogue).__name__}.step returned"
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise InputError(f"{subject} {result!r:.60}; it must return (messages, reward, done)")
    messages, reward, done = result
    are_valid = isinstance(messages, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str)
        for message in messages
    )
    if isinstance(messages, str) or not are_valid:
        raise InputError(
            f"{subject} the messages {messages!r:.60}; each must be a mapping with role and content"
        )
    number = np.asarray(reward)
    if number.shape or number.dtype.kind not in "biuf" or not np.isfinite(number):
        raise InputError(f"{subject} the reward {reward!r:.60}; it must be one finite number")
    return messages, float(number), bool(done)


async def _run_in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a blocking call, which runs in a new thread so that no tool of a batch
    waits for another."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def set_result(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        future.set_result(value) if error is None else future.set_exception(error)

    def run_call() -> None:
        value, failure = None, None
        try:
            value = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(set_result, value, failure)

    threading.Thread(target=run_call, name="tool", daemon=True).start()
    return await future


class DialogueConfig(Section):
    """Budgets of a dialogue. Its tokens, including those of tools, are at most the run's
    horizon."""

    max_turns: int = Field(default=8, gt=0)
    """Maximum number of messages of the policy."""
    max_turn_tokens: int = Field(default=512, gt=0)
    """Maximum number of tokens of one message of the policy."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait, in seconds, for a step of the other side, and for each attempt of a tool
    call."""
    tool_retries: int = Field(default=2, ge=0)
    """Retries of a tool call after an outage; 0 if a call must not happen twice."""
    tool_backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first retry; the wait doubles with each further retry."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a batch's dialogues that may end in an outage. The stage fails if more of
    them do, and if all of them do."""


class DialogueEnvironment(TextEnvironment):
    """Exchanges messages with the policy; a task defines the dialogues.

    Steps are tokens. A message's reward is on its last token; ``turns`` int32 ``[T]`` is the index
    of the policy's message that a token belongs to or follows. If :meth:`Dialogue.step` raises or
    takes too long, only this dialogue is lost: all of its steps are masked, it has no score, and
    advantages of its group are computed without it.
    """

    Config: ClassVar[type[Section]] = DialogueConfig
    config: DialogueConfig
    provides = frozenset({PROMPTS, STEP_REWARDS, TURNS})
    stop_strings: ClassVar[tuple[str, ...]] = ()
    """Texts that end a message of the policy, in addition to the stop tokens and stop strings of
    the run."""
    uses_chat_template = True
    inline_replies: ClassVar[bool] = False
    """Whether replies continue the policy's own turn verbatim, unless it ended that turn with a
    stop token. Otherwise the chat template inserts them between two turns."""

    @abstractmethod
    def create_dialogue(self, split: str, random: np.random.Generator) -> Dialogue:
        """Return a new dialogue; equal random numbers create equal dialogues."""

    def simulate(
        self, request: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Trajectory]:
        states = [self._create_state(request, int(sample)) for sample in request.sample_ids()]
        try:
            self._encode_first_messages(states)
            live = states
            with asyncio.Runner() as runner:
                while live:
                    self._request_messages(request, live, observations, actions)
                    runner.run(self._step_all(live))
                    self._add_replies(request, live)
                    for state in live:
                        if state.stop_reason:
                            yield state.trajectory(request)
                    live = [state for state in live if not state.stop_reason]
            observations.close()
        finally:
            for state in states:
                state.dialogue.close()

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        """Return the sum of each dialogue's rewards; NaN for a lost dialogue."""
        return [
            math.nan if t.is_failed else float(t.require("episode_return")) for t in trajectories
        ]

    def _create_state(self, request: RolloutRequest, sample: int) -> _DialogueState:
        group, split = sample // request.group_size, request.split
        seed, iteration = request.seed, request.iteration
        if split == "test":
            seed, iteration = TEST_SEED, 0
        dialogue = self.create_dialogue(split, generator(seed, "dialogue", split, iteration, group))
        config = self.config
        dialogue.limits = ToolLimits(config.timeout_s, config.tool_retries, config.tool_backoff_s)
        return _DialogueState(sample, group, dialogue)

    def _encode_first_messages(self, states: Sequence[_DialogueState]) -> None:
        conversations = [state.dialogue.init() for state in states]
        texts = self._render(conversations)
        for state, text, ids in zip(states, texts, self.encode_prompts(texts), strict=True):
            state.prompt, state.prompt_text = ids, text

    def _request_messages(
        self,
        request: RolloutRequest,
        live: Sequence[_DialogueState],
        observations: Channel,
        actions: Channel,
    ) -> None:
        """Request and record the policy's next message in each dialogue."""
        stops = [*json.loads(str(request.request_info.get("stop", "[]"))), *self.stop_strings]
        by_limit: dict[int, list[_DialogueState]] = {}
        for state in live:
            max_tokens = min(self.config.max_turn_tokens, request.horizon - len(state.tokens))
            by_limit.setdefault(max_tokens, []).append(state)
        for max_tokens, states in sorted(by_limit.items(), reverse=True):
            observations.put(_token_request(request, states, max_tokens, stops))
        waiting = {state.sample: state for state in live}
        while waiting:
            output = actions.get()
            for row, sample in enumerate(output.steps["sample"].tolist()):
                waiting.pop(sample).add_message(output, row, self.chat_format, stops)

    async def _step_all(self, live: Sequence[_DialogueState]) -> None:
        await asyncio.gather(*(self._step_one(state) for state in live))

    async def _step_one(self, state: _DialogueState) -> None:
        has_tools = isinstance(state.dialogue, ToolDialogue)
        timeout_s = state.dialogue.limits.max_duration_s if has_tools else self.config.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result = state.dialogue.step(state.message)
                state.step_result = await result if isinstance(result, Awaitable) else result
                PROGRESS.mark()
        except Exception as error:  # the author's code may raise anything
            state.fail(error)
            log.warning("sample %d: its dialogue failed: %s", state.sample, _describe_error(error))
            log.debug("%s", _format_traceback(error))

    def _add_replies(self, request: RolloutRequest, live: Sequence[_DialogueState]) -> None:
        """Add the other side's replies, and end the dialogues that are done."""
        continuing = []
        for state in live:
            if state.stop_reason:
                continue
            _, reward, done = state.step_result = check_step(state.dialogue, state.step_result)
            state.rewards[-1] += float(reward)
            if done:
                state.stop_reason = "stop"
            elif state.num_turns == self.config.max_turns:
                state.stop_reason = "length"
            else:
                continuing.append(state)
        for state, ids in zip(continuing, self._reply_tokens(continuing), strict=True):
            if len(state.tokens) + len(ids) >= request.horizon:
                state.stop_reason = "length"
            else:
                state.add_reply(ids)

    def _reply_tokens(self, states: Sequence[_DialogueState]) -> list[np.ndarray]:
        """Return the tokens between the policy's last message and its next one."""
        inline = [state for state in states if self._is_inline(state)]
        templated = [state for state in states if not self._is_inline(state)]
        texts = [_join_contents(state.step_result[0]) for state in inline]
        replies = [*self.encode(texts, literal=True), *self._templated_reply_tokens(templated)]
        pairs = zip([*inline, *templated], replies, strict=True)
        ids = {state.sample: tokens for state, tokens in pairs}
        return [ids[state.sample] for state in states]

    def _templated_reply_tokens(self, states: Sequence[_DialogueState]) -> list[np.ndarray]:
        """Return the tokens of replies, each with the chat template's tokens around it. The text of
        a reply never becomes a special token."""
        # Pieces alternate between text of the template and of a reply.
        all_pieces = chat_template_affixes(self._render, [state.step_result[0] for state in states])
        for state, pieces in zip(states, all_pieces, strict=True):
            # The policy has already written the token that ends its message.
            pieces[0] = pieces[0].removeprefix(state.stop_token_text)
        template_texts = [piece for pieces in all_pieces for piece in pieces[::2]]
        reply_texts = [piece for pieces in all_pieces for piece in pieces[1::2]]
        template_ids = iter(self.encode(template_texts))
        reply_ids = iter(self.encode(reply_texts, literal=True))
        return [
            np.concatenate([next(reply_ids if n % 2 else template_ids) for n in range(len(pieces))])
            for pieces in all_pieces
        ]

    def _is_inline(self, state: _DialogueState) -> bool:
        """Return whether the reply continues the policy's turn; see :attr:`inline_replies`."""
        return self.chat_format.template is None or (
            self.inline_replies and not state.stop_token_text
        )

    def _render(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[str]:
        if self.chat_format.template is None:
            return [_join_contents(messages) for messages in conversations]
        return self.chat_format.render_prompts(conversations)


@dataclass
class _DialogueState:
    """A running dialogue and its recorded tokens."""

    sample: int
    group: int
    dialogue: Dialogue
    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    prompt_text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Tokens of both sides after the prompt. The lists below have one value for each of them."""
    logprobs: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    token_turns: list[int] = field(default_factory=list)
    """Index of the policy's message that a token belongs to or follows."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights for each token; empty if the engine does not report it."""
    version: int | None = None
    """Version of the weights that generated the first message."""
    text: str = ""
    """All messages after the prompt, with replies in brackets."""
    message: str = ""
    """The policy's last message."""
    stop_token_text: str = ""
    """Text of the stop token that ended the message; empty if a stop string or the budget did."""
    num_turns: int = 0
    """Number of the policy's messages."""
    step_result: DialogueStep = ((), 0.0, True)
    stop_reason: str = ""
    """Why the dialogue ended; empty while it runs."""
    error: str = ""
    """The error that ended a lost dialogue."""
    is_user_error: bool = False
    """Whether the error is in the user's own code, so that a retry would raise it again."""

    def add_message(self, output: Record, row: int, chat: ChatFormat, stops: Sequence[str]) -> None:
        """Record a message of the policy from a row of the engine's output."""
        length = int(output.steps["length"][row])
        ids = output.steps["tokens"][row, :length].tolist()
        self.message = chat.decode(ids)
        ends_with_token = output.steps["stopped"][row] and not any(s in self.message for s in stops)
        self.stop_token_text = chat.tokenizer.decode(ids[-1:]) if ends_with_token else ""
        self.text += self.message
        self.version = int(output.info["version"]) if self.version is None else self.version
        self.tokens += ids
        self.logprobs += output.steps["logprobs"][row, :length].tolist()
        if "version" in output.steps:
            self.versions += output.steps["version"][row, :length].tolist()
        self.mask += [1.0] * length
        self.rewards += [0.0] * length
        self.token_turns += [self.num_turns] * length
        self.num_turns += 1

    def add_reply(self, ids: np.ndarray) -> None:
        self.text += f"[{_join_contents(self.step_result[0])}]"
        self.tokens += ids.tolist()
        self.logprobs += [0.0] * len(ids)
        self.mask += [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.token_turns += [self.num_turns - 1] * len(ids)
        if self.versions:
            self.versions += self.versions[-1:] * len(ids)

    def fail(self, error: Exception) -> None:
        """Discard the dialogue: mask all of its steps."""
        user_error = to_user_code_error(error)
        self.stop_reason = STOP_REASON_ERROR
        self.error = _format_traceback(error) if user_error is None else str(user_error)
        self.is_user_error = isinstance(user_error, UserCodeError)
        self.mask = [0.0] * len(self.mask)
        self.rewards = [0.0] * len(self.rewards)

    def trajectory(self, request: RolloutRequest) -> Trajectory:
        """Return the ended dialogue. :attr:`Dialogue.info` does not override recorded fields."""
        recorded: dict[str, Any] = {
            "group": self.group,
            "policy_version": int(self.version or 0),
            "stop_reason": self.stop_reason,
            "prompt_text": self.prompt_text,
            "text": self.text,
            "num_turns": self.num_turns,
            "tool_errors": self.dialogue.tool_errors,
            "tool_retries": self.dialogue.tool_retries,
            "error": self.error,
            "failed_in_user_code": int(self.is_user_error),
            "episode_return": float(sum(self.rewards)),
        }
        return Trajectory(
            identity=RecordId(request.iteration, self.sample),
            actions=np.array(self.tokens, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            mask=np.array(self.mask, np.float32),
            rewards=np.array(self.rewards, np.float32),
            turns=np.array(self.token_turns, np.int32),
            versions=np.array(self.versions, np.int64) if self.versions else None,
            prompt=self.prompt,
            **{"answer": "", **info_fields(self.dialogue.info), **recorded},
        )


def _token_request(
    request: RolloutRequest, states: Sequence[_DialogueState], max_tokens: int, stops: Sequence[str]
) -> Record:
    """Return a request for at most ``max_tokens`` tokens after each dialogue's tokens so far."""
    contexts = [np.append(state.prompt, np.array(state.tokens, np.int64)) for state in states]
    lengths = np.array([len(ids) for ids in contexts], dtype=np.int64)
    padded = np.zeros((len(states), int(lengths.max())), dtype=np.int64)
    for row, ids in zip(padded, contexts, strict=True):
        row[: len(ids)] = ids
    settings = {**request.request_info, "horizon": max_tokens}
    if stops:
        settings["stop"] = json.dumps(stops)
    if "min_tokens" in settings:
        settings["min_tokens"] = min(int(settings["min_tokens"]), max_tokens)
    return Record(
        RecordId(request.iteration, states[0].sample),
        steps={
            "sample": np.array([state.sample for state in states], np.int64),
            "turn": np.array([state.num_turns for state in states], np.int64),
            "prompt": padded,
            "prompt_length": lengths,
        },
        info=settings,
    )


def _format_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def _join_contents(messages: Sequence[ChatMessage]) -> str:
    return "".join(message["content"] for message in messages)
