"""Evaluate: score one version of the weights on held-out starts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlinf.data.record import VIDEO_PREFIX
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.engines.base import Engine
from rlinf.envs.base import Environment, RolloutRequest, score_trajectories
from stages.context import StageContext
from stages.dialogue_failures import DialogueFailures
from stages.factory import environment_class, eval_environment, get_engine
from stages.flow import EVALUATE
from stages.layout import VIDEOS_FOLDER
from stages.rollout import PolicyRunner, rollout_iter


def write_videos(
    folder: Path, trajectories: Sequence[Trajectory], columns: Sequence[str], *, fps: int
) -> int:
    """Write videos of the trajectories that have steps and images; return the number of files.

    Args:
        columns: names of the columns with images, uint8 ``[T, H, W, 3]``: one per camera.
        fps: steps per second of the video.
    """
    # Only tasks with cameras need the module.
    from rlinf.data.video import write_video

    count = 0
    for trajectory in trajectories:
        sample = trajectory.identity.sample
        for name in columns if len(trajectory) else ():
            camera = name.partition(".")[2]
            frames = trajectory.videos if name.startswith(VIDEO_PREFIX) else trajectory.images
            if camera in frames:
                folder.mkdir(exist_ok=True)
                write_video(folder / f"{sample:04d}-{camera}.mp4", frames[camera], fps)
                count += 1
    return count


EVAL_SEED = 0
"""The seed of held-out starts and their sampling, independent of the run's seed."""


def run(ctx: StageContext) -> None:
    """Input: ``weights``. Output channel: ``trajectories`` (test split), with their scores; metric
    ``score``."""
    environment = eval_environment(ctx)
    policy = None if ctx.remote_policy is not None else policy_runner(ctx)
    if environment is None:
        # This rank of an engine with several ranks only computes for the primary rank.
        assert policy is not None, "every client of a remote policy is a primary rank"
        with ctx.span("generate"):
            policy.engine.run_follower(seed=policy.seed, stage=policy.stage)
        return
    num_samples = environment.num_eval_samples(ctx.config.evaluate.samples)
    starts = ctx.world.shard(num_samples)
    counts = Counter[str]()
    with ctx.span("generate"):
        trajectories = generate_eval_episodes(
            ctx, environment, policy, starts, num_samples, num_videos=ctx.config.evaluate.videos
        )
    with ctx.span("score"):
        scores = score_trajectories(environment, trajectories, counts)
    failures = DialogueFailures()
    for trajectory in trajectories:
        failures.add(trajectory)
    failures.log_metrics(ctx)
    settings = ctx.config.evaluate
    has_worst_videos = settings.video_episodes == "worst"
    if settings.videos:
        video_columns = environment.video_columns(environment_class(ctx.config)[1])
        with ctx.span("videos"):
            write_videos(
                ctx.data_folder / VIDEOS_FOLDER,
                [
                    t
                    for t in trajectories
                    if has_worst_videos or t.identity.sample < settings.videos
                ],
                video_columns,
                fps=settings.video_fps,
            )
    output = ctx.open_writer("trajectories")
    for trajectory, score in zip(trajectories, scores, strict=True):
        extra = {**trajectory.extra, **environment.evaluation_info(trajectory)}
        images = {} if has_worst_videos else trajectory.images
        scored = replace(trajectory, images=images, videos={}, score=score, extra=extra)
        output.put(scored.to_record())
    output.close()
    if trajectories:
        valid = [score for score in scores if not np.isnan(score)]
        weights = np.array(environment.sample_weights(trajectories)) * ~np.isnan(scores)
        # A rank without scores has weight 0; if no rank has scores, the commit fails.
        mean = float(np.average(np.nan_to_num(scores), weights=weights)) if valid else np.nan
        ctx.log_metric("score", mean, weight=float(weights.sum()))
        for task, task_scores in scores_by_task(trajectories, scores).items():
            ctx.log_metric(f"score/{task}", float(np.mean(task_scores)), weight=len(task_scores))
        lengths = [loss_mask(trajectory).sum() for trajectory in trajectories]
        ctx.log_metric("completion_length", float(np.mean(lengths)), weight=len(lengths))
        for name, value in environment.episode_metrics(trajectories).items():
            ctx.log_metric(name, value, weight=len(valid))
        ctx.log_counts(counts, len(scores), "held-out answers")


def policy_runner(ctx: StageContext) -> PolicyRunner:
    """Return a runner of the policy with the input ``weights`` and the seed of evaluations."""
    return eval_policy_runner(get_engine(ctx, "weights", ctx.iteration))


def eval_policy_runner(engine: Engine) -> PolicyRunner:
    """Return a loaded engine with the seed and stage name of evaluations."""
    return PolicyRunner(engine, EVAL_SEED, EVALUATE)


def scores_by_task(
    trajectories: Sequence[Trajectory], scores: Sequence[float]
) -> dict[str, list[float]]:
    """Return the scores by task name, without trajectories that have no task or no score."""
    by_name: dict[str, list[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        if trajectory.task is not None and not np.isnan(score):
            by_name.setdefault(str(trajectory.task), []).append(score)
    return by_name


def run_eval_episodes(
    ctx: StageContext,
    environment: Environment,
    policy: PolicyRunner | None,
    starts: Sequence[int],
    counts: Counter[str],
) -> tuple[list[Trajectory], list[float]]:
    """Run the held-out episodes; return their trajectories and scores.

    Args:
        policy: see :func:`stages.rollout.rollout_iter`.
        counts: updated with the number of failures by kind.
    """
    num_samples = ctx.config.evaluate.samples
    trajectories = generate_eval_episodes(ctx, environment, policy, starts, num_samples)
    return trajectories, score_trajectories(environment, trajectories, counts)


def generate_eval_episodes(
    ctx: StageContext,
    environment: Environment,
    policy: PolicyRunner | None,
    starts: Sequence[int],
    num_samples: int,
    *,
    num_videos: int = 0,
) -> list[Trajectory]:
    """Return the trajectories of the held-out episodes, in the order of their samples.

    Args:
        policy: see :func:`stages.rollout.rollout_iter`.
        num_samples: number of held-out samples of all processes.
        num_videos: see :class:`rlinf.envs.base.RolloutRequest`.
    """
    request = RolloutRequest(
        seed=EVAL_SEED,
        iteration=0,
        split="test",
        group_ids=starts,
        num_groups=num_samples,
        group_size=1,
        horizon=ctx.config.evaluate.horizon or ctx.config.rollout.horizon,
        temperature=ctx.config.evaluate.temperature,
        num_videos=num_videos,
        has_worst_videos=ctx.config.evaluate.video_episodes == "worst",
        sampling=(
            ctx.config.evaluate.sampling or ctx.config.rollout.sampling
        ).non_default_settings(),
    )
    trajectories = []
    with contextlib.closing(rollout_iter(ctx, environment, request, policy)) as generated:
        for trajectory in generated:
            trajectories.append(trajectory)
            ctx.report_progress(len(trajectories), len(starts), "held-out samples")
    trajectories.sort(key=lambda trajectory: trajectory.identity)
    return trajectories
