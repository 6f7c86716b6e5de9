"""EnvPool (arXiv 2206.10558): Gymnasium's and Atari's environments in C++, stepped by threads.

Physics and rewards are those of the environments of the same name in Gymnasium, but initial states
are drawn by other random generators, so episodes differ. The first episode of a sample depends on
its seed, and the following ones continue the generator of its environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PACKAGES = ("envpool",)
BATCHED = True
__all__ = ["BATCHED", "PACKAGES", "make"]


def make(
    id: str, kwargs: dict[str, Any], count: int, images: Mapping[str, Sequence[int]]
) -> EnvPoolEnv:
    """``id`` is one of ``envpool.list_all_envs()``; ``kwargs`` are further arguments of
    ``envpool.make``. ``num_threads`` among them is by default the number of the process's CPUs.

    Raises:
        ImportError, ValueError: see :mod:`rlinf.envs.simulators`.
    """
    import envpool

    if id not in envpool.list_all_envs():
        raise ValueError(
            f"EnvPool has no {id!r}; envpool.list_all_envs() has the names, and task.simulator: "
            "gymnasium has all environments of Gymnasium"
        )
    if images:
        raise ValueError(
            f"EnvPool renders no cameras, and task.images has {', '.join(images)}; take "
            "task.simulator: gymnasium"
        )
    for name in ("num_envs", "batch_size", "seed", "env_seed"):
        if name in kwargs:
            raise ValueError(f"kwargs.{name}: the run sets it; leave it out")
    return EnvPoolEnv(id, {"num_threads": len(os.sched_getaffinity(0)), **kwargs}, count)


class EnvPoolEnv:
    """``count`` environments of one pool."""

    def __init__(self, id: str, kwargs: dict[str, Any], count: int) -> None:
        self._id, self._kwargs, self.count = id, kwargs, count
        self._pool = self._create([0] * count)
        self._is_seeded = False
        self.observation_space = self._pool.observation_space
        self.action_space = self._pool.action_space

    def start_samples(self, numbers: list[int], seeds: list[int]) -> None:
        """Create the pool again, because an environment is seeded only at its creation."""
        all_seeds = [0] * self.count
        for number, seed in zip(numbers, seeds):  # noqa: B905 - on Python 3.9 zip is never strict
            all_seeds[number] = seed
        self._pool, self._is_seeded = self._create(all_seeds), True

    def reset(self, numbers: list[int], seeds: list[int]) -> Any:
        if not self._is_seeded:
            # This process replaces one that died in the middle of samples.
            self.start_samples(numbers, seeds)
        observations, info = self._pool.reset(np.array(numbers, np.int32))
        rows = {number: row for row, number in enumerate(info["env_id"].tolist())}
        return observations[[rows[number] for number in numbers]]

    def step(self, actions: np.ndarray) -> Any:
        observations, rewards, terminated, truncated, info = self._pool.step(actions)
        solved = info.get("success", np.zeros(self.count, bool))
        return observations, rewards, terminated, truncated, np.asarray(solved, bool)

    def close(self) -> None:
        self._pool.close()

    def _create(self, seeds: list[int]) -> Any:
        import envpool

        try:
            return envpool.make_gymnasium(self._id, num_envs=self.count, seed=seeds, **self._kwargs)
        except (AssertionError, TypeError, RuntimeError) as error:
            raise ValueError(f"cannot make {self._id!r}: {error}") from None
