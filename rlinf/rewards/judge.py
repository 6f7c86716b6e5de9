"""A language model as the judge: asked for a verdict on each response, at a remote endpoint.

What it does not answer is never scored in silence: it has the configured fallback, is counted in
the metrics, and its record says why. An answer is asked for once in a run, whatever is repeated.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlinf.config import Section, digest
from rlinf.data.record import Record
from rlinf.errors import DataError, nearest
from rlinf.fit import PROMPTS
from rlinf.rewards.answers import Answers
from rlinf.rewards.base import Judgement, Resources, Reward, Worth
from rlinf.rewards.claims import Claims
from rlinf.rewards.endpoint import (
    OVER_BUDGET,
    REFUSED,
    UNANSWERED,
    Answer,
    ChatEndpoint,
    EndpointConfig,
    Spent,
    read_key,
)

log = logging.getLogger(__name__)

UNREADABLE = "unreadable"
FIELD = re.compile(r"\{(\w+)\}")
SHORT = {"prompt": "prompt_text", "response": "text"}
"""Fields that have another name in the ``info`` of a trajectory."""
OWN = frozenset({"model", "messages", "temperature", "max_tokens"})
NUMBER = r"(?im)^\W*?(?:(?:score|rating|verdict|reward)\W*?)?(-?\d+(?:\.\d+)?)\W*$"
"""A line that is a number, or names it: ``Score: 7``. Not ``7/10``."""


class VerdictConfig(Section):
    """How a verdict is read: the last match of a pattern, as a number or one of some words."""

    pattern: str = NUMBER
    """Regular expression with one group."""
    words: dict[str, float] = {}
    """The number that each word stands for, whatever its case; empty: the group is a number."""
    least: float = 0.0
    most: float = 1.0
    """A number outside is no verdict."""

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, value: str) -> str:
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
    def _is_a_range(self) -> VerdictConfig:
        if self.least >= self.most:
            raise ValueError(f"least {self.least:g} is not below most {self.most:g}")
        for word, worth in self.words.items():
            if not self.least <= worth <= self.most:
                raise ValueError(
                    f"words.{word} {worth:g} is not within least {self.least:g} and most "
                    f"{self.most:g}"
                )
        return self

    def read(self, text: str) -> float | None:
        """The verdict in an answer; None: there is none."""
        found = [match[1] for match in re.finditer(self.pattern, text)]
        if not found or found[-1] is None:
            return None
        if self.words:
            known = {word.casefold(): worth for word, worth in self.words.items()}
            return known.get(found[-1].strip().casefold())
        try:
            number = float(found[-1])
        except ValueError:
            return None
        return number if math.isfinite(number) and self.least <= number <= self.most else None


class JudgeConfig(Section):
    """Who judges, what is asked, and what an answer is worth: ``scale * verdict + offset``."""

    endpoint: EndpointConfig
    model: str = Field(min_length=1)
    """The judge's name at its endpoint."""
    prompt: str
    """The question. ``{prompt}``, ``{response}``, ``{answer}`` and other names of the trajectory's
    ``info`` stand for their texts; other braces stand for themselves."""
    system: str = ""
    """System message; empty: none."""
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=256, gt=0)
    """Most tokens of an answer."""
    more: dict[str, Any] = {}
    """Further fields of the request, for endpoints that have them."""
    verdict: VerdictConfig = VerdictConfig()
    scale: float = 1.0
    offset: float = 0.0
    fallback: float | Literal["mask"] = "mask"
    """The reward where there is no verdict; ``mask``: such a trajectory takes no part in the
    update."""

    @field_validator("prompt")
    @classmethod
    def _asks(cls, value: str) -> str:
        if "response" not in FIELD.findall(value):
            raise ValueError("does not contain {response}, so that nothing would be judged")
        return value

    @field_validator("more")
    @classmethod
    def _is_further(cls, value: dict[str, Any]) -> dict[str, Any]:
        if twice := sorted(OWN & value.keys()):
            raise ValueError(f"holds {twice[0]}, which has a key of its own beside it")
        return value


class JudgeReward(Reward):
    """See the module."""

    Config = JudgeConfig
    needs = frozenset({PROMPTS})
    needs_score = False
    troubles = (UNANSWERED, REFUSED, UNREADABLE, OVER_BUDGET)
    config: JudgeConfig

    @classmethod
    def check(cls, config: JudgeConfig) -> None:
        read_key(config.endpoint)

    def __init__(self, config: Any, resources: Resources) -> None:
        super().__init__(config, resources)
        name = f"{os.uname().nodename}-r{resources.world.data_rank}"
        self._answers = Answers(resources.folder, name)
        folder = resources.folder
        self._spent = Spent(config.endpoint, Claims(folder and folder / "requests"))
        self._endpoint = ChatEndpoint(config.endpoint, self._spent)

    def judge(
        self, trajectories: Sequence[Record], scores: Sequence[float]
    ) -> list[Worth | Judgement]:
        """See :class:`Reward`; equal questions are asked once.

        Raises:
            ConfigError: the endpoint refuses all requests.
            DataError: the prompt names a field that a trajectory has not.
        """
        questions = [self._messages(trajectory) for trajectory in trajectories]
        keys = [digest({**self._settings(), "messages": question}) for question in questions]
        self._answers.refresh()
        self._spent.know(self._answers.requests, self._answers.tokens)
        waiting = {
            key: question
            for key, question in zip(keys, questions, strict=True)
            if self._answers.get(key) is None
        }
        known, troubles = len(set(keys)) - len(waiting), self._ask(waiting)
        found: list[Worth | Judgement] = []
        for key in keys:
            text = self._answers.get(key)
            verdict = None if text is None else self.config.verdict.read(text)
            if verdict is None:
                found.append(self._fallback(troubles.get(key, UNREADABLE)))
            else:
                found.append(self.config.scale * verdict + self.config.offset)
        log.info(
            "judge: %d questions, %d of them answered before; %d requests and %d tokens in all",
            *(len(set(keys)), known, self._spent.requests, self._spent.tokens),
        )
        return found

    def _ask(self, questions: Mapping[str, list[dict[str, str]]]) -> dict[str, str]:
        """Ask what is not known; returns the trouble of each question without an answer."""
        if not questions:
            return {}
        settings, troubles = self._settings(), dict[str, str]()
        failed = threading.Event()
        self._spent.expect(len(questions))

        def ask(key: str) -> Answer:
            if failed.is_set():  # what that raised is raised below
                return Answer(None, UNANSWERED)
            try:
                answer = self._endpoint.ask(messages=questions[key], **settings)
            except BaseException:
                failed.set()
                raise
            if answer.requests:
                self._answers.put(key, answer.text, answer.requests, answer.tokens)
                self._spent.know(self._answers.requests, self._answers.tokens)
            return answer

        pool = ThreadPoolExecutor(self.config.endpoint.concurrency, "judge")
        try:
            for key, answer in zip(questions, pool.map(ask, questions), strict=True):
                if answer.text is None:
                    troubles[key] = answer.trouble
        finally:
            # An error ends it at once: what was not asked yet is not asked.
            pool.shutdown(wait=True, cancel_futures=True)
        return troubles

    def _settings(self) -> dict[str, Any]:
        config = self.config
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        return {"model": config.model, **sampling, **config.more}

    def _messages(self, trajectory: Record) -> list[dict[str, str]]:
        asked = filled(self.config.prompt, trajectory)
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return [*system, {"role": "user", "content": asked}]

    def _fallback(self, trouble: str) -> Judgement:
        masked = self.config.fallback == "mask"
        return Judgement(0.0 if masked else float(self.config.fallback), not masked, trouble)


def filled(template: str, trajectory: Record) -> str:
    """A template with the texts of a trajectory's fields, which are not templates themselves.

    Raises:
        DataError: it names a field that the trajectory has not.
    """

    def text(match: re.Match[str]) -> str:
        name = SHORT.get(match[1], match[1])
        if name not in trajectory.info:
            hint = nearest(match[1], [*SHORT, *trajectory.info])
            raise DataError(
                f"reward.prompt: sample {trajectory.identity.sample} has no field "
                f"{{{match[1]}}}{hint}"
            )
        return str(trajectory.info[name])

    return FIELD.sub(text, template)
