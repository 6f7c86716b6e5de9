"""What every trainer promises, whatever it is made of."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf.channels.world import World
from rlinf.config import OptimizerSection
from rlinf.models.causal_lm import CausalLM
from rlinf.residency import Residency
from rlinf.trainers import trainers
from rlinf.trainers.base import Trainer
from tests.rlinf.trainers.test_lanes import CONFIG, folder, loss, records

__all__ = ["folder"]
LR = 1e-3
NAMES = trainers.names()


def make(name: str, folder: Path, budget: int = 40, world: World | None = None) -> Trainer:
    cls = trainers.get(name)
    trainer: Trainer = cls(
        CausalLM.load(folder, CONFIG),
        cls.Config.model_validate({"device": "cpu", "token_budget": budget}),
        OptimizerSection(lr=LR),
        world or World(),
    )
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_state().items()}


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_an_update_does_not_depend_on_the_cut(name: str, folder: Path) -> None:
    few, many, parts = make(name, folder, 10_000), make(name, folder, 1), make(name, folder)
    many.limit(20)
    data = records()
    one, other = few.step(data, loss, lr=LR), many.step(data, loss, lr=LR)
    assert other == pytest.approx(one, rel=1e-5)
    # The first step of Adam is as long as LR whatever the gradient: rounding shows at its zeros.
    assert_alike(weights(few), weights(many), LR / 50)
    if parts.accumulates:
        parts.accumulate(data[:5], loss)
        parts.accumulate(data[5:], loss)
        assert parts.update(lr=LR) == pytest.approx(one, rel=1e-5)
        assert_alike(weights(few), weights(parts), LR / 50)


@pytest.mark.parametrize("name", NAMES)
def test_its_whole_state_is_the_policys(name: str, folder: Path) -> None:
    trainer = make(name, folder)
    assert_alike(trainer.full_state(), dict(CausalLM.load(folder, CONFIG).module.state_dict()))
    own = trainer.full_state(copy=True)
    before = {key: tensor.clone() for key, tensor in own.items()}
    trainer.step(records(), loss, lr=LR)
    assert_alike(own, before)
    if trainer.takes_weights:
        other = make(name, folder)
        other.load_weights(trainer.full_state())
        assert_alike(other.full_state(), trainer.full_state())


@pytest.mark.parametrize("name", NAMES)
def test_leaving_the_device_loses_nothing(name: str, folder: Path) -> None:
    stays, moves, data = make(name, folder), make(name, folder), records()
    residency = Residency(moves.device, sys.maxsize)
    for _ in range(2):
        residency.need(moves)
        residency.clear()
        assert not any(size.here for size in moves.size().values())
        residency.need(moves)
        assert stays.step(data, loss, lr=LR) == moves.step(data, loss, lr=LR)
    assert_alike(stays.full_state(), moves.full_state())


@pytest.mark.parametrize("name", NAMES)
def test_closing_frees_the_weights_and_a_snapshot_can_still_be_written(
    name: str, folder: Path, tmp_path: Path
) -> None:
    trainer, other = make(name, folder), make(name, folder)
    trainer.step(records(), loss, lr=LR)
    expected, state = weights(trainer), trainer.snapshot()
    held = weakref.ref(next(iter(trainer.policy.module.parameters())))
    trainer.close()
    trainer.close()
    gc.collect()
    assert held() is None
    trainer.save(tmp_path, state)
    other.load(tmp_path)
    assert_alike(other.full_state(), expected)


RANKS = """
import sys
from pathlib import Path
from rlinf.channels.world import World
from tests.contracts.test_trainer import assert_alike, make, weights, LR
from tests.rlinf.trainers.test_lanes import loss, records

name, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
root = folder.parent / f"ranks-{name}"
alone = make(name, folder)
alone.step(records(), loss, lr=LR)
world = World(rank, 2, meeting=root / "channels" / "group-t.json")
both = make(name, folder, world=world)
both.step(records(), loss, lr=LR)
assert_alike(weights(both), weights(alone), LR / 50)
if rank == 0:
    alone.save(root / "alone")
both.save(root / "both")
import torch.distributed as dist
dist.barrier()
alone.load(root / "both")
assert_alike(weights(alone), weights(both))
again = make(name, folder, world=world)
again.load(root / "alone")
for trainer in (again, both, alone):
    trainer.step(records(), loss, lr=LR)
assert_alike(weights(again), weights(alone), LR / 50)
assert_alike(weights(both), weights(alone), LR / 50)
print("ok")
"""


@pytest.mark.parametrize("name", NAMES)
def test_ranks_update_alike_and_take_each_others_states(name: str, folder: Path) -> None:
    (folder.parent / f"ranks-{name}" / "channels").mkdir(parents=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, name, str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate() for process in processes]
    assert [out for out, _ in ended] == ["ok\n"] * 2, ended
