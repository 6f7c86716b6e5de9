"""A sharded trainer gives its weights away as a trainer that is not sharded would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
import torch
from rlinf.algorithms.base import AlgorithmConfig
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from rlinf.trainers.world import World

folder = Path(sys.argv[1])
config = CausalLMConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
CausalLM.create(config, {"alphabet": "0123456789+="}, 0, folder)
before = {n: t.clone() for n, t in CausalLM.load(folder, config).module.state_dict().items()}
options = FSDPConfig(device="cpu", param_dtype="bfloat16")
trainer = FSDPTrainer(CausalLM.load(folder, config), options, AlgorithmConfig(), World())
assert type(next(trainer.policy.module.parameters()).data).__name__ == "DTensor"
state = trainer.full_state()
assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
assert state.keys() == before.keys()
assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
print("ok")
"""


def test_weights_of_a_sharded_module_are_whole_and_tied_ones_are_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
