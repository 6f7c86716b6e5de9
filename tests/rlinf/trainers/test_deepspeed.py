"""DeepSpeed's options that do not go together are refused before a job is submitted; odd sizes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlinf.channels.process_group import ParallelLayout
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLMConfig
from rlinf.trainers.deepspeed import DeepSpeedConfig, DeepSpeedTrainer
from tests.environments import need_environment
from tests.rlinf.trainers.run_components import run_components

ODD = """
import sys
from pathlib import Path
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.trainers.deepspeed import DeepSpeedConfig, DeepSpeedTrainer

config, spec = MLPConfig(hidden=(8,)), {"observation": 4, "action": {"kind": "discrete", "size": 2}}
folder = Path(sys.argv[1])
MLPPolicy.create(config, spec, 0, folder)
policy = MLPPolicy.load(folder, config)
assert sum(p.numel() for p in policy.module.parameters()) % 2
options = DeepSpeedConfig(device="cpu", zero_stage=2)
trainer = DeepSpeedTrainer(policy, options, OptimizerSection(), ProcessGroupInfo())
print(len(trainer.full_state_dict()) > 0)
"""


def check(**options: object) -> None:
    config = DeepSpeedConfig.model_validate(options)
    run = run_components(CausalLMConfig())
    DeepSpeedTrainer.check_layout(config, run, ParallelLayout(), 1, "layout")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"zero_stage": 2, "offload_param": True}, "trainer.offload_param: stage 2"),
        ({"zero_stage": 3, "lora": {"rank": 4}}, "trainer.zero_stage: 3 .* choose 1 or 2"),
        ({"zero_stage": 1, "lora": {"rank": 4}, "param_dtype": "bfloat16"}, "trainer.param_dtype"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check(**options)


def test_others_are_taken() -> None:
    check(zero_stage=3, offload_param=True)
    check(zero_stage=2, lora={"rank": 4})


def test_a_network_of_an_odd_number_of_weights_is_taken(tmp_path: Path) -> None:
    python = need_environment("deepspeed")
    here = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [python, "-c", ODD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "True" in done.stdout, done.stderr[-3000:]
