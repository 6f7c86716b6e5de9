"""Dialogues: the policy and an environment exchange messages in turns.

The author of an agent writes a :class:`Dialogue` (the other side's messages, with or without tools)
and a :class:`DialogueEnvironment` that creates it. This module keeps tokens, masks,
log-probabilities and budgets. A trajectory is one row of tokens, exactly as the policy saw them:
the policy's own with mask 1, all others with mask 0.
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
from rlinf.data.trajectory import Trajectory, info_fields
from rlinf.envs.base import RolloutRequest
from rlinf.envs.text_environment import TextEnvironment
from rlinf.errors import InputError, UserCodeError
from rlinf.models.chat_format import ChatFormat, chat_template_affixes
from rlinf.models.chat_template import ChatMessage
from rlinf.registry import PROMPTS, STEP_REWARDS, TURNS
from rlinf.seeding import generator
from rlinf.user_code import to_user_code_error

log = logging.getLogger(__name__)

STOP_REASON_ERROR = "error"
"""Stop reason of a dialogue that was lost."""
TOOL_METRICS = ("tool_errors", "tool_retries")
"""Counts of each trajectory: refused calls, and retried calls."""
SLACK_S = 5.0
TEST_SEED = 1234
"""Seed of evaluation dialogues; the run's seed does not change them."""

DialogueStep = tuple[Sequence[ChatMessage], float, bool]
"""Messages to the policy, the reward of its message, and whether the dialogue is done."""


class ToolInputError(ValueError):
    """A tool refuses the policy's request: wrong arguments, a division by zero, no such file.

    The policy reads the message and can learn from it. Any other exception of a tool is an outage.
    """


class ToolLimits(NamedTuple):
    """The time limit of a tool call, and its retries after an outage."""

    timeout_s: float = 60.0
    """Longest wait for one attempt."""
    retries: int = 2
    backoff_s: float = 1.0
    """Wait before the first retry; it doubles with each further one."""

    @property
    def max_duration_s(self) -> float:
        """The longest duration of all attempts of a call together."""
        waits = self.backoff_s * (2**self.retries - 1)
        return (self.retries + 1) * self.timeout_s + waits + SLACK_S


class Dialogue(ABC):
    """One conversation, from the other side's view. It has a state of its own."""

    info: Mapping[str, Scalar] = {}
    """Extra fields for the reward; they are in ``extra`` of the trajectory."""
    limits: ToolLimits = ToolLimits()
    """Set by the environment from its configuration."""
    tool_errors: int = 0
    """Refused calls so far."""
    tool_retries: int = 0
    """Calls retried after an outage so far."""

    @abstractmethod
    def init(self) -> Sequence[ChatMessage]:
        """Return the first messages: ``role`` (system, user) and ``content``."""

    @abstractmethod
    def step(self, message: str) -> DialogueStep | Awaitable[DialogueStep]:
        """Return the response to a message of the policy.

        May be ``async``: all dialogues of a batch wait concurrently.
        """

    def close(self) -> None:  # noqa: B027
        """Release resources; called once, however the dialogue ended."""


class ToolCall(NamedTuple):
    """A tool call by the policy."""

    name: str
    arguments: Mapping[str, Any]


class ToolDialogue(Dialogue):
    """The policy calls tools until it sends a message without a call, which :meth:`score_answer`
    rewards.

    Calls are ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as most chat templates
    with tools write them; override :meth:`parse_calls` for another form.

    The policy reads its own mistakes: a malformed call, an unknown tool, arguments that do not fit
    the tool's signature, and a :class:`ToolInputError` of the tool. Any other exception, and an
    attempt that takes too long, is an outage. The tool is then called again with the same
    arguments; if the last attempt fails too, :meth:`step` raises its error, which ends the
    dialogue.
    """

    tools: Mapping[str, Callable[..., Any]] = {}
    """Tools by name; plain functions run in threads, ``async`` ones concurrently."""

    @abstractmethod
    def score_answer(self, message: str) -> float:
        """Return the reward of the last message."""

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
            return [{"role": "tool", "content": self._refusal(error)}], 0.0, False
        if not calls:
            return [], self.score_answer(message), True
        results = await asyncio.gather(*map(self._call, calls))
        return [{"role": "tool", "content": text} for text in results], 0.0, False

    async def _call(self, call: ToolCall) -> str:
        tool = self.tools.get(call.name)
        if tool is None:
            names = ", ".join(sorted(self.tools))
            return self._refusal(f"no tool {call.name!r}; there are {names}")
        try:
            arguments = convert_arguments(tool, call.arguments)
        except ToolInputError as error:
            return self._refusal(error)
        for attempt in range(self.limits.retries + 1):
            try:
                async with asyncio.timeout(self.limits.timeout_s):
                    return str(await _result(tool, arguments))
            except ToolInputError as error:
                return self._refusal(error)
            except Exception as error:  # a tool may raise anything
                if attempt == self.limits.retries:
                    raise
                log.debug("tool %s: %s; calling it again", call.name, _describe_error(error))
            self.tool_retries += 1
            await asyncio.sleep(self.limits.backoff_s * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def _refusal(self, why: object) -> str:
        """Return the text that the policy reads after a wrong call."""
        self.tool_errors += 1
        return f"error: {why}"


def convert_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments converted to the types of the tool's signature.

    Values are converted by pydantic: a number may be given as text, for example. Types that
    pydantic does not know are not checked.

    Raises:
        ToolInputError: an argument does not fit; says which one and why.
    """
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        raise ToolInputError(str(error)) from None
    except ValueError:  # of some built-in functions
        return dict(arguments)
    try:
        hints = get_type_hints(tool)
    except Exception:  # a name that is not there, or a tool that is no function
        return dict(arguments)
    return {name: _as_type(name, value, hints.get(name, Any)) for name, value in arguments.items()}


def _as_type(name: str, value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint)
    except PydanticUserError:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ToolInputError(f"{name}: {error.errors()[0]['msg']}") from None


async def _result(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    call = functools.partial(tool, **arguments)
    if inspect.iscoroutinefunction(tool):
        return await call()
    result = await _in_thread(call)
    return await result if inspect.isawaitable(result) else result


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def check_step(dialogue: Dialogue, answer: Any) -> DialogueStep:
    """Return the result of :meth:`Dialogue.step` if it is valid.

    Raises:
        InputError: it is not; names the class and the value.
    """
    where = f"task: {type(dialogue).__name__}.step returned"
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise InputError(f"{where} {answer!r:.60}; it must return (messages, reward, done)")
    messages, reward, done = answer
    fit = isinstance(messages, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str)
        for message in messages
    )
    if isinstance(messages, str) or not fit:
        raise InputError(
            f"{where} the messages {messages!r:.60}; each must be a mapping with role and content"
        )
    number = np.asarray(reward)
    if number.shape or number.dtype.kind not in "biuf" or not np.isfinite(number):
        raise InputError(f"{where} the reward {reward!r:.60}; it must be one finite number")
    return messages, float(number), bool(done)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a blocking call in a thread of its own, so that no tool of a batch waits
    for another."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def give(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        result.set_result(value) if error is None else result.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(give, value, failure)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await result


class DialogueConfig(Section):
    """Budgets of a dialogue. Its tokens, including those of tools, are at most the run's
    horizon."""

    max_turns: int = Field(default=8, gt=0)
    """Most messages of the policy."""
    max_turn_tokens: int = Field(default=512, gt=0)
    """Most tokens of one message of the policy."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait, in seconds, for a step of the other side, and for each attempt of a tool
    call."""
    tool_retries: int = Field(default=2, ge=0)
    """Retries of a tool call after an outage; 0 if a call must not happen twice."""
    tool_backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first retry; the wait doubles with each."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a batch's dialogues that may end in an outage. The stage fails above it, and
    if all of them do."""


class DialogueEnvironment(TextEnvironment):
    """Exchanges messages with the policy; a task defines the dialogues.

    Steps are tokens. A message's reward is on its last token; ``turns`` int32 ``[T]`` is the number
    of the policy's message that a token belongs to or follows. If ``step`` raises or takes too
    long, only its dialogue is lost: none of its steps counts, it has no score, and its group is
    compared without it.
    """

    Config: ClassVar[type[Section]] = DialogueConfig
    config: DialogueConfig
    provides = frozenset({PROMPTS, STEP_REWARDS, TURNS})
    stop_strings: ClassVar[tuple[str, ...]] = ()
    """Texts that end a message of the policy, beside its stop tokens and those of the run."""
    uses_chat_template = True
    inline_replies: ClassVar[bool] = False
    """Whether replies continue the policy's own turn verbatim, unless it ended that turn with a
    stop token. Otherwise the chat template inserts them between two turns."""

    @abstractmethod
    def create_dialogue(self, split: str, random: np.random.Generator) -> Dialogue:
        """Return a new dialogue; the same random numbers create the same one."""

    def simulate(
        self, request: RolloutRequest, observations: Channel, actions: Channel
    ) -> Iterator[Trajectory]:
        talks = [self._create_state(request, int(sample)) for sample in request.sample_ids()]
        try:
            self._encode_openings(talks)
            live = talks
            with asyncio.Runner() as runner:
                while live:
                    self._request_messages(request, live, observations, actions)
                    runner.run(self._step_all(live))
                    self._add_replies(request, live)
                    for talk in live:
                        if talk.ended:
                            yield talk.trajectory(request)
                    live = [talk for talk in live if not talk.ended]
            observations.close()
        finally:
            for talk in talks:
                talk.dialogue.close()

    def score(self, trajectories: Sequence[Trajectory], counts: Counter[str]) -> list[float]:
        """Return the sum of each dialogue's rewards; NaN for one that was lost."""
        return [
            math.nan if is_failed(t) else float(t.require("episode_return")) for t in trajectories
        ]

    def _create_state(self, request: RolloutRequest, sample: int) -> _DialogueState:
        start, split = sample // request.group_size, request.split
        seed, iteration = request.seed, request.iteration
        if split == "test":
            seed, iteration = TEST_SEED, 0
        dialogue = self.create_dialogue(split, generator(seed, "dialogue", split, iteration, start))
        config = self.config
        dialogue.limits = ToolLimits(config.timeout_s, config.tool_retries, config.tool_backoff_s)
        return _DialogueState(sample, start, dialogue)

    def _encode_openings(self, talks: Sequence[_DialogueState]) -> None:
        conversations = [talk.dialogue.init() for talk in talks]
        texts = self._rendered(conversations)
        for talk, text, ids in zip(talks, texts, self.encode_prompts(texts), strict=True):
            talk.prompt, talk.prompt_text = ids, text

    def _request_messages(
        self,
        request: RolloutRequest,
        live: Sequence[_DialogueState],
        observations: Channel,
        actions: Channel,
    ) -> None:
        """Request the policy's next message in each dialogue."""
        stops = [*json.loads(str(request.request_info.get("stop", "[]"))), *self.stop_strings]
        rooms: dict[int, list[_DialogueState]] = {}
        for talk in live:
            room = min(self.config.max_turn_tokens, request.horizon - len(talk.tokens))
            rooms.setdefault(room, []).append(talk)
        for room, part in sorted(rooms.items(), reverse=True):
            observations.put(_request(request, part, room, stops))
        waiting = {talk.sample: talk for talk in live}
        while waiting:
            reply = actions.get()
            for row, sample in enumerate(reply.steps["sample"].tolist()):
                waiting.pop(sample).add_message(reply, row, self.chat_format, stops)

    async def _step_all(self, live: Sequence[_DialogueState]) -> None:
        await asyncio.gather(*(self._step_one(talk) for talk in live))

    async def _step_one(self, talk: _DialogueState) -> None:
        with_tools = isinstance(talk.dialogue, ToolDialogue)
        longest_s = talk.dialogue.limits.max_duration_s if with_tools else self.config.timeout_s
        try:
            async with asyncio.timeout(longest_s):
                answer = talk.dialogue.step(talk.message)
                talk.answer = await answer if isinstance(answer, Awaitable) else answer
        except Exception as error:  # the author's code may raise anything
            talk.fail(error)
            log.warning("sample %d: its dialogue failed: %s", talk.sample, _describe_error(error))
            log.debug("%s", _format_traceback(error))

    def _add_replies(self, request: RolloutRequest, live: Sequence[_DialogueState]) -> None:
        """Add the other side's replies, and end the dialogues that are done."""
        going = []
        for talk in live:
            if talk.ended:
                continue
            _, reward, done = talk.answer = check_step(talk.dialogue, talk.answer)
            talk.rewards[-1] += float(reward)
            if done:
                talk.ended = "stop"
            elif talk.turns == self.config.max_turns:
                talk.ended = "length"
            else:
                going.append(talk)
        for talk, ids in zip(going, self._reply_tokens(going), strict=True):
            if len(talk.tokens) + len(ids) >= request.horizon:
                talk.ended = "length"
            else:
                talk.add_reply(ids)

    def _reply_tokens(self, talks: Sequence[_DialogueState]) -> list[np.ndarray]:
        """Return the tokens between the policy's message and its next one."""
        plain = [talk for talk in talks if self._is_inline(talk)]
        others = [talk for talk in talks if not self._is_inline(talk)]
        replies = self.encode([_join_contents(talk.answer[0]) for talk in plain], literal=True)
        pairs = zip(
            [*others, *plain], [*self._templated_reply_tokens(others), *replies], strict=True
        )
        ids = {talk.sample: tokens for talk, tokens in pairs}
        return [ids[talk.sample] for talk in talks]

    def _templated_reply_tokens(self, talks: Sequence[_DialogueState]) -> list[np.ndarray]:
        """Return the tokens of the chat template and of the replies; text of a reply is never a
        special token."""
        turns = chat_template_affixes(self._rendered, [talk.answer[0] for talk in talks])
        for talk, pieces in zip(talks, turns, strict=True):
            # The token that ended the message is there already.
            pieces[0] = pieces[0].removeprefix(talk.end)
        written = iter(self.encode([piece for pieces in turns for piece in pieces[::2]]))
        words = iter(self.encode([p for pieces in turns for p in pieces[1::2]], literal=True))
        return [
            np.concatenate([next(words if n % 2 else written) for n in range(len(pieces))])
            for pieces in turns
        ]

    def _is_inline(self, talk: _DialogueState) -> bool:
        return self.chat_format.template is None or (self.inline_replies and not talk.end)

    def _rendered(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[str]:
        if self.chat_format.template is None:
            return [_join_contents(messages) for messages in conversations]
        return self.chat_format.render_prompts(conversations)


@dataclass
class _DialogueState:
    """A running dialogue and its recorded tokens."""

    sample: int
    start: int
    dialogue: Dialogue
    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    prompt_text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    version: int | None = None
    """Version of the weights that wrote the first message."""
    text: str = ""
    message: str = ""
    """The policy's last message."""
    end: str = ""
    """Text of the stop token that ended the message; empty if a stop string or the budget did."""
    turns: int = 0
    answer: DialogueStep = ((), 0.0, True)
    ended: str = ""
    error: str = ""
    """The error that ended a lost dialogue."""
    bug: bool = False
    """Whether that error is in the user's own code, so that a retry would meet it again."""

    def add_message(self, reply: Record, row: int, chat: ChatFormat, stops: Sequence[str]) -> None:
        """Record a message of the policy."""
        length = int(reply.steps["length"][row])
        ids = reply.steps["tokens"][row, :length].tolist()
        self.message = chat.decode(ids)
        by_token = reply.steps["stopped"][row] and not any(s in self.message for s in stops)
        self.end = chat.tokenizer.decode(ids[-1:]) if by_token else ""
        self.text += self.message
        self.version = int(reply.info["version"]) if self.version is None else self.version
        self.tokens += ids
        self.logprobs += reply.steps["logprobs"][row, :length].tolist()
        if "version" in reply.steps:
            self.versions += reply.steps["version"][row, :length].tolist()
        self.mask += [1.0] * length
        self.rewards += [0.0] * length
        self.turn += [self.turns] * length
        self.turns += 1

    def add_reply(self, ids: np.ndarray) -> None:
        """Record a reply of the other side."""
        self.text += f"[{_join_contents(self.answer[0])}]"
        self.tokens += ids.tolist()
        self.logprobs += [0.0] * len(ids)
        self.mask += [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.turn += [self.turns - 1] * len(ids)
        if self.versions:
            self.versions += self.versions[-1:] * len(ids)

    def fail(self, error: Exception) -> None:
        """Discard the dialogue: none of its steps counts."""
        users = to_user_code_error(error)
        self.ended, self.error = (
            STOP_REASON_ERROR,
            _format_traceback(error) if users is None else str(users),
        )
        self.bug = isinstance(users, UserCodeError)
        self.mask = [0.0] * len(self.mask)
        self.rewards = [0.0] * len(self.rewards)

    def trajectory(self, request: RolloutRequest) -> Trajectory:
        """Return the finished dialogue; its own ``info`` does not replace what is recorded."""
        recorded: dict[str, Any] = {
            "group": self.start,
            "policy_version": int(self.version or 0),
            "stop_reason": self.ended,
            "prompt_text": self.prompt_text,
            "text": self.text,
            "num_turns": self.turns,
            "tool_errors": self.dialogue.tool_errors,
            "tool_retries": self.dialogue.tool_retries,
            "error": self.error,
            "failed_in_user_code": int(self.bug),
            "episode_return": float(sum(self.rewards)),
        }
        return Trajectory(
            identity=RecordId(request.iteration, self.sample),
            actions=np.array(self.tokens, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            mask=np.array(self.mask, np.float32),
            rewards=np.array(self.rewards, np.float32),
            turns=np.array(self.turn, np.int32),
            versions=np.array(self.versions, np.int64) if self.versions else None,
            prompt=self.prompt,
            **{"answer": "", **info_fields(self.dialogue.info), **recorded},
        )


def _request(
    request: RolloutRequest, talks: Sequence[_DialogueState], room: int, stops: Sequence[str]
) -> Record:
    """Return a request for at most ``room`` tokens after each dialogue's tokens so far."""
    contexts = [np.append(talk.prompt, np.array(talk.tokens, np.int64)) for talk in talks]
    lengths = np.array([len(ids) for ids in contexts], dtype=np.int64)
    padded = np.zeros((len(talks), int(lengths.max())), dtype=np.int64)
    for line, ids in zip(padded, contexts, strict=True):
        line[: len(ids)] = ids
    settings = {**request.request_info, "horizon": room}
    if stops:
        settings["stop"] = json.dumps(stops)
    if "min_tokens" in settings:
        settings["min_tokens"] = min(int(settings["min_tokens"]), room)
    return Record(
        RecordId(request.iteration, talks[0].sample),
        steps={
            "sample": np.array([talk.sample for talk in talks], np.int64),
            "turn": np.array([talk.turns for talk in talks], np.int64),
            "prompt": padded,
            "prompt_length": lengths,
        },
        info=settings,
    )


def is_failed(trajectory: Trajectory) -> bool:
    """Return whether the trajectory is a dialogue that was lost."""
    return trajectory.stop_reason == STOP_REASON_ERROR


def _format_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def _join_contents(messages: Sequence[ChatMessage]) -> str:
    return "".join(message["content"] for message in messages)
