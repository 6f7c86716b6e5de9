"""The rollout loop: environment and engine, joined by an observation and an action channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from rlinf.channels.channel import LocalChannel
from rlinf.data.trajectory import Trajectory
from rlinf.engines.base import NO_HOOKS, Engine, RolloutHooks
from rlinf.envs.base import Environment, RolloutRequest
from rlinf.errors import RequeueRequested
from stages.context import StageContext


@dataclass(frozen=True)
class PolicyRunner:
    """An engine with the policy's weights, and the arguments of its ``generate``."""

    engine: Engine
    seed: int
    stage: str
    hooks: RolloutHooks = NO_HOOKS


def rollout_iter(
    ctx: StageContext,
    environment: Environment,
    episodes: RolloutRequest,
    policy: PolicyRunner | None,
) -> Generator[Trajectory]:
    """Yield the trajectories of ``episodes``, each as soon as it is complete.

    Args:
        policy: None: the policy is in another worker, which receives the requests.

    Raises:
        RequeueRequested: the allocation is about to end.
        UpstreamFailed: the workers that have the policy no longer answer.
    """
    if policy is None:
        assert ctx.remote_policy is not None, "a process without an engine needs a remote policy"
        return ctx.remote_policy.rollout_iter(ctx, environment, episodes)
    return local_rollout_iter(
        environment, policy.engine, episodes, policy.stage, policy.hooks, ctx.should_stop
    )


class _Unread(Exception):
    """The caller has closed the iterator of trajectories."""


def local_rollout_iter(
    environment: Environment,
    engine: Engine,
    episodes: RolloutRequest,
    stage: str,
    hooks: RolloutHooks = NO_HOOKS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Trajectory]:
    """Yield the trajectories of ``episodes``, each as soon as it is complete.

    The engine answers in a thread of its own. An error on either side ends both and is raised here.
    If the iterator is closed early, unfinished samples are discarded.

    Args:
        should_stop: whether the allocation is about to end; called at every step of the engine.

    Raises:
        RequeueRequested: it is.
    """
    observations, actions = LocalChannel(capacity=64), LocalChannel()
    failure: list[BaseException] = []
    unread = threading.Event()

    def should_abort(remaining: int, of: int) -> bool:
        if unread.is_set():
            raise _Unread
        if should_stop():
            raise RequeueRequested(f"{stage}: stopping with {remaining} of {of} samples left")
        return hooks.should_abort is not None and hooks.should_abort(remaining, of)

    engine_hooks = replace(hooks, should_abort=should_abort)

    def generate() -> None:
        try:
            replies = engine.generate(
                observations, seed=episodes.seed, stage=stage, hooks=engine_hooks
            )
            for reply in replies:
                actions.put(reply)
        except _Unread:
            observations.close()
        except BaseException as error:
            failure.append(error)
            observations.close()
        finally:
            actions.close()

    worker = threading.Thread(target=generate, name="generate", daemon=True)
    worker.start()
    exhausted = False
    try:
        yield from environment.simulate(episodes, observations, actions)
        exhausted = True
    except Exception:
        if failure:
            raise failure[0] from None
        raise
    finally:
        if not exhausted:
            unread.set()
        observations.close()
        worker.join()
    if failure:
        raise failure[0]
