"""A flow with one more stage: rewards are divided by how often their group gave the same answer."""

from collections import Counter
from dataclasses import replace

from rlinf.data.record import Record
from stages.context import Context
from stages.flow import Flow, Source, Stage, on_policy

novelty = Stage(
    inputs={"trajectories": Source("rollout"), "rewards": Source("reward")},
    streams="rewards",
    device=False,
    whole=True,
    like="train",
    program="mylab.flow",
)
stages = dict(on_policy.stages)
train, sync = stages.pop("train"), stages.pop("sync")
novel = Flow(
    stages={
        **stages,
        "novelty": novelty,
        "train": replace(train, inputs={**train.inputs, "rewards": Source("novelty")}),
        "sync": sync,
    },
    offline=on_policy.offline,
    evaluate=on_policy.evaluate,
)


def run(ctx: Context) -> None:
    """The program of the stage: inputs ``trajectories`` and ``rewards``, output ``rewards``."""
    if ctx.world.rank:
        return
    output, shares = ctx.writer("rewards"), []
    for samples in ctx.parts():
        trajectories = ctx.records("trajectories", samples)
        rewards = ctx.records("rewards", samples)
        said = [(t.info["group"], t.info["text"]) for t in trajectories]
        often = Counter(said)
        for answer, old in zip(said, rewards, strict=True):
            steps = {"rewards": old.steps["rewards"] / often[answer]}
            output.put(Record(old.identity, steps, info=old.info))
        shares.append(len(often) / len(said))
    output.close()
    ctx.metric("unlike", sum(shares) / len(shares))
