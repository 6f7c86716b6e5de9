"""Whether the pools of a plan hold what they can: checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf.errors import nearest
from stages.flow import EVALUATE

if TYPE_CHECKING:
    from pipeline.plan import Plan


def check_pools(plan: Plan) -> None:
    """What pools hold must be what stages of the plan's flow can do.

    Raises:
        ValueError: names the key.
    """
    flow = plan.flow
    _check_apart(plan)
    generates, elastic = flow.elastic, {n for n, stage in flow.table.items() if stage.elastic}
    homes = plan.homes() if plan.pools else {}
    for i, pool in enumerate(plan.pools):
        if pool.ranks and pool.workers:
            raise ValueError(f"pools[{i}].ranks: each worker is a job of one process; leave it out")
        for stage, ranks in pool.ranks.items():
            if homes.get(stage) != i:
                raise ValueError(
                    f"pools[{i}].ranks.{stage}: this pool does not run it"
                    f"{nearest(stage, flow.table)}"
                )
            size = sum(pool.gpus.values())
            _check_ranks(plan, stage, ranks, size, f"pools[{i}].ranks.{stage}")
    for i, pool in enumerate(plan.pools):
        if pool.helps_rollout and generates in pool.stages:
            raise ValueError(
                f"pools[{i}].helps_rollout: this pool holds {generates}; say it of another one"
            )
        if pool.workers is None:
            continue
        if generates is None:
            more = "rollouts take more than weights (flow=dynamic_sampling, task.continues)"
            raise ValueError(f"pools[{i}].workers: {more}; leave it out")
        if not {generates} <= set(pool.stages) <= elastic:
            names = ", and ".join(sorted(elastic - {generates}))
            raise ValueError(
                f"pools[{i}].workers: only a pool of {generates}, and {names}, can be elastic"
            )
        for stage in pool.stages:
            needs = plan.of(stage)
            if needs.nodes * needs.processes > 1:
                raise ValueError(
                    f"pools[{i}].workers: each is a job of one process, but stage {stage} "
                    f"asks for {needs.nodes} x {needs.processes}"
                )
    held = {stage for pool in plan.pools for stage in pool.stages}
    alone = [name for name, stage in flow.stages.items() if stage.like is None]
    missing = next((stage for stage in alone if stage not in held), None)
    if plan.pools and missing:
        raise ValueError(f"pools: no pool holds {missing}; only other stages may be left out")
    some = any(pool.workers is not None for pool in plan.pools)
    apart = any(pool.workers is None and EVALUATE in pool.stages for pool in plan.pools)
    edge = f"{flow.publishes} -> {EVALUATE}"
    way = plan.transports.get(edge, "file")
    if some and not apart and way != "file":
        raise ValueError(
            f"transports: {edge!r} cannot be {way} in an elastic pool, whose evaluations begin "
            "once weights are committed and take those that came for rollouts; say it of "
            f"'{flow.publishes} -> {generates}'"
        )


def _check_ranks(plan: Plan, stage: str, ranks: Sequence[int], size: int, key: str) -> None:
    """What is said of the processes, of ``size``, that compute a stage in its pool.

    Raises:
        ValueError: names the key.
    """
    if sorted(set(ranks)) != list(ranks) or not ranks or ranks[-1] >= size:
        raise ValueError(f"{key}: {list(ranks)}; give some of 0 to {size - 1}, in order, each once")
    flow = plan.flow
    free = [n for n, s in flow.table.items() if s.loads != "trainer" and n not in flow.offline]
    if stage not in free or plan.of(stage).layout.split():
        raise ValueError(
            f"{key}: all processes of the pool share the model that {stage} computes with; only "
            f"{', '.join(free)} may have some of them, where no layout splits their model"
        )
    if flow.table[stage].elastic and any(pool.workers for pool in plan.pools):
        raise ValueError(f"{key}: with an elastic pool one process gathers it; leave it out")


def _check_apart(plan: Plan) -> None:
    """What is said of the policy's part of rollouts, where the plan places it.

    Raises:
        ValueError: names the key.
    """
    flow = plan.flow
    part, acts = next(iter(flow.apart), None), flow.acts
    if part is None:
        return
    key, homes = f"stages.{part}", {s: i for i, pool in enumerate(plan.pools) for s in pool.stages}
    if not plan.pools:
        raise ValueError(
            f"{key}: a job of grain: stage has its simulators and its policy in one process; use "
            f"grain: segment and name {part} in a pool, or leave it out"
        )
    if part not in homes:
        raise ValueError(
            f"{key}: no pool holds it; name it in the stages of one, or leave it out: {acts} then "
            "has the policy too"
        )
    if acts not in homes:
        return  # which is said of any flow
    number, sides = homes[part], plan.pools[homes[part]].ranks
    for i, pool in enumerate(plan.pools):
        if pool.workers is not None:
            raise ValueError(
                f"pools[{i}].workers: workers that come and go have the simulators and the policy "
                f"in one process; leave workers out, or {part}"
            )
    if plan.of(part).layout.split():
        raise ValueError(
            f"{key}.layout: each of its processes answers with a whole model; leave it out"
        )
    if number == homes[acts]:
        for name in (acts, EVALUATE):
            own = sides.get(name, sides.get(str(acts), ()))
            if not own or not sides.get(part) or {*own} & {*sides[part]}:
                raise ValueError(
                    f"pools[{number}].ranks: {name} and {part} in one pool need processes of "
                    f"their own, as {{{acts}: [0], {part}: [1]}}; or give {part} another pool"
                )
