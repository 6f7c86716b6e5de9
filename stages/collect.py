"""Collecting experience: simulate and generate joined by an observation and an action channel."""

from __future__ import annotations

import threading
from collections.abc import Generator

from rlinf.channels.local import LocalChannel
from rlinf.data.record import Record
from rlinf.engines.base import NO_HOOKS, Engine, Hooks
from rlinf.envs.base import Environment, Episodes


def collect(
    environment: Environment,
    engine: Engine,
    episodes: Episodes,
    stage: str,
    hooks: Hooks = NO_HOOKS,
) -> Generator[Record]:
    """Trajectories of ``episodes``, each as soon as it is complete.

    The engine answers in a thread of its own. An error on either side ends both and is raised here.
    """
    observations, actions = LocalChannel(capacity=64), LocalChannel()
    failure: list[BaseException] = []

    def generate() -> None:
        try:
            replies = engine.generate(observations, seed=episodes.seed, stage=stage, hooks=hooks)
            for reply in replies:
                actions.put(reply)
        except BaseException as error:
            failure.append(error)
            observations.close()
        finally:
            actions.close()

    worker = threading.Thread(target=generate, name="generate", daemon=True)
    worker.start()
    try:
        yield from environment.simulate(episodes, observations, actions)
    except Exception:
        if failure:
            raise failure[0] from None
        raise
    finally:
        observations.close()
        worker.join()
    if failure:
        raise failure[0]
