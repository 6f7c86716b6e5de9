"""``rlinf world-model``: fit a world model to the recorded episodes of a run, or measure one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from pipeline.commands.results import RunResults
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.data.transitions import executed_actions, reject_action_chunks
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.simulators.world_model_network import (
    RecordedEpisode,
    WorldModelSpec,
    fit_world_model,
    load_world_model,
    measure_world_model,
    save_world_model,
)
from rlinf.errors import DataError, InputError
from stages.factory import environment_class

HELD_OUT_EVERY = 5
"""Every fifth episode is held out: its frames measure the model, and evaluations begin with its
first frame."""


def fit(
    source: Path,
    target: Path,
    *,
    steps: int,
    seed: int,
    report: Callable[[int, dict[str, float]], None],
) -> dict[str, float]:
    """Fit a world model to all rollouts of a run on disk, and write it to a new file.

    Args:
        steps, seed, report: as for :func:`fit_world_model`.

    Returns:
        Its metrics on held-out episodes (:func:`measure_world_model`).

    Raises:
        InputError: the target exists, or the run has no episodes of one simulator with one camera.
    """
    if target.exists():
        raise InputError(f"{target}: exists already; choose a new file")
    run = RunResults.open(source)
    config, camera = recorded_task(run)
    episodes = list(recorded_episodes(run.trajectories(), camera))
    if len(episodes) < HELD_OUT_EVERY:
        raise InputError(
            f"{source}: has {len(episodes)} episodes on disk, and {HELD_OUT_EVERY} are needed at "
            "least; record more (iterations, checkpoint.keep_trajectories)"
        )
    bounds = config.action.bounds if config.action else None
    if bounds is None or not np.isfinite(bounds).all():
        raise InputError(f"{source}: a world model needs finite bounds of actions (task.action)")
    assert isinstance(config.id, str)
    spec = WorldModelSpec(
        config.id,
        camera,
        *config.images[camera],
        state_size=config.observation or 0,
        max_steps=max(len(episode.frames) for episode in episodes),
    )
    held_out = episodes[::HELD_OUT_EVERY]
    training = [e for index, e in enumerate(episodes) if index % HELD_OUT_EVERY]
    try:
        model = fit_world_model(spec, bounds, training, steps=steps, seed=seed, report=report)
    except ValueError as error:
        raise InputError(f"task.{error}") from None
    starts = [np.stack([e.frames[0] for e in part]) for part in (training, held_out)]
    target.parent.mkdir(parents=True, exist_ok=True)
    save_world_model(str(target), model, spec, *starts)
    return measure_world_model(model, held_out)


def check(source: Path, file: Path) -> dict[str, float]:
    """Measure a world model on the newest evaluation of a run in the real simulator.

    Raises:
        InputError: the run has no such evaluation of the same task.
        DataError: the file is no world model.
    """
    try:
        model, spec, *_ = load_world_model(str(file))
    except ValueError as error:
        raise DataError(str(error).removeprefix("kwargs.model: ")) from None
    run = RunResults.open(source)
    config, camera = recorded_task(run)
    if (config.id, camera, *config.images[camera]) != (
        spec.id,
        spec.camera,
        spec.height,
        spec.width,
    ):
        raise InputError(
            f"{source}: has {config.id} with camera {camera} {list(config.images[camera])}, and "
            f"{file} imitates {spec.id} with {spec.camera} {[spec.height, spec.width]}"
        )
    versions = [int(row["version"]) for row in run.evaluations()]
    if not versions:
        raise InputError(f"{source}: has no evaluation yet")
    trajectories = run.evaluation_trajectories(max(versions))
    episodes = list(recorded_episodes(trajectories, camera))
    return measure_world_model(model, episodes)


def recorded_task(run: RunResults) -> tuple[GymConfig, str]:
    """Return the task of a run, and the name of its only camera.

    Raises:
        InputError: the run has no real simulator of one task with one camera.
    """
    cls, config = environment_class(run.config)
    if not issubclass(cls, GymEnvironment) or config.simulator == "world_model":
        raise InputError(f"{run.folder}: its episodes are not those of a simulator")
    if config.carry_over_episodes:
        raise InputError(
            f"{run.folder}: its samples may begin within an episode; record with "
            "task.carry_over_episodes=false"
        )
    if len(config.images) != 1 or not isinstance(config.id, str) or cls.num_tasks(config) > 1:
        raise InputError(
            f"{run.folder}: a world model imitates one camera of one task; record with one "
            "task.images and one task.id"
        )
    return config, next(iter(config.images))


def recorded_episodes(trajectories: Iterable[Trajectory], camera: str) -> Iterator[RecordedEpisode]:
    """Yield the episodes of trajectories. Episodes with masked steps, which were lost, and episodes
    of one step are left out.

    Raises:
        InputError: a step has several actions, between which no frame was recorded.
    """
    for trajectory in trajectories:
        reject_action_chunks(trajectory)
        mask, actions = loss_mask(trajectory), executed_actions(trajectory)
        frames, success = np.asarray(trajectory.images[camera]), trajectory.require("success")
        ended = np.asarray(trajectory.require("terminated")) != 0
        ended |= np.asarray(trajectory.require("truncated")) != 0
        start = 0
        for end in sorted({*(np.flatnonzero(ended) + 1).tolist(), len(trajectory)}):
            steps = slice(start, end)
            if end > start + 1 and mask[steps].all():
                yield RecordedEpisode(
                    frames[steps],
                    np.asarray(actions[steps], np.float32),
                    np.asarray(success)[steps] != 0,
                )
            start = end
