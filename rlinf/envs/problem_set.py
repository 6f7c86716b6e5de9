"""Tasks with a fixed set of problems: questions or conversations, each with an answer.

A task defines where problems come from (:meth:`ProblemSetEnvironment.load_problems`) and how a
response is scored. This module reads problems from JSON-lines files and renders the prompts:
template, few-shot examples, system message, and the tokenizer's chat template.
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
from rlinf.data.record import RecordId, Scalar
from rlinf.data.trajectory import ANSWER_SEPARATOR, Trajectory, accepted_answers
from rlinf.envs.base import RolloutRequest, TaskSize
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


def read_problems(
    path: Path, prompt_field: str, answer_field: str, key: str, info_fields: Sequence[str] = ()
) -> JsonLinesFile[ChatProblem]:
    """Return the problems of a JSON-lines file, each read when it is used.

    The prompt is a text or a list of messages (``role`` and ``content``). If the last message is
    the assistant's, it is the demonstration, and in rows without ``answer_field`` also the answer.

    Args:
        prompt_field, answer_field: names of the fields with the prompt and the reference answer.
        key: configuration key that names the file. Error messages begin with a ``prefix``: key,
            file and line.
        info_fields: names of further fields, for :attr:`ChatProblem.info`.

    Raises:
        DataError: missing or empty file, not UTF-8, a line that is not JSON, a field that is
            missing, empty or of another type; names the line.
    """

    def parse(prefix: str, item: dict[str, Any], is_text_field: np.ndarray) -> ChatProblem:
        location = prefix.removeprefix(f"{key}: ")
        problem = _parse_problem(item, prompt_field, answer_field, prefix, location)
        info = {}
        for name, is_text in zip(info_fields, is_text_field, strict=True):
            value = _scalar(_field(item, name, "info_fields", prefix), prefix, name)
            info[name] = json.dumps(value) if is_text and not isinstance(value, str) else value
        return replace(problem, info=info)

    def find_text_fields(item: dict[str, Any], is_text_field: np.ndarray) -> None:
        # If a field is a text in some row, its numbers become JSON texts, because the records of a
        # channel have one schema.
        for i, name in enumerate(info_fields):
            value = _field(item, name, "info_fields", "")
            is_text_field[i] |= isinstance(_scalar(value, "", name), str)

    settings = f"problems {prompt_field!r} {answer_field!r} {[*info_fields]!r}"
    return JsonLinesFile(
        path,
        key,
        parse,
        settings=settings,
        row_text=question_text,
        observe=find_text_fields,
        num_flags=len(info_fields),
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

    def parse(prefix: str, item: dict[str, Any], flags: np.ndarray) -> ChatProblem:
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
    value = _field(item, name, option, prefix)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{prefix}: {name!r} is {_excerpt(value)}; expected a text or a number")
    return _check_not_empty(str(value), prefix, name)


def _parse_problem(
    item: dict[str, Any], prompt_field: str, answer_field: str, prefix: str, location: str
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
        return ChatProblem(tuple(messages), demonstration, location, demonstration)
    answer = _field(item, answer_field, "answer_field", prefix)
    if not isinstance(answer, list):
        text = text_field(item, answer_field, "answer_field", prefix)
        return ChatProblem(tuple(messages), text, location, demonstration)
    answers = [
        text_field({answer_field: accepted}, answer_field, "answer_field", prefix)
        for accepted in answer
    ]
    if not answers:
        raise DataError(f"{prefix}: {answer_field!r} is an empty list")
    return ChatProblem(tuple(messages), ANSWER_SEPARATOR.join(answers), location, demonstration)


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
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{prefix}: {field!r} has half of a surrogate pair, which is no character")
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
MAX_CACHED_PROMPTS = 4096
"""Maximum number of rendered prompts that stay in memory."""
DISK_CACHE_MIN_PROBLEMS = 20_000
"""From this many problems on, their token counts are cached on disk for all processes."""
TOKENIZER_PROBES = 8
"""Number of rendered problems in the key of the disk cache."""


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
    """Maximum number of tokens of a prompt; longer prompts are left out."""
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


class RenderedDataset(Generic[T]):
    """Items (prompts or whole conversations) that are rendered from problems on use.

    The last :data:`MAX_CACHED_PROMPTS` rendered items stay in memory. All others are rendered
    again when they are used; the first rendering only counted their tokens.
    """

    def __init__(
        self,
        problems: Sequence[ChatProblem],
        render: Callable[[Sequence[ChatProblem]], list[tuple[int, T]]],
        num_tokens: Callable[[T], int],
    ) -> None:
        """
        Args:
            render: renders problems to items, each with the index of its problem in the argument. A
                problem may become several consecutive items.
            num_tokens: returns the number of tokens of an item.
        """
        self._problems, self.render, self._num_tokens = problems, render, num_tokens
        self._cache: OrderedDict[tuple[int, int], T] = OrderedDict()
        self._places = np.zeros((0, 2), np.int64)
        """For each item within the limit: the index of its problem, and its index among the items
        of that problem, int64 ``[N, 2]``."""
        self.longest = 0
        """Number of tokens of the longest item within the limit."""
        self.total = 0
        """Number of items, including those above the limit."""
        self.first_omitted: tuple[int, int] | None = None
        """Index of the problem of the first item above the limit, and its number of tokens."""

    def __len__(self) -> int:
        return len(self._places)

    def filter_by_length(self, max_tokens: int, cache_key: str | None = None) -> None:
        """Select the items of at most ``max_tokens`` tokens.

        Args:
            cache_key: key of the disk cache, a text that determines the lengths; None: do not
                cache.
        """
        arrays = (
            self._count_tokens()
            if cache_key is None
            else cached_arrays("tokens", cache_key, self._count_tokens, use_file=True)
        )
        tokens = arrays["tokens"]
        self._places, self.total = arrays["places"][tokens <= max_tokens], len(tokens)
        self.longest = int(tokens[tokens <= max_tokens].max(initial=0))
        if len(omitted := np.flatnonzero(tokens > max_tokens)):
            self.first_omitted = int(arrays["places"][omitted[0], 0]), int(tokens[omitted[0]])

    def take(self, indices: Sequence[int]) -> list[T]:
        """Return items by index among the items within the limit."""
        places = [(int(row), int(part)) for row, part in self._places[list(indices)]]
        rows = list(dict.fromkeys(place[0] for place in places if place not in self._cache))
        rendered = self._render_rows(rows, [self._problems[row] for row in rows]) if rows else {}
        items = [rendered[p] if p in rendered else self._cache[p] for p in places]
        self._add_to_cache(rendered)
        return items

    def __getitem__(self, index: int) -> T:
        return self.take([index])[0]

    def _count_tokens(self) -> dict[str, np.ndarray]:
        """Return the number of tokens of every item, and its place, as in :attr:`_places`."""
        places, tokens = list[np.ndarray](), list[np.ndarray]()
        for rows, problems in _chunks(self._problems):
            rendered = self._render_rows(rows, problems)
            places.append(np.array(list(rendered), np.int64).reshape(-1, 2))
            tokens.append(np.array([self._num_tokens(i) for i in rendered.values()], np.int64))
            self._add_to_cache(rendered)
        return {"places": np.concatenate(places), "tokens": np.concatenate(tokens)}

    def _render_rows(
        self, rows: Sequence[int], problems: Sequence[ChatProblem]
    ) -> dict[tuple[int, int], T]:
        rendered: dict[tuple[int, int], T] = {}
        num_parts: Counter[int] = Counter()
        for index, item in self.render(problems):
            row = rows[index]
            rendered[row, num_parts[row]] = item
            num_parts[row] += 1
        return rendered

    def _add_to_cache(self, rendered: Mapping[tuple[int, int], T]) -> None:
        self._cache.update(rendered)
        while len(self._cache) > MAX_CACHED_PROMPTS:
            self._cache.popitem(last=False)


def _chunks(problems: Sequence[ChatProblem]) -> Iterator[tuple[list[int], list[ChatProblem]]]:
    """Yield all problems in chunks, with their indices."""
    chunk, size = list[ChatProblem](), 0
    for row, problem in enumerate(problems):
        chunk.append(problem)
        size += sum(len(message["content"]) for message in problem.messages)
        if len(chunk) == RENDER_CHUNK or size > RENDER_CHUNK_CHARACTERS or row + 1 == len(problems):
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
            environment.num_problems("train"),
            environment.num_problems("test"),
            environment.longest_prompt,
        )

    @classmethod
    def max_context(cls, config: Any, horizon: int) -> int | None:
        return int(config.max_prompt_length) + horizon

    def num_problems(self, split: Split) -> int:
        """Return the number of problems whose prompts are within the limit."""
        return sum(map(len, self._training.values())) if split == "train" else len(self._test)

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(prompts.longest for prompts in (*self._training.values(), self._test))

    def prompt_sets(self) -> dict[str, RenderedDataset[RenderedProblem]]:
        """Return the problems within the limit by configuration key of their set, training sets
        first."""
        keys = {name: part.key for name, part in self.training_sets(self.config).items()}
        training = {keys[name]: dataset for name, dataset in self._training.items()}
        return {**training, "task.test": self._test}

    def final_answer(self, trajectory: Trajectory) -> str | None:
        """Return the final answer of a response in a normalised form, so that equal answers are
        equal texts and responses can vote. None: the response has no answer, or the task has no
        such form."""
        return None

    def prompts(self, request: RolloutRequest) -> Sequence[Prompt]:
        """Return training problems without replacement, in a new order for each epoch of their set
        (:class:`rlinf.envs.problem_mixture.ProblemMixture`), or the first test problems."""
        if request.split == "test":
            return self._test.take([group % len(self._test) for group in request.group_ids])
        start = request.iteration * request.num_groups
        return self._draw(request.seed, [start + group for group in request.group_ids])

    def _draw(self, seed: int, draws: Sequence[int]) -> list[RenderedProblem]:
        """Return the training problems of some draws (see :meth:`ProblemMixture.locate`). If there
        are several sets, ``info`` has the name of the problem's set, ``task``."""
        assert self._mixture is not None, "a run without training problems is rejected"
        places = [self._mixture.locate(seed, draw) for draw in draws]
        problems: dict[int, RenderedProblem] = {}
        for name, dataset in self._training.items():
            rows = [row for row, place in enumerate(places) if place[0] == name]
            for row, problem in zip(rows, dataset.take([places[r][1] for r in rows]), strict=True):
                info = {**problem.info, "task": name} if name else problem.info
                problems[row] = replace(problem, info=info)
        return [problems[row] for row in range(len(draws))]

    def reasoning_tags(self) -> ReasoningTags:
        """Return the tags of reasoning in responses. The chat template may already have written the
        opening tag."""
        tags = ReasoningTags()
        prompt = self._test[0].rendered
        return replace(tags, starts_open=tags.ends_with_open_tag(prompt))

    def demonstrations(self, seed: int, step: int, count: int) -> list[Trajectory]:
        if "" in self._training:
            problems = self._training[""]
            # The address is "jsonl" for all tasks, so that older runs give the same results.
            random = generator(seed, "jsonl", "demonstration", step)
            prompts = problems.take(random.integers(len(problems), size=count).tolist())
        else:
            prompts = self._draw(seed, range(step * count, (step + 1) * count))
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
        """Return the problems whose prompts are within the limit. All prompts are rendered once, in
        chunks, to count their tokens.

        Raises:
            DataError: no prompt is within the limit; a problem or setting needs a chat template;
                the template fails, or drops a message.
        """
        if not problems:
            raise DataError(
                f"{key}: no problem is left beside task.num_fewshot={self.config.num_fewshot}"
            )
        max_tokens = self.config.max_prompt_length
        dataset = RenderedDataset(
            problems,
            lambda chunk: list(enumerate(self._render_problems(chunk, key))),
            lambda prompt: prompt.num_tokens,
        )
        if len(problems) >= DISK_CACHE_MIN_PROBLEMS:
            log.info("%s: counting the tokens of %d prompts", key, len(problems))
        with name_key_in_memory_errors(key):
            dataset.filter_by_length(max_tokens, self._cache_key(problems, dataset))
        if not len(dataset):
            raise DataError(
                f"{key}: all {len(problems)} prompts, from {problems[0].location} on, are longer "
                f"than task.max_prompt_length={max_tokens}"
            )
        if dataset.first_omitted is not None:
            row, num_tokens = dataset.first_omitted
            log.warning(
                "%s: %d of %d problems are left out: their prompts are longer than "
                "task.max_prompt_length=%d; the first is %s with %d tokens",
                key,
                len(problems) - len(dataset),
                len(problems),
                max_tokens,
                problems[row].location,
                num_tokens,
            )
        return dataset

    def _cache_key(
        self, problems: Sequence[ChatProblem], dataset: RenderedDataset[Any]
    ) -> str | None:
        """Return the cache key for :meth:`RenderedDataset.filter_by_length`; None if the set is so
        small that its lengths are not cached.

        The key includes the first rendered problems, because they depend on all settings of the
        tokenizer and its template.
        """
        if not isinstance(problems, JsonLinesFile) or len(problems) < DISK_CACHE_MIN_PROBLEMS:
            return None
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = (
            (problems.digest, len(problems)),
            self.config.model_dump_json(exclude={"grader_workers", "timeout_s"}),
            type(tokenizer).__name__,
            backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
            (self.chat_format.template, dict(self.chat_format.template_kwargs)),
            [repr(item) for item in dataset.render(problems[:TOKENIZER_PROBES])],
        )
        return repr(parts)

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
