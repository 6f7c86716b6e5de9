"""Rollout with dynamic sampling (DAPO, arXiv 2503.14476, eq. 11 and algorithm 1).

Groups that the algorithm would not keep, for all of their samples scored the same, are drawn anew,
of other starts, until each place of the batch has a group that teaches something or was drawn so
often as ``rollout.refills`` says. A place draws by itself: what comes does not depend on how the
batch is shared out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlinf.algorithms.base import Algorithm
from rlinf.data.record import Record
from rlinf.errors import ConfigError
from stages.context import Context
from stages.parts import held_reward, make_algorithm, speaking_environment
from stages.reward import judged
from stages.rollout import acting, collected, rolled_out

__all__ = ["acting", "by_place", "filled", "run", "teaches"]


def run(ctx: Context) -> None:
    """Input ``weights``; output channel ``trajectories``.

    Raises:
        ConfigError: processes share a copy of the engine's model; they would have to know how often
            the first of them draws.
    """
    if ctx.world.layout.split():
        raise ConfigError(
            "plan.stages.rollout.layout: with flow=dynamic_sampling each process of the rollout "
            "has a model of its own; leave the layout out, or choose flow=on_policy"
        )
    counts = Counter[str]()
    rolled_out(ctx, lambda ctx, places: filled(ctx, places, counts))
    # Sums over processes.
    ctx.metric("refilled", float(counts["refilled"]), weight=0)
    ctx.metric("unfilled", float(counts["unfilled"]), weight=0)


def filled(ctx: Context, places: Sequence[int], counts: Counter[str]) -> Iterator[Record]:
    """Groups for some places of the batch, each once it was judged to teach something.

    What is left after the last draw is handed on as it is; the reward stage drops it.

    Args:
        counts: gets ``refilled`` (groups drawn anew) and ``unfilled`` (places left without one).
    """
    settings = ctx.config.rollout
    most, left = settings.refills or 0, list(places)
    algorithm = make_algorithm(ctx.config)
    for draw in range(most + 1):
        if not left:
            return
        starts = [place + draw * settings.batch for place in left]
        made = collected(ctx, starts, batch=settings.batch * (most + 1))
        # All of them: what judges may need the device that the engine has until then.
        groups = by_place(list(made), settings.batch, settings.group_size)
        taught = {place for place in left if teaches(ctx, algorithm, groups[place])}
        for place in left:
            if place in taught or draw == most:
                yield from groups[place]
        left = [place for place in left if place not in taught]
        counts["unfilled" if draw == most else "refilled"] += len(left)


def by_place(records: Sequence[Record], batch: int, size: int) -> dict[int, list[Record]]:
    """Samples as those of the place of the batch that they were drawn for, in order."""
    groups: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.identity):
        start, number = divmod(record.identity.sample, size)
        place = start % batch
        identity = record.identity._replace(sample=place * size + number)
        info = {**record.info, "group": place}
        groups.setdefault(place, []).append(replace(record, identity=identity, info=info))
    return groups


def teaches(ctx: Context, algorithm: Algorithm, group: Sequence[Record]) -> bool:
    """Whether the algorithm keeps any sample of a group, by the run's reward."""
    reward = held_reward(ctx)
    environment = speaking_environment(ctx) if reward.needs_score else None
    with ctx.span("score"):
        # What went wrong is told by the reward stage.
        verdict = judged(reward, algorithm, environment, group, Counter())
    return bool(verdict.kept.any())
