"""The rows of ``make bench-learning``: tasks, algorithms and goals. :mod:`benchmarks.learning`
measures them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PRIOR_DATA_ROW = "pendulum_sac"
"""The row whose transitions (seed 0) are the prior data of other rows."""


@dataclass(frozen=True)
class Sb3Baseline:
    """A run of the same method by Stable-Baselines3."""

    env: str
    method: str
    steps: int
    every: int
    """Steps between evaluations."""
    environments: int = 1
    standardised: bool = False
    """Whether observations are normalized by running statistics."""
    reward_scale: float = 1.0
    """Factor of rewards in training; evaluations use unscaled rewards."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LearningRow:
    """A row of ``make bench-learning``."""

    method: str
    algorithm: str
    column: str
    """Policy and kind of task: a key of :data:`benchmarks.combinations.COLUMNS`."""
    task: str
    goal: float | None
    """Held-out score to reach. None: the mean of the last scores of ``theirs``."""
    experiment: str
    words: tuple[str, ...] = ()
    """Overrides of the experiment."""
    unit: str = "environment steps"
    counted: str = "rollout/steps"
    """Metric that counts the steps of an iteration, in ``unit``."""
    prior: int = 0
    """Number of transitions to learn from: the newest ones of :data:`PRIOR_DATA_ROW`; 0: none."""
    theirs: Sb3Baseline | None = None


def _arithmetic_row(method: str, algorithm: str, *words: str, critic: bool = False) -> LearningRow:
    experiment = "arithmetic_ppo" if critic else "arithmetic_one_digit"
    return LearningRow(
        method,
        algorithm,
        "causal_lm_critic" if critic else "causal_lm",
        "one-digit sums",
        0.85,
        experiment,
        (
            *(f"algorithm={algorithm}", "iterations=120", "trainer.cpu_threads=1"),
            *(() if critic else ("rollout.batch_size=64",)),
            *words,
        ),
        unit="tokens",
    )


def _pendulum_row(method: str, algorithm: str, *words: str, **more: Any) -> LearningRow:
    task = ("Pendulum-v1", -200, "pendulum_sac")
    return LearningRow(
        method, algorithm, "mlp_q", *task, (f"algorithm={algorithm}", *words), **more
    )


def _double_pendulum_row(method: str, algorithm: str, *words: str, **more: Any) -> LearningRow:
    task = ("InvertedDoublePendulum-v5", 9_000, "double_pendulum_sac")
    words = (f"algorithm={algorithm}", "evaluate.every=5", *words)
    return LearningRow(method, algorithm, "mlp_q", *task, words, **more)


def _walking_row(task: str, environments: int, horizon: int) -> LearningRow:
    """Return a row for PPO on a walking robot.

    A minibatch is the steps of one environment; in Stable-Baselines3, as many steps of random ones.
    """
    iterations, every = 150, 25
    return LearningRow(
        "PPO",
        "ppo",
        "mlp",
        f"{task}-v5",
        None,
        "halfcheetah_ppo",
        (
            *(f"task={task.lower()}", f"iterations={iterations}", f"evaluate.every={every}"),
            *(f"rollout.batch_size={environments}", f"rollout.horizon={horizon}"),
            *(f"algorithm.minibatches={environments}", "optimizer.lr_scheduler_type=constant"),
            "trainer.cpu_threads=1",
        ),
        theirs=Sb3Baseline(
            env=f"{task}-v5",
            method="PPO",
            steps=iterations * environments * horizon,
            every=every * environments * horizon,
            environments=environments,
            standardised=True,
            reward_scale=0.1,
            settings={
                "n_steps": horizon,
                "batch_size": horizon,
                "n_epochs": 10,
                "learning_rate": 3e-4,
                "gamma": 0.99,
                "gae_lambda": 0.95,
                "max_grad_norm": 0.5,
                "policy_kwargs": {
                    "log_std_init": -1.0,
                    "net_arch": [64, 64],
                    "optimizer_kwargs": {"eps": 1e-8},
                },
            },
        ),
    )


def _chunked_row(level: str, gamma: float, gae_lambda: float) -> LearningRow:
    """Return a row for PPO with chunks of four actions. Both levels have the same discount per
    action."""
    return LearningRow(
        "PPO",
        "ppo",
        "mlp",
        f"HalfCheetah-v5, chunks of four actions, one value per {level}",
        1_000,
        "halfcheetah_ppo",
        (
            *("model.chunk_size=4", f"model.value_level={level}", "algorithm.logprob_level=action"),
            *(f"algorithm.gamma={gamma}", f"algorithm.gae_lambda={gae_lambda}"),
            *("rollout.horizon=64", "iterations=36", "evaluate.every=6", "evaluate.samples=8"),
            *("evaluate.horizon=250", "trainer.cpu_threads=1"),
        ),
        unit="chunks",
    )


ROWS = {
    "halfcheetah_ppo": _walking_row("HalfCheetah", 16, 128),
    "halfcheetah_chunks": _chunked_row("chunk", 0.960596, 0.814506),
    "halfcheetah_actions": _chunked_row("action", 0.99, 0.95),
    "hopper_ppo": _walking_row("Hopper", 8, 256),
    "cartpole_ppo": LearningRow("PPO", "ppo", "mlp_numbered", "CartPole-v1", 475, "cartpole_ppo"),
    "cartpole_async_ppo": LearningRow(
        "async PPO",
        "async_ppo",
        "mlp_numbered",
        "CartPole-v1",
        475,
        "cartpole_ppo",
        ("algorithm=async_ppo", "algorithm.epochs=6"),
    ),
    "sums_grpo": _arithmetic_row("GRPO", "grpo"),
    "sums_dapo": _arithmetic_row("DAPO", "dapo", "rollout.max_resamples=2"),
    "sums_rloo": _arithmetic_row("RLOO", "rloo"),
    "sums_reinforce_plus_plus": _arithmetic_row("REINFORCE++", "reinforce_plus_plus"),
    "sums_ppo": _arithmetic_row("PPO with a critic", "ppo", critic=True),
    "sums_async_ppo": _arithmetic_row(
        "async PPO with a critic", "async_ppo", "algorithm.epochs=1", critic=True
    ),
    PRIOR_DATA_ROW: _pendulum_row(
        "SAC",
        "sac",
        theirs=Sb3Baseline(
            env="Pendulum-v1",
            method="SAC",
            steps=6_000,
            every=1_000,
            settings={
                "learning_starts": 400,
                "batch_size": 128,
                "learning_rate": 1e-3,
                "policy_kwargs": {"net_arch": [64, 64]},
            },
        ),
    ),
    "pendulum_crossq": _pendulum_row(
        *("CrossQ", "crossq", "model=mlp_crossq", "model.critic_hidden=[256,256]"),
        *("optimizer.betas=[0.5,0.999]", "algorithm.policy_delay=1", "iterations=40"),
    ),
    "pendulum_rlpd": _pendulum_row(
        *("RLPD", "rlpd", "model=mlp_rlpd", "algorithm.utd_ratio=5"),
        *("algorithm.policy_delay=5", "iterations=10", "evaluate.every=2"),
        prior=2_000,
    ),
    "pendulum_iql": _pendulum_row(
        *("IQL", "iql", "model=mlp_iql", "flow=offline", "algorithm.gradient_steps=2500"),
        *(
            "algorithm.beta=10",
            "optimizer.lr_scheduler_type=cosine",
            "iterations=16",
            "evaluate.every=2",
        ),
        unit="optimizer steps",
        counted="train/steps",
        prior=6_000,
    ),
    "pendulum_bc_flow": LearningRow(
        "behavior cloning",
        "bc",
        "flow",
        "Pendulum-v1",
        -200,
        "pendulum_bc",
        (),
        unit="optimizer steps",
        counted="train/steps",
        prior=3_000,
    ),
    "inverted_pendulum_flow": LearningRow(
        "PPO on a flow-matching policy",
        "ppo",
        "flow",
        "InvertedPendulum-v5",
        950,
        "inverted_pendulum_flow",
    ),
    "metaworld_reach": LearningRow(
        "PPO", "ppo", "mlp", "Meta-World reach-v3", 0.9, "metaworld_reach"
    ),
    "metaworld_pixels": LearningRow(
        "PPO", "ppo", "cnn", "Meta-World handle-press-v3, images only", 0.9, "metaworld_pixels"
    ),
    "double_pendulum_crossq": _double_pendulum_row(
        *("CrossQ", "crossq", "model=mlp_crossq", "model.critic_hidden=[256,256]"),
        *("optimizer.betas=[0.5,0.999]", "algorithm.policy_delay=1", "iterations=30"),
    ),
    "double_pendulum_sac": _double_pendulum_row(
        "SAC",
        "sac",
        theirs=Sb3Baseline(
            env="InvertedDoublePendulum-v5",
            method="SAC",
            steps=30_000,
            every=2_500,
            settings={"learning_starts": 500, "batch_size": 256, "learning_rate": 3e-4},
        ),
    ),
}
