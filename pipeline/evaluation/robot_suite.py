"""The results of a policy on a suite of robot tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from pipeline.evaluation.statistics import Estimate, Proportion, average_at_k
from rlinf.config import RunConfig, json_digest
from rlinf.data.episodes import decode_instruction
from rlinf.data.trajectory import Trajectory
from rlinf.envs.simulators.requirements import get_requirements
from stages.factory import environment_class

RUNTIME_TASK_KEYS = (
    *("num_processes", "max_parallel_envs", "python", "renderer", "timeout_s", "double_buffer"),
    "video",
)
"""Keys of a robot task that are no part of a suite's protocol, because they do not change
results."""
CHAIN_LENGTH = 5
"""Number of subtasks of a chain in CALVIN."""


class ResultModel(BaseModel):
    """A part of the results of an evaluation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EpisodeResult(ResultModel):
    """One episode of a suite of robot tasks."""

    task: str
    initial_state: int
    """Index among the episodes of the task. A task with a list of initial states uses it as the
    index in its list; in other tasks it determines the seed."""
    score: float
    """1 if the task was solved; in CALVIN the number of solved subtasks. 0 if the simulator
    failed."""
    steps: int
    """Number of executed actions."""


class TaskResult(ResultModel):
    """The results of one task of a suite."""

    task: str
    instruction: str
    """The instruction of the first episode; empty if there is none."""
    success: Proportion
    mean_steps: float


class SuiteResult(ResultModel):
    """The results of one policy on a suite of robot tasks."""

    episodes: list[EpisodeResult]
    """All episodes, in the order of their samples."""
    protocol_episodes: int
    """Number of episodes of the published protocol."""
    tasks: list[TaskResult]
    """Results by task; empty if scores are numbers of subtasks."""
    chain_success: list[Proportion]
    """Of chains of subtasks: share of chains with at least 1, 2, ... solved subtasks."""
    failures: dict[str, int]
    """Number of episodes in which the simulator failed. They score 0."""
    protocol: dict[str, Any]
    """Task and evaluation settings without paths, with the number of episodes."""
    protocol_digest: str
    """Digest of ``protocol``; results are comparable only if it is equal."""
    prompts_digest: str
    """Digest of the instructions of all episodes."""
    videos: list[str]
    """Videos of the worst episodes: paths below the run directory."""

    @property
    def is_partial(self) -> bool:
        """Whether fewer episodes ran than the protocol has, so this is no published score."""
        return len(self.episodes) < self.protocol_episodes

    @property
    def average(self) -> Estimate:
        """The mean score of the episodes."""
        return average_at_k(self.score_array())

    @property
    def success(self) -> Proportion | None:
        """The share of solved episodes; None if scores are numbers of subtasks."""
        if self.chain_success:
            return None
        return _proportion(episode.score for episode in self.episodes)

    def score_array(self) -> np.ndarray:
        """Return the scores, float64 ``[N, 1]``."""
        return np.array([[episode.score] for episode in self.episodes], np.float64)


def suite_result(
    config: RunConfig,
    trajectories: Sequence[Trajectory],
    protocol_episodes: int,
    videos: list[str],
) -> SuiteResult:
    """Return the results of a suite.

    Args:
        config: configuration of the evaluation.
        trajectories: all episodes, with their scores.
        protocol_episodes: number of episodes of the protocol.
        videos: paths of the videos below the run directory.
    """
    environment, options = environment_class(config)
    num_tasks = environment.num_tasks(options)
    ordered = sorted(trajectories, key=lambda t: t.identity)
    name = str(options.model_dump().get("id", config.task.name))
    episodes = [
        EpisodeResult(
            task=name if t.task is None else str(t.task),
            initial_state=t.identity.sample // num_tasks,
            score=float(np.nan_to_num(t.require("score"))),
            steps=round(float(t.require("episode_length"))),
        )
        for t in ordered
    ]
    texts = [b"" if t.instruction is None else t.instruction[:1].tobytes() for t in ordered]
    instructions = dict(zip((e.task for e in reversed(episodes)), reversed(texts), strict=True))
    num_failed = sum(bool(np.isnan(t.require("score"))) for t in ordered)
    task = options.model_dump(mode="json", exclude=set(RUNTIME_TASK_KEYS))
    requirements = get_requirements(options.simulator)
    paths = requirements.assets.keys() | requirements.optional.keys()
    task["kwargs"] = {key: value for key, value in options.kwargs.items() if key not in paths}
    protocol = {
        "horizon": config.evaluate.horizon,
        "temperature": config.evaluate.temperature,
        "episodes": len(episodes),
        "task": task,
    }
    is_success = options.score_by_success
    chain_length = 0 if is_success else CHAIN_LENGTH
    return SuiteResult(
        episodes=episodes,
        protocol_episodes=protocol_episodes,
        tasks=_task_results(episodes, instructions) if is_success else [],
        chain_success=[
            _proportion(float(episode.score >= number) for episode in episodes)
            for number in range(1, chain_length + 1)
        ],
        failures={"simulator": num_failed} if num_failed else {},
        protocol=protocol,
        protocol_digest=json_digest(protocol),
        prompts_digest=hashlib.blake2b(b"".join(texts), digest_size=16).hexdigest(),
        videos=videos,
    )


def _task_results(
    episodes: Sequence[EpisodeResult], instructions: Mapping[str, bytes]
) -> list[TaskResult]:
    by_task: dict[str, list[EpisodeResult]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode)
    return [
        TaskResult(
            task=task,
            instruction=decode_instruction(np.frombuffer(instructions[task], np.uint8)),
            success=_proportion(episode.score for episode in own),
            mean_steps=float(np.mean([episode.steps for episode in own])),
        )
        for task, own in by_task.items()
    ]


def _proportion(scores: Iterable[float]) -> Proportion:
    """Return the share of episodes with the score 1."""
    is_success = [score >= 1 for score in scores]
    return Proportion(sum(is_success), len(is_success))
