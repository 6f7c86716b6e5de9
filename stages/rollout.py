"""Rollout: generate ``group_size`` trajectories per prompt or initial state (*start*)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rlinf.channels.channel import LocalChannel
from rlinf.channels.record_files import RecordFileReader, RecordFileWriter
from rlinf.data.episodes import OPEN_EPISODES, pop_open_episode
from rlinf.data.record import Record
from rlinf.data.trajectory import Trajectory, loss_mask
from rlinf.data.transitions import action_clip_ratio
from rlinf.engines.base import NO_HOOKS, Engine, RolloutHooks
from rlinf.envs.base import Environment, RolloutRequest
from rlinf.errors import RequeueRequested
from stages.context import StageContext
from stages.dialogue_failures import DialogueFailures
from stages.factory import get_engine, newer_weights_poller, primary_rank_environment
from stages.flow import carries_over_episodes


def run(ctx: StageContext) -> None:
    """Generate the trajectories of an iteration.

    Inputs: ``weights``, and ``open_episodes`` (unfinished episodes of the previous iteration) if
    ``task.carry_over_episodes`` is set. Output channels: ``trajectories`` and
    ``open_episodes``.
    """
    emit_trajectories(ctx, partial(generate_trajectories, open_episodes=load_open_episodes(ctx)))


def load_open_episodes(ctx: StageContext) -> Mapping[int, Record] | None:
    """Load the open episodes of this process's samples, by sample number.

    Returns None if episodes are not carried over.

    Raises:
        ArtifactError: the input is damaged.
    """
    if not carries_over_episodes(ctx.config):
        return None
    if OPEN_EPISODES not in ctx.inputs:
        return {}
    # All processes wait for the input, because they generate together.
    folder, size = ctx.verified_folder(OPEN_EPISODES), ctx.config.rollout.group_size
    if not ctx.world.is_primary:
        return {}
    shard = ctx.world.shard(ctx.config.rollout.batch_size)
    samples = {sample for start in shard for sample in range(start * size, (start + 1) * size)}
    records = RecordFileReader(folder.glob(f"{OPEN_EPISODES}-r*.h5"), samples)
    return {record.identity.sample: record for record in records}


def emit_trajectories(
    ctx: StageContext, generate: Callable[[StageContext, Sequence[int]], Iterable[Trajectory]]
) -> None:
    """Generate the trajectories of this process's starts, chunk by chunk, and write them.

    Args:
        generate: yields the trajectories of some starts of the batch.
    """
    settings = ctx.config.rollout
    shard = ctx.world.shard(settings.batch_size)

    def generate_chunks() -> Generator[Trajectory]:
        for samples in ctx.chunks():
            yield from generate(ctx, [n for n in shard if n * settings.group_size in samples])

    # After an error, too, the engine must stop before another stage gets the device.
    with contextlib.closing(generate_chunks()) as trajectories:
        write_trajectories(ctx, trajectories, len(shard) * settings.group_size)


def receive_trajectories(ctx: StageContext) -> None:
    """Write the trajectories that rollout workers generate and send to this worker.

    Repeated records were dropped on arrival, so all readers of the channel get the same records.

    Raises:
        UpstreamFailed: trajectories were generated with weights that were not committed.
    """
    total = ctx.config.rollout.batch_size * ctx.config.rollout.group_size
    records = ctx.receive_records("trajectories", total, source_input="weights")
    with ctx.waiting("samples"):
        write_trajectories(ctx, map(Trajectory.from_record, records), total)


def generate_trajectories(
    ctx: StageContext,
    starts: Sequence[int],
    partial_samples: Mapping[int, Trajectory] | None = None,
    should_abort: Callable[[int, int], bool] | None = None,
    *,
    num_starts: int | None = None,
    open_episodes: Mapping[int, Record] | None = None,
) -> Iterator[Trajectory]:
    """Yield the trajectories of some starts of the batch as they are completed.

    Args:
        partial_samples: unfinished samples by number; if given, only these are generated.
        should_abort: see :class:`rlinf.engines.base.RolloutHooks`.
        num_starts: number of starts that an iteration may use; None: the batch size.
        open_episodes: see :attr:`rlinf.envs.base.RolloutRequest.open_episodes`.
    """
    settings = ctx.config.rollout
    environment = primary_rank_environment(ctx)
    policy = None if ctx.remote_policy is not None else policy_runner(ctx)
    if environment is None:
        assert policy is not None, "every client of a remote policy is a primary rank"
        with ctx.span("generate"):
            policy.engine.run_follower(seed=policy.seed, stage=policy.stage)
        return
    request = RolloutRequest(
        seed=ctx.config.seed,
        iteration=ctx.iteration,
        split="train",
        group_ids=starts,
        num_groups=num_starts or settings.batch_size,
        groups_per_batch=settings.batch_size,
        group_size=settings.group_size,
        horizon=settings.horizon,
        temperature=settings.temperature,
        partial_samples=partial_samples,
        open_episodes=open_episodes,
        sampling=settings.sampling.non_default_settings(),
    )
    if policy is not None and environment.supports_resume:
        policy = replace(policy, hooks=replace(policy.hooks, should_abort=should_abort))
    with ctx.span("generate"):
        yield from rollout_iter(ctx, environment, request, policy)


def policy_runner(ctx: StageContext) -> PolicyRunner:
    """Return the engine with input ``weights``. With in-flight updates its weights may be newer."""
    settings = ctx.config.rollout
    in_flight = settings.in_flight_updates
    version = max(0, ctx.iteration - settings.staleness)
    engine = get_engine(ctx, "weights", version, max_version=ctx.iteration if in_flight else None)
    hooks = RolloutHooks(newer_weights_poller(ctx, engine) if in_flight else None)
    return PolicyRunner(engine, ctx.config.seed, "rollout", hooks)


def write_trajectories(ctx: StageContext, trajectories: Iterable[Trajectory], total: int) -> None:
    """Write trajectories to the output channel and record their metrics.

    Lengths, steps and staleness count only unmasked steps.
    """
    output = ctx.open_writer("trajectories")
    open_episodes_file = None
    if carries_over_episodes(ctx.config) and ctx.world.is_primary:
        open_episodes_file = RecordFileWriter(ctx.data_folder, OPEN_EPISODES, ctx.world.rank)
    lengths, num_truncated, total_staleness = [], 0, 0
    failures = DialogueFailures()
    clip_ratios = list[float]()
    for trajectory in trajectories:
        episode = pop_open_episode(trajectory)
        if episode is not None and open_episodes_file is not None:
            open_episodes_file.put(episode)
        output.put(trajectory.to_record())
        failures.add(trajectory)
        mask = loss_mask(trajectory)
        lengths.append(int(mask.sum()))
        if (clip_ratio := action_clip_ratio(trajectory)) is not None:
            clip_ratios.append(clip_ratio)
        num_truncated += trajectory.stop_reason == "length"
        if trajectory.versions is not None:
            total_staleness += int((ctx.iteration - trajectory.versions)[mask].sum())
        ctx.report_progress(len(lengths), total, "samples")
    output.close()
    if open_episodes_file is not None:
        ctx.defer(open_episodes_file.close)
    failures.log_metrics(ctx)
    ctx.log_metric("samples", len(lengths), weight=0)
    ctx.log_metric("steps", float(np.sum(lengths)), weight=0)
    if lengths:
        ctx.log_metric("completion_length", float(np.mean(lengths)), weight=len(lengths))
        ctx.log_metric("truncated_ratio", num_truncated / len(lengths), weight=len(lengths))
        if clip_ratios:
            clip_ratio = float(np.mean(clip_ratios))
            ctx.log_metric("action_clip_ratio", clip_ratio, weight=len(clip_ratios))
        if ctx.config.rollout.in_flight_updates:
            num_steps = sum(lengths)
            staleness = total_staleness / max(1, num_steps)
            ctx.log_metric("staleness_mean", staleness, weight=num_steps)


@dataclass(frozen=True)
class PolicyRunner:
    """An engine with the policy's weights, and the arguments of its ``generate``."""

    engine: Engine
    seed: int
    stage: str
    """Stage name, which is part of the sampling seed."""
    hooks: RolloutHooks = NO_HOOKS


def rollout_iter(
    ctx: StageContext,
    environment: Environment,
    request: RolloutRequest,
    policy: PolicyRunner | None,
) -> Generator[Trajectory]:
    """Yield the trajectories of ``request``, each as soon as it is complete.

    Args:
        policy: the engine; None: the policy is in another worker.

    Raises:
        RequeueRequested: the allocation is about to end.
        UpstreamFailed: the worker with the policy no longer answers.
    """
    if policy is None:
        assert ctx.remote_policy is not None, "a process without an engine needs a remote policy"
        return ctx.remote_policy.rollout_iter(ctx, environment, request)
    return local_rollout_iter(
        environment, policy.engine, request, policy.stage, policy.hooks, ctx.should_stop
    )


class _IteratorClosed(Exception):
    """The caller has closed the iterator of trajectories."""


def local_rollout_iter(
    environment: Environment,
    engine: Engine,
    request: RolloutRequest,
    stage: str,
    hooks: RolloutHooks = NO_HOOKS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Trajectory]:
    """Yield the trajectories of ``request``, each as soon as it is complete.

    The engine runs in a separate thread. An error of the engine or the environment ends both and is
    raised here. If the iterator is closed early, unfinished samples are discarded.

    Args:
        should_stop: returns whether the allocation is about to end; called at every engine step.

    Raises:
        RequeueRequested: the allocation is about to end.
    """
    observations, actions = LocalChannel(capacity=64), LocalChannel()
    failure: list[BaseException] = []
    closed = threading.Event()

    def should_abort(remaining: int, total: int) -> bool:
        if closed.is_set():
            raise _IteratorClosed
        if should_stop():
            raise RequeueRequested(f"{stage}: stopping with {remaining} of {total} samples left")
        return hooks.should_abort is not None and hooks.should_abort(remaining, total)

    engine_hooks = replace(hooks, should_abort=should_abort)

    def generate() -> None:
        try:
            replies = engine.generate(
                observations, seed=request.seed, stage=stage, hooks=engine_hooks
            )
            for reply in replies:
                actions.put(reply)
        except _IteratorClosed:
            observations.close()
        except BaseException as error:
            failure.append(error)
            observations.close()
        finally:
            actions.close()

    thread = threading.Thread(target=generate, name="generate", daemon=True)
    thread.start()
    is_exhausted = False
    try:
        yield from environment.simulate(request, observations, actions)
        is_exhausted = True
    except Exception:
        if failure:
            raise failure[0] from None
        raise
    finally:
        if not is_exhausted:
            closed.set()
        observations.close()
        thread.join()
    if failure:
        raise failure[0]
