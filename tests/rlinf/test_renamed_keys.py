"""A key that had another name before is answered with today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.experiment import compose, validate_experiment
from rlinf.errors import ConfigError
from rlinf.models import policies
from rlinf.renamed_keys import RENAMED_KEYS
from slurm.jobs import current_job_resources


@pytest.mark.parametrize(
    ("experiment", "key"),
    [
        ("arithmetic_grpo", "rollout.batch"),
        ("arithmetic_grpo", "algorithm.clip_low"),
        ("arithmetic_grpo", "trainer.token_budget"),
        ("cartpole_ppo", "task.world"),
        ("pendulum_sac", "algorithm.update_ratio"),
    ],
)
def test_an_old_key_is_answered_with_the_new_one(experiment: str, key: str, tmp_path: Path) -> None:
    words = [f"experiment={experiment}", f"run.root={tmp_path}", f"++{key}=1"]
    with pytest.raises(ConfigError, match=f"{key}: unknown key; it is '{RENAMED_KEYS[key]}' now"):
        validate_experiment(compose(words), current_job_resources())


def test_an_old_name_of_a_policy_is_answered_with_the_new_one(tmp_path: Path) -> None:
    words = [f"run.root={tmp_path}", "experiment=metaworld_openvla_oft", "model=vla"]
    with pytest.raises(ConfigError, match="model=vla: no such model; it is 'openvla_oft' now"):
        compose(words)
    with pytest.raises(ConfigError, match="'vla'; it is 'openvla_oft' now"):
        policies.target("vla")


def test_no_name_is_both_old_and_new() -> None:
    """Two renames in a row would name a key that is unknown again."""
    for key, new in RENAMED_KEYS.items():
        assert f"{key.rpartition('.')[0]}.{new}" not in RENAMED_KEYS
