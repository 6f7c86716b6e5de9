"""How much work the jobs of a profile pass try the stages on."""

from __future__ import annotations

from pipeline.planning.profile.trial import Case
from rlinf.config import RunConfig
from rlinf.trainers import trainers
from stages.parts import make_algorithm


def cases(config: RunConfig, processes: int) -> tuple[Case, ...]:
    """The run's own size, smaller batches, and other token budgets."""
    budget, batch = token_budget(config), config.rollout.batch
    minibatches = make_algorithm(config).minibatches
    found = [Case(starts=batch, token_budget=budget)]
    for part in (2, 4):
        starts = batch // part
        if starts >= processes and not starts * config.rollout.group_size % minibatches:
            found.append(Case(starts=starts, token_budget=budget))
    if budget is not None:
        found += [Case(starts=batch, token_budget=max(1, b)) for b in (budget // 2, 2 * budget)]
    return tuple(dict.fromkeys(found))


def token_budget(config: RunConfig) -> int | None:
    """That of the run's trainer; None where it has none."""
    options = config.trainer.options(trainers.get(config.trainer.name).Config, "trainer")
    budget = getattr(options, "token_budget", None)
    return None if budget is None else int(budget)
