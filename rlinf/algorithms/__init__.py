"""Algorithms: which samples count, what their advantages are, and the loss."""

from rlinf.registry import Registry

algorithms = Registry(
    "algorithm",
    {
        "grpo": "rlinf.algorithms.group_relative:GRPO",
        "dapo": "rlinf.algorithms.group_relative:DAPO",
        "ppo": "rlinf.algorithms.ppo:PPO",
        "async_ppo": "rlinf.algorithms.ppo:AsyncPPO",
        "reinforce_plus_plus": "rlinf.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
        "reinforce_plus_plus_baseline": (
            "rlinf.algorithms.reinforce_plus_plus:ReinforcePlusPlusBaseline"
        ),
        "rloo": "rlinf.algorithms.group_relative:RLOO",
        "sac": "rlinf.algorithms.sac:SAC",
        "crossq": "rlinf.algorithms.sac:CrossQ",
        "rlpd": "rlinf.algorithms.sac:RLPD",
        "bc": "rlinf.algorithms.bc:BC",
        "iql": "rlinf.algorithms.iql:IQL",
    },
    base="rlinf.algorithms.base:Algorithm",
)
