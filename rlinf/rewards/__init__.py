"""Rewards: from finished trajectories to a reward per step."""

from rlinf.registry import Registry

rewards = Registry(
    "reward",
    {
        "score": "rlinf.rewards.score:ScoreReward",
        "digits": "rlinf.rewards.digits:DigitsReward",
        "judge": "rlinf.rewards.judge:JudgeReward",
        "reward_model": "rlinf.rewards.reward_model:RewardModelReward",
        "environment": "rlinf.rewards.environment:EnvironmentReward",
    },
    base="rlinf.rewards.base:Reward",
)
