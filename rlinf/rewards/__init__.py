"""Rewards: from finished trajectories to a reward per step."""

from rlinf.registry import Registry

rewards = Registry(
    "reward",
    {
        "score": "rlinf.rewards.task_rewards:ScoreReward",
        "digits": "rlinf.rewards.task_rewards:DigitsReward",
        "function": "rlinf.rewards.function:FunctionReward",
        "judge": "rlinf.rewards.judge:JudgeReward",
        "reward_model": "rlinf.rewards.reward_model:RewardModelReward",
        "environment": "rlinf.rewards.task_rewards:EnvironmentReward",
    },
    base="rlinf.rewards.base:Reward",
)
