"""The combinations of algorithm, policy and task: ``docs/reference/algorithms.md`` has a summary.

``tests/contracts/test_combinations.py`` runs one small iteration of each combination that
:func:`find_refusal` accepts. Rows of :mod:`benchmarks.learning` measure what some of them learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.commands.experiment import compose
from pipeline.validate_config import validate_config
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError
from rlinf.hydra_config import force_add

SMALL_TEXT = (
    *("model.hidden=32", "model.layers=1", "model.heads=2", "model.kv_heads=1"),
    *("model.intermediate=64", "sft.max_steps=1", "sft.batch_size=8"),
    *("sft.eval_every=1", "rollout.batch_size=2", "rollout.group_size=4"),
    "rollout.horizon=6",
)
VECTORS = ["engine=direct", "reward=environment", "rollout.batch_size=2", "rollout.group_size=4"]
WITH_IMAGES = (
    *("task=inverted_pendulum", "task.images={free: [32, 32]}", "task.instruction=balance"),
    *VECTORS,
    *("rollout.horizon=4", "model.hidden=32", "model.layers=2", "model.heads=2"),
    *("model.kv_heads=1", "model.intermediate=64", "model.vision_hidden=16"),
    *("model.vision_heads=2", "model.patch_size=16", "model.proprio_dim=4", "model.chunk_size=3"),
)
PENDULUM = ("task=pendulum", *VECTORS, "rollout.horizon=20", "model.hidden=[16]")


@dataclass(frozen=True)
class PolicyTaskColumn:
    """A column of the table: a policy and a task for it."""

    title: str
    words: tuple[str, ...]
    """Overrides of the default configuration."""


COLUMNS = {
    "causal_lm": PolicyTaskColumn(
        "`causal_lm`: text",
        ("task=arithmetic", "model=small", *SMALL_TEXT),
    ),
    "causal_lm_critic": PolicyTaskColumn(
        "`causal_lm_critic`: text",
        ("task=arithmetic", "model=small_critic", *SMALL_TEXT),
    ),
    "qwen2_5_vl": PolicyTaskColumn(
        "`qwen2_5_vl`: images and text",
        (
            *("task=visual_questions", "model=qwen2_5_vl", *SMALL_TEXT, "model.hidden=64"),
            *("model.vision_hidden=32", "model.vision_layers=1", "model.vision_heads=2"),
        ),
    ),
    "mlp_numbered": PolicyTaskColumn(
        "`mlp`: numbered actions",
        ("task=cartpole", "model=mlp", *VECTORS, "rollout.horizon=20", "model.hidden=[16]"),
    ),
    "mlp": PolicyTaskColumn("`mlp`: vectors", ("model=mlp", *PENDULUM)),
    "cnn": PolicyTaskColumn(
        "`cnn`: pictures",
        (
            *("task=inverted_pendulum", "task.images={free: [36, 36]}", *VECTORS),
            *("model=cnn", "rollout.horizon=8", "model.hidden=[16]", "model.features_dim=8"),
        ),
    ),
    "flow": PolicyTaskColumn("`flow`: vectors", ("model=flow", *PENDULUM)),
    "openvla_oft": PolicyTaskColumn(
        "`openvla_oft`: pictures and words", ("model=openvla_oft", *WITH_IMAGES)
    ),
    "smolvla": PolicyTaskColumn(
        "`smolvla`: pictures and words",
        (
            "model=smolvla",
            *WITH_IMAGES,
            "model.image_size=32",
            "model.pixel_shuffle_factor=1",
            "model.denoising_steps=2",
        ),
    ),
    "pi05": PolicyTaskColumn(
        "`pi0`, `pi05`: pictures and words",
        (
            "model=pi05",
            *WITH_IMAGES,
            "model.head_dim=8",
            "model.expert_hidden=16",
            "model.denoising_steps=2",
        ),
    ),
    "gr00t": PolicyTaskColumn(
        "`gr00t`: pictures and words",
        ("model=gr00t", *WITH_IMAGES, "model.expert_hidden=16", "model.denoising_steps=2"),
    ),
    "mlp_q": PolicyTaskColumn(
        "`mlp_q`: vectors",
        ("model=mlp_q", *PENDULUM, "model.critic_hidden=[16]"),
    ),
}
REPLAYED = ["algorithm.batch_size=16", "algorithm.gradient_steps=4"]
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dapo": ("algorithm.filter_zero_variance_groups=false",),
    "rloo": (),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": (),
    "ppo": ("algorithm.epochs=1", "algorithm.minibatches=2"),
    "async_ppo": ("algorithm.epochs=1", "algorithm.minibatches=2"),
    "sac": ("flow=off_policy", *REPLAYED),
    "crossq": ("flow=off_policy", *REPLAYED),
    "rlpd": ("flow=off_policy", *REPLAYED, "algorithm.policy_delay=2"),
    "iql": ("flow=offline", *REPLAYED),
    "bc": ("flow=offline", *REPLAYED),
}
"""Overrides that each algorithm needs; the algorithms of :data:`WITH_PRIOR` also need a file of
transitions."""
WITH_PRIOR = ("rlpd", "iql", "bc")
MODEL_OVERRIDES = {"crossq": "mlp_crossq", "rlpd": "mlp_rlpd", "iql": "mlp_iql"}
"""The model that replaces ``model=mlp_q`` for algorithms that need other settings."""


def compose_config(algorithm: str, column: str, prior: Path, *further: str) -> dict[str, Any]:
    """Return the configuration of a small run.

    Args:
        prior: a file of transitions of the pendulum.
    """
    replacements = {"model=mlp_q": f"model={MODEL_OVERRIDES.get(algorithm, 'mlp_q')}"}
    words = [replacements.get(word, word) for word in COLUMNS[column].words]
    words.insert(0, f"algorithm={algorithm}")
    words += [*ALGORITHMS[algorithm], *further, "run.name=small", "iterations=1"]
    if algorithm in WITH_PRIOR:
        words.append(f"algorithm.offline_data={prior}")
    words += ["evaluate.every=0", "evaluate.samples=2", "evaluate.horizon=4", "log.trackers=[]"]
    return compose(["~experiment", *map(force_add, words)])


def find_refusal(algorithm: str, column: str, prior: Path) -> str | None:
    """Return why a combination is rejected; None if it is possible.

    Raises:
        ConfigError: the configuration is invalid for another reason.
    """
    values = compose_config(algorithm, column, prior)
    try:
        validate_config(validate(RunConfig, values))
    except ConfigError as error:
        if not str(error).startswith(("algorithm.name: ", "model.name: ", "flow: ")):
            raise
        return str(error)
    return None
