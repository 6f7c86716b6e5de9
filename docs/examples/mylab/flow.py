"""A flow with an extra stage, which divides a reward by the count of its answer in the group."""

from collections import Counter
from dataclasses import replace

from rlinf.data.trajectory import StepRewards, Trajectory
from stages.context import StageContext
from stages.flow import Flow, InputSource, StageSpec, on_policy

novelty = StageSpec(
    inputs={"trajectories": InputSource("rollout"), "rewards": InputSource("reward")},
    output_stream="rewards",
    uses_device=False,
    single_process=True,
    colocate_with="train",
    module="mylab.flow",
)
stages = dict(on_policy.stages)
train, sync = stages.pop("train"), stages.pop("sync")
novel = Flow(
    stages={
        **stages,
        "novelty": novelty,
        "train": replace(train, inputs={**train.inputs, "rewards": InputSource("novelty")}),
        "sync": sync,
    },
    setup_stages=on_policy.setup_stages,
    evaluate=on_policy.evaluate,
)


def run(ctx: StageContext) -> None:
    """Run the stage: inputs ``trajectories`` and ``rewards``, output ``rewards``."""
    if ctx.world.rank:
        return
    writer, fractions = ctx.open_writer("rewards"), []
    for samples in ctx.chunks():
        trajectories = ctx.read(Trajectory, "trajectories", samples)
        rewards = ctx.read(StepRewards, "rewards", samples)
        answers = [(t.group, t.text) for t in trajectories]
        counts = Counter(answers)
        for answer, reward in zip(answers, rewards, strict=True):
            writer.put(replace(reward, rewards=reward.rewards / counts[answer]).to_record())
        fractions.append(len(counts) / len(answers))
    writer.close()
    ctx.log_metric("distinct_fraction", sum(fractions) / len(fractions))
