"""DeepSpeed's options that do not go together are refused before a job is submitted."""

from __future__ import annotations

import pytest

from rlinf.channels.world import ParallelLayout
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers.deepspeed import DeepSpeedConfig, DeepSpeedTrainer


def check(**options: object) -> None:
    config = DeepSpeedConfig.model_validate(options)
    given = OptimizerSection(), ParallelLayout(), 1, "layout"
    DeepSpeedTrainer.check(config, CausalLM, CausalLMConfig(), *given)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"stage": 2, "offload_param": True}, "trainer.offload_param: stage 2"),
        ({"stage": 3, "lora": {"rank": 4}}, "trainer.stage: 3 .* choose 1 or 2"),
        ({"stage": 1, "lora": {"rank": 4}, "param_dtype": "bfloat16"}, "trainer.param_dtype"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check(**options)


def test_others_are_taken() -> None:
    check(stage=3, offload_param=True)
    check(stage=2, lora={"rank": 4})
