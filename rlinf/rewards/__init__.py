"""Rewards: from finished trajectories to a reward per step."""

from rlinf.registry import Registry

rewards = Registry(
    "reward",
    {
        "score": "rlinf.rewards.score:ScoreReward",
        "environment": "rlinf.rewards.environment:EnvironmentReward",
    },
)
