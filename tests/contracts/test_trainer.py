"""What every trainer promises, whatever it is made of."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.device_memory import DeviceMemoryManager
from rlinf.models.causal_lm import CausalLM
from rlinf.trainers import trainers
from rlinf.trainers.base import Trainer
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, folder, loss, records

__all__ = ["folder"]
LR = 1e-3


LORA = 'lora={"rank":4,"alpha":8}'
OPTIONS = {
    "deepspeed": [
        "zero_stage=1",
        "zero_stage=2",
        "zero_stage=3",
        "zero_stage=1 offload_optimizer=true",
        "zero_stage=2 offload_optimizer=true",
        "zero_stage=3 offload_optimizer=true offload_param=true",
        f"zero_stage=2 {LORA}",
        f"zero_stage=1 {LORA}",
    ],
    "fsdp": ["", LORA],
    "megatron": [
        "",
        "use_distributed_optimizer=true",
        LORA,
        f"use_distributed_optimizer=true {LORA}",
    ],
}
"""Ways in which a trainer works that are all to keep the contract; the first are its defaults."""


def kinds() -> list[Any]:
    """Every trainer and its options; those without their packages in this environment wait for
    one that has them (:mod:`tests.contracts.test_environments`)."""
    found = []
    for name in trainers.names():
        cls = trainers.get(name)
        for options in OPTIONS.get(name, [""]):
            packages = cls.required_packages(cls.Config.model_validate(parse_options(options)))
            there = all(importlib.util.find_spec(package) for package in packages)
            skip = pytest.mark.skipif(not there, reason=f"{packages} are not in this environment")
            found.append(pytest.param(f"{name} {options}".strip(), marks=skip))
    return found


def parse_options(options: str) -> dict[str, Any]:
    """The options of a trainer, of what stands behind its name."""
    return {key: json.loads(value) for key, value in (word.split("=") for word in options.split())}


def peer(name: str) -> str:
    """FSDP2 with the adapters that another trainer has, if any."""
    return " ".join(["fsdp", *(word for word in name.split() if word.startswith("lora="))])


NAMES = kinds()
ALL_WEIGHTS = [param for param in NAMES if LORA not in param.values[0]]
"""Those whose parameters are all trained."""


class Halves(CausalLM):
    """A policy whose parameters are in two groups."""

    parameter_groups = ("layers", "rest")

    def parameter_group(self, parameter: str) -> str:
        return "layers" if "layers" in parameter else "rest"


def make(
    name: str,
    folder: Path,
    budget: int = 40,
    world: ProcessGroupInfo | None = None,
    policy: type[CausalLM] = CausalLM,
    optimizer: Any = "adamw",
    decay: float = 0.0,
) -> Trainer:
    name, _, options = name.partition(" ")
    cls = trainers.get(name)
    world = world or ProcessGroupInfo()
    load = policy.meta_from_folder if world.size > 1 else policy.load
    trainer: Trainer = cls(
        load(folder, CONFIG),
        cls.Config.model_validate(
            {"device": "cpu", "max_tokens_per_microbatch": budget, **parse_options(options)}
        ),
        OptimizerSection(name=optimizer, lr=LR, weight_decay=decay),
        world,
    )
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_state_dict().items()}


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_an_update_does_not_depend_on_the_cut(name: str, folder: Path) -> None:
    few, many, parts = make(name, folder, 10_000), make(name, folder, 20), make(name, folder)
    data = records()
    one, other = few.step(data, loss, lr=LR), many.step(data, loss, lr=LR)
    assert other == pytest.approx(one, rel=1e-5)
    # The first step of Adam is as long as LR whatever the gradient: rounding shows at its zeros.
    assert_alike(weights(few), weights(many), LR / 50)
    if parts.supports_accumulation:
        parts.accumulate(data[:5], loss)
        parts.accumulate(data[5:], loss)
        assert parts.update(lr=LR) == pytest.approx(one, rel=1e-5)
        assert_alike(weights(few), weights(parts), LR / 50)


def loss_with_largest(policy: Any, inputs: Any, spans: Any) -> Any:
    value, metrics = loss(policy, inputs, spans)
    rows = torch.tensor([1.0 + span.row for span in spans])
    return value, {**metrics, "row_max": rows.max(), "rows": torch.tensor(float(len(rows)))}


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_of_a_metric_is_kept_and_not_scaled(name: str, folder: Path) -> None:
    trainer, data = make(name, folder), records()
    trainer.accumulate(data, loss_with_largest)
    found = trainer.update(lr=LR, scale=0.5)
    assert (found["row_max"], found["rows"]) == (len(data), len(data) / 2)


def streamed(trainer: Trainer, folder: Path) -> None:
    """What a new trainer streams is what is in the folder, each tensor once, and its file."""
    state, right = trainer.stream_weights(), CausalLM.load(folder, CONFIG).module.state_dict()
    assert {n: (t.shape, t.dtype) for n, t in state.templates.items()} == {
        n: (t.shape, t.dtype) for n, t in right.items()
    }
    came = list(state.stream)
    assert len(came) == len({id(like) for like in state.templates.values()}) == len(right) - 1
    assert all(torch.equal(tensor, right[name]) for name, tensor in came)
    with tempfile.TemporaryDirectory() as copy:
        trainer.policy.save_state(Path(copy), trainer.stream_weights())
        for path in folder.iterdir():
            assert (Path(copy) / path.name).read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("name", NAMES)
def test_its_streamed_state_is_the_whole(name: str, folder: Path) -> None:
    streamed(make(name, folder), folder)


@pytest.mark.parametrize("name", NAMES)
def test_its_whole_state_is_the_policys(name: str, folder: Path) -> None:
    trainer = make(name, folder)
    assert_alike(trainer.full_state_dict(), dict(CausalLM.load(folder, CONFIG).module.state_dict()))
    own = trainer.full_state_dict(copy=True)
    before = {key: tensor.clone() for key, tensor in own.items()}
    trainer.step(records(), loss, lr=LR)
    assert_alike(own, before)
    if trainer.can_load_weights:
        other = make(name, folder)
        other.load_weights(trainer.full_state_dict().items())
        assert_alike(other.full_state_dict(), trainer.full_state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_leaving_the_device_loses_nothing(name: str, folder: Path) -> None:
    stays, moves, data = make(name, folder), make(name, folder), records()
    residency = DeviceMemoryManager(moves.device, sys.maxsize)
    for _ in range(2):
        residency.acquire(moves)
        residency.offload_all()
        assert not any(size.on_device for size in moves.group_sizes().values())
        residency.acquire(moves)
        assert stays.step(data, loss, lr=LR) == moves.step(data, loss, lr=LR)
    assert_alike(stays.full_state_dict(), moves.full_state_dict())


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
    assert_alike(other.full_state_dict(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_fails_leaves_nothing_and_nothing_in_memory(name: str, folder: Path) -> None:
    trainer, other = make(name, folder, budget=20), make(name, folder, budget=20)
    calls: list[int] = []

    def fails(policy: Any, inputs: Any, spans: Any) -> Any:
        calls.append(len(spans))
        value = loss(policy, inputs, spans)
        if len(calls) == 2:
            raise ZeroDivisionError
        return value

    with pytest.raises(ZeroDivisionError):
        trainer.accumulate(records(), fails)
    assert trainer.step(records(), loss, lr=LR) == other.step(records(), loss, lr=LR)
    assert_alike(weights(trainer), weights(other))
    held = weakref.ref(next(iter(trainer.policy.module.parameters())))
    trainer.close()
    gc.collect()
    assert held() is None


def of_group(state: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    """Weights and moments of a group of :class:`Halves`, copied."""
    return {n: t.clone() for n, t in state.items() if ("layers" in n) == (group == "layers")}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", ALL_WEIGHTS)
def test_an_update_of_a_group_changes_no_byte_of_the_others(
    name: str, optimizer: str, folder: Path, tmp_path: Path
) -> None:
    """Neither of the weights nor of the moments, whether there were any before or not."""
    if "use_distributed_optimizer" in name and optimizer != "adamw":
        pytest.skip("it steps by AdamW alone")
    settings: Any = {"policy": Halves, "optimizer": optimizer, "decay": 0.1}
    trainer, again = (make(name, folder, **settings) for _ in range(2))
    for number, group in enumerate(["rest", "layers", "rest"]):
        before = trainer.snapshot()
        trainer.step(records(), loss, lr=LR, groups=[group])
        after, (other,) = trainer.snapshot(), set(Halves.parameter_groups) - {group}
        if number:
            assert_alike(of_group(before, other), of_group(after, other))
        moved = of_group(after, group)
        assert any(not torch.equal(before[n], t) for n, t in moved.items() if n in before)
        again.step(records(), loss, lr=LR, groups=[group])
        trainer.save(tmp_path / str(number))
        again.load(tmp_path / str(number))
    for one in (trainer, again):
        one.step(records(), loss, lr=LR)
    assert_alike(trainer.snapshot(), again.snapshot())


@pytest.mark.parametrize("name", ALL_WEIGHTS)
def test_groups_have_their_own_learning_rates(name: str, folder: Path) -> None:
    start, even, same, uneven = (make(name, folder, policy=Halves) for _ in range(4))
    even.step(records(), loss, lr=LR)
    same.step(records(), loss, lr=dict.fromkeys(Halves.parameter_groups, LR))
    uneven.step(records(), loss, lr={"layers": LR / 10, "rest": LR})
    first, full, less = weights(start), weights(even), weights(uneven)
    assert_alike(full, weights(same))
    assert_alike(of_group(full, "rest"), of_group(less, "rest"))
    for key in of_group(full, "layers"):
        torch.testing.assert_close(
            10 * (less[key] - first[key]), full[key] - first[key], rtol=0, atol=LR / 50
        )


@pytest.mark.parametrize("name", ALL_WEIGHTS)
def test_a_group_that_is_not_there_changes_nothing(name: str, folder: Path) -> None:
    trainer = make(name, folder, policy=Halves)
    before = weights(trainer)
    for wrong in ({"lr": LR, "groups": ["critic"]}, {"lr": {"rest": LR}}):
        with pytest.raises(ValueError, match="no group of parameters, or no learning rate"):
            trainer.step(records(), loss, **wrong)
    assert_alike(weights(trainer), before)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_belong_together_are_in_one_micro_batch(name: str, folder: Path) -> None:
    data, pairs = records(10), [[0, 9], [1, 8], [2, 7, 3], [4], [5, 6]]
    apart, trainer = make(name, folder), make(name, folder, budget=30)
    seen: list[list[int]] = []

    def watched(policy: Any, inputs: Any, spans: Any) -> Any:
        seen.append([span.row for span in spans])
        return loss(policy, inputs, spans)

    trainer.accumulate(data, watched, row_groups=pairs)
    assert len(seen) > 1
    assert sorted(row for rows in seen for row in rows) == list(range(10))
    assert all(any(set(pair) <= set(rows) for rows in seen) for pair in pairs)
    assert trainer.update(lr=LR) == pytest.approx(apart.step(data, loss, lr=LR), rel=1e-5)
    with pytest.raises(ValueError, match="each row"):
        trainer.accumulate(data, loss, row_groups=[[0, 1]])


RANKS = """
import sys
from pathlib import Path
import torch.distributed as dist
from rlinf.channels.process_group import ProcessGroupInfo
from tests.contracts.test_trainer import Halves, assert_alike, loss_with_largest, make, peer
from tests.contracts.test_trainer import streamed, weights, LORA, LR
from tests.rlinf.trainers.test_threaded_data_parallel import CONFIG, loss, records

name, folder, root = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
rank = int(sys.argv[4])
alone, rounding = make(peer(name), folder, policy=Halves), 1e-7 if LORA in name else 0.0
alone.step(records(), loss, lr=LR, groups=["layers"])
world = ProcessGroupInfo(rank, 2, rendezvous_file=root / "channels" / "group-t.json")
both = make(name, folder, world=world, policy=Halves)
assert not any(p.is_meta for p in both.policy.module.parameters())
streamed(both, folder)
told = both.step(records(), loss_with_largest, lr=LR, groups=["layers"])
assert (told["row_max"], told["rows"]) == (len(records()), len(records()))
assert_alike(weights(both), weights(alone), LR / 50)
both.save(root / "both")
dist.barrier()
alone.load(root / "both")
assert_alike(weights(alone), weights(both), rounding)
again = make(name, folder, world=world, policy=Halves)
again.load(root / "alone")
for trainer in (again, both, alone):
    trainer.step(records(), loss, lr={"layers": LR / 2, "rest": LR})
assert_alike(weights(again), weights(alone), LR / 50)
assert_alike(weights(both), weights(alone), LR / 50)
if again.can_load_weights:
    again.load_weights(weights(alone).items())
    assert_alike(weights(again), weights(alone))
again.load_policy_folder(folder)
assert_alike(weights(again), dict(Halves.load(folder, CONFIG).module.state_dict()))
print("ok")
"""


@pytest.mark.parametrize("writer", ["itself", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_update_alike_and_take_the_states_of_others(
    name: str, writer: str, folder: Path, tmp_path: Path
) -> None:
    """Of another number of ranks, and of another trainer."""
    if writer == "fsdp" and peer(name) == name:
        pytest.skip("it is itself")
    (tmp_path / "channels").mkdir()
    alone = make(name if writer == "itself" else peer(name), folder, policy=Halves)
    alone.step(records(), loss, lr=LR, groups=["layers"])
    alone.save(tmp_path / "alone")
    run_ranks(RANKS, 2, name, folder, tmp_path)
    other = make(name, folder, policy=Halves)
    other.load(tmp_path / "both")
    for trainer in (alone, other):
        trainer.step(records(), loss, lr={"layers": LR / 2, "rest": LR})
    assert_alike(weights(alone), weights(other), LR / 50)
