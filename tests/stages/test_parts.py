"""What a stage takes is on its device, whatever others did there while it waited for an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.commands.experiment import compose, execute
from pipeline.flow import Graph, Node
from pipeline.run import Run
from rlinf.artifacts import read_manifest
from rlinf.channels.world import World
from stages.board import Board
from stages.context import Context, Input
from stages.parts import (
    held_engine,
    held_policy,
    held_reference,
    held_trainer,
    on_device,
    residency,
    trainer_published,
)
from stages.resident import Resident
from tests.conftest import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    words = ["experiment=arithmetic_grpo", f"++run.root={root}", "++log.trackers=[]", *TINY]
    # A limit at all: on a CPU there is none by default, and nothing would ever leave.
    execute(compose([*words, "device_memory_gib=1"]))
    return Run.open(root / "tiny")


@dataclass
class Late(Input):
    """An input that is committed while its stage waits; others compute meanwhile."""

    meanwhile: Callable[[], object] = lambda: None

    def on_disk(self) -> bool:
        self.meanwhile()
        return super().on_disk()


def context(run: Run, resident: Resident, **inputs: tuple[str, int]) -> Context:
    """Of a stage whose inputs come late, when all else has left the device."""
    late = {}
    for name, of in inputs.items():
        folder = Graph(run.config).folder(run.folder, Node(*of))
        manifest = read_manifest(folder)
        assert manifest is not None
        output = Board().output(str(folder))
        output.done(manifest.data)  # its name is known before it is committed
        late[name] = Late(folder, None, output)
    ctx = Context(
        config=run.config,
        stage="test",
        iteration=1,
        run=run.folder,
        out=run.folder,
        data=run.folder,
        world=World(),
        inputs=late,
        resident=resident,
    )
    for entry in late.values():
        entry.meanwhile = lambda: residency(ctx).clear()
    return ctx


def committed(run: Run, stage: str, iteration: int) -> dict[str, torch.Tensor]:
    folder = Graph(run.config).folder(run.folder, Node(stage, iteration))
    (path,) = folder.glob("data-*/weights/model.safetensors")
    return load_file(path)


def assert_there(holder: Any, expected: dict[str, torch.Tensor]) -> None:
    given = {tensor.sum().item() for tensor in expected.values()}
    weights = holder.resident()["weights"]
    assert all(tensor.untyped_storage().nbytes() for tensor in weights)
    assert {tensor.sum().item() for tensor in weights} == given


def test_the_engine(run: Run) -> None:
    resident = Resident()
    for number, of in enumerate([("warm_start", 0), ("sync", 0), ("sync", 1)]):
        engine = held_engine(context(run, resident, weights=of), "weights", number)
        assert_there(engine, committed(run, *of))


def test_the_trainer_and_the_reference(run: Run) -> None:
    resident = Resident()
    inputs = {"initial": ("warm_start", 0), "checkpoint": ("train", 0)}
    for _ in range(2):
        ctx = context(run, resident, **inputs)
        assert_there(held_trainer(ctx), committed(run, "sync", 0))
        assert_there(held_reference(ctx), committed(run, "warm_start", 0))
    on_device(ctx, held_trainer(ctx))
    assert [span["name"] for span in ctx.spans].count("onload") > 0


def test_the_policy_that_is_only_evaluated(run: Run) -> None:
    """One takes version after version; where training has come as far it is the trainer itself."""
    resident = Resident()
    made = []
    for of in [("warm_start", 0), ("sync", 0), ("sync", 1)]:
        ctx = context(run, resident, initial=("warm_start", 0), weights=of)
        made.append(held_policy(ctx))
        assert_there(made[-1], committed(run, *of))
    assert made[0] is made[1] is made[2]
    inputs = {"initial": ("warm_start", 0), "checkpoint": ("train", 0)}
    trainer = held_trainer(context(run, resident, **inputs))
    assert trainer is not made[-1]
    later = {"initial": ("warm_start", 0), "weights": ("sync", 0)}
    # A process that was started again does not know that these are the trainer's: neither goes.
    for _ in range(2):
        assert held_policy(context(run, resident, **later)) is made[-1]
        assert held_trainer(context(run, resident, **inputs)) is trainer
    ctx = context(run, resident, **later)
    ctx.out, ctx.data = ctx.inputs["weights"].folder, ctx.inputs["weights"].data
    trainer_published(ctx)
    assert held_policy(ctx) is trainer


def test_before_any_training_one_load_serves_both(run: Run) -> None:
    resident = Resident()
    first = ("warm_start", 0)
    policy = held_policy(context(run, resident, initial=first, weights=first))
    assert held_trainer(context(run, resident, initial=first)) is policy
    assert held_policy(context(run, resident, initial=first, weights=first)) is policy
