"""What leaves a device comes back as it was, and no more of it leaves than must."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf.device_memory import DeviceMemoryManager, MemorySize, OffloadableTensors, move_to_device
from rlinf.errors import ConfigError

CPU = torch.device("cpu")
FLOAT = 4
"""Bytes."""


class Held(OffloadableTensors):
    """A holder of named groups."""

    device = CPU

    def __init__(self, **groups: list[Tensor]) -> None:
        self.groups = groups

    def tensor_groups(self) -> Mapping[str, Sequence[Tensor]]:
        return self.groups


class Log:
    """The names of the spans that were entered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def filled(size: int, start: float = 0.0) -> Tensor:
    return torch.arange(start, start + size, dtype=torch.float32)


def is_there(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def present_bytes(*holders: Held) -> int:
    storages = {
        t.untyped_storage()
        for h in holders
        for ts in h.groups.values()
        for t in ts
        if not t.is_meta
    }
    return sum(storage.nbytes() for storage in storages)


SIZES = st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3)
"""Of the tensors of each group of one holder."""


@given(
    holders=st.lists(SIZES, min_size=1, max_size=3),
    slack=st.integers(0, 20),
    calls=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 2))), max_size=12),
)
def test_whatever_is_needed_is_there_as_it_was_left_and_the_budget_holds(
    holders: list[list[list[int]]], slack: int, calls: list[tuple[int, set[int]]]
) -> None:
    held = [
        Held(**{str(g): [torch.rand(n) for n in ns] for g, ns in enumerate(h)}) for h in holders
    ]
    expected = [{g: [t.clone() for t in ts] for g, ts in h.groups.items()} for h in held]
    budget = max(map(present_bytes, held)) + slack * FLOAT
    residency = DeviceMemoryManager(CPU, budget)
    for h in held:
        residency.acquire(h)
    for number, chosen in calls:
        holder, copies = held[number % len(held)], expected[number % len(held)]
        groups = [str(g) for g in chosen if str(g) in holder.groups]
        residency.acquire(holder, *groups)
        assert present_bytes(*held) <= budget
        for group in groups or holder.groups:
            for tensor, copy in zip(holder.groups[group], copies[group], strict=True):
                assert torch.equal(tensor, copy)
                # Who computes with it changes it.
                tensor.add_(1)
                copy.add_(1)
    for holder, copies in zip(held, expected, strict=True):
        residency.acquire(holder)
        for group, tensors in holder.groups.items():
            assert all(map(torch.equal, tensors, copies[group]))


def test_what_was_needed_longest_ago_goes_first_and_no_more_of_it_than_must() -> None:
    old, young, new = Held(a=[filled(4), filled(4)]), Held(a=[filled(4)]), Held(a=[filled(3)])
    residency, log = DeviceMemoryManager(CPU, 12 * FLOAT), Log()
    for holder in (young, old, young):
        residency.acquire(holder, span=log)
    assert log.names == []
    residency.acquire(new, span=log)
    assert log.names == ["offload"]
    assert [is_there(t) for t in (*old.groups["a"], *young.groups["a"])] == [False, True, True]


def test_a_group_that_is_not_needed_stays_out() -> None:
    trainer, engine = Held(weights=[filled(4)], moments=[filled(8)]), Held(weights=[filled(4)])
    residency = DeviceMemoryManager(CPU, 12 * FLOAT)
    residency.acquire(trainer)
    residency.acquire(engine)
    residency.acquire(trainer, "weights")
    assert is_there(trainer.groups["weights"][0])
    assert not is_there(trainer.groups["moments"][0])
    residency.acquire(trainer)
    assert torch.equal(trainer.groups["moments"][0], filled(8))


def test_room_is_made_for_what_is_still_to_come() -> None:
    engine = Held(weights=[filled(4)])
    trainer = Held(weights=[filled(4)], gradients=[torch.empty(4, device="meta")])
    residency = DeviceMemoryManager(CPU, 8 * FLOAT)
    residency.acquire(engine)
    residency.acquire(trainer, "weights")
    assert is_there(engine.groups["weights"][0])
    residency.acquire(trainer, "weights", "gradients")
    assert not is_there(engine.groups["weights"][0])


def test_exceeding_the_memory_budget_is_an_error_that_moves_nothing() -> None:
    engine, trainer = Held(weights=[filled(4)]), Held(weights=[filled(4)], moments=[filled(8)])
    residency = DeviceMemoryManager(CPU, 11 * FLOAT)
    residency.acquire(engine)
    with pytest.raises(ConfigError, match=r"(?s)device_memory_gib: 4.1e-08.*Held.*4.47e-08") as e:
        residency.acquire(trainer)
    assert "weights 1.49e-08, moments 2.98e-08" in str(e.value)
    assert torch.equal(engine.groups["weights"][0], filled(4))


def test_views_tied_tensors_and_optimizers_see_what_came_back() -> None:
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    other.weight = one.weight
    row, lane = one.weight.data[1], one.weight.detach()
    optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
    holder, residency = Held(weights=[one.weight, other.weight, row]), DeviceMemoryManager(CPU, 100)
    before, address = one.weight.detach().clone(), id(one.weight)
    residency.acquire(holder)
    residency.offload_all()
    assert present_bytes(holder) == 0
    residency.acquire(holder)
    assert id(one.weight) == address
    one.weight.grad = torch.ones(3, 3)
    optimizer.step()
    for seen in (one.weight, other.weight, lane):
        assert torch.equal(seen, before - 1)
    assert torch.equal(row, before[1] - 1)


def test_what_is_to_be_overwritten_gets_its_memory_back_only() -> None:
    engine, residency = Held(weights=[filled(4)]), DeviceMemoryManager(CPU, 100)
    residency.acquire(engine)
    residency.offload_all()
    host = next(iter(engine._host_copies.values()))
    host.fill_(255)  # what would come back is not a number
    residency.acquire(engine, copy_data=False)
    weights = engine.groups["weights"][0]
    assert weights.untyped_storage().nbytes() == weights.nbytes
    assert not weights.isnan().all()
    weights.copy_(filled(4, 1))
    residency.offload_all()
    residency.acquire(engine)
    assert torch.equal(weights, filled(4, 1))


def test_gradients_that_were_dropped_while_they_were_out_do_not_come_back() -> None:
    trainer, residency, log = (
        Held(gradients=[filled(4)]),
        DeviceMemoryManager(CPU, 4 * FLOAT),
        Log(),
    )
    residency.acquire(trainer)
    residency.offload_all()
    trainer.groups["gradients"] = [filled(4, 7)]
    residency.acquire(trainer, span=log)
    assert log.names == []
    assert torch.equal(trainer.groups["gradients"][0], filled(4, 7))


def test_the_copies_of_a_holder_that_is_gone_go_with_it() -> None:
    engine, trainer, residency = (
        Held(a=[filled(4)]),
        Held(a=[filled(4)]),
        DeviceMemoryManager(CPU, 100),
    )
    residency.acquire(trainer)
    residency.offload_all()
    (copy,) = map(weakref.ref, trainer._host_copies.values())
    del trainer
    residency.acquire(engine)
    assert copy() is None


class Sleeper:
    """Moves all it has or nothing, by a way of its own, as an engine's server does."""

    device = CPU

    def __init__(self, size: int) -> None:
        self.bytes, self.awake, self.filled = size, True, True

    def group_sizes(self) -> Mapping[str, MemorySize]:
        here = self.bytes if self.awake else 0
        return {"server": MemorySize(here, self.bytes - here, 0)}

    def offload(self, group: str, min_bytes: int) -> int:
        self.awake = False
        return self.bytes

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        self.awake, self.filled = True, copy_data


def test_holders_move_in_their_own_way() -> None:
    server, trainer, residency = Sleeper(100), Held(a=[filled(20)]), DeviceMemoryManager(CPU, 120)
    residency.acquire(server)
    residency.acquire(trainer)
    assert (server.awake, is_there(trainer.groups["a"][0])) == (False, True)
    residency.acquire(server, copy_data=False)
    assert (server.awake, server.filled, is_there(trainer.groups["a"][0])) == (True, False, False)


def test_without_a_limit_nobody_is_asked_what_he_holds() -> None:
    class Never(OffloadableTensors):
        device = CPU

        def tensor_groups(self) -> Mapping[str, Sequence[Tensor]]:
            raise AssertionError

    residency = DeviceMemoryManager(CPU)
    residency.acquire(Never(), "weights")
    residency.offload_all()


def test_tensors_elsewhere_neither_count_nor_move() -> None:
    holder, residency = Held(a=[filled(4)]), DeviceMemoryManager(torch.device("cuda:0"), 1)
    residency.acquire(holder)
    residency.offload_all()
    assert is_there(holder.groups["a"][0])


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[], nn.Linear]:
    """A module whose weights are mapped from a file."""
    save_file({"weight": torch.rand(5, 5)}, tmp_path / "a.safetensors")

    def make() -> nn.Linear:
        module = nn.Linear(5, 5, bias=False)
        module.load_state_dict(load_file(tmp_path / "a.safetensors"), assign=True)
        assert not module.weight.untyped_storage().resizable()
        return module

    return make


def test_weights_mapped_from_a_file_get_memory_that_can_be_given_back(mapped: Any) -> None:
    module, residency = move_to_device(mapped(), CPU), DeviceMemoryManager(CPU, 100)
    assert torch.equal(module.weight, mapped().weight)
    holder = Held(weights=[module.weight])
    residency.acquire(holder)
    residency.offload_all()
    assert present_bytes(holder) == 0
    residency.acquire(holder)
    assert torch.equal(module.weight, mapped().weight)


def test_what_cannot_move_stays(mapped: Any) -> None:
    module, residency = mapped(), DeviceMemoryManager(CPU, 1)
    residency.acquire(Held(weights=[module.weight]))
    residency.offload_all()
    assert torch.equal(module.weight, mapped().weight)


def test_each_thread_computes_on_the_gpu_of_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of a pool runs in a new thread, whose current GPU is the first one."""
    current: dict[str, torch.device] = {}

    def set_device(device: torch.device) -> None:
        current[threading.current_thread().name] = device

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    second, owner = torch.device("cuda", 1), Held()
    owner.device = second
    manager = DeviceMemoryManager(second, 1 << 20)
    for name in ("train of iteration 0", "train of iteration 1"):
        thread = threading.Thread(target=manager.acquire, args=(owner,), name=name)
        thread.start()
        thread.join()
        assert current.pop(name) == second
    manager.acquire(Held(weights=[filled(4)]))
    assert not current, "an object on a CPU changes nothing"
