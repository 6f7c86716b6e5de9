"""The number of workers of an elastic pool: set by the user, or scaled automatically with the
load."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.graph import StageNode
from pipeline.metrics import busy_s
from pipeline.plan import Plan, PoolPlan
from pipeline.pools.worker_speeds import WorkerSpeeds
from pipeline.run import Run
from rlinf.artifacts import write_atomic
from rlinf.errors import InputError, PlanError
from stages.layout import POOLS_FOLDER

log = logging.getLogger("rlinf")
TARGET_SIZES_FILE = "target_sizes.json"
"""File in the folder of the pools: the target number of workers by index of the pool."""
SCALE_REQUEST = re.compile(r"(?P<pool>[a-z_]+)(?:(?P<sign>[+=-])(?P<number>\d+)|=auto)")
MIN_GAIN = 0.05
"""Minimum share of an iteration's time that an additional worker must save."""
MAX_LOSS = 0.02
"""A worker is removed if it saves less than this share of an iteration's time. It is below
:data:`MIN_GAIN`, so that the number of workers does not oscillate."""


@dataclass(frozen=True)
class IterationLoad:
    """The measured times of the stages of an iteration."""

    fixed_s: float
    """Rollout seconds of each worker that do not depend on the number of workers."""
    work_s: float
    """Further rollout seconds of a single worker; n workers need 1/n of them."""
    other_stages_s: float
    """Seconds of all other stages."""
    overlaps: bool
    """Whether the other stages overlap with the next rollout (staleness)."""

    def iteration_s(self, workers: int) -> float:
        """Return the seconds of an iteration with a number of workers."""
        rollout = self.fixed_s + self.work_s / workers
        return max(rollout, self.other_stages_s) if self.overlaps else rollout + self.other_stages_s

    def target_workers(self, workers: int, min_workers: int, max_workers: int) -> int:
        """Return the next number of workers, at most twice the current number.

        Under a constant load, repeated calls change the number in one direction only.
        """
        max_workers = min(max_workers, 2 * workers)
        best = max(workers, min_workers)
        while best < max_workers and self._saved_share(best) > MIN_GAIN:
            best += 1
        while best > min_workers and best <= workers and self._saved_share(best - 1) < MAX_LOSS:
            best -= 1
        return min(best, max_workers)

    def _saved_share(self, workers: int) -> float:
        """Return the share of an iteration's time that one more worker saves."""
        current_s = self.iteration_s(workers)
        return (current_s - self.iteration_s(workers + 1)) / current_s if current_s else 0.0


def target_size(run: Path, plan: Plan, pool: int) -> int:
    """Return the target number of workers of a pool: the last saved one, or that of the plan."""
    return _read_target(run, pool)[0] or plan.pools[pool].workers or 1


def is_autoscaled(run: Path, plan: Plan, pool: int) -> bool:
    """Return whether the number of workers of a pool follows the load."""
    return plan.pools[pool].max_workers is not None and not _read_target(run, pool)[1]


class Autoscaler:
    """Decides how many generators, workers of the elastic pool, the driver keeps.

    Args:
        speeds: speeds of the generators, which the scheduler measures.
    """

    def __init__(self, run: Run, plan: Plan, speeds: WorkerSpeeds) -> None:
        self._run, self._plan, self._speeds = run, plan, speeds
        pools = enumerate(plan.pools)
        self._pool = next((number for number, pool in pools if pool.workers is not None), None)
        self._finished: dict[str, list[tuple[str, int]]] = {}
        """Worker and size of each finished share, by rollout of an unfinished iteration."""

    @property
    def target(self) -> int:
        """The target number of generators; 0 without an elastic pool."""
        return 0 if self._pool is None else target_size(self._run.folder, self._plan, self._pool)

    def record(self, rollout: str, worker: str, size: int) -> None:
        """Record a finished share of ``size`` starts of a rollout, such as ``rollout/3``."""
        self._finished.setdefault(rollout, []).append((worker, size))

    def adjust(self, iteration: int, workers: Collection[str]) -> None:
        """Set the target after an iteration, if the pool is autoscaled.

        Args:
            workers: the connected generators. Nothing changes until all requested ones are
                connected and have finished a share of this iteration.
        """
        plan, flow, pool = self._plan, self._plan.flow, self._pool
        rollout = StageNode(str(flow.elastic_stage), iteration)
        finished = self._finished.pop(rollout.name, [])
        if pool is None or not is_autoscaled(self._run.folder, plan, pool):
            return
        all_workers = {worker for worker, _ in finished}
        if len(workers) < self.target or not all_workers.issuperset(workers):
            return
        stages = [s for s in flow.stages if s not in (rollout.stage, flow.publish_stage)]
        fixed_s, per_start_s = self._speeds.fit_line()
        load = IterationLoad(
            fixed_s * len(finished) / len(all_workers),
            per_start_s * sum(size for worker, size in finished if worker in workers),
            sum(busy_s(self._run.folder, stage, iteration) for stage in stages),
            overlaps=self._run.config.rollout.staleness > 0,
        )
        min_workers, max_workers = plan.pools[pool].workers or 1, plan.pools[pool].max_workers
        target = load.target_workers(len(workers), min_workers, max_workers or len(workers))
        if target != len(workers):
            log.info(
                "pool %s: %d workers instead of %d; expected iteration time %.3g s, not %.3g s",
                pool,
                target,
                len(workers),
                load.iteration_s(target),
                load.iteration_s(len(workers)),
            )
            save_target(self._run.folder, pool, target, by_hand=False)


def request_scale(run: Run, request: str) -> int:
    """Request more or fewer workers, as in ``rollout+2``. The driver applies the request.

    Returns:
        The requested number; with ``=auto`` the current number.

    Raises:
        InputError: the request is malformed, or leaves fewer than one worker.
        PlanError: the run has no elastic pool with this stage, or the pool cannot be autoscaled.
    """
    match = SCALE_REQUEST.fullmatch(request)
    if match is None:
        raise InputError(f"{request!r}: expected rollout+2, rollout-1, rollout=4 or rollout=auto")
    plan, stage = Plan.from_run(run.folder), match["pool"]
    pool, pool_plan = _elastic_pool(plan, stage, run.folder)
    current = target_size(run.folder, plan, pool)
    if match["sign"] is None:
        if pool_plan.max_workers is None:
            raise PlanError(f"{run.folder}: set max_workers of the pool of {stage} in the plan")
        save_target(run.folder, pool, current, by_hand=False)
        return current
    change = int(match["number"])
    requested = {"+": current + change, "-": current - change, "=": change}[match["sign"]]
    if requested < 1:
        raise InputError(f"{request}: a pool needs at least one worker, and has {current}")
    save_target(run.folder, pool, requested, by_hand=True)
    return requested


def save_target(run: Path, pool: int, workers: int, *, by_hand: bool) -> None:
    """Save the target number of workers of a pool; ``by_hand`` (by the user) ends autoscaling."""
    folder = run / POOLS_FOLDER
    folder.mkdir(exist_ok=True)
    saved = {"workers": workers, "by_hand": by_hand, "time": time.time()}
    write_atomic(folder / TARGET_SIZES_FILE, json.dumps({**_read_targets(run), str(pool): saved}))


def _elastic_pool(plan: Plan, name: str, folder: Path) -> tuple[int, PoolPlan]:
    """Return the index and the plan of the elastic pool with the stage ``name``."""
    if plan.execution != "pools":
        raise PlanError(f"{folder}: its plan has no pools; only pools can be scaled")
    for number, pool in enumerate(plan.pools):
        if name in pool.stages:
            if pool.workers is None:
                raise PlanError(
                    f"{folder}: the pool of {name} is not elastic; set workers: 1 in the plan"
                )
            return number, pool
    raise PlanError(f"{folder}: no pool of its plan has the stage {name!r}")


def _read_target(run: Path, pool: int) -> tuple[int | None, bool]:
    """Return the last saved number of workers (None without one), and whether the user set it."""
    try:
        saved = _read_targets(run)[str(pool)]
        return max(1, int(saved["workers"])), bool(saved["by_hand"])
    except (ValueError, KeyError, TypeError):
        return None, False


def _read_targets(run: Path) -> dict[str, Any]:
    try:
        content = json.loads((run / POOLS_FOLDER / TARGET_SIZES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
