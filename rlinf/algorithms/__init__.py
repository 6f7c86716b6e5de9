"""Algorithms: which samples count, what their advantages are, and the loss."""

from rlinf.registry import Registry

algorithms = Registry(
    "algorithm",
    {
        "grpo": "rlinf.algorithms.grpo:GRPO",
        "dapo": "rlinf.algorithms.grpo:DAPO",
        "ppo": "rlinf.algorithms.ppo:PPO",
    },
    base="rlinf.algorithms.base:Algorithm",
)
