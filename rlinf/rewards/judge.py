"""A language model as the judge (LLM-as-a-judge), behind a remote endpoint.

The judge gives a verdict on each response. A response without a verdict gets the configured
fallback; a metric counts it, and its record has the reason. A run requests each answer of the judge
only once, even if a stage is repeated.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlinf.config import Section, json_digest
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError, did_you_mean
from rlinf.registry import PROMPTS, RunComponents
from rlinf.rewards.base import Reward, RewardResources, RewardResult, RewardValue
from rlinf.rewards.chat_endpoint import (
    OVER_BUDGET,
    REFUSED,
    UNANSWERED,
    ChatEndpoint,
    ChatEndpointConfig,
    ChatReply,
    RequestBlocks,
    RequestBudget,
    read_api_key,
)


class AnswerCache:
    """Cache of the judge's answers in the run's folder, by digest of the question; thread-safe.
    Each node and rank appends to its own file of JSON lines, because appending is safe only within
    one node. A line is written as soon as its answer arrives, so a repeated stage requests only the
    missing answers. A partial last line of a killed process is ignored."""

    def __init__(self, folder: Path | None, name: str) -> None:
        """
        Args:
            folder: folder of the files of all processes, earlier ones included; None: nothing is
                written.
            name: name of this process's file.
        """
        self._lock, self._answers = threading.Lock(), dict[str, str]()
        self._folder, self._name = folder, name
        self._read_bytes: dict[Path, int] = {}
        """Number of bytes of each file that have been read."""
        self.requests = self.tokens = 0
        """Totals over all lines, including those without an answer."""
        self.refresh()

    def get(self, digest: str) -> str | None:
        """Return the answer to a question; None if there is none."""
        return self._answers.get(digest)

    def put(self, digest: str, text: str | None, requests: int, tokens: int) -> None:
        """Store an answer, or only the cost of a request without an answer.

        Raises:
            ConfigError: the file is a symbolic link.
        """
        entry = {"digest": digest, "text": text, "requests": requests, "tokens": tokens}
        line = json.dumps(entry).encode()
        with self._lock:
            if self._folder is None:
                self._add_line(line)
                return
            self._append(self._folder / f"{self._name}.jsonl", line)
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that this and other processes have added."""
        with self._lock:
            for path in sorted(self._folder.glob("*.jsonl")) if self._folder is not None else ():
                with path.open("rb") as file:
                    file.seek(self._read_bytes.get(path, 0))
                    # A partial last line is still being written.
                    complete, end, _ = file.read().rpartition(b"\n")
                for line in complete.splitlines():
                    self._add_line(line)
                position = self._read_bytes.get(path, 0)
                self._read_bytes[path] = position + len(complete) + len(end)

    def _add_line(self, line: bytes) -> None:
        try:
            entry: Any = json.loads(line)
            digest, text = str(entry["digest"]), entry["text"]
            requests, tokens = int(entry["requests"]), int(entry["tokens"])
        except (ValueError, LookupError, TypeError, RecursionError):
            return
        if isinstance(text, str):
            # The first answer wins, because results from it may be committed.
            self._answers.setdefault(digest, text)
        self.requests += requests
        self.tokens += tokens

    @staticmethod
    def _append(path: Path, line: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if path.is_symlink():
                raise ConfigError(f"{path} is a link; remove it") from error
            raise
        try:
            size = os.fstat(file).st_size
            # A truncated line must not corrupt the next one.
            is_complete = not size or os.pread(file, 1, size - 1) == b"\n"
            os.write(file, (b"" if is_complete else b"\n") + line + b"\n")
        finally:
            os.close(file)


log = logging.getLogger(__name__)

UNPARSABLE = "unreadable"
"""Value of :attr:`RewardResult.failure`: the judge's answer has no verdict."""
TEMPLATE_FIELD = re.compile(r"\{(\w+)\}")
FIELD_ALIASES = {"prompt": "prompt_text", "response": "text"}
"""Names in the template that stand for another field of the trajectory."""
RESERVED_FIELDS = frozenset({"model", "messages", "temperature", "max_tokens"})
"""Fields of a request that ``extra_body`` cannot set, because they have keys of their own."""
VERDICT_PATTERN = r"(?im)^\W*?(?:(?:score|rating|verdict|reward)\W*?)?(-?\d+(?:\.\d+)?)\W*$"
"""A line that is a number, or a label and a number, such as ``Score: 7``, but not ``7/10``."""


class VerdictConfig(Section):
    """Settings of parsing a verdict: the last match of a pattern, as a number or a label."""

    pattern: str = VERDICT_PATTERN
    """Regular expression with one group."""
    labels: dict[str, float] = {}
    """Number of each label, compared without case; empty: the text in the group is a number."""
    min_value: float = 0.0
    max_value: float = 1.0
    """A number below ``min_value`` or above ``max_value`` is not a verdict."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
        if groups != 1:
            raise ValueError(
                f"has {groups} groups; one must hold the verdict, others are written (?:...)"
            )
        return value

    @model_validator(mode="after")
    def _check_range(self) -> VerdictConfig:
        if self.min_value >= self.max_value:
            raise ValueError(
                f"min_value {self.min_value:g} is not below max_value {self.max_value:g}"
            )
        for word, value in self.labels.items():
            if not self.min_value <= value <= self.max_value:
                raise ValueError(
                    f"labels.{word} {value:g} is not within min_value {self.min_value:g} and "
                    f"max_value {self.max_value:g}"
                )
        return self

    def parse(self, text: str) -> float | None:
        """Return the verdict in an answer; None if there is none."""
        matches = [match[1] for match in re.finditer(self.pattern, text)]
        if not matches or matches[-1] is None:
            return None
        if self.labels:
            labels = {word.casefold(): value for word, value in self.labels.items()}
            return labels.get(matches[-1].strip().casefold())
        try:
            number = float(matches[-1])
        except ValueError:
            return None
        return (
            number if math.isfinite(number) and self.min_value <= number <= self.max_value else None
        )


class JudgeConfig(Section):
    """Settings of the judge: endpoint, question and verdict. The reward is ``scale * verdict +
    offset``."""

    endpoint: ChatEndpointConfig
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    prompt: str
    """Question template. ``{prompt}``, ``{response}``, ``{answer}`` and other names of texts and
    numbers of the trajectory are replaced by their values; other braces stay."""
    system_prompt: str = ""
    """System message; empty: none."""
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=256, gt=0)
    """Maximum number of tokens of an answer."""
    extra_body: dict[str, Any] = {}
    """Additional fields of the request body."""
    verdict: VerdictConfig = VerdictConfig()
    scale: float = 1.0
    offset: float = 0.0
    fallback: float | Literal["mask"] = "mask"
    """Reward if there is no verdict; ``mask``: the update excludes the trajectory."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str) -> str:
        if "response" not in TEMPLATE_FIELD.findall(value):
            raise ValueError("does not contain {response}, so that nothing would be judged")
        return value

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, value: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(RESERVED_FIELDS & value.keys()):
            raise ValueError(f"holds {reserved[0]}, which has a key of its own beside it")
        return value


class JudgeReward(Reward):
    """Reward of a language model as the judge."""

    Config = JudgeConfig
    requires = frozenset({PROMPTS})
    needs_score = False
    failure_kinds = (UNANSWERED, REFUSED, UNPARSABLE, OVER_BUDGET)
    config: JudgeConfig

    @classmethod
    def check(cls, options: JudgeConfig, run: RunComponents) -> None:
        super().check(options, run)
        read_api_key(options.endpoint)

    def __init__(self, config: Any, resources: RewardResources) -> None:
        super().__init__(config, resources)
        name = f"{os.uname().nodename}-r{resources.world.data_parallel_rank}"
        self._answer_cache = AnswerCache(resources.folder, name)
        folder = resources.folder
        self._budget = RequestBudget(config.endpoint, RequestBlocks(folder and folder / "requests"))
        self._endpoint = ChatEndpoint(config.endpoint, self._budget)

    def compute(
        self, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> list[RewardValue | RewardResult]:
        """Return rewards; see :class:`Reward`. Equal questions are requested once.

        Raises:
            ConfigError: the endpoint rejects all requests.
            DataError: the prompt names a field that a trajectory does not have.
        """
        questions = [self._question_messages(trajectory) for trajectory in trajectories]
        settings = self._request_settings()
        digests = [json_digest({**settings, "messages": question}) for question in questions]
        self._answer_cache.refresh()
        self._budget.record_usage(self._answer_cache.requests, self._answer_cache.tokens)
        missing = {
            digest: question
            for digest, question in zip(digests, questions, strict=True)
            if self._answer_cache.get(digest) is None
        }
        num_cached = len(set(digests)) - len(missing)
        failures = self._request_answers(missing)
        results: list[RewardValue | RewardResult] = []
        for digest in digests:
            text = self._answer_cache.get(digest)
            verdict = None if text is None else self.config.verdict.parse(text)
            if verdict is None:
                results.append(self._fallback_result(failures.get(digest, UNPARSABLE)))
            else:
                results.append(self.config.scale * verdict + self.config.offset)
        log.info(
            "judge: %d questions, %d of them answered before; %d requests and %d tokens in all",
            *(len(set(digests)), num_cached, self._budget.requests, self._budget.tokens),
        )
        return results

    def _request_answers(self, questions: Mapping[str, list[dict[str, str]]]) -> dict[str, str]:
        """Request the answers to questions, by digest, and cache them. Return the failure of each
        question without an answer."""
        if not questions:
            return {}
        settings, failures = self._request_settings(), dict[str, str]()
        failed = threading.Event()
        self._budget.expect_requests(len(questions))

        def request(digest: str) -> ChatReply:
            if failed.is_set():  # another request failed; its error is raised below
                return ChatReply(None, UNANSWERED)
            try:
                reply = self._endpoint.complete(messages=questions[digest], **settings)
            except BaseException:
                failed.set()
                raise
            if reply.num_requests:
                self._answer_cache.put(digest, reply.text, reply.num_requests, reply.num_tokens)
                self._budget.record_usage(self._answer_cache.requests, self._answer_cache.tokens)
            return reply

        pool = ThreadPoolExecutor(self.config.endpoint.max_concurrency, "judge")
        try:
            for digest, reply in zip(questions, pool.map(request, questions), strict=True):
                if reply.text is None:
                    failures[digest] = reply.failure
        finally:
            # After an error, pending requests are cancelled.
            pool.shutdown(wait=True, cancel_futures=True)
        return failures

    def _request_settings(self) -> dict[str, Any]:
        config = self.config
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        return {"model": config.model, **sampling, **config.extra_body}

    def _question_messages(self, trajectory: Trajectory) -> list[dict[str, str]]:
        question = fill_template(self.config.prompt, trajectory)
        system = (
            [{"role": "system", "content": self.config.system_prompt}]
            if self.config.system_prompt
            else []
        )
        return [*system, {"role": "user", "content": question}]

    def _fallback_result(self, failure: str) -> RewardResult:
        masked = self.config.fallback == "mask"
        return RewardResult(0.0 if masked else float(self.config.fallback), not masked, failure)


def fill_template(template: str, trajectory: Trajectory) -> str:
    """Return a template with names replaced by the trajectory's fields. Names within a field's text
    are not replaced.

    Raises:
        DataError: the template names a field that the trajectory does not have.
    """
    fields = trajectory.scalars()

    def text(match: re.Match[str]) -> str:
        name = FIELD_ALIASES.get(match[1], match[1])
        if name not in fields:
            hint = did_you_mean(match[1], [*FIELD_ALIASES, *fields])
            raise DataError(
                f"reward.prompt: sample {trajectory.identity.sample} has no field "
                f"{{{match[1]}}}{hint}"
            )
        return str(fields[name])

    return TEMPLATE_FIELD.sub(text, template)
