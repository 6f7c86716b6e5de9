"""The stages of an iteration and the offline ones: glue between channels and library objects.

Every driver starts a stage the same way: ``python -m stages NAME --config F --out D``.
"""

SECTIONS: dict[str, tuple[str, ...]] = {
    "warm_start": ("seed", "task", "model", "engine", "trainer", "warm_start", "evaluate"),
    "rollout": ("seed", "task", "model", "engine", "rollout"),
    "reward": ("task", "model", "reward", "algorithm"),
    "inference": ("model", "algorithm", "trainer", "rollout"),
    "train": ("seed", "model", "algorithm", "trainer", "rollout"),
    "sync": ("model",),
    "evaluate": ("task", "model", "engine", "rollout", "evaluate"),
}
"""Each stage and the configuration sections that change its output; part of its identity."""
