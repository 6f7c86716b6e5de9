"""The state of a trainer on disk: no pickle, and any number of ranks reads what others wrote."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save_file

from rlinf.errors import DataError
from rlinf.trainers import sharded_checkpoint
from tests.rlinf.trainers.ranks import run_ranks

PROGRAM = """
import pickle, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from rlinf.trainers import sharded_checkpoint
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.sharded_tensors import gather_full_tensors

def refuse(*arguments, **options):
    raise AssertionError("pickled")

pickle.dumps = pickle.loads = refuse
for name in ("_object_to_tensor", "_tensor_to_object"):
    setattr(dist.distributed_c10d, name, refuse)
folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rendezvous = folder / "channels" / f"group-{size}.json"
ProcessGroupInfo(rank, size, rendezvous_file=rendezvous).init_process_group("cpu", 60)
mesh = init_device_mesh("cpu", (size,))

def state(fill):
    def tensor(*shape):
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * fill
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    tied = tensor(7, 3)
    return {
        "model": {"a": tied, "b": tied.detach(), "row": tensor(1, 2), "c": tensor(5)},
        "optimizer": {"state": {"a": {"step": torch.tensor(3.0 * fill), "m": tensor(7, 3)}}},
    }

sharded_checkpoint.write_shards(folder / "both", state(1.0), rank, size)
dist.barrier()
for name in ("alone", "both"):
    mine, right = state(0.0), state(1.0)
    sharded_checkpoint.read_shards(folder / name, mine)
    for key, value in mine["model"].items():
        assert torch.equal(value.to_local(), right["model"][key].to_local()), key
    mine, right = (s["optimizer"]["state"]["a"] for s in (mine, right))
    assert torch.equal(mine["m"].to_local(), right["m"].to_local())
    assert mine["step"] == 3
named = state(1.0)["model"] | {"plain": torch.ones(2), "wide": state(1.0)["model"]["a"].bfloat16()}
for most in (1, 8, 50, 1 << 20):
    whole = dict(gather_full_tensors(named.items(), most))
    assert whole.keys() == named.keys()
    for key, value in named.items():
        right = value.full_tensor() if key != "plain" else value
        assert torch.equal(whole[key], right), key
print("ok")
"""


def state(fill: float) -> dict[str, Any]:
    tied = torch.arange(1.0, 22).view(7, 3) * fill
    row, c = torch.tensor([[1.0, 2.0]]) * fill, torch.arange(1.0, 6) * fill
    moments = {"step": torch.tensor(3.0 * fill), "m": tied.clone()}
    return {
        "model": {"a": tied, "b": tied.detach(), "row": row, "c": c},
        "optimizer": {"state": {"a": moments}, "param_groups": [{"lr": 0.1}]},
    }


def test_one_rank_reads_what_two_wrote_and_two_what_one_wrote(tmp_path: Path) -> None:
    sharded_checkpoint.write_shards(tmp_path / "alone", state(1.0), 0, 1)
    run_ranks(PROGRAM, 2, tmp_path)
    assert len(list((tmp_path / "both").iterdir())) == 2
    mine, right = state(0.0), state(1.0)
    sharded_checkpoint.read_shards(tmp_path / "both", mine)
    assert all(torch.equal(v, right["model"][k]) for k, v in mine["model"].items())
    mine, right = (s["optimizer"]["state"]["a"] for s in (mine, right))
    assert torch.equal(mine["m"], right["m"])
    assert mine["step"] == 3


@given(st.data())
def test_every_rank_finds_its_part_however_it_was_cut(data: st.DataObject) -> None:
    """By rows as FSDP2 cuts, or anywhere as ZeRO does."""
    whole = torch.arange(2.0 * data.draw(st.integers(1, 9))).view(-1, 2)
    none, shape = whole[:0], tuple(whole.shape)

    def cut() -> list[tuple[int, torch.Tensor]]:
        ends = data.draw(st.lists(st.integers(0, whole.numel()), max_size=5).map(sorted))
        pairs = itertools.pairwise([0, *ends, whole.numel()])
        return [(begin, whole.view(-1)[begin:end]) for begin, end in pairs]

    with tempfile.TemporaryDirectory() as name:
        folder, writers = Path(name), cut()
        for rank, (start, part) in enumerate(writers):
            places = {"x": sharded_checkpoint.ShardPlacement(shape, start)}
            sharded_checkpoint.write_shards(folder, {"x": part}, rank, len(writers), places)
        for start, part in [*cut(), (0, whole), (whole.numel(), none)]:
            mine = torch.full_like(part, -1.0)
            place = sharded_checkpoint.ShardPlacement(shape, start)
            sharded_checkpoint.read_shards(folder, {"x": mine}, {"x": place})
            assert torch.equal(mine, part)


@pytest.mark.parametrize("start", [0, 3])
def test_elements_that_no_rank_or_several_wrote_are_missed(tmp_path: Path, start: int) -> None:
    for rank, begin in enumerate((0, start)):
        places = {"x": sharded_checkpoint.ShardPlacement((4,), begin)}
        sharded_checkpoint.write_shards(tmp_path, {"x": torch.zeros(2)}, rank, 2, places)
    with pytest.raises(DataError, match=r"x: element 2 of \[4\] is in no file, or in several"):
        sharded_checkpoint.read_shards(tmp_path, {"x": torch.zeros(4)})


def test_equal_states_are_equal_bytes_with_tied_weights_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        sharded_checkpoint.write_shards(tmp_path / name, state(1.0), 0, 1)
    one, two = ((tmp_path / n / "rank-0-of-1.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two
    assert "model/b" not in load(one)


def test_what_an_attempt_with_more_ranks_left_is_removed(tmp_path: Path) -> None:
    for rank in range(3):
        sharded_checkpoint.write_shards(tmp_path, state(2.0), rank, 3)
    sharded_checkpoint.write_shards(tmp_path, state(1.0), 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-of-1.safetensors"]


def no_file(folder: Path) -> None:
    (folder / "rank-0-of-1.safetensors").unlink()


def not_safetensors(folder: Path) -> None:
    (folder / "rank-0-of-1.safetensors").write_bytes(b"pickle?")


def without_table(folder: Path) -> None:
    save_file({"model/a": torch.zeros(7, 3)}, folder / "rank-0-of-1.safetensors")


def two_of_them(folder: Path) -> None:
    sharded_checkpoint.write_shards(folder / "x", state(1.0), 0, 2)
    (folder / "x/rank-0-of-2.safetensors").rename(folder / "rank-0-of-2.safetensors")


@pytest.mark.parametrize("damage", [no_file, not_safetensors, without_table, two_of_them])
def test_files_that_make_no_state_are_refused(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    sharded_checkpoint.write_shards(tmp_path, state(1.0), 0, 1)
    damage(tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path}: not "):
        sharded_checkpoint.read_shards(tmp_path, state(0.0))


@pytest.mark.parametrize(
    ("name", "shape"), [("c", (6,)), ("c", (4,)), ("row", (1, 3)), ("more", (2,)), ("c", ())]
)
def test_a_state_of_another_model_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    sharded_checkpoint.write_shards(tmp_path, state(1.0), 0, 1)
    other = state(0.0)
    other["model"][name] = torch.zeros(shape)
    with pytest.raises(DataError, match=f"model/{name}"):
        sharded_checkpoint.read_shards(tmp_path, other)


@given(st.data())
def test_stretches_of_rows_come_back_however_they_are_cut(data: st.DataObject) -> None:
    """Columns by two ranks, read as other columns, as a range, and whole."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 7))
    whole = torch.randn(rows, columns)

    def place(begin: int, end: int) -> sharded_checkpoint.ShardPlacement:
        starts = np.arange(rows) * columns + begin
        return sharded_checkpoint.ShardPlacement(
            (rows, columns),
            begin,
            sharded_checkpoint.to_strided_ranges(starts, np.full(rows, end - begin)),
        )

    cut, low = data.draw(st.integers(1, columns - 1)), data.draw(st.integers(0, columns - 1))
    high = data.draw(st.integers(low + 1, columns))
    with tempfile.TemporaryDirectory() as name:
        for rank, where in enumerate((place(0, cut), place(cut, columns))):
            sharded_checkpoint.write_shards(
                Path(name), {"x": where.extract(whole)}, rank, 2, {"x": where}
            )
        every, some = torch.zeros(rows, columns), torch.zeros(rows * (high - low))
        sharded_checkpoint.read_shards(Path(name), {"x": every})
        assert torch.equal(every, whole)
        sharded_checkpoint.read_shards(Path(name), {"x": some}, {"x": place(low, high)})
        assert torch.equal(some.view(rows, -1), whole[:, low:high])
        start = data.draw(st.integers(0, whole.numel() - 1))
        flat = torch.zeros(data.draw(st.integers(1, whole.numel() - start)))
        sharded_checkpoint.read_shards(
            Path(name),
            {"x": flat},
            {"x": sharded_checkpoint.ShardPlacement((rows, columns), start)},
        )
        assert torch.equal(flat, whole.view(-1)[start : start + len(flat)])
