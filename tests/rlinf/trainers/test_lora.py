"""Low-rank adapters: they alone change, and everybody else sees a network like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.errors import ConfigError
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, loss, records

__all__ = ["folder"]
LR = 1e-2
LORA = {"rank": 4, "alpha": 8.0}


def make(folder: Path, world: ProcessGroupInfo | None = None, **options: Any) -> FSDPTrainer:
    policy = (CausalLM.meta_from_folder if world else CausalLM.load)(folder, CONFIG)
    given = {"device": "cpu", "max_tokens_per_microbatch": 40, "lora": LORA, **options}
    config = FSDPConfig.model_validate(given)
    return FSDPTrainer(policy, config, OptimizerSection(lr=LR), world or ProcessGroupInfo())


def assert_close(one: FSDPTrainer, other: FSDPTrainer, atol: float = LR / 50) -> None:
    theirs = other.full_state_dict()
    for name, tensor in one.full_state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol, msg=name)


def test_adapters_alone_are_trained_and_kept(folder: Path) -> None:
    made = make(folder)
    start = CausalLM.load(folder, CONFIG).module.state_dict()
    whole = made.full_state_dict()
    assert whole.keys() == start.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in start.items())
    made.step(records(), loss, lr=LR)
    own = made.policy.module.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in start.items())
    changed = {
        name for name, t in made.full_state_dict().items() if not torch.equal(t, start[name])
    }
    assert changed == {name for name in start if "proj.weight" in name}
    assert all(".lora_" in name for name in made.snapshot())


def test_the_merged_network_says_what_the_adapted_one_says(folder: Path) -> None:
    made, plain = make(folder), make(folder, lora=None)
    for _ in range(2):
        made.step(records(), loss, lr=LR)
    plain.load_weights(made.full_state_dict().items())
    again = make(folder)
    again.load_weights(made.full_state_dict().items())
    outputs = [trainer.forward(records(), 1.0) for trainer in (made, plain, again)]
    for (_, one), (_, two), (_, three) in zip(*outputs, strict=True):
        torch.testing.assert_close(one.logprobs, two.logprobs, rtol=0, atol=1e-5)
        assert torch.equal(two.logprobs, three.logprobs)
    before = make(folder).forward(records(), 1.0)
    assert not torch.equal(outputs[0][0][1].logprobs, before[0][1].logprobs)


def test_training_goes_on_from_the_adapters_alone(folder: Path, tmp_path: Path) -> None:
    one, other = make(folder, cpu_threads=2), make(folder, cpu_threads=2)
    one.step(records(), loss, lr=LR)
    one.save(tmp_path)
    other.load(tmp_path)
    for trainer in (one, other):
        trainer.step(records(), loss, lr=LR)
    assert_close(one, other, 0.0)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000


def test_gradients_and_moments_are_of_adapters(folder: Path) -> None:
    made, plain = make(folder), make(folder, lora=None)
    for trainer in (made, plain):
        trainer.step(records(), loss, lr=LR)
    own, whole = made.group_sizes(), plain.group_sizes()
    adapters = sum(p.nbytes for p in made.policy.module.parameters() if p.requires_grad)
    assert own["gradients"].to_allocate == adapters
    assert 2 * adapters <= own["optimizer"].on_device < whole["optimizer"].on_device
    assert own["weights"].on_device == whole["weights"].on_device + adapters


def test_a_target_that_is_nowhere_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.target_modules: .*no_proj"):
        make(folder, lora={"rank": 4, "target_modules": ["no_proj"]})
    with pytest.raises(ConfigError, match=r"'v_porj' is not in the model.*v_proj"):
        make(folder, lora={"rank": 4, "target_modules": ["q_proj", "v_porj"]})


def test_what_cannot_be_merged_is_refused(folder: Path) -> None:
    """Whoever takes the weights would not have what was trained."""
    with pytest.raises(ConfigError, match="lm_head shares its weight with another layer"):
        make(folder, lora={"rank": 4, "target_modules": ["q_proj", "lm_head"]})
    with pytest.raises(ConfigError, match=r"embed_tokens is a Embedding; .* only linear layers"):
        make(folder, lora={"rank": 4, "target_modules": ["embed_tokens"]})


def test_a_state_that_is_looked_at_before_the_first_step_changes_nothing(folder: Path) -> None:
    """Torch would take an optimizer step of its own, and count it."""
    looked, plain = make(folder, lora=None), make(folder, lora=None)
    looked.snapshot()
    for trainer in (looked, plain):
        trainer.step(records(), loss, lr=LR)
    assert_close(looked, plain, 0.0)


RANKS = """
import sys
from pathlib import Path
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from tests.rlinf.trainers.test_threaded_data_parallel import loss, records
from tests.rlinf.trainers.test_lora import LR, assert_close, make

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
alone = make(folder)
world = ProcessGroupInfo(rank, 2, rendezvous_file=folder.parent / "channels" / "group-l.json")
both = make(folder, world, fsdp_wrap_min_mb=0)
assert_close(both, alone, 0.0)
for trainer in (alone, both):
    trainer.step(records(), loss, lr=LR)
assert_close(both, alone)
both.save(folder.parent / "both", both.snapshot())
dist.barrier()
again = make(folder)
again.load(folder.parent / "both")
assert_close(both, again, 1e-7)
for trainer in (again, both):
    trainer.step(records(), loss, lr=LR)
assert_close(both, again)
both.load_policy_folder(folder)
assert_close(both, make(folder), 0.0)
print("ok")
"""


def test_ranks_share_adapters(folder: Path) -> None:
    (folder.parent / "channels").mkdir(exist_ok=True)
    run_ranks(RANKS, 2, folder)
